"""What fails in the middle leaves a session as it was: forwards, the pool, interrupts, threads. What watchers see."""
# pyright: reportArgumentType=false, reportOptionalOperand=false

import copy
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import NotFiniteError, PoolError, SessionError
from kvpatch_jax.traces import Event, Recorder, Trace
from tests.shared.session_cases import QUESTION, Oracle, expect_logits, image_of, logits, state, words


@pytest.mark.parametrize("error", [MemoryError("no more"), NotFiniteError("of logits"), KeyboardInterrupt()])
def test_a_forward_that_fails_in_the_middle_changes_nothing(backbone, error, tmp_path):
    failing, run, left = copy.copy(backbone), backbone.prefill, [100]

    def prefill(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and not isinstance(error, NotFiniteError):
            raise error
        out = run(*args, **options)
        return out._replace(logits=out.logits * np.nan) if left[0] < 0 else out

    failing.prefill = prefill
    with kvp.Session(failing, keep=3) as session:
        for left[0] in (0, 1):
            with pytest.raises(type(error)):
                session.add(words(5, 9), id="history")
            assert (len(session), session.runtime.executor.slots.counts.any()) == (0, False)
        left[0] = 100
        session.add(words(5, 9), id="history")
        for number in range(3):
            session.add(image_of(number), id=f"shot {number}")
        before, expected = state(session), logits(session)
        for forwards, call, arguments in (
            (0, session.add, (image_of(7),)),
            (0, session.replace, ("history", "w30 w31")),
            (2, session.replace, ("history", "w30 w31")),
            (1, session.insert, (image_of(7), "shot 1")),
        ):
            left[0] = forwards
            with pytest.raises(type(error)):
                call(*arguments)
            left[0] = 100
            assert state(session) == before
            assert (logits(session) == expected).all()
        # Nothing of a failed call is saved, and the same calls succeed afterwards.
        session.save(tmp_path / "session")
        kvp.Session.restore(tmp_path / "session", backbone).close()
        session.replace("history", "w30 w31")
        expect_logits(session, Oracle(backbone, words(5, 4), "w30 w31", *map(image_of, range(3))).logits())


def test_a_full_pool_refuses_and_one_without_a_size_grows(backbone):
    with kvp.Session(backbone, pages=5) as small:
        small.add(image_of(0), id="lead")
        small.add(image_of(1), id="shot")
        before = state(small)
        for name, *arguments in (
            ("add", image_of(2)),
            ("insert", image_of(2), "shot"),
            ("replace", "shot", image_of(2)),
        ):
            with pytest.raises(PoolError, match=r"got 2 whole pages; .*more pages=, a window that keeps fewer"):
                getattr(small, name)(*arguments)
            assert state(small) == before
        small.evict("shot")
        small.add(image_of(2))
        assert small.ask(QUESTION, steps=1, audit=True).kl < 1e-8
    with kvp.Session(backbone) as grown:
        grown.runtime.executor.slots.allocate(253 * 16)
        for number in range(3):
            grown.add(image_of(number))
        assert grown.stats().pages == 512
        assert grown.ask(QUESTION, steps=1, audit=True).kl < 1e-8


def test_a_pool_that_was_lost_is_filled_again(backbone):
    with kvp.Session(backbone, keep=1) as session, session.fork() as branch:
        for each in (session, branch):
            for number in range(3):
                each.add(image_of(number))
        for value in jax.tree.leaves(session.runtime.executor.pools):
            value.delete()
        expected = Oracle(backbone, image_of(0), image_of(2)).logits()
        for each in (branch, session):
            # What had left is forgotten: it was in the pool alone.
            assert each.ask(QUESTION, steps=1, audit=True).kl < 1e-8
            expect_logits(each, expected)


@pytest.mark.parametrize(("op", "arguments"), [("add", (image_of(5),)), ("replace", ("shot 2", "w30 w31"))])
def test_an_interrupt_at_any_moment_leaves_the_window_before_or_after(backbone, op, arguments):
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
            moments = interrupted(lambda: getattr(branch, op)(*arguments), None)
            expected = {branch.ids: logits(branch), session.ids: logits(session)}
        counts = session.runtime.executor.slots.counts
        for moment in range(3, moments, max(1, moments // 25)):
            with session.fork() as branch:
                interrupted(lambda branch=branch: getattr(branch, op)(*arguments), moment)
                np.testing.assert_array_equal(logits(branch), expected[branch.ids])
                branch.add("w40")
            np.testing.assert_array_equal(session.runtime.executor.slots.counts, counts)


def test_threads_on_one_runtime_take_turns(backbone):
    """Each has a session of its own, and one that they share."""
    failed, together = list[BaseException](), threading.Barrier(4)

    def work(number: int) -> None:
        try:
            together.wait(60)
            for step in range(3):
                name = shared.add(image_of(step), id=f"{number}.{step}")
                alone[number].add(image_of(step))
                assert alone[number].ask(QUESTION, steps=2, stop=(), audit=True).kl < 1e-8
                str(shared.ask(QUESTION, steps=2))
                shared.evict(name)
        except BaseException as error:
            failed.append(error)

    with kvp.Session(backbone, lead=image_of(9)) as shared:
        alone = [kvp.Session(backbone, runtime=shared.runtime) for _ in range(4)]
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert failed == []
        assert (len(shared), len(shared.gone), shared.stats().asked) == (1, 12, 12)
        expect_logits(shared, Oracle(backbone, image_of(9)).logits())
        for session in alone:
            session.close()
        assert shared.stats().free_pages == shared.stats().pages - 2


@pytest.mark.parametrize("op", ["fork", "close"])
def test_a_watcher_that_raises_holds_nothing(backbone, op):
    session = kvp.Session(backbone, lead=image_of(0))

    def watch(event: Event, _: Any) -> None:
        assert event.op != op

    session.watchers.append(watch)
    held = session.stats().free_pages
    with pytest.raises(AssertionError):
        getattr(session, op)()
    executor = session.runtime.executor
    assert (len(executor.branches), executor.slots.free_pages) == ((1, held) if op == "fork" else (0, held + 2))
    session.watchers.clear()
    session.close()
    with pytest.raises(SessionError, match="after its runtime was closed"):
        session.runtime.check_open()


def test_watchers_see_every_change_after_it_has_happened(backbone, tmp_path):
    seen: list[tuple[Any, ...]] = []
    with (
        Recorder(tmp_path / "trace.jsonl") as recorder,
        kvp.Session(backbone, None, 1, placeholder="w9 w10", name="a") as session,
    ):

        def watch(event: Event, items: Any) -> None:
            assert event.chunk is None or (event.chunk in session) == (event.op != "evict")
            seen.append((event.op, event.chunk, event.replaced, event.text, len(items)))

        session.watchers.append(watch)
        session.watchers.append(recorder)
        session.add("w5 w6", id="system")
        session.add(image_of(0), id="shot 0")
        session.add(image_of(1), id="shot 1")
        session.recall("shot 0")
        session.insert("w20", "shot 0", id="note")
        session.replace("note", "w21", name="other")
        session.ask(QUESTION, steps=1)
        session.evict("other")
        session.slide(0)
    assert seen == [
        ("add", "system", None, "w5 w6", 1), ("add", "shot 0", None, None, 1),
        ("replace", "shot 0 left", "shot 0", "w9 w10", 1), ("add", "shot 1", None, None, 1),
        ("replace", "shot 1 left", "shot 1", "w9 w10", 1), ("recall", "shot 0", None, None, 0),
        ("insert", "note", None, "w20", 1), ("replace", "other", "note", "w21", 1), ("ask", None, None, QUESTION, 0),
        ("evict", "other", None, None, 0), ("slide", None, None, None, 0), ("close", None, None, None, 0),
    ]  # fmt: skip
    assert [event.op for event in Trace.read(tmp_path / "trace.jsonl").events] == [op for op, *_ in seen]
