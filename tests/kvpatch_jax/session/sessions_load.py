"""Agents on threads, each with a window of its own in one pool: what they do is drawn by their number alone."""

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np
from window_drill import backbone_of as backbone_of
from window_oracle import tokens_of

from kvpatch_jax.sampling import Sampling
from kvpatch_jax.session import Sessions
from kvpatch_jax.window import Costs, Entry, Window

PAGES, PAGE = 104, 8
"""Three pieces of a page for each of 32 agents, and four answers of two pages at a time."""
LENGTHS = (5, 7, 8)


def opened(backbone: Any, **options: Any) -> Sessions:
    """Sessions on a pool of the one size that is compiled for."""
    return Sessions(backbone, **{"pages": PAGES, "page_size": PAGE, "dtype": "float32"} | options)


def question_of(backbone: Any, number: int) -> Any:
    return tokens_of(backbone, 9000 + number, LENGTHS[number % 2])


def ids_of(answer: Any) -> list[int]:
    return [int(piece.ids[0]) for piece in answer]


@dataclasses.dataclass
class Agent:
    """A window that is added to, slid, asked about, forked.

    Attributes:
      done: acts. said: what every answer was.
    """

    shared: Any
    number: int
    done: int = 0
    said: list[list[int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.backbone: Any = self.shared.backbone
        self.window = Window.empty(Costs.of(self.backbone, "float32"), branch=Sessions.name())
        self.rng = np.random.default_rng(self.number)

    def run(self, changed: tuple[Window, Any]) -> None:
        self.shared.run(*changed)
        self.window = changed[0]

    def add(self, piece: int, keep: int | None = None) -> None:
        """Appends a piece, which agents share by its id, or brings it back; `keep` slides first."""
        tokens, id = tokens_of(self.backbone, piece, LENGTHS[piece % 3]), f"c{piece}"
        self.shared.provide(id, tokens, LENGTHS[piece % 3], id)
        window, edits = self.window, ()
        if keep is not None:
            window, edits = window.slide(keep)
        if any(each.entry.id == id for each in window.evicted):
            window, more = window.recall(id, "prefill")
        else:
            window, more = window.append(Entry.of_tokens(id, tokens, id, kind="chunk"))
        self.run((window, (*edits, *more)))

    def ask(self, number: int = 0, steps: int = 5, window: Window | None = None, read: int | None = None) -> list[int]:
        """Asks, and reads at most so many tokens."""
        sampling, key = (Sampling(0.9, 0.8), number) if number % 3 == 0 else (Sampling(), None)
        there = self.window if window is None else window
        answer: Any = self.shared.answer(there, question_of(self.backbone, number), None, steps, sampling, key, ())
        found: list[int] = []
        for piece in answer:
            found.append(int(piece.ids[0]))
            if len(found) == read:
                answer.close()
                break
        return found

    def live(self, acts: int) -> None:
        """Acts until it did so many; what it does depends on its number alone."""
        while self.done != acts:
            self.done += 1
            number = self.done
            what = self.rng.choice(["add", "ask", "recall", "fork", "cancel"], p=[0.3, 0.4, 0.1, 0.1, 0.1])
            free = [piece for piece in range(24) if f"c{piece}" not in self.window]
            piece = int(self.rng.choice(free))
            gone = [each.entry.id for each in self.window.evicted]
            if what == "add" or not self.window.pieces:
                self.add(piece, keep=1)
            elif what == "recall" and gone:
                window, slid = self.window.slide(1)
                window, back = window.recall(gone[piece % len(gone)], "prefill")
                self.run((window, (*slid, *back)))
            elif what == "fork":
                self._fork(number)
            elif what == "cancel":
                self.ask(number, 5, read=2)
            else:
                self.said.append(self.ask(number, int(self.rng.integers(1, 6))))

    def _fork(self, number: int) -> None:
        """Asks about the window in a branch where its last piece has left."""
        there, shared = self.window.fork()
        self.shared.run(there, shared)
        if len(there) > 1:
            there, edits = there.evict(there.pieces[-1].entry.id)
            self.shared.run(there, edits)
        self.said.append(self.ask(number, 3, there))
        self.shared.release(there.branch)


def on_threads(works: Any) -> None:
    """Calls all at once, each on a thread of its own; raises what the first in the list that failed raised."""
    with concurrent.futures.ThreadPoolExecutor(len(works)) as threads:
        list(threads.map(lambda work: work(), works))


def expect_balanced(shared: Any, branches: set[str]) -> None:
    """Every slot has an owner, and only these branches are left."""
    books = shared.executor.books
    assert (books.owners() == books.allocator.counts).all()
    assert set(books.branches) == branches
    assert shared.decode_loop.batch.rows == []
    assert not shared.decode_loop.requests
