"""Sessions on one pool decode together the tokens that each has alone, in turn, without deadlock or a lost slot."""
# pyright: reportArgumentType=false

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.answers import Sampling
from kvpatch_jax.errors import InputError, NotFiniteError, PoolError, SessionError
from kvpatch_jax.session.batching import BatchScheduler
from kvpatch_jax.session.runtime import AnswerOptions, Runtime
from kvpatch_jax.window import Entry, Window
from tests.shared.compilations import compilations
from tests.shared.session_cases import ONE_TABLE_SIZE, Oracle, expect_logits, image_of, worded, words
from tests.shared.window_oracle import backbone_of, owners, tokens_of

PAGES, PAGE = 104, 8
LENGTHS = (5, 7, 8)


@contextlib.contextmanager
def shared_runtime(backbone: Any, *, waiting: int = 64, timeout: float = 30.0) -> Iterator[Any]:
    """Opens a runtime of many sessions, on a pool of the one size that is compiled for."""
    schedule = functools.partial(BatchScheduler, batch=8, waiting=waiting, timeout=timeout)
    runtime = Runtime(backbone, pages=PAGES, page_size=PAGE, dtype="float32", schedule=schedule)
    try:
        yield runtime
    finally:
        runtime.close()


def options_of(number: int, steps: int) -> AnswerOptions:
    """Returns options of an answer: greedy, or drawn in one of two ways."""
    sampling = (Sampling(), Sampling(0.9, 0.8), Sampling(1.2, top_k=5))[number % 3]
    return AnswerOptions(steps, sampling, number if number % 3 else None, ())


def ids_of(answer: Any) -> list[int]:
    return [int(piece.ids[0]) for piece in answer]


@dataclasses.dataclass
class Agent:
    """A window that is added to and asked about."""

    runtime: Runtime
    number: int

    def __post_init__(self) -> None:
        self.backbone: Any = self.runtime.backbone
        self.window = Window.empty(self.backbone, lead=0, branch=secrets.token_hex(8))

    def run(self, window: Window) -> None:
        self.runtime.run(window)
        self.window = window

    def window_with(self, *pieces: int) -> Window:
        """Returns the window with pieces at its end, which agents share by their ids."""
        window = self.window
        for piece in pieces:
            id, tokens = f"c{piece}", tokens_of(self.backbone, piece, LENGTHS[piece % 3])
            self.runtime.provide(id, tokens, LENGTHS[piece % 3], id)
            gone = id in window.gone
            window = window.recall(id) if gone else window.append(Entry.of_tokens(id, tokens, id, kind="chunk"))
        return window

    def add(self, piece: int) -> None:
        self.run(self.window_with(piece))

    def start(self, number: int = 0, steps: int = 5) -> Any:
        """Starts an answer."""
        tokens = tokens_of(self.backbone, 9000 + number, LENGTHS[number % 2])
        return self.runtime.answer(self.window, tokens, LENGTHS[number % 2], options_of(number, steps))

    def ask(self, number: int = 0, steps: int = 5) -> list[int]:
        return ids_of(self.start(number, steps))

    def alone(self, number: int = 0, steps: int = 5) -> list[int]:
        """Returns the answer that the executor generates over contiguous KV."""
        _, sampling, key, stop = options_of(number, steps)
        tokens, executor = tokens_of(self.backbone, 9000 + number, LENGTHS[number % 2]), self.runtime.executor

        def job() -> list[int]:
            return executor.generate(self.window, tokens, steps, sampling=sampling, key=key, stop=stop)[0].tolist()

        return self.runtime.do(job)


def agents_of(runtime: Runtime, count: int) -> list[Agent]:
    agents = [Agent(runtime, number) for number in range(count)]
    for agent in agents:
        for piece in range(2):
            agent.add(3 * agent.number + piece)
    return agents


def on_threads(works: Sequence[Callable[[], object]]) -> list[Any]:
    """Calls all at once, each on a thread of its own; raises what the first in the list that failed raised."""
    with concurrent.futures.ThreadPoolExecutor(len(works)) as threads:
        return [future.result() for future in [threads.submit(work) for work in works]]


