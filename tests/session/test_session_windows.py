"""A session's window and KV are what its calls say, its answers the model's, and its counts and audits true."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.models import load
from kvpatch_jax.session import RetrievalQuery, embedded
from kvpatch_jax.store import Linker, StaticLibrary
from tests.goldens.load import write_chatting
from tests.shared.session_cases import (
    IMAGE_TOKENS,
    QUESTION,
    Oracle,
    expect_logits,
    image_of,
    logits,
    state,
    worded,
    words,
)
from tests.shared.window_oracle import BUCKETS, backbone_of

SHOTS = [image_of(number) for number in range(4)]
HISTORIES = [words(5 + number, 9 + number) for number in range(3)]
SINK = 4
LEAD, LEFT = "w5 w6", "w9 w10"


@pytest.mark.parametrize("family", ["mrope", pytest.param("hybrid", marks=pytest.mark.nightly)])
def test_images_that_slide_move_and_return_are_served_as_they_were_computed(family: str):
    """Each image is prefilled behind those that are there, and stays as it is when others leave or move."""
    backbone, images = worded(backbone_of(family)), [image_of(number, 24, 24) for number in range(5)]
    oracle = Oracle(backbone)

    def expect(session: kvp.Session, *order: int) -> None:
        oracle.naive.parts = [next(part for part in parts if part.id == str(number)) for number in order]
        oracle.naive.close()
        expect_logits(session, oracle.logits())

    with kvp.Session(backbone, lead=0, reuse="patched") as session:
        for number in range(4):
            session.add(images[number], id=str(number), order_free=True)
            oracle.put(str(number), images[number])
        parts = list(oracle.naive.parts)
        expect(session, 0, 1, 2, 3)
        session.evict("1")
        expect(session, 0, 2, 3)
        assert [session.fidelity(name) for name in session.ids] == ["exact", "survivor", "survivor"]
        session.reorder(["3", "2", "0"])
        expect(session, 3, 2, 0)
        with session.fork() as branch:
            branch.slide(1)
            expect(branch, 0)
        expect(session, 3, 2, 0)
        session.recall("1")
        oracle.put("1", images[1])
        expect_logits(session, oracle.logits())
        stats = session.stats()
        assert (stats.added, stats.recalled, stats.forwards, stats.left, stats.rotated) == (4, 1, 5, 1, 4)
        numbers = 4 * 4 * backbone.layout.transition_numbers if backbone.layout.parts else 0
        assert stats.state_bytes >= numbers


def test_chunks_come_back_by_name_and_by_content_and_copies_have_names_of_their_own(backbone, session):
    names = [session.add(image_of(step)) for step in range(4)]
    assert names == [chunk_id(backbone.fingerprint, image_of(step)) for step in range(4)]
    assert session.gone == (names[1],)
    assert session.recall(names[1]) == names[1]
    assert session.recall(image_of(2)) == names[2]
    assert session.add(image_of(3)) == names[3]
    assert session.recall(names[3]) == session.recall(image_of(3)) == names[3]
    assert session.stats().recalled == 3, "what is there stays as it is"
    assert session.slide(0) == (names[2], names[3])
    session.recall(names[3])
    assert session.ask(QUESTION, steps=3, audit=True).kl < 1e-8, "behind the lead alone it is exact again"
    with pytest.raises(SessionError, match="never added"):
        session.recall(image_of(9))

    name = names[0]
    assert session.add(image_of(0)) == f"{name}#2"
    session.evict(f"{name}#2")
    # An input that is passed twice is recalled once, and a copy beside that.
    assert session.plan(image_of(0), image_of(0)).window.ids == (name, f"{name}#2", f"{name}#3")
    # The evicted copy is meant, not the chunk that is there.
    assert session.recall(image_of(0)) == f"{name}#2"
    with pytest.raises(SessionError, match="name of another piece"):
        session.add(image_of(2), id=name)


def test_texts_leave_with_the_chunk_that_they_follow(session):
    session.add("w5 w6", id="system")
    session.add("w9 w8", id="history")
    for step in range(3):
        session.add(image_of(step), id=f"shot {step}")
        session.add(f"w{10 + step} w9", id=f"note {step}")
    assert session.ids == ("system", "history", "shot 1", "note 1", "shot 2", "note 2")
    assert session.gone == ("shot 0",)
    with pytest.raises(SessionError, match="text, or forgotten since: add it again"):
        session.recall("note 0")
    assert session.add("w10 w9").endswith("#2"), "an evicted text may be added again, as a new piece"


def test_a_fork_shares_until_it_changes(backbone, session):
    for step in range(3):
        session.add(image_of(step))
    before, free = logits(session), session.stats().free_pages
    branch = session.fork(keep=5)
    assert (branch.ids, branch.keep, session.stats().free_pages) == (session.ids, 5, free)
    branch.add(image_of(4))
    branch.slide(1)
    assert (logits(session) == before).all()
    after = logits(branch)
    session.close()
    assert (logits(branch) == after).all(), "the parent is not needed any more"
    assert branch.recall(image_of(2))
    executor, ids = branch.runtime.executor, (*branch.window.ids, *branch.window.gone)
    branch.close()
    assert not executor.slots.counts.any()
    assert not executor.branches
    assert not any(executor.sources[id].tokens is not None for id in ids)


@pytest.mark.parametrize("promise", ["remember", "forget"])
def test_chunks_leave_together_once_there_are_too_many(backbone, promise, tmp_path):
    sizes, forwards, kept = [], [], []
    with kvp.Session(backbone, None, (2, 4), lead=0, promise=promise) as session:
        # A trace replays by the number that stayed, whatever the session's own rule was.
        session.watchers.append(lambda event, _: kept.append(event.keep))
        for number in range(9):
            session.add(image_of(number))
            sizes.append(len(session))
            forwards.append(session.stats().forwards)
        session.save(tmp_path / "session")
    assert sizes == [1, 2, 3, 4, 2, 3, 4, 2, 3]
    assert kept[:6] == [4, 4, 4, 4, 2, 4]
    # A window that forgets runs what stayed again, but only when something left: two chunks in place of one.
    again = [1] * 4 + ([1, 1, 1, 1, 1] if promise == "remember" else [2, 1, 1, 2, 1])
    assert np.diff([0, *forwards]).tolist() == again
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        assert session.keep == (2, 4)


@pytest.mark.parametrize("reuse", ["exact", "patched"])
def test_rounds_of_texts_in_front_prefill_the_text_and_where_reuse_is_exact_what_follows_it(backbone, reuse):
    with kvp.Session(backbone, reuse=reuse) as session:
        oracle = Oracle(backbone, words(5, SINK), words(5 + SINK, 9 - SINK), *SHOTS)
        session.add(HISTORIES[0], id="history 0")
        for number, shot in enumerate(SHOTS):
            session.add(shot, id=f"shot {number}")
        for number in (1, 2):
            session.replace(f"history {number - 1}", HISTORIES[number], name=f"history {number}")
            # The first text's sink stays in front of every later one.
            assert session.ids == ("history 0 sink", f"history {number}", *(f"shot {n}" for n in range(4)))
            step, text = session.stats().steps[-1], 9 + number
            if reuse == "exact":
                assert (step.computed, step.reused) == (text + 4 * IMAGE_TOKENS, {"kept": SINK})
                oracle = Oracle(backbone, words(5, SINK), HISTORIES[number], *SHOTS)
            else:
                assert (step.computed, step.reused) == (text, {"kept": SINK, "rotated": 4 * IMAGE_TOKENS})
                oracle.remove(oracle.naive.parts[1].id)
                oracle.put(f"history {number}", HISTORIES[number], 1)
            expect_logits(session, oracle.logits())
        fidelities = ["exact"] * 6 if reuse == "exact" else ["exact"] * 2 + ["approximate"] * 4
        assert [session.fidelity(name) for name in session.ids] == fidelities
        assert session.window.as_promised == (reuse == "exact")


def test_an_inserted_chunk_is_unknown_to_what_follows(backbone):
    with kvp.Session(backbone, keep=2, reuse="patched") as session:
        session.add("w5 w6", id="system")
        session.add(SHOTS[0], id="shot 0")
        assert session.insert(SHOTS[1], "shot 0", id="shot 1") == "shot 1"
        oracle = Oracle(backbone, "w5 w6", SHOTS[0])
        oracle.put("shot 1", SHOTS[1], 1)
        expect_logits(session, oracle.logits())
        assert session.fidelity("shot 0") == "approximate"
        with pytest.raises(SessionError, match="'shot 1', which leaves to make room"):
            session.insert(SHOTS[2], "shot 1")


@pytest.mark.parametrize(("lead", "count"), [([words(5, 9), SHOTS[1], "w30 w31"], 3), (None, 0), (0, 0)])
def test_a_lead_never_leaves(backbone, lead, count):
    with kvp.Session(backbone, keep=1, lead=lead) as session:
        # Nothing splits a lead that was given: it stays as a whole.
        assert len(session) == count
        for number in (0, 2, 3):
            session.add(SHOTS[number], id=f"shot {number}")
        first = session.ids[0]
        assert len(session) == count + (2 if lead is None else 1)
        assert session.gone == (("shot 2",) if lead is None else ("shot 0", "shot 2"))
        if isinstance(lead, int):
            session.evict(first)
            assert len(session) == 0
            return
        before = state(session)
        for call, arguments in ((session.evict, ()), (session.replace, ("w9",))):
            with pytest.raises(SessionError, match="pinned"):
                call(first, *arguments)
            assert state(session) == before


@pytest.mark.parametrize("promise", ["forget", "remember"])
def test_a_placeholder_takes_the_place_of_a_chunk_that_leaves(backbone, promise, tmp_path):
    with kvp.Session(backbone, None, (1, 3), lead=LEAD, promise=promise, placeholder=LEFT) as session:
        for number, stayed in enumerate(([0], [0, 1], [0, 1, 2], [3])):
            session.add(image_of(number), id=f"shot {number}")
            session.add(f"w{20 + number} w9")
            assert session.stats().placeholders == number + 1 - len(stayed)
        pieces = [LEAD, LEFT, "w20 w9", LEFT, "w21 w9", LEFT, "w22 w9", image_of(3), "w23 w9"]
        expect_logits(session, Oracle(backbone, *pieces).logits(), 1e-4)
        assert session.window.as_promised
        assert [name for name in session.ids if "left" in name] == [f"shot {number} left" for number in range(3)]
        assert session.gone == ("shot 0", "shot 1", "shot 2")
        # One that comes back and leaves again has a placeholder of another name.
        session.recall("shot 0")
        session.add(image_of(4), id="shot 4")
        session.add(image_of(5))
        assert [name for name in session.ids if "left" in name][-3:] == ["shot 3 left", "shot 0 left#2", "shot 4 left"]
        before = logits(session)
        session.save(tmp_path / "session")
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        np.testing.assert_array_equal(logits(session), before)


@pytest.mark.parametrize("reuse", ["exact", "patched"])
def test_steps_count_what_was_computed_and_what_others_would_have_computed(backbone, reuse):
    """A prefix cache that holds every earlier window computes what follows the longest one that it has."""
    seen, computed = set[tuple[str, ...]](), list[int]()
    adds: list[Any] = [("add", image_of(number)) for number in range(4)]
    acts = [*adds, ("replace", "history 0", words(9, 3)), ("recall", SHOTS[1]), ("slide", 2), *adds[1:3]]
    acts += [("evict", SHOTS[3]), ("recall", SHOTS[0]), ("slide", 1), ("recall", SHOTS[2]), *adds]
    with kvp.Session(backbone, keep=4, reuse=reuse) as session:
        session.runtime.executor.observers.append(lambda *prefill: computed.append(prefill[3]))
        session.add(words(5, 6), id="history 0")
        seen |= {tuple(piece.entry.key for piece in session.window.pieces[:length]) for length in (1, 2)}
        for call, *arguments in acts:
            before, starts = session.window, {piece.made: piece.start for piece in session.window.pieces}
            del computed[:]
            if call == "evict":
                arguments = [chunk_id(backbone.fingerprint, *arguments)]
            getattr(session, call)(*arguments)
            counted, window = session.stats().steps[-1], session.window
            if window == before:
                continue
            contents = [piece.entry.key for piece in window.pieces]
            prefixes = [tuple(contents[: length + 1]) for length in range(len(contents))]
            sizes = [piece.entry.tokens for piece in window.pieces]
            missed = next((n for n, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
            assert counted.prefix_cache == sum(sizes[missed:])
            seen |= set(prefixes)
            assert counted.computed == sum(computed)
            assert counted.reprefill == sum(sizes) == counted.computed + sum(counted.reused.values())
            stays = [piece for piece in window.pieces if piece.made in starts]
            rotated = sum(piece.entry.tokens for piece in stays if starts[piece.made] != piece.start)
            assert counted.reused.get("rotated", 0) == rotated
        stats = session.stats()
        assert stats.tokens == sum(step.computed for step in stats.steps)
        assert stats.prefix_cache == sum(step.prefix_cache for step in stats.steps) < stats.reprefill
        assert stats.flops == sum(step.flops for step in stats.steps)
        assert stats.tokens_held == session.window.tokens
        assert f"{stats.tokens} computed; a prefix cache {stats.prefix_cache}" in str(stats)


def test_an_answer_belongs_to_the_window_that_was_asked(backbone, session):
    session.add(image_of(0))
    asked = embedded(backbone, [QUESTION])
    expected = session.runtime.executor.generate(session.window, asked.tokens, 6, asked.length)
    assert session.ask(QUESTION, steps=6, stop=()).ids == tuple(expected[0].tolist())
    begun = session.ask(QUESTION, steps=6, stop=())
    for number in (1, 2, 3):
        session.add(image_of(number))
    assert begun.ids == tuple(expected[0].tolist())
    assert "".join(begun) == str(begun) == "".join(begun)
    assert begun.done
    assert session.ask(QUESTION, steps=0).ids == ()


def test_sampled_answers_follow_the_seed(session):
    session.add(image_of(0))
    options: Any = {"steps": 6, "temperature": 2, "top_p": 0.9, "stop": ()}
    first, again, *others = (session.ask(QUESTION, **options, seed=seed).ids for seed in (1, 1, 2, 3))
    assert first == again
    assert len({first, *others}) > 1


def divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Returns KL(first ‖ second) of two vectors of logits."""
    logs = []
    for value in (first.astype(np.float64), second.astype(np.float64)):
        logs.append(value - value.max() - np.log(np.exp(value - value.max()).sum()))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())


