"""Answers under way in one pool: their slots, and one program that makes the next token of all of them.

An answer reads its context at slots that it owns too, as a fork would: whatever its session does meanwhile to its
window leaves them alone. Axis letters: B rows, N pages of a table, O slots of a page.
"""

import dataclasses
import queue
from typing import Any

import jax
import numpy as np

from ..answers import AnswerRows, Draws, no_row
from ..backbone import Tokens
from ..core import NO_PAGE, Buckets, Paged
from ..errors import NotFiniteError
from ..window import PagedExecutor, ResidentPiece, all_slots, programs

TABLES = Buckets(smallest=64, steps=1)
"""Keys of a row are rounded up to powers of two: a batch's programs are few, whatever its contexts."""
LEAST_KEYS = 64
REFUSED = -1
"""The token of a row whose logits say nothing."""


def row_bucket(count: int, most: int) -> int:
    """How many rows are run where so many grow: 1, 4, 16, …, at most `most`."""
    size = 1
    while size < count:
        size *= 4
    return min(size, most)


@dataclasses.dataclass(eq=False)
class DecodeRequest:
    """A question on its way: asked, in the line, in the batch, ended.

    Attributes:
      number: of `Place.number`. branch: of the pool, the answer's own. window: the branch that is asked about.
      tokens, length: the question, at its place behind the window, and how many of its tokens count.
      steps: tokens at most. draws, stop: how they are chosen, and what ends them.
      deadline: when it gives up waiting for room, of `time.monotonic`.
      made: tokens for whoever asked, one by one; then None, or what went wrong.
      cancelled: set by whoever asked, from any thread.
    """

    number: int
    branch: str
    window: str
    tokens: Tokens
    length: int
    steps: int
    draws: Draws
    stop: tuple[int, ...]
    deadline: float
    made: "queue.SimpleQueue[int | BaseException | None]" = dataclasses.field(default_factory=queue.SimpleQueue)
    cancelled: bool = False

    @property
    def start(self) -> int:
        """Where the question stands."""
        return int(np.asarray(self.tokens.positions).reshape(-1)[0])


@dataclasses.dataclass(eq=False)
class DecodeRow:
    """An answer in the batch.

    Attributes:
      behind: tokens of context and question. position: of the first token of the answer, on every axis.
      token: the last one chosen. count: how many were.
      where: table, owned slots and their places, as `AnswerRows` has them; None until they are looked up.
    """

    ask: DecodeRequest
    behind: int
    position: int | float
    token: int
    count: int = 1
    where: Paged | None = None

    @property
    def ended(self) -> bool:
        """Whether no token is to come."""
        return self.count >= self.ask.steps or self.token in self.ask.stop


