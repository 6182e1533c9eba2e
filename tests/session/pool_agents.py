"""Agents on threads, each with a window of its own in one pool: what they do is drawn by their number alone."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from kvpatch_jax.answers import Sampling
from kvpatch_jax.session.batching import BatchScheduler
from kvpatch_jax.session.runtime import AnswerOptions, Runtime
from kvpatch_jax.window import Entry, Window
from tests.shared.window_oracle import tokens_of

PAGES, PAGE = 104, 8
LENGTHS = (5, 7, 8)


@contextlib.contextmanager
def shared_runtime(
    backbone: Any, *, pages: int = PAGES, batch: int = 8, waiting: int = 64, timeout: float = 30.0
) -> Iterator[Any]:
    """Opens a runtime of many sessions, on a pool of the one size that is compiled for."""
    schedule = functools.partial(BatchScheduler, batch=batch, waiting=waiting, timeout=timeout)
    runtime = Runtime(backbone, pages=pages, page_size=PAGE, dtype="float32", schedule=schedule)
    try:
        yield runtime
    finally:
        runtime.close()


def question_of(backbone: Any, number: int) -> Any:
    return tokens_of(backbone, 9000 + number, LENGTHS[number % 2])


def options_of(number: int, steps: int) -> AnswerOptions:
    """Returns options of an answer: greedy, or drawn in one of two ways."""
    sampling = (Sampling(), Sampling(0.9, 0.8), Sampling(1.2, top_k=5))[number % 3]
    return AnswerOptions(steps, sampling, number if number % 3 else None, ())


def ids_of(answer: Any) -> list[int]:
    return [int(piece.ids[0]) for piece in answer]


@dataclasses.dataclass
class Agent:
    """A window that is added to, slid, asked about, forked.

    Attributes:
      answers: the ids of every answer.
    """

    runtime: Runtime
    number: int
    answers: list[list[int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.backbone: Any = self.runtime.backbone
        self.window = Window.empty(self.backbone, lead=0, branch=secrets.token_hex(8))
        self.rng = np.random.default_rng(self.number)

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

    def start(self, number: int = 0, steps: int = 5, window: Window | None = None) -> Any:
        """Starts an answer."""
        tokens, window = question_of(self.backbone, number), self.window if window is None else window
        return self.runtime.answer(window, tokens, LENGTHS[number % 2], options_of(number, steps))

    def ask(self, number: int = 0, steps: int = 5, window: Window | None = None) -> list[int]:
        return ids_of(self.start(number, steps, window))

    def alone(self, number: int = 0, steps: int = 5) -> list[int]:
        """Returns the answer that the executor generates over contiguous KV."""
        _, sampling, key, stop = options_of(number, steps)
        tokens, executor = question_of(self.backbone, number), self.runtime.executor

        def job() -> list[int]:
            return executor.generate(self.window, tokens, steps, sampling=sampling, key=key, stop=stop)[0].tolist()

        return self.runtime.do(job)

    def live(self, acts: int) -> None:
        """Acts so many times; what it does depends on its number alone."""
        for number in range(1, acts + 1):
            act = self.rng.choice(["add", "ask", "slide", "fork", "cancel"], p=[0.3, 0.4, 0.1, 0.1, 0.1])
            piece = int(self.rng.choice([piece for piece in range(24) if f"c{piece}" not in self.window]))
            steps = int(self.rng.integers(1, 6))
            if act == "add" or not self.window.pieces:
                self.run(self.window.slide(1))
                self.add(piece)
            elif act == "slide":
                self.run(self.window.slide(1))
            elif act == "fork":
                fork = self.window.fork()
                self.runtime.run(fork)
                fork = fork.slide(len(fork) - 1)
                self.runtime.run(fork)
                self.answers.append(self.ask(number, steps, fork))
                self.runtime.release(fork.branch)
            elif act == "cancel":
                answer = self.start(number, 5)
                next(answer)
                answer.close()
            else:
                self.answers.append(self.ask(number, steps))


def agents_of(runtime: Runtime, count: int, pieces: int = 2) -> list[Agent]:
    agents = [Agent(runtime, number) for number in range(count)]
    for agent in agents:
        for piece in range(pieces):
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
        owners = np.zeros(executor.slots.counts.size, np.int32)
        for residents in executor.branches.values():
            for resident in residents.values():
                np.add.at(owners, resident.slots, 1)
        return (owners == executor.slots.counts).all(), set(executor.branches), len(scheduler.batch.rows)

    assert runtime.do(job) == (True, {user.window.branch for user in users}, 0)
    assert scheduler.waiting == 0