def test_an_audit_measures_the_difference_from_a_reprefill(backbone, session):
    for step in range(3):
        session.add(image_of(step))
    exact = session.ask(QUESTION, steps=4, stop=(), audit=True)
    assert exact.kl < 1e-8
    assert (exact.audit.flips, exact.audit.places, exact.audit.as_promised) == (0, 4, True)
    session.add(image_of(3))
    survived = session.ask(QUESTION, steps=4, stop=(), audit=True)
    truth = Oracle(backbone, image_of(0), image_of(2), image_of(3)).logits()[0, 0]
    assert np.isclose(survived.audit.first, divergence(truth, logits(session)[0, 0]), rtol=1e-3)
    # It remembers what has left, as it promises.
    assert survived.audit.as_promised
    assert survived.kl > 1e-6
    assert session.ask(QUESTION, steps=4).kl is None


def test_needs_compares_with_the_chunk_bare_and_out_and_leaves_everything_as_it_was(backbone, session):
    for step in range(3):
        session.add(image_of(step), id=f"shot {step}")
    before, served = state(session)[:4], logits(session)
    report = session.needs("shot 1", QUESTION, steps=3, erased=True)
    assert state(session)[:4] == before
    assert (logits(session) == served).all()

    def without_conditioning(oracle: Oracle, index: int, seed: int) -> None:
        oracle.naive.parts[index].kv = Oracle(backbone, image_of(seed)).naive.parts[0].kv

    bare, out, erased = (Oracle(backbone, *map(image_of, range(3))) for _ in range(3))
    without_conditioning(bare, 1, 1)
    out.remove("1")
    erased.remove("1")
    without_conditioning(erased, 1, 2)
    for ablated, oracle in ((report.bare, bare), (report.out, out), (report.erased, erased)):
        assert np.isclose(ablated.first, divergence(served[0, 0], oracle.logits()[0, 0]), rtol=1e-2, atol=1e-8)


