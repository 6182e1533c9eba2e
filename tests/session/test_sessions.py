"""Many sessions in one pool: the same tokens in company, slots given back, turns, waiting, a lost pool, the end."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from sessions_load import (
    PAGES,
    Agent,
    agents_of,
    backbone_of,
    expect_balanced,
    hog,
    ids_of,
    on_threads,
    question_of,
    shared_runtime,
)

import kvpatch_jax as kvp
from kvpatch_jax.answers import Sampling
from kvpatch_jax.errors import (
    InputError,
    NotFiniteError,
    PoolError,
    SessionError,
)
from kvpatch_jax.session.runtime import AnswerOptions
from kvpatch_jax.window import Entry
from tests.shared.compilations import compilations
from tests.shared.session_cases import Oracle, expect_logits, image_of, logits, reader, words
from tests.shared.window_oracle import tokens_of


@pytest.fixture(scope="module")
def backbone():
    return backbone_of("gqa")


@pytest.fixture
def runtime(backbone):
    with shared_runtime(backbone) as opened:
        yield opened


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("layout", ["gqa", pytest.param("mla", marks=pytest.mark.nightly)])
def test_tokens_are_the_same_alone_and_in_company(layout: str):
    """Greedy ones and drawn ones; as the executor's own `generate` makes them, over contiguous KV."""
    with shared_runtime(backbone_of(layout)) as runtime:
        agents = agents_of(runtime, 6)
        expected = [agent.alone(agent.number, 7) for agent in agents]
        assert len({tuple(answer) for answer in expected}) > 3
        assert agents[1].ask(1, 7) == expected[1]
        with compilations() as compiled:
            answers = on_threads([lambda agent=agent: agent.ask(agent.number, 7) for agent in agents])
        assert answers == expected
        expect_balanced(runtime, *agents)
        # Fewer launches than tokens, because rows were decoded together: 1, 4 or 8 rows, one program for each.
        assert runtime.scheduler.batch.steps < 6 + 6 * 6
        assert compiled.count("jit(_next_in_pages)") <= 3


def test_rows_of_a_hybrid_model_join_and_leave_with_their_states():
    """Answers of unlike lengths, so that rows move between batches of several sizes."""
    with shared_runtime(backbone_of("hybrid"), batch=4) as runtime:
        agents = agents_of(runtime, 3)
        expected = [agent.alone(0, steps) for agent, steps in zip(agents, (9, 3, 6), strict=True)]
        first = agents[0].start(0, 9)
        begun = [int(next(first).ids[0])]
        others = [agents[1].start(0, 3), agents[2].start(0, 6)]
        assert [begun + ids_of(first), *map(ids_of, others)] == expected
        expect_balanced(runtime, *agents)


@pytest.mark.usefixtures("unchecked")
def test_invalid_questions_are_refused_at_once(runtime):
    (agent,) = agents_of(runtime, 1)
    tokens = question_of(runtime.backbone, 1)
    for length, options in (
        (7, AnswerOptions(-1)),
        (7, AnswerOptions(3, Sampling(0.5))),
        (7, AnswerOptions(3, stop=(10**6,))),
        (8, AnswerOptions(3)),
    ):
        with pytest.raises(InputError):
            runtime.answer(agent.window, tokens, length, options)
    assert list(runtime.answer(agent.window, tokens, 7, AnswerOptions(0))) == []
    expect_balanced(runtime, agent)


def test_a_dropped_answer_releases_its_slots_before_the_next_token(runtime):
    one, other = agents_of(runtime, 2)
    expected, free = other.ask(1, 40), runtime.executor.slots.free
    answers = [one.start(1, 40), other.start(1, 40)]
    for answer in answers:
        next(answer)
    answers[0].close()
    assert list(answers[0]) == []
    assert ids_of(answers[1]) == expected[1:]
    begun, unread = one.start(1, 40), one.start(1, 40)
    next(begun)
    del begun, unread, answer, answers
    gc.collect()
    wait_until(lambda: runtime.executor.slots.free == free)
    assert runtime.scheduler.cancelled == 3
    expect_balanced(runtime, one, other)