@contextlib.contextmanager
def hog(runtime: Runtime, free: int) -> Iterator[None]:
    """Takes all but so many free pages, as somebody else would."""
    slots = runtime.executor.slots
    runtime.do(lambda: runtime.executor.reserve("hog", (slots.free_pages - free) * PAGE))
    yield
    runtime.release("hog")


def expect_balanced(runtime: Runtime, *users: Any) -> None:
    """Every owner of a slot is in a branch, and only those of these agents or sessions are left."""
    executor, scheduler = runtime.executor, cast(Any, runtime.scheduler)

    def job() -> tuple[Any, set[str], int]:
        return (owners(executor) == executor.slots.counts).all(), set(executor.branches), len(scheduler.batch.rows)

    assert runtime.do(job) == (True, {user.window.branch for user in users}, 0)
    assert scheduler.waiting == 0


@pytest.fixture(scope="module")
def backbone():
    with ONE_TABLE_SIZE:
        yield backbone_of("gqa")


@pytest.fixture
def runtime(backbone):
    with shared_runtime(backbone) as opened:
        yield opened


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.usefixtures("backbone")
@pytest.mark.parametrize("layout", ["gqa", pytest.param("hybrid", marks=pytest.mark.nightly)])
def test_tokens_are_the_same_alone_and_in_company(layout: str):
    """Greedy ones and drawn ones; as the executor's own `generate` makes them, over contiguous KV."""
    with shared_runtime(backbone_of(layout)) as runtime:
        agents = agents_of(runtime, 6)
        expected = [agent.alone(agent.number, 25) for agent in agents]
        assert len({tuple(answer) for answer in expected}) > 3
        assert agents[1].ask(1, 25) == expected[1]
        with compilations() as compiled:
            answers = on_threads([lambda agent=agent: agent.ask(agent.number, 25) for agent in agents])
        assert answers == expected
        expect_balanced(runtime, *agents)
        # Fewer launches than tokens, because rows were decoded together: 1, 4 or 8 rows, one program for each.
        assert runtime.scheduler.batch.steps < 6 * 25
        assert compiled.count("jit(_next_in_pages)") <= 3


def test_a_dropped_answer_releases_its_slots_before_the_next_token(runtime):
    first, other = agents_of(runtime, 2)
    expected, free = other.ask(1, 40), runtime.executor.slots.free
    answers = [first.start(1, 40), other.start(1, 40)]
    for answer in answers:
        next(answer)
    answers[0].close()
    assert list(answers[0]) == []
    assert ids_of(answers[1]) == expected[1:]
    begun, unread = first.start(1, 40), first.start(1, 40)
    next(begun)
    del begun, unread, answer, answers
    gc.collect()
    wait_until(lambda: runtime.executor.slots.free == free)
    assert runtime.scheduler.cancelled == 3
    released = first.start(1, 40)
    runtime.release(first.window.branch)
    with pytest.raises(SessionError, match="released"):
        ids_of(released)
    expect_balanced(runtime, other)


def test_logits_that_are_not_finite_end_their_own_answer(runtime, monkeypatch):
    first, other = agents_of(runtime, 2)
    expected, rows_of = other.ask(0, 12), runtime.scheduler.batch
    answers = [agent.start(0, 12) for agent in (first, other)]
    begun = [int(next(answer).ids[0]) for answer in answers]
    advance = runtime.backbone.advance_answers

    def refusing(pool, rows, draws):
        rows, pool = advance(pool, rows, draws)
        token = np.asarray(rows.token).copy()
        token[[place for place, row in enumerate(rows_of.rows) if row.asked == first.window.branch]] = -1
        return rows._replace(token=jax.numpy.asarray(token)), pool

    monkeypatch.setattr(runtime.backbone, "advance_answers", refusing)
    with pytest.raises(NotFiniteError, match="logits with NaN"):
        ids_of(answers[0])
    assert [begun[1], *ids_of(answers[1])] == expected
    expect_balanced(runtime, first, other)