@pytest.fixture
def linker(backbone, store):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("A", image_of(8))
    library.put("B", image_of(9))
    return Linker(backbone.fingerprint, library)


def test_references_place_chunks_for_one_question(backbone, linker):
    with kvp.Session(backbone, keep=2, around=("w30 w33 ", " w31 w32"), linker=linker) as session:
        session.add("w5 w6")
        before = state(session)[:6]
        named = session.ask("w7 w8 IMAGE#A IMAGE#B w11 w12", steps=4, stop=(), audit=True)
        assert named.recalled == ["IMAGE#A", "IMAGE#B"]
        assert named.kl < 1e-8
        asked = backbone.prepare([kvp.Text(" w31 w32")])["input_ids"][0].tolist()
        with session.fork(keep=5) as branch:
            for item in ("w30 w33 ", "w7 w8 ", image_of(8), image_of(9), " w11 w12"):
                branch.add(kvp.Text(item) if isinstance(item, str) else item)
            assert named.ids == branch.ask(asked, steps=4, stop=()).ids
        assert state(session)[:6] == before
        assert session.stats().forwards > 1, "the branch's work is the session's"


def test_a_retriever_is_asked_between_parts_of_an_answer(backbone, linker, tmp_path):
    queries: list[RetrievalQuery] = []

    def find(query: RetrievalQuery) -> list[str]:
        queries.append(query)
        assert query.hidden(1).shape == query.vector.shape
        return {2: ["shot 1"], 4: ["IMAGE#A"]}.get(len(query.ids), [])

    with kvp.Session(backbone, keep=1) as plain:
        for number in range(3):
            plain.add(image_of(number), id=f"shot {number}")
        plain.save(tmp_path / "session")
        expected = plain.ask(QUESTION, steps=6, stop=()).ids
        asked = backbone.prepare([QUESTION])["input_ids"][0].tolist()
        with plain.fork(keep=5) as branch:
            # Nothing leaves for what is recalled.
            branch.recall("shot 1")
            recalled = branch.ask([*asked, *expected[:2]], steps=2, stop=()).ids

    def retrieving(retriever: Any) -> kvp.Session:
        return kvp.Session.restore(tmp_path / "session", backbone, linker=linker, retriever=retriever)

    with retrieving(find) as session:
        before = state(session)[:6]
        answer = session.ask(QUESTION, steps=6, stop=(), look=2)
        assert answer.ids[:4] == (*expected[:2], *recalled)
        assert state(session)[:6] == before
    assert [(len(query.ids), query.gone) for query in queries] == [(n, ("shot 1",)) for n in (0, 2, 4)]
    assert answer.recalled == ["shot 1", "IMAGE#A"]

    for names in ("shot 1", ["IMAGE#C"]):
        with retrieving(lambda _, names=names: names) as session:
            before = state(session)[:6]
            with pytest.raises(InputError):
                session.ask(QUESTION, steps=2)
            assert state(session)[:6] == before


def test_a_chat_is_asked_as_the_checkpoint_was_trained(backbone, tmp_path: Path):
    """Answers are those of one message with these images: exact, for nothing has left."""
    chatting = load(write_chatting("qwen2_5_vl", tmp_path / "chat"), buckets=BUCKETS)
    images = [image_of(0), image_of(1)]
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "What is this?"}]
    system = {"role": "system", "content": [{"type": "text", "text": "A page"}]}
    prompt = chatting.chat([system, {"role": "user", "content": content}])
    expected = np.asarray(chatting.generate(chatting.embed(**prompt), 4, stop=()))[0].tolist()
    with kvp.Session(chatting, keep=2, chat=True, lead="A page") as session:
        for image in images:
            session.add(image)
        assert list(session.ask("What is this?", steps=4, stop=()).ids) == expected
        session.add(image_of(2))
        assert (len(session.gone), session.window.pieces[0].entry.kind) == (1, "text"), "the template's front stays"
    with pytest.raises(InputError, match="without a chat template"):
        kvp.Session(backbone, chat=True)
    with pytest.raises(SessionError, match="expected"):
        kvp.Session(chatting, chat=True, around=("a", "b"))