def test_an_answer_ignores_later_changes_of_its_window(runtime):
    """The window closes a gap while the answer is decoded: keys that the answer reads are copied, not rotated."""
    (agent,) = agents_of(runtime, 1, pieces=3)
    expected, answer = agent.ask(1, 40), agent.start(1, 40)
    begun = [int(next(answer).ids[0])]
    agent.run(agent.window.evict(agent.window.ids[1]))
    assert agent.ask(1, 40) == agent.alone(1, 40) != expected
    assert begun + ids_of(answer) == expected
    expect_balanced(runtime, agent)


def test_logits_that_are_not_finite_end_their_own_answer(runtime, monkeypatch):
    one, other = agents_of(runtime, 2)
    expected, rows_of = other.ask(0, 12), runtime.scheduler.batch
    answers = [agent.start(0, 12) for agent in (one, other)]
    begun = [int(next(answer).ids[0]) for answer in answers]
    advance = runtime.backbone.advance_answers

    def refusing(pool, rows, draws):
        rows, pool = advance(pool, rows, draws)
        token = np.asarray(rows.token).copy()
        token[[place for place, row in enumerate(rows_of.rows) if row.asked == one.window.branch]] = -1
        return rows._replace(token=jax.numpy.asarray(token)), pool

    monkeypatch.setattr(runtime.backbone, "advance_answers", refusing)
    with pytest.raises(NotFiniteError, match="logits with NaN"):
        ids_of(answers[0])
    assert [begun[1], *ids_of(answers[1])] == expected
    expect_balanced(runtime, one, other)


# --------------------------------------------------------------------------------------------------------------- turns


def test_calls_run_in_order_and_answers_go_on_between_them(runtime, monkeypatch):
    (agent,) = agents_of(runtime, 1)
    order, gate, advance = list[Any](), threading.Event(), runtime.backbone.advance_answers

    def noting(*arguments):
        order.append("step")
        return advance(*arguments)

    monkeypatch.setattr(runtime.backbone, "advance_answers", noting)
    answer = agent.start(0, 600)
    next(answer)
    gates = threading.Thread(target=lambda: runtime.do(lambda: (gate.wait(), order.clear())))
    gates.start()
    threads = [gates]
    for number in range(4):
        threads.append(threading.Thread(target=lambda number=number: runtime.do(lambda: order.append(number))))
        threads[-1].start()
        time.sleep(0.05)
    gate.set()
    for thread in threads:
        thread.join()
    answer.close()
    assert [step for step in order if step != "step"] == [0, 1, 2, 3]
    # Never two calls without a step in between, while there is something to decode.
    assert order[order.index(0) : order.index(3)] == [0, "step", 1, "step", 2, "step"]


def test_a_job_may_call_and_read_on_the_worker_itself(backbone):
    """A watcher that runs inside a call asks, and reads the answer there."""
    with shared_runtime(backbone, timeout=0.5) as runtime:
        one, other = agents_of(runtime, 2)
        expected, answer = one.ask(0, 6), one.start(0, 6)
        assert runtime.do(lambda: ids_of(answer)) == expected
        assert runtime.do(lambda: other.ask(0, 6)) == other.alone(0, 6)
        with hog(runtime, 0), pytest.raises(PoolError, match="other sessions held"):
            runtime.do(lambda: one.ask(0, 6))
        expect_balanced(runtime, one, other)


# ---------------------------------------------------------------------------------------------------------------- room


def test_who_waits_for_room_is_served_in_order_and_passed_by_calls_without_need(runtime):
    one, two, three = agents_of(runtime, 3)
    expected, order = two.alone(0, 3), list[Any]()

    def add() -> None:
        one.run(one.window_with(60, 61))
        order.append("large")

    with hog(runtime, 0):
        large = threading.Thread(target=add)
        large.start()
        wait_until(lambda: runtime.scheduler.waiting == 1)
        three.run(three.window.evict(three.window.ids[-1]))  # needs no room, and releases a page: too few
        small = threading.Thread(target=lambda: order.append(two.ask(0, 3)))  # would fit, and does not overtake
        small.start()
        wait_until(lambda: runtime.scheduler.waiting == 2)
        three.run(three.window.evict(three.window.ids[-1]))
        large.join()
        assert order == ["large"]
    small.join()
    assert order == ["large", expected]
    assert runtime.scheduler.busy == 0
    expect_balanced(runtime, one, two, three)