def test_calls_run_in_order_and_answers_go_on_between_them(runtime, monkeypatch):
    (agent,) = agents_of(runtime, 1)
    order, gate, advance = list[Any](), threading.Event(), runtime.backbone.advance_answers

    def noting(*arguments):
        order.append("step")
        return advance(*arguments)

    monkeypatch.setattr(runtime.backbone, "advance_answers", noting)
    answers = list[Any]()
    threads = [threading.Thread(target=lambda: runtime.do(lambda: (answers.append(agent.start(0, 40)), gate.wait())))]
    threads[0].start()
    wait_until(lambda: len(answers) == 1)
    for number in range(4):
        threads.append(threading.Thread(target=lambda number=number: runtime.do(lambda: order.append(number))))
        threads[-1].start()
        wait_until(lambda number=number: runtime.scheduler._inbox.qsize() == number + 1)
    gate.set()
    for thread in threads:
        thread.join()
    answers[0].close()
    assert [step for step in order if step != "step"] == [0, 1, 2, 3]
    # Never two calls without a step in between, while there is something to decode.
    assert order[order.index(0) : order.index(3)] == [0, "step", 1, "step", 2, "step"]


def test_a_job_may_call_and_read_on_the_worker_itself(backbone):
    """A watcher that runs inside a call asks, and reads the answer there."""
    with shared_runtime(backbone, timeout=0.5) as runtime:
        first, other = agents_of(runtime, 2)
        expected, answer = first.ask(0, 6), first.start(0, 6)
        assert runtime.do(lambda: ids_of(answer)) == expected
        assert runtime.do(lambda: other.ask(0, 6)) == other.alone(0, 6)
        with hog(runtime, 0), pytest.raises(PoolError, match="other sessions held"):
            runtime.do(lambda: first.ask(0, 6))
        expect_balanced(runtime, first, other)


def test_who_waits_for_room_is_served_in_order_and_passed_by_calls_without_need(runtime):
    first, second, third = agents_of(runtime, 3)
    expected, order = second.alone(0, 3), list[Any]()

    def add() -> None:
        first.run(first.window_with(60, 61))
        order.append("large")

    with hog(runtime, 0):
        large = threading.Thread(target=add)
        large.start()
        wait_until(lambda: runtime.scheduler.waiting == 1)
        third.run(third.window.evict(third.window.ids[-1]))  # needs no room, and releases a page: too few
        small = threading.Thread(target=lambda: order.append(second.ask(0, 3)))  # would fit, and does not overtake
        small.start()
        wait_until(lambda: runtime.scheduler.waiting == 2)
        third.run(third.window.evict(third.window.ids[-1]))
        large.join()
        assert order == ["large"]
    small.join()
    assert order == ["large", expected]
    assert runtime.scheduler.busy == 0
    expect_balanced(runtime, first, second, third)


def test_waiting_times_out(backbone):
    with shared_runtime(backbone, timeout=0.2, waiting=1) as runtime:
        (agent,) = agents_of(runtime, 1)
        window = agent.window
        with hog(runtime, 0):
            with pytest.raises(PoolError, match=r"whole pages.*other"):
                agent.add(40)
            answer = agent.start(0)
            with pytest.raises(PoolError, match="other sessions held"):
                ids_of(answer)
        assert agent.window is window
        assert runtime.scheduler.busy == 2
        assert len(agent.ask(1)) == 5
        expect_balanced(runtime, agent)


def test_what_can_never_fit_is_refused_at_once(runtime):
    first, other = agents_of(runtime, 2)
    with pytest.raises(PoolError, match="whole pages") as raised:
        first.ask(1, PAGES * 8)
    assert "other sessions held" not in str(raised.value)
    runtime.release(other.window.branch)  # from now on nobody else holds pages
    with pytest.raises(PoolError, match="whole pages"):
        first.ask(1, (PAGES - 2) * 8)
    assert runtime.scheduler.busy == 0
    assert len(first.ask(1)) == 5
    expect_balanced(runtime, first)


def test_a_lost_pool_is_allocated_again_and_windows_are_brought_again(runtime, monkeypatch):
    agents = first, other = agents_of(runtime, 2)
    expected = [agent.ask(0, 8) for agent in agents]
    advance = runtime.backbone.advance_answers

    def failing(pool, rows, draws):
        jax.block_until_ready(advance(pool, rows, draws))  # which donates it
        raise RuntimeError("no memory left")

    monkeypatch.setattr(runtime.backbone, "advance_answers", failing)
    answers, causes = runtime.do(lambda: [agent.start(0, 8) for agent in agents]), []
    for answer in answers:
        with pytest.raises(PoolError, match="got its pool lost") as raised:
            ids_of(answer)
        assert raised.value.lost
        causes.append(str(raised.value.__cause__))
    assert causes == ["no memory left"] * 2
    monkeypatch.setattr(runtime.backbone, "advance_answers", advance)
    first.window = runtime.reprefill(first.window)
    assert first.ask(0, 8) == expected[0]
    with pytest.raises(PoolError, match="expected `reprefill`"):
        other.ask(0, 8)
    other.window = runtime.reprefill(other.window)
    assert other.ask(0, 8) == expected[1]
    expect_balanced(runtime, first, other)


