"""Sessions: the loop of an agent, answers that stream, names, what comes back, forks, and whatever an enemy gives."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import io
import struct
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from session_cases import QUESTION, image_of, reader
from window_oracle import tiny

import kvpatch_jax as kvp
from evals.oracles import HostExecutor
from kvpatch_jax.errors import (
    CertificateError,
    ConfigError,
    ImageError,
    InputError,
    KVPatchError,
    PoolError,
    SessionClosedError,
    SessionError,
    WindowError,
)
from kvpatch_jax.session import embedded
from kvpatch_jax.session.session_input import thing_of
from kvpatch_jax.window import Costs, Entry, Window, window_state

BAR = 2e-5


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


@pytest.fixture
def session(backbone):
    with kvp.Session(backbone, keep=2) as made:
        yield made


def state(session: kvp.Session) -> tuple[Any, ...]:
    """All that a refused call must leave as it was."""
    books = session.runtime.executor.books
    held = sorted(session.runtime.executor.sources._units)
    return session.window, session.ids, session.gone, books.allocator.counts.tolist(), held


def logits(session: kvp.Session, question: str = QUESTION) -> np.ndarray:
    asked = embedded(session.backbone, [question])
    return np.asarray(session.runtime.executor.prefill(session.window, asked.tokens, asked.length).logits)


def close_to(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= BAR * np.abs(expected).max())


def test_the_loop_is_the_windows(backbone, session):
    """Held against the same operations on plain arrays."""
    host, window = HostExecutor(backbone), Window.empty(Costs.of(backbone, jnp.float32))
    question = backbone.embed(**backbone.prepare([QUESTION]))
    for step in range(5):
        image = image_of(step)
        name = session.add(image)
        tokens = backbone.embed(**backbone.prepare([image]))
        host.provide(name, tokens=tokens)
        entry = Entry.of_tokens(name, tokens, name, kind="chunk")
        slid: tuple = ()
        if window.lead_settled:
            window, slid = window.slide(1)
        window, placed = window.append(entry)
        host.run(window, (*slid, *placed))
        if step >= 2:  # full windows, before and after they slide: each size is programs of its own
            assert close_to(logits(session), np.asarray(host.prefill(window, question).logits))
    assert session.window.pieces == window.pieces
    assert (len(session), session.gone) == (3, tuple(piece.entry.id for piece in window.evicted))
    assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
    stats = session.stats()
    assert (stats.added, stats.forwards, stats.left, stats.turned) == (5, 5, 2, 3 - 1)
    assert "5 of pieces" in str(stats)


def test_an_answer_streams_and_stays_what_it_was_asked_behind(backbone, session):
    session.add(image_of(0))
    whole = session.ask(QUESTION, steps=6)
    expected = session.runtime.executor.generate(
        session.window, *(lambda asked: (asked.tokens, 6, asked.length))(embedded(backbone, [QUESTION]))
    )
    assert whole.ids == tuple(expected[0])
    begun = session.ask(QUESTION, steps=6)
    session.add(image_of(1))
    session.add(image_of(2))
    session.add(image_of(3))
    assert begun.ids == whole.ids
    assert "".join(begun) == str(begun) == "".join(begun)
    assert begun.done
    assert session.ask(QUESTION, steps=0).ids == ()
    with pytest.raises(InputError, match="steps"):
        session.ask(QUESTION, steps=-1)


def test_draws_follow_the_seed(session):
    session.add(image_of(0))
    drawn = [session.ask(QUESTION, steps=6, temperature=2, top_p=0.9, seed=seed).ids for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1
    own = session.ask(QUESTION, steps=6, temperature=2.0, top_p=0.9)
    assert session.ask(QUESTION, steps=6, temperature=2.0, top_p=0.9, seed=own.seed).ids == own.ids
    assert session.ask(QUESTION, steps=6).seed is None


def test_answers_end_at_stop_tokens(session):
    session.add(image_of(0))
    free = session.ask(QUESTION, steps=6, stop=()).ids
    assert len(free) == 6
    assert session.ask(QUESTION, steps=6, stop=[free[2]]).ids == free[: free.index(free[2]) + 1]
    with pytest.raises(InputError, match="2 tokens"):
        session.ask(QUESTION, stop=["w5 w6"])
    with pytest.raises(InputError, match="stop token"):
        session.ask(QUESTION, stop=[10**6])
    with pytest.raises(ConfigError):
        session.ask(QUESTION, temperature=-1)


def test_an_answer_is_as_long_as_the_checkpoint_says_where_nobody_else_does(session, monkeypatch):
    """`max_new_tokens` of its generation_config.json; a model that ends no answer would go on to the limit."""
    session.add(image_of(0))
    monkeypatch.setattr(session.backbone, "answer_tokens", 3)
    assert len(session.ask(QUESTION, stop=()).ids) == 3
    assert len(session.ask(QUESTION, steps=5, stop=()).ids) == 5
    assert session.ask(QUESTION, steps=0).ids == ()


def test_an_answer_may_be_closed_and_read_by_several(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=6, stop=())
    answer.close()
    for _ in range(2):
        with pytest.raises(SessionClosedError):
            str(answer)
    shared = session.ask(QUESTION, steps=6, stop=())
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(shared.ids)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [shared.ids] * 4


def test_an_audit_says_how_far_reuse_is_off(session):
    for step in range(3):
        session.add(image_of(step))
    exact = session.ask(QUESTION, steps=4, stop=(), audit=True)
    assert exact.kl is not None
    assert exact.kl < 1e-8
    assert (exact.audit.flips, exact.audit.places, exact.audit.as_promised) == (0, 4, True)
    session.add(image_of(3))
    session.add(image_of(4))
    kept = session.ask(QUESTION, steps=4, stop=(), audit=True)
    assert kept.audit.as_promised
    assert kept.kl > exact.kl  # it remembers what has left
    assert session.ask(QUESTION, steps=4).kl is None


# ------------------------------------------------------------------------------------------------------ names


def test_ids_come_from_content(backbone, session, tmp_path: Path):
    image = image_of(0)
    Image.fromarray(image).save(tmp_path / "shot.png")
    name = session.add(tmp_path / "shot.png")
    assert name == thing_of(backbone, image).content
    assert session.window.piece(name).entry.content == name
    again = session.add(tmp_path / "shot.png")
    assert again == f"{name}#2"
    assert len(session) == 2
    assert session.window.piece(again).entry.content == name
    assert session.add(image_of(1), id="mine") == "mine"
    assert "mine" in session
    for taken in ("mine", name):
        with pytest.raises(SessionError, match="another piece"):
            session.add(image_of(2), id=taken)


def test_a_path_is_a_path_and_a_text_a_text(session, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(image_of(0)).save("shot.png")
    before = state(session)
    for name in ("shot.png", "one.JPEG"):  # whether it is there or not
        for call in (session.add, session.recall, session.ask):
            with pytest.raises(InputError, match=r"looks like a file's name.*pathlib\.Path\(.*kvpatch_jax\.Text\("):
                call(name)
    with pytest.raises(ImageError, match="not there"):
        session.add(tmp_path / "none.png")
    assert state(session) == before
    given = (kvp.Text("w9"), "w5 w6", [7, 8, 9], [image_of(0), image_of(1)])
    for thing, kind, tokens in zip(given, ("text", "text", "text", "chunk"), (1, 2, 3, 36), strict=True):
        name = session.add(thing)
        assert (session.window.piece(name).entry.kind, session.window.piece(name).entry.tokens) == (kind, tokens)
    name = session.add("w12 w13", kind="chunk")
    assert session.window.piece(name).entry.kind == "chunk"


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has many pixels."""
    chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_and_changes_nothing(backbone, session, tmp_path: Path):
    session.add(image_of(0))
    kept = session.add(image_of(1))
    before, stats = state(session), session.stats()
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.write(bomb(10, 10))
        file.truncate(100 << 20)
    whole = io.BytesIO()
    Image.fromarray(image_of(5)).save(whole, "PNG")
    for wrong in (
        large,
        bomb(50_000, 50_000),
        bomb(8_000, 8_000),
        whole.getvalue()[:60],
        b"\x89PNG nothing",
        np.zeros((6000, 6000, 3), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
        tmp_path,
        Path("/dev/zero"),
        tmp_path / "a\0b",
    ):
        with pytest.raises(ImageError):
            session.add(wrong)
    for wrong in (None, 7, {}, [], (), "", "  ", [[]], [None], b"text", {"image": 1}, object(), [1.5], True):
        with pytest.raises(InputError):
            session.add(wrong)
    for wrong in ("", [], None, 3.5, "   "):
        with pytest.raises(InputError):
            session.ask(wrong)
    for error, how in (
        (InputError, {"steps": 2**40}),
        (InputError, {"temperature": 1, "seed": 1.5}),
        (InputError, {"temperature": 1, "seed": "7"}),
        (ConfigError, {"temperature": "hot"}),
        (ConfigError, {"temperature": None}),
        (ConfigError, {"top_p": "all"}),
    ):
        with pytest.raises(error, match="expected"):
            session.ask(QUESTION, **how)
    assert session.recall(image_of(1)) == session.recall(kept) == kept  # it is there
    for wrong in ("no such name", image_of(9)):
        with pytest.raises(SessionError):
            session.recall(wrong)
    for error, call in (
        (SessionError, lambda: session.evict("no such name")),
        (WindowError, lambda: session.evict(session.ids[0])),
        (WindowError, lambda: session.slide(-1)),
        (WindowError, lambda: session.reorder([kept, session.ids[0]])),
        (SessionError, lambda: session.needs("no such name", QUESTION)),
        (WindowError, lambda: session.needs(session.ids[0], QUESTION)),
        (KVPatchError, lambda: session.add(image_of(3), id=3)),
        (KVPatchError, lambda: session.add(image_of(3), id="")),
        (InputError, lambda: session.add(image_of(3), id="\ud800")),
        (SessionError, lambda: session.fork(keep=0)),
        (SessionError, lambda: session.fork(keep=-3)),
        (KVPatchError, lambda: session.add("w5", order_free=True, kind="text")),
        (KVPatchError, lambda: session.add(image_of(3), kind="picture")),
    ):
        with pytest.raises(error):
            call()
    assert state(session) == before
    assert session.stats() == stats


@pytest.mark.usefixtures("unchecked")
def test_what_makes_no_session_is_refused(backbone):
    other = tiny("gqa")
    linker = type("Linker", (), {"backbone": "f" * 64})()
    with kvp.Session(other) as alien:
        for error, given in (
            (SessionError, {"backbone": "evals/trained/qwen2_5_vl"}),
            (SessionError, {"store": "cache"}),
            (SessionError, {"keep": 0}),
            (SessionError, {"keep": True}),
            (SessionError, {"keep": 2.0}),
            (SessionError, {"runtime": alien.runtime}),
            (SessionError, {"linker": linker}),
            (SessionError, {"certificate": "certificate.json"}),
            (SessionError, {"goal": 0.1}),
            (WindowError, {"promise": "recall"}),
            (PoolError, {"pages": -1}),
            (ImageError, {"lead": b"\x89PNG nothing"}),
        ):
            with pytest.raises(error):
                kvp.Session(**{"backbone": backbone, **given})


@pytest.mark.slow
def test_a_full_pool_refuses_and_one_without_a_size_grows(backbone):
    with kvp.Session(backbone, pages=4, page_size=16) as small:
        small.add(image_of(0))
        small.add(image_of(1))
        before = state(small)
        with pytest.raises(PoolError):
            small.add(image_of(2))
        assert state(small) == before
        small.evict(small.ids[1])
        small.add(image_of(2))
    with kvp.Session(backbone, page_size=16) as grown:
        grown.runtime.executor.books.allocator.allocate(254 * 16)
        for step in range(3):
            grown.add(image_of(step))
        assert grown.stats().pages == 512
        exact = grown.ask(QUESTION, steps=1, audit=True)
        assert exact.kl is not None
        assert exact.kl < 1e-8


# ---------------------------------------------------------------------------------------- what comes and goes


def test_what_left_comes_back_by_name_and_by_image(backbone, session):
    names = [session.add(image_of(step)) for step in range(4)]
    assert session.gone == (names[1],)
    assert session.recall(names[1]) == names[1]
    assert session.gone == (names[2],)
    assert session.recall(image_of(2)) == names[2]
    assert session.add(image_of(3)) == names[3]  # what left and is given again comes back
    assert session.ids == (names[0], names[2], names[3])
    assert session.stats().recalled == 3
    assert session.slide(0) == (names[2], names[3])
    session.recall(names[3])
    assert session.ask(QUESTION, steps=2, audit=True).kl < 1e-8  # behind the lead alone it is exact again
    assert session.replace(names[3], image_of(7)) == thing_of(backbone, image_of(7)).content
    assert session.ids[0] == names[0]


def test_what_is_let_go_of_must_be_given_again(backbone):
    with kvp.Session(backbone, keep=1, memory=0) as session:
        session.add(image_of(0))
        first = session.add(image_of(1), id="first")
        session.add(image_of(2))
        before = state(session)
        with pytest.raises(SessionError, match="given again"):
            session.recall(first)
        assert state(session) == before
        assert session.recall(image_of(1)) == "first"
        assert session.ids[-1] == "first"


def test_texts_leave_with_the_chunk_behind_them(session):
    session.add("w5 w6", id="system")
    for step in range(3):
        session.add(f"w{10 + step}", id=f"note {step}")
        session.add(image_of(step), id=f"shot {step}")
    assert session.ids == ("system", "note 0", "shot 1", "note 2", "shot 2")
    assert session.gone == ("shot 0",)
    with pytest.raises(SessionError):
        session.recall("note 1")
    assert session.add("w11").endswith("#2")  # a text that is gone may come again, as something new
    assert len(session) == 6


def test_order_free_chunks_are_reordered(session):
    session.add("w5 w6")
    names = [session.add(image_of(step), order_free=True) for step in range(2)]
    session.reorder(names[::-1])
    assert session.ids[1:] == (names[1], names[0])
    with pytest.raises(SessionError):
        session.reorder(["none"])


def test_a_fork_shares_until_it_changes(backbone, session):
    for step in range(3):
        session.add(image_of(step))
    before, used = logits(session), session.runtime.executor.books.allocator.free
    branch = session.fork()
    assert session.runtime.executor.books.allocator.free == used
    assert branch.ids == session.ids
    branch.add(image_of(4))
    branch.slide(1)
    assert (logits(session) == before).all()
    own = logits(branch)
    session.close()
    with pytest.raises(SessionClosedError):
        session.ask(QUESTION)
    assert (logits(branch) == own).all()
    assert branch.recall(image_of(2))
    runtime = branch.runtime
    branch.close()
    books = runtime.executor.books
    assert not books.allocator.counts.any()
    assert not runtime.executor.sources._units
    assert not books.branches


def test_a_closed_session_does_nothing(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=8, stop=())
    session.close()
    session.close()
    for call in (
        lambda: session.add(image_of(1)),
        lambda: session.ask(QUESTION),
        lambda: session.recall("x"),
        lambda: session.slide(1),
        lambda: session.evict("x"),
        lambda: session.replace("x", image_of(1)),
        lambda: session.reorder([]),
        lambda: session.fork(),
        lambda: session.needs("x", QUESTION),
        lambda: session.plan(),
        lambda: session.save("x"),
        lambda: answer.ids,
    ):
        with pytest.raises(SessionClosedError):
            call()
    assert "closed" in repr(session)


def test_needs_leaves_the_session_as_it_was(backbone, session):
    names = [session.add(image_of(step)) for step in range(3)]
    before, drawn = state(session)[:4], logits(session)
    found = session.needs(names[1], QUESTION, steps=3, erased=True)
    assert state(session)[:4] == before
    assert (logits(session) == drawn).all()
    assert found.verdict in ("needed", "canonical", "disposable")
    assert found.chunk in str(found) or found.chunk[:12] in str(found)

    out = session.fork()
    out.evict(names[1])
    bare = session.fork()
    window, edits = bare.window.bare(names[1])
    bare.runtime.run(window, edits)
    asked = embedded(backbone, [QUESTION])
    first = lambda window: np.asarray(bare.runtime.executor.prefill(window, asked.tokens, asked.length).logits[0, 0])
    for without, there in ((found.out, out.window), (found.bare, window)):
        own, other = (value.astype(np.float64) for value in (drawn[0, 0], first(there)))
        log = [value - np.log(np.exp(value - value.max()).sum()) - value.max() for value in (own, other)]
        assert np.isclose(without.first, (np.exp(log[0]) * (log[0] - log[1])).sum(), rtol=1e-3, atol=1e-9)
    out.close()
    bare.close()


def test_events_are_told_once_they_happened(session):
    told: list[Any] = []
    session.watchers.append(lambda event, things: told.append(event))
    session.add("w5 w6", id="system")
    for step in range(4):
        session.add(image_of(step), id=f"shot {step}")
    session.ask(QUESTION, steps=1)
    session.recall("shot 0")
    with pytest.raises(SessionError):
        session.recall("none")
    branch = session.fork()
    branch.evict("shot 0")
    branch.close()
    assert [event.op for event in told] == [*["add"] * 5, "ask", "recall", "fork", "evict", "close"]
    assert told[6].chunk == "shot 0"
    assert told[-1].session == told[7].branch == branch.name


def test_a_certificate_of_other_weights_is_refused(backbone, session):
    from kvpatch_jax.plan import Certificate

    certificate = object.__new__(Certificate)
    object.__setattr__(certificate, "backbone", "f" * 64)
    object.__setattr__(certificate, "model", "another")
    with pytest.raises(CertificateError, match="another"):
        kvp.Session(backbone, certificate=certificate)


@pytest.mark.slow
def test_a_long_loop_costs_no_more_at_its_end(backbone, monkeypatch: pytest.MonkeyPatch):
    """A step calls as many functions when hundreds of chunks have left as when some have: beyond a bound all goes."""
    monkeypatch.setattr(window_state, "MOST_GONE", 6)
    calls = 0

    def count(frame: Any, what: str, argument: Any) -> None:
        nonlocal calls
        calls += what == "call"

    taken = []
    with kvp.Session(backbone, keep=2) as session:
        for step in range(40):
            image = image_of(1 if step == 30 else step)
            calls = 0
            sys.setprofile(count)
            try:
                name = session.add(image)
            finally:
                sys.setprofile(None)
            taken.append(calls)
            if step == 30:  # forgotten by now: another name, but the id that stores know it by
                assert name.endswith("#2")
                assert session.window.pieces[-1].entry.id == name.removesuffix("#2")
        assert len(session.gone) == 6
        assert len(session._known) == 9
        with pytest.raises(SessionError, match="expected one that left"):
            session.recall(image_of(2))
    assert max(taken[32:]) <= max(taken[12:22]) + 20