def test_waiting_times_out(backbone):
    with shared_runtime(backbone, timeout=0.2, waiting=1) as runtime:
        (agent,) = agents_of(runtime, 1)
        window = agent.window
        with hog(runtime, 0):
            with pytest.raises(PoolError, match=r"whole pages.* others|whole pages.*other sessions held"):
                agent.add(40)
            with pytest.raises(PoolError, match="other sessions held"):
                agent.ask(1)
            answer = agent.start(0)
            with pytest.raises(PoolError, match="other sessions held"):
                ids_of(answer)
        assert agent.window is window
        assert runtime.scheduler.busy == 3
        assert len(agent.ask(1)) == 5
        expect_balanced(runtime, agent)


def test_questions_beyond_those_that_may_wait_wait_to_enter(backbone, monkeypatch):
    with shared_runtime(backbone, batch=1, waiting=1) as runtime:
        (agent,) = agents_of(runtime, 1)
        expected = agent.alone(0, 6)
        gate, advance = threading.Event(), backbone.advance_answers
        monkeypatch.setattr(backbone, "advance_answers", lambda *rows: (gate.wait(), advance(*rows))[1])
        answers = [agent.start(0, 6)]
        entering = threading.Thread(target=lambda: answers.extend(agent.start(0, 6) for _ in range(3)))
        entering.start()
        time.sleep(0.2)
        assert len(answers) < 3  # one is decoded, one waits for its row
        gate.set()
        entering.join()
        assert [ids_of(answer) for answer in answers] == [expected] * 4
        expect_balanced(runtime, agent)


def test_what_can_never_fit_is_refused_at_once(runtime):
    one, other = agents_of(runtime, 2)
    tokens = tokens_of(runtime.backbone, 50, PAGES * 8 + 1)
    runtime.provide("large", tokens, PAGES * 8 + 1, None)
    with pytest.raises(PoolError, match="whole pages") as raised:
        runtime.run(other.window.append(Entry.of_tokens("large", tokens)))
    assert "other sessions held" not in str(raised.value)
    with pytest.raises(PoolError, match="whole pages"):
        one.ask(1, PAGES * 8)
    runtime.release(other.window.branch)  # from now on nobody else holds pages
    with pytest.raises(PoolError, match="whole pages"):
        one.ask(1, (PAGES - 2) * 8)
    assert runtime.scheduler.busy == 0
    assert len(one.ask(1)) == 5
    expect_balanced(runtime, one)


# ------------------------------------------------------------------------------------------------------ losses and ends


def test_a_lost_pool_is_allocated_again_and_windows_are_brought_again(runtime, monkeypatch):
    agents = one, other = agents_of(runtime, 2)
    expected = [agent.ask(0, 8) for agent in agents]
    advance = runtime.backbone.advance_answers

    def failing(pool, rows, draws):
        jax.block_until_ready(advance(pool, rows, draws))  # which donates it
        raise RuntimeError("no memory left")

    answers = [agent.start(0, 400) for agent in agents]
    monkeypatch.setattr(runtime.backbone, "advance_answers", failing)
    causes = []
    for answer in answers:
        with pytest.raises(PoolError, match="got its pool lost") as raised:
            ids_of(answer)
        assert raised.value.lost
        causes.append(str(raised.value.__cause__))
    assert causes == ["no memory left"] * 2
    monkeypatch.setattr(runtime.backbone, "advance_answers", advance)
    one.window = runtime.reprefill(one.window)
    assert one.ask(0, 8) == expected[0]
    for use in (lambda: other.add(40), lambda: other.ask(0, 8)):
        with pytest.raises(PoolError, match="expected `reprefill`"):
            use()
    other.window = runtime.reprefill(other.window)
    assert other.ask(0, 8) == expected[1]
    assert runtime.reprefill(other.window) is other.window
    expect_balanced(runtime, one, other)