class DecodeBatch:
    """Rows that get their next tokens together.

    Attributes:
      rows: in the order in which they joined. steps: launches so far. shapes: rows and pages of the programs that were
      run, and those of questions: tokens and pages.
    """

    def __init__(self, executor: PagedExecutor, size: int):
        """Nothing under way; at most `size` rows."""
        self.executor, self.size = executor, size
        self.backbone: Any = executor.backbone
        self.rows: list[DecodeRow] = []
        self.steps = 0
        self.shapes: set[tuple[str, int, int]] = set()
        self._now: tuple[AnswerRows, Draws] | None = None

    @property
    def full(self) -> bool:
        """Whether no further row fits."""
        return len(self.rows) >= self.size

    def needs(self, ask: DecodeRequest) -> int:
        """Slots that an answer takes: its last token's KV is never written."""
        return ask.length + ask.steps - 1

    def reserve(self, ask: DecodeRequest) -> None:
        """Takes the slots of a question and of its whole answer, so that none can run out on the way.

        Raises:
          PoolError: no room; nothing is taken.
        """
        executor, count = self.executor, self.needs(ask)
        books = executor.books.copy()
        slots = books.allocate(count, executor.aligned, f"question of {ask.length} tokens, answer of {ask.steps}")
        local = np.zeros((count, *np.shape(ask.tokens.positions)[2:]), np.float32)
        books.put(ask.branch, ResidentPiece("", None, slots, local, ask.start))
        executor.books = books

    def begin(self, ask: DecodeRequest) -> DecodeRow:
        """Runs a question in its slots and has its answer join, unless the first token ends it.

        Raises:
          NotFiniteError: of its logits. What the backbone raises.
        """
        executor = self.executor
        where, behind = self._where(ask)
        own = executor.books.held(ask.branch, "").slots[: ask.length]
        context = where._replace(seen=where.seen & (where.places_of_keys() < behind))
        question = ask.tokens, ask.length, context, own, ask.draws, ask.steps
        found, pool = self.backbone.begin_answer(*question)
        executor.pools = programs.Pools(dict(pool), executor.pools.source)
        size = ask.tokens.embeddings.shape[1]
        self.shapes.add(("question", size, where.table.shape[1]))
        executor.meter.asked(executor.pools.engine, (ask.length, size), (behind, where.key_count), 1)

        last = np.asarray(ask.tokens.positions)[0, : ask.length].max() + 1
        row = DecodeRow(ask, behind + ask.length, last.item(), int(np.asarray(found)[0]), where=where)
        self._tell(row)
        if not row.ended:
            self.rows.append(row)
            self._now = None
        return row

    def step(self) -> list[DecodeRow]:
        """Makes the next token of every row; returns those that ended."""
        executor = self.executor
        if self._now is None:
            self._now = self._gathered()
        rows, draws = self._now
        rows, pool = self.backbone.advance_answers(executor.pools.engine, rows, draws)
        executor.pools = programs.Pools(dict(pool), executor.pools.source)
        self._now = rows, draws
        self.steps += 1
        self.shapes.add(("answers", *rows.table.shape))
        ended = []
        for row, token in zip(self.rows, np.asarray(rows.token).tolist(), strict=False):
            row.token, row.count = token, row.count + 1
            try:
                self._tell(row)
            except NotFiniteError as error:
                row.ask.made.put(error)
                ended.append(row)
            else:
                ended += [row] if row.ended else []
        for row in ended:
            self.leave(row)
        return ended

    def leave(self, row: DecodeRow) -> None:
        """Takes a row out."""
        self.rows.remove(row)
        self._now = None
        keys = row.where.key_count if row.where is not None else row.behind
        if row.count > 1:
            made = row.count - 1
            self.executor.meter.asked(self.executor.pools.engine, (made, made), (row.behind, keys), made)

    def moved(self) -> None:
        """Looks up anew where the rows lie: slots were packed."""
        self._now = None
        for row in self.rows:
            row.where = None

    def _tell(self, row: DecodeRow) -> None:
        """Gives whoever asked the token.

        Raises:
          NotFiniteError: there is none.
        """
        if row.token == REFUSED:
            raise NotFiniteError(
                f"answer: logits of token {row.count - 1} behind the question hold NaN or infinity, or are all "
                "-infinity; expected a finite largest one"
            )
        row.ask.made.put(row.token)

    def _where(self, ask: DecodeRequest) -> tuple[Paged, int]:
        """Pages of an answer's context, question and answer to come, and how many tokens the context has."""
        executor = self.executor
        pieces = executor.books.ordered(ask.branch)
        where = Paged.of(executor.pools.engine, all_slots(pieces), TABLES)
        where = _widened(where, -(-LEAST_KEYS // where.page_size))
        return where, sum(piece.length for piece in pieces if piece.id)

    def _gathered(self) -> tuple[AnswerRows, Draws]:
        """The rows as arrays, filled up to their bucket with rows that stand for none."""
        for row in self.rows:
            if row.where is None:
                row.where, _ = self._where(row.ask)
        pages = max(row.where.table.shape[1] for row in self.rows if row.where is not None)
        # Fractional positions are M-RoPE's alone, of a question with a video in it.
        kind = np.float32 if any(isinstance(row.position, float) for row in self.rows) else np.int32
        made = [_row(row, pages, kind) for row in self.rows]
        count = row_bucket(len(made), self.size)
        whole = [*made, *[no_row(made[0])] * (count - len(made))]
        rows = AnswerRows(*(np.concatenate(values) for values in zip(*whole, strict=True)))
        draws = [row.ask.draws for row in self.rows]
        draws += [draws[0]._replace(temperature=np.zeros(1, np.float32))] * (count - len(draws))
        # On the device from the first step on, as later steps have them: one program for all.
        return jax.device_put((rows, Draws(*(np.concatenate(values) for values in zip(*draws, strict=True)))))


def _widened(where: Paged, pages: int) -> Paged:
    """A context whose table has room for so many pages at least."""
    room = max(0, pages - where.table.shape[1])
    table = np.pad(np.asarray(where.table), ((0, 0), (0, room)), constant_values=NO_PAGE)
    wide = lambda value: np.pad(np.asarray(value), ((0, 0), (0, room * where.page_size)))
    return Paged(where.pool, table, wide(where.seen), wide(where.places_of_keys()))


def _row(row: DecodeRow, pages: int, kind: type[np.generic]) -> AnswerRows:
    """A row as arrays, its table of so many pages and its position of a kind."""
    assert row.where is not None
    where, made = _widened(row.where, pages), row.count - 1
    numbers = row.token, row.behind + made, row.position + made, row.count
    kinds = np.int32, np.int32, kind, np.int32
    token, place, position, index = (np.array([each], of) for each, of in zip(numbers, kinds, strict=True))
    return AnswerRows(token, place, position, index, where.table, where.seen, where.places_of_keys())
