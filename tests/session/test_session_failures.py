"""A call that fails, is interrupted or finds no room leaves its session as it was, and watchers see what happened."""
# pyright: reportArgumentType=false, reportOptionalOperand=false

import concurrent.futures
import copy
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import NotFiniteError, PoolError
from kvpatch_jax.traces import Event
from tests.shared.session_cases import QUESTION, Oracle, expect_logits, image_of, logits, state, words


@pytest.mark.parametrize("error", [NotFiniteError("of logits"), KeyboardInterrupt()])
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
        session.add(words(5, 9), id="history")
        for number in range(3):
            session.add(image_of(number), id=f"shot {number}")
        before, expected = state(session), logits(session)
        for forwards, call, arguments in (
            (0, session.add, (image_of(7),)),
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
        image = image_of(2)
        for call, *inputs in ((small.add, image), (small.insert, image, "shot"), (small.replace, "shot", image)):
            with pytest.raises(PoolError, match=r"got 2 whole pages; .*more pages=, a window that keeps fewer"):
                call(*inputs)
            assert state(small) == before
    with kvp.Session(backbone) as grown:
        grown.runtime.executor.slots.allocate(253 * 16)
        for number in range(3):
            grown.add(image_of(number))
        assert grown.stats().pages == 512
        assert grown.ask(QUESTION, steps=1, audit=True).kl < 1e-8


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
            assert window.ask(QUESTION, steps=1, audit=True).kl < 1e-8
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
                branch.add("w40")
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