def test_a_launch_or_a_worker_that_fails_ends_the_answers_under_way_and_no_later_one(runtime, monkeypatch):
    (agent,) = agents_of(runtime, 1)
    expected, scheduler = agent.ask(0, 8), runtime.scheduler
    for owner, name in ((runtime.backbone, "advance_answers"), (scheduler, "_step")):
        answer = agent.start(0, 400)
        next(answer)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ids_of(answer)
        assert agent.ask(0, 8) == expected
        expect_balanced(runtime, agent)


def test_releasing_a_branch_ends_its_answers(runtime):
    one, other = agents_of(runtime, 2)
    expected = other.ask(0, 40)
    answers = [one.start(0, 40), other.start(0, 40)]
    runtime.release(one.window.branch)
    with pytest.raises(SessionError, match="released"):
        ids_of(answers[0])
    assert ids_of(answers[1]) == expected
    expect_balanced(runtime, other)


def test_closing_ends_answers_and_waits(backbone):
    with shared_runtime(backbone) as runtime:
        one, other = agents_of(runtime, 2)
        answer = one.start(0, 200)
        next(answer)
        errors: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(SessionError, match="got closed") as raised:
                other.add(40)
            errors.append(raised.value)

        runtime.do(lambda: runtime.executor.reserve("hog", runtime.executor.slots.free_pages * 8))
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: runtime.scheduler.waiting == 1)
        runtime.close()
        thread.join()
        assert len(errors) == 1
        with pytest.raises(SessionError, match="got closed"):
            ids_of(answer)
        for use in (lambda: one.add(41), lambda: one.ask(1), lambda: runtime.reprefill(one.window)):
            with pytest.raises(SessionError, match="after its runtime was closed"):
                use()
        runtime.release(one.window.branch)
        runtime.close()
        assert not any(thread.name == "sessions" for thread in threading.enumerate())


def test_in_a_forked_process_nothing_waits_for_ever(runtime, monkeypatch):
    (agent,) = agents_of(runtime, 1)
    answer = agent.start(0, 3)
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    for use in (lambda: next(answer), lambda: agent.add(40), lambda: agent.ask(1)):
        with pytest.raises(SessionError, match="forked off"):
            use()
    runtime.close()
    monkeypatch.undo()


# ---------------------------------------------------------------------------------------------------------- under load


