"""An input is named by its content, and a call that is invalid, fails or is interrupted leaves a session as it was."""
# pyright: reportArgumentType=false, reportOptionalOperand=false

import base64
import concurrent.futures
import io
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import chunk_id
from kvpatch_jax.errors import InputError, KVPatchError, NotFiniteError, PoolError, SessionError
from kvpatch_jax.traces import Event
from tests.shared.session_cases import QUESTION, Oracle, expect_logits, image_of, logits, state, words
from tests.shared.window_oracle import Watched, backbone_of

PAGE = image_of(0)


def encoded(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image_part(content: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def user(*parts: Any) -> dict:
    return {"role": "user", "content": list(parts)}


def test_an_image_is_one_input_in_every_form(backbone, tmp_path: Path):
    from PIL import Image

    path, page = tmp_path / "page.png", PAGE.copy()
    path.write_bytes(encoded(PAGE))
    forms = [Image.fromarray(PAGE), path, path.read_bytes(), [path], image_part(encoded(PAGE))]
    forms += [user(image_part(encoded(PAGE))), {"type": "image", "path": str(path)}]
    with kvp.Session(backbone, lead="w5 w6") as session:
        name = session.add(page)
        # What was read is no one's to change.
        page[:] = 0
        for form in forms:
            session.evict(name)
            assert session.recall(form) == name == chunk_id(backbone.fingerprint, PAGE)
        assert session.stats().added == 2
        assert session.add(page) != name


def test_parts_of_messages_texts_and_frames_have_their_kinds(backbone, session):
    message = user({"type": "text", "text": "w5"}, image_part(encoded(PAGE)), {"type": "text", "text": "w6 w7"})
    frames = np.stack([PAGE, image_of(1)])
    for item, modality, kind, tokens in (
        (message, "mixed", "chunk", 1 + 18 + 2),
        ([{"role": "system", "content": "w5"}, user({"type": "text", "text": "w6"})], "text", "text", 2),
        (kvp.Text("w8 w9"), "text", "text", 2),
        ([7, 8, 9], "text", "text", 3),
        (np.array([7, 8]), "text", "text", 2),
        (frames, "images", "chunk", 36),
        ({"type": "video", "video": list(frames), "rate": 2}, "video", "chunk", None),
    ):
        session.add(item)
        entry = session.window.pieces[-1].entry
        assert (entry.modality, entry.kind) == (modality, kind)
        assert tokens in (None, entry.tokens)
    assert session.recall(message) == chunk_id(backbone.fingerprint, "w5", PAGE, "w6 w7")
    session.add("w12 w13", kind="chunk")
    assert session.window.pieces[-1].entry.kind == "chunk"


def test_inputs_beyond_the_limits_are_refused(session):
    before, large = state(session), np.zeros((6000, 6000, 3), np.uint8)
    for item in ([PAGE, large], [kvp.Video(np.broadcast_to(large, (2, *large.shape)), rate=1)]):
        with pytest.raises(InputError, match="expected at most"):
            session.add(item)
    with pytest.raises(InputError, match="got a text of 40000 tokens"):
        session.ask([7] * 40_000)
    assert state(session) == before


IMAGE = image_of(5)
INPUTS = (None, 10**400, True, "", "\ud800", b"\x89PNG", [True], {"image": 1}, [], [[]], [2**70], [-1], [1.5], object(),
          Path("a\0b"), Path("/dev/zero"), np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8))  # fmt: skip
NAMES = (None, 2.0, "", "no such", "\ud800", b"lead", ["lead"], {}, np.zeros(3))
COUNTS = (-1, -(2**70), 10**400, 1.5, "2", True, [], np.ones(2))
NUMBERS = ("hot", [[]], float("nan"), -1.5, object())
# The values that mean nothing in place of "?": as an argument, or as an option by name.
TABLE = [
    (INPUTS, ("add", "?"), ("insert", "?", "shot"), ("replace", "shot", "?"), ("recall", "?"), ("ask", "?"),
     ("needs", "shot", "?"), ("plan", "?")),
    (("lead", *NAMES), ("evict", "?"), ("insert", IMAGE, "?"), ("replace", "?", IMAGE), ("needs", "?", QUESTION)),
    (COUNTS, ("slide", "?"), ("fork", "keep"), ("ask", QUESTION, "steps"), ("ask", QUESTION, "look"),
     ("needs", "shot", QUESTION, "steps")),
    (NUMBERS, ("ask", QUESTION, "temperature"), ("ask", QUESTION, "top_p"), ("ask", QUESTION, "top_k"),
     ("add", IMAGE, "kind"), ("reorder", "?"), ("needs", "last", QUESTION, "bound")),
    (("", "\ud800", 7, [], "shot"), ("add", IMAGE, "id"), ("insert", IMAGE, "last", "id"),
     ("replace", "shot", "w5", "name")),
    ((None, "a\0b", "/no folder/file"), ("save", "?")),
    ((["shot", "lead"], ["shot", "shot"], ["no such"], [7]), ("reorder", "?")),
]  # fmt: skip
OPTIONS = ("keep", "steps", "look", "temperature", "top_p", "top_k", "kind", "bound", "id", "name")


@pytest.mark.usefixtures("unchecked")
def test_hostile_calls_change_nothing(backbone):
    with kvp.Session(backbone, keep=2) as session:
        for number, name in enumerate(("lead", "gone", "shot", "last")):
            session.add(image_of(number), id=name)
        answer, before, wrong, count = session.ask(QUESTION, steps=2, stop=()).ids, state(session), [], 0
        for values, *calls in TABLE:
            for name, *arguments in calls:
                option = arguments[-1] if isinstance(arguments[-1], str) and arguments[-1] in OPTIONS else None
                for value in values:
                    inputs = [value if isinstance(item, str) and item == "?" else item for item in arguments]
                    outcome, count = "no error", count + 1
                    try:
                        named = {option: value} if option else {}
                        getattr(session, name)(*inputs[: len(inputs) - bool(option)], **named)
                    except KVPatchError:
                        outcome = ""
                    except Exception as error:
                        outcome = repr(error)[:80]
                    if outcome or state(session) != before:
                        wrong.append((name, arguments, f"{value!r:.40}", outcome))
                        before = state(session)
        assert not wrong, "\n".join(map(str, wrong))
        assert count >= 180
        assert session.ask(QUESTION, steps=2, stop=()).ids == answer


def test_a_closed_session_takes_no_calls(session):
    session.add(image_of(0))
    answer = session.ask(QUESTION, steps=8, stop=())
    session.close()
    session.close()
    for name, *arguments in (("add", "w5"), ("ask", QUESTION), ("slide", 1), ("fork",), ("save", "x"), ("plan",)):
        with pytest.raises(SessionError, match="was closed"):
            getattr(session, name)(*arguments)
    with pytest.raises(SessionError, match="got closed after"):
        str(answer)


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_of_a_session_are_refused(backbone):
    linker = type("Linker", (), {"backbone": "f" * 64})()
    with kvp.Session(backbone_of("gqa")) as other:
        for name, *values in (
            *(("keep", 0, (2, 1), "2"), ("kl", -0.1, float("nan"), "0.05"), ("around", "w5", ("w5",)), ("pages", 0)),
            *(("encoding", "k9v9"), ("placeholder", "  ", 3), ("memory", -1, "lots"), ("reuse", "uncertified")),
            *(("runtime", 5, other.runtime), ("promise", "recall"), ("audit", 1.5), ("linker", 5, linker)),
            *((name, 5) for name in ("backbone", "store", "name", "certificate", "retriever", "config")),
            *(("rank", -1, {"nope": 4}, "four"), ("lead", b"\x89PNG nothing", -1), ("chat", "yes")),
        ):
            for value in values:
                with pytest.raises(KVPatchError, match="expected"):
                    kvp.Session(**{"backbone": backbone, name: value})
        with pytest.raises(SessionError, match="got option 'kep'; expected 'keep', or another of around"):
            kvp.Session(backbone, kep=2)


@pytest.mark.parametrize(("failure", "error"), [("nan", NotFiniteError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_forward_that_fails_in_the_middle_changes_nothing(backbone, failure, error, tmp_path):
    watched = Watched(backbone)
    with kvp.Session(watched.backbone, keep=3) as session:
        session.add(words(5, 9), id="history")
        for number in range(3):
            session.add(image_of(number), id=f"shot {number}")
        before, expected = state(session), logits(session)
        for forwards, call, arguments in (
            (0, session.add, (image_of(7),)),
            (2, session.replace, ("history", "w30 w31")),
            (1, session.insert, (image_of(7), "shot 1")),
        ):
            watched.fail(failure, forwards)
            with pytest.raises(error):
                call(*arguments)
            watched.fail(None)
            assert state(session) == before
            assert (logits(session) == expected).all()
        # Nothing of a failed call is saved, and the same calls succeed afterwards.
        session.save(tmp_path / "session")
        kvp.Session.restore(tmp_path / "session", backbone).close()
        session.replace("history", "w30 w31")
        expect_logits(session, Oracle(backbone, words(5, 4), "w30 w31", *map(image_of, range(3))).logits())


def test_a_full_pool_refuses_and_one_without_a_size_grows(backbone, monkeypatch):
    with kvp.Session(backbone, pages=256) as small:
        small.runtime.executor.slots.allocate(251 * 16)
        small.add(image_of(0), id="lead")
        small.add(image_of(1), id="shot")
        before = state(small)
        image = image_of(2)
        for call, *inputs in ((small.add, image), (small.insert, image, "shot"), (small.replace, "shot", image)):
            with pytest.raises(PoolError, match=r"got 2 whole pages; .*more pages=, a window that keeps fewer"):
                call(*inputs)
            assert state(small) == before
    monkeypatch.setattr(sys.modules["kvpatch_jax.session.runtime"], "FIRST_PAGES", 128)
    with kvp.Session(backbone) as grown:
        grown.runtime.executor.slots.allocate(125 * 16)
        for number in range(3):
            grown.add(image_of(number))
        assert grown.stats().pages == 256
        assert grown.ask(QUESTION, steps=3, audit=True).kl < 1e-8


def test_a_pool_that_was_lost_is_filled_again(backbone):
    with kvp.Session(backbone, keep=1) as session, session.fork() as branch:
        for window in (session, branch):
            for number in range(3):
                window.add(image_of(number))
        for value in jax.tree.leaves(session.runtime.executor.pools):
            value.delete()
        expected = Oracle(backbone, image_of(0), image_of(2)).logits()
        for window in (branch, session):
            # What had left is forgotten: it was in the pool alone.
            assert window.ask(QUESTION, steps=3, audit=True).kl < 1e-8
            expect_logits(window, expected)


def test_an_interrupt_at_any_moment_leaves_the_window_before_or_after(backbone):
    """A signal is raised at one function call after the other, as a key that is pressed there."""

    def interrupted(call: Callable[[], Any], moment: int | None) -> int:
        calls = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            if event == "call" and "/kvpatch_jax/" in frame.f_code.co_filename:
                calls += 1
                if calls == moment:
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(profile)
        try:
            call()
        except KeyboardInterrupt:
            assert moment is not None
        finally:
            sys.setprofile(None)
        return calls

    with kvp.Session(backbone, keep=2) as session:
        for number in range(4):
            session.add(image_of(number), id=f"shot {number}")
        with session.fork() as branch:
            moments = interrupted(lambda: branch.replace("shot 2", "w30 w31"), None)
            expected = {branch.ids: logits(branch), session.ids: logits(session)}
        counts = session.runtime.executor.slots.counts
        for moment in range(3, moments, max(1, moments // 12)):
            with session.fork() as branch:
                interrupted(lambda branch=branch: branch.replace("shot 2", "w30 w31"), moment)
                np.testing.assert_array_equal(logits(branch), expected[branch.ids])
                branch.add("w40 w41")
            np.testing.assert_array_equal(session.runtime.executor.slots.counts, counts)


def test_threads_on_one_session_take_turns(backbone):
    def work(number: int) -> None:
        for step in range(3):
            name = session.add(image_of(step), id=f"{number}.{step}")
            str(session.ask(QUESTION, steps=2))
            session.evict(name)

    with kvp.Session(backbone, lead=image_of(9)) as session:
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            list(threads.map(work, range(3)))
        assert (len(session), len(session.gone), session.stats().asked) == (1, 9, 9)
        expect_logits(session, Oracle(backbone, image_of(9)).logits())
        assert session.stats().free_pages == session.stats().pages - 2


def test_watchers_see_every_change_after_it_has_happened_and_may_raise(backbone):
    seen: list[tuple[Any, ...]] = []
    with kvp.Session(backbone, None, 1, placeholder="w9 w10") as session:

        def watch(event: Event, items: Any) -> None:
            assert event.op != "close"
            assert event.chunk is None or (event.chunk in session) == (event.op != "evict")
            seen.append((event.op, event.chunk, event.replaced, event.text, len(items)))

        session.watchers.append(watch)
        session.add("w5 w6", id="system")
        session.add(image_of(0), id="shot 0")
        session.add(image_of(1), id="shot 1")
        session.recall("shot 0")
        session.evict("shot 0")
        executor = session.runtime.executor
        with pytest.raises(AssertionError):
            session.close()
        assert executor.slots.free_pages == executor.slots.pages
        session.watchers.clear()
    assert seen == [
        ("add", "system", None, "w5 w6", 1),
        ("add", "shot 0", None, None, 1),
        ("replace", "shot 0 left", "shot 0", "w9 w10", 1),
        ("add", "shot 1", None, None, 1),
        ("replace", "shot 1 left", "shot 1", "w9 w10", 1),
        ("recall", "shot 0", None, None, 0),
        ("evict", "shot 0", None, None, 0),
    ]