def test_closing_ends_answers_and_waits(backbone, monkeypatch):
    advance = backbone.advance_answers
    monkeypatch.setattr(backbone, "advance_answers", lambda *arguments: (time.sleep(0.05), advance(*arguments))[1])
    with shared_runtime(backbone) as runtime:
        first, other = agents_of(runtime, 2)
        answer = first.start(0, 100)
        next(answer)
        errors: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(SessionError, match="got closed") as raised:
                other.add(40)
            errors.append(raised.value)

        with hog(runtime, 0):
            thread = threading.Thread(target=wait)
            thread.start()
            wait_until(lambda: runtime.scheduler.waiting == 1)
            runtime.close()
            thread.join()
        assert len(errors) == 1
        with pytest.raises(SessionError, match="got closed"):
            ids_of(answer)
        with pytest.raises(SessionError, match="after its runtime was closed"):
            first.ask(1)
        runtime.close()
        assert not any(thread.name == "sessions" for thread in threading.enumerate())


def test_sessions_share_pool_and_store_and_outlive_a_lost_pool(backbone, tmp_path):
    rng = np.random.default_rng(0)
    shots, options = [rng.integers(3, 40, 8).tolist() for _ in range(4)], {"steps": 3, "stop": ()}

    def answers_of(session: kvp.Session) -> list[Any]:
        answers = []
        for shot in shots[:3]:
            session.add(shot, kind="chunk")
            answers.append(session.ask([5, 6], **options).ids)
        return answers

    with kvp.Session(backbone, keep=2, runtime=Runtime(backbone, pages=PAGES, page_size=PAGE)) as alone:
        expected = answers_of(alone)
    with (
        kvp.ChunkStore(tmp_path / "store") as store,
        kvp.Sessions(backbone, store, pages=PAGES, page_size=PAGE, rank=0) as sessions,
    ):
        first, _, third = opened = [sessions.open(keep=2) for _ in range(3)]
        assert on_threads([lambda session=session: answers_of(session) for session in opened]) == [expected] * 3
        fork = first.fork()
        assert fork.ask([5, 6], **options).ids == expected[-1]
        third.save(tmp_path / "third")
        third.close()
        with sessions.restore(tmp_path / "third") as third:
            assert third.ask([5, 6], **options).ids == expected[-1]
        with pytest.raises(InputError, match="share the pool"):
            sessions.open(pages=8)
        with pytest.raises(InputError, match="sessions: got"):
            kvp.Sessions(backbone, pages=8, batch=0)
        with kvp.ChunkStore(tmp_path / "other") as other, pytest.raises(SessionError, match="store"):
            kvp.Session(backbone, other, runtime=sessions.runtime)
        fork.close()
        stats = sessions.stats()
        assert (stats.growing, stats.waiting, stats.busy, stats.slots) == (0, 0, 0, PAGES * 8)
    for use in (lambda: first.add(shots[0]), sessions.open):
        with pytest.raises(SessionError, match="after its runtime was closed"):
            use()


def test_sessions_may_have_the_same_texts_and_names_for_other_pieces():
    """A first text is split in one session and whole in the next; placeholders and chunks are called alike."""
    reading, text = worded(backbone_of("mrope")), words(5, 8)
    with kvp.Sessions(reading, pages=256) as sessions:
        first = sessions.open(keep=1, placeholder="w30 w31")
        second = sessions.open(keep=1, placeholder="w31 w32", lead=text)
        for session in (first, second):
            session.add(text)
            for number in range(3):
                session.add(image_of(number), id=f"shot {number}")
        expect_logits(first, Oracle(reading, words(5, 4), words(9, 4), *["w30 w31"] * 2, image_of(2)).logits())
        left = ["w31 w32"] * 2
        expect_logits(second, Oracle(reading, text, text, *left, image_of(2)).logits())