@contextlib.contextmanager
def interrupts(count: int) -> Iterator[tuple[threading.Thread, list[bool]]]:
    """Interrupts the main thread at random moments, those at which the list is not empty."""
    armed, rng = list[bool](), np.random.default_rng(0)

    def interrupt(*_: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    def work() -> None:
        for _ in range(count):
            time.sleep(float(rng.uniform(0.001, 0.03)))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    source, before = threading.Thread(target=work), signal.signal(signal.SIGINT, interrupt)
    source.start()
    try:
        yield source, armed
    finally:
        armed.clear()
        source.join()
        signal.signal(signal.SIGINT, before)


def test_interrupts_at_random_moments_leave_books_and_answers_consistent(backbone):
    """Three agents act on threads and one on the main thread, which is interrupted again and again."""
    with shared_runtime(backbone) as runtime:
        agents = agents_of(runtime, 1) + [Agent(runtime, number) for number in (1, 2, 3)]
        expected, count, window = agents[0].alone(0, 5), 0, agents[0].window
        threads = [threading.Thread(target=agent.live, args=(8,)) for agent in agents[1:]]
        for thread in threads:
            thread.start()
        with interrupts(40) as (source, armed):
            while source.is_alive():
                try:
                    armed.append(True)
                    agents[0].ask(0, 5)
                    runtime.run(window.slide(1))
                    runtime.run(window)  # which the next answer brings, if this is never reached
                    armed.clear()
                except KeyboardInterrupt:
                    count += 1
        for thread in threads:
            thread.join()
        gc.collect()
        assert count
        assert agents[0].ask(0, 5) == expected
        wait_until(lambda: not any("//" in branch for branch in runtime.executor.branches))
        expect_balanced(runtime, *agents)
    for agent in agents[1:]:
        with shared_runtime(backbone, batch=1) as runtime:
            alone = Agent(runtime, agent.number)
            alone.live(8)
            assert alone.answers == agent.answers


# ------------------------------------------------------------------------------------------------------------ sessions


def test_sessions_share_pool_and_store_and_outlive_a_lost_pool(backbone, tmp_path):
    rng = np.random.default_rng(0)
    shots, options = [rng.integers(3, 40, 8).tolist() for _ in range(4)], {"steps": 3, "stop": ()}

    def answers_of(session: kvp.Session) -> list[Any]:
        answers = []
        for shot in shots[:3]:
            session.add(shot, kind="chunk")
            answers.append(session.ask([5, 6], **options).ids)
        return answers

    with kvp.Session(backbone, keep=2) as alone:
        expected = answers_of(alone)
    store = kvp.ChunkStore(tmp_path / "store")
    with kvp.Sessions(backbone, store, pages=PAGES, page_size=8, rank=0) as sessions:
        first, second, third = (sessions.open(keep=2) for _ in range(3))
        assert on_threads([lambda session=session: answers_of(session) for session in (first, second, third)]) == (
            [expected] * 3
        )
        fork = first.fork()
        assert fork.ask([5, 6], **options).ids == expected[-1]
        third.save(tmp_path / "third")
        third.close()
        with sessions.restore(tmp_path / "third") as third:
            assert third.ask([5, 6], **options).ids == expected[-1]
        with pytest.raises(InputError, match="share the pool"):
            sessions.open(pages=8)
        with pytest.raises(SessionError, match="store"):
            kvp.Session(backbone, kvp.ChunkStore(tmp_path / "other"), runtime=sessions.runtime)

        for value in jax.tree.leaves(sessions.runtime.executor.pools):
            value.delete()
        assert len(fork.ask([5, 6], **options).ids) == 3  # its parent is not there
        fork.close()
        first.add(shots[3], kind="chunk")
        assert len(second.ask([5, 6], **options).ids) == 3
        expect_balanced(sessions.runtime, first, second)
        stats = sessions.stats()
        assert (stats.growing, stats.waiting, stats.busy, stats.slots) == (0, 0, 0, PAGES * 8)
        assert f"answers {stats.answers}" in str(stats)
    for use in (lambda: first.add(shots[0]), sessions.open):
        with pytest.raises(SessionError, match="after its runtime was closed"):
            use()
    first.close()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "options", [{"batch": 0}, {"batch": True}, {"waiting": 0}, {"timeout": -1.0}, {"timeout": "long"}]
)
def test_sessions_refuse_invalid_numbers(backbone, options):
    with pytest.raises(InputError, match="sessions: got"):
        kvp.Sessions(backbone, pages=8, **options)


def test_sessions_may_have_the_same_texts_and_names_for_other_pieces():
    """A first text is split in one session and whole in the next; placeholders and chunks are called alike."""
    reading, text = reader(), words(5, 8)
    with kvp.Sessions(reading, pages=64) as sessions:
        first = sessions.open(keep=1, placeholder="w30")
        second = sessions.open(keep=1, placeholder="w31 w32", lead=text)
        for session in (first, second):
            session.add(text)
            for number in range(3):
                session.add(image_of(number), id=f"shot {number}")
        expect_logits(first, Oracle(reading, words(5, 4), words(9, 4), "w30", "w30", image_of(2)).logits())
        left = ["w31 w32"] * 2
        expect_logits(second, Oracle(reading, text, text, *left, image_of(2)).logits())


def test_sessions_on_one_runtime_keep_their_own_kv():
    reading = reader()
    with kvp.Session(reading, keep=1) as first, kvp.Session(reading, runtime=first.runtime) as second:
        for number in range(4):
            first.add(image_of(number))
        expected = logits(first)
        second.add(image_of(7))
        np.testing.assert_array_equal(logits(first), expected)
        expect_logits(second, Oracle(reading, image_of(7)).logits())
