"""Continuous decode batch: answers in one pool, which get their next tokens in one launch.

An answer owns its slots, and shares those of its context, as a fork does. Later edits of its session's window therefore
leave it alone. Axis letters: B rows, N pages of a table, O slots of a page.
"""

import dataclasses
import queue
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..answers import AnswerRows, Draws, no_row
from ..backbone import Tokens
from ..core import NO_PAGE, Buckets, Paged, end_position
from ..errors import NotFiniteError
from ..window import PagedExecutor, ResidentPiece, all_slots

TABLES = Buckets(smallest=64, steps=1)
"""Keys of a row are rounded up to powers of two, so that a batch has few programs, whatever its contexts."""
LEAST_KEYS = 64
INVALID_TOKEN = -1
"""The token of a row whose logits are not finite."""


def row_bucket(count: int, most: int) -> int:
    """Returns the number of rows to run for so many answers: 1, 4, 16, ..., at most `most`."""
    # Each size compiles a program, so there are few; padding costs little, for decoding reads the weights once.
    size = 1
    while size < count:
        size *= 4
    return min(size, most)


@dataclasses.dataclass(eq=False)
class DecodeRequest:
    """Question and the state of its answer: queued, in the batch, ended.

    Attributes:
      number: its arrival, as of `WaitTicket.number`.
      branch: of the pool, the answer's own.
      window: the branch of the window that is asked.
      tokens, length: the question at its place after the window, and how many of its tokens count.
      steps: the largest number of tokens.
      draws, stop: how tokens are chosen, and which end the answer.
      deadline: of waiting for room, of `time.monotonic`.
      results: tokens for the caller one by one, then None or an error.
      cancelled: set by the caller, on any thread.
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
    results: "queue.SimpleQueue[int | BaseException | None]" = dataclasses.field(default_factory=queue.SimpleQueue)
    cancelled: bool = False

    @property
    def slots(self) -> int:
        """Slots of the question and of its longest answer, whose last token's KV is never written."""
        return self.length + self.steps - 1


@dataclasses.dataclass(eq=False)
class DecodeRow:
    """Answer in the batch.

    Attributes:
      request: whose answer it is.
      behind: the number of tokens of context and question.
      position: of the first token of the answer, on every axis.
      token: the latest token.
      count: the number of tokens so far.
      where: table, owned slots and their places, as `AnswerRows` has them. None until they are looked up.
      transition: of a hybrid model, that of all its tokens but the latest, {part: [L,1,R,K,W]}, as of when it joined
        or another one joined or left.
    """

    request: DecodeRequest
    behind: int
    position: int | float
    token: int
    count: int = 1
    where: Paged | None = None
    transition: Mapping[str, Array] | None = None

    @property
    def ended(self) -> bool:
        """Whether the latest token is the last."""
        return self.count >= self.request.steps or self.token in self.request.stop


class DecodeBatch:
    """Rows that get their next tokens together.

    Attributes:
      rows: in the order in which they joined.
      steps: launches so far.
      shapes: of the programs that were run: ("answers", rows, pages) and ("question", tokens, pages).
    """

    def __init__(self, executor: PagedExecutor, size: int):
        """Starts an empty batch of at most `size` rows."""
        self.executor, self.size = executor, size
        self.backbone: Any = executor.backbone
        self.rows: list[DecodeRow] = []
        self.steps = 0
        self.shapes: set[tuple[str, int, int]] = set()
        # The rows as arrays on the device. None where rows joined, left or moved since the last step.
        self._arrays: tuple[AnswerRows, Draws] | None = None

    @property
    def full(self) -> bool:
        """Whether no other row fits."""
        return len(self.rows) >= self.size

    def reserve(self, request: DecodeRequest) -> None:
        """Allocates the slots of a question and its whole answer, so that they cannot run out in between.

        Raises:
          PoolError: no room. Nothing is allocated.
        """
        executor, count = self.executor, request.slots
        # The books are replaced, never changed, because other threads read them without the lock.
        books = executor.books.copy()
        label = f"question of {request.length} tokens, answer of {request.steps}"
        slots = books.allocate(count, executor.aligned, label)
        positions = np.asarray(request.tokens.positions)
        local = np.zeros((count, *positions.shape[2:]), np.float32)
        books.put(request.branch, ResidentPiece("", None, slots, local, int(positions.reshape(-1)[0])))
        executor.books = books

    def begin(self, request: DecodeRequest) -> DecodeRow:
        """Runs a question in its slots. Its answer joins the batch, unless the first token ends it.

        Raises:
          NotFiniteError: of its logits. What the backbone raises.
        """
        executor = self.executor
        # The question sees its context and itself, but not the slots that are reserved for the answer.
        where, behind = self._locate(request)
        pieces = [piece for piece in executor.books.ordered(request.branch) if piece.id]
        slots = executor.books.held(request.branch, "").slots[: request.length]
        seen = where.seen & (where.places_of_keys() < behind)
        context = where._replace(seen=seen, transition=executor.pool.composed(pieces))
        question = request.tokens, request.length, context, slots, request.draws, request.steps
        first, pool, transition = self.backbone.begin_answer(*question)
        executor.pool.vectors = executor.pool.vectors._replace(engine=dict(pool))

        size = request.tokens.embeddings.shape[1]
        self.shapes.add(("question", size, where.table.shape[1]))
        executor.meter.asked(executor.pool.vectors.engine, (request.length, size), (behind, where.key_count), 1)

        position = end_position(np.asarray(request.tokens.positions)[:1, : request.length])[0] + 1
        token = int(np.asarray(first)[0])
        row = DecodeRow(request, behind + request.length, position.item(), token, where=where, transition=transition)
        self._deliver(row)
        if not row.ended:
            self._scatter()
            self.rows.append(row)
        return row

    def step(self) -> list[DecodeRow]:
        """Decodes the next token of every row. Returns the rows that ended, which leave."""
        executor = self.executor
        rows, draws = self._arrays = self._gather() if self._arrays is None else self._arrays
        rows, pool = self.backbone.advance_answers(executor.pool.vectors.engine, rows, draws)
        executor.pool.vectors = executor.pool.vectors._replace(engine=dict(pool))
        self._arrays = rows, draws
        self.steps += 1
        self.shapes.add(("answers", *rows.table.shape))

        # Rows beyond those of the batch are padding.
        ended = []

        for row, token in zip(self.rows, np.asarray(rows.token).tolist(), strict=False):
            row.token, row.count = token, row.count + 1
            # Logits that are not finite end their own answer and no other.
            try:
                self._deliver(row)
            except NotFiniteError as error:
                row.request.results.put(error)
                ended.append(row)
            else:
                if row.ended:
                    ended.append(row)

        for row in ended:
            self.leave(row)
        return ended

    def leave(self, row: DecodeRow) -> None:
        """Removes a row."""
        self._scatter()
        self.rows.remove(row)
        # The first token came with the question, which `begin` has metered.
        if row.count > 1:
            keys = row.behind if row.where is None else row.where.key_count
            decoded, vectors = row.count - 1, self.executor.pool.vectors.engine
            self.executor.meter.asked(vectors, (decoded, decoded), (row.behind, keys), decoded)

    def moved(self) -> None:
        """Forgets where the rows are, because slots were compacted."""
        self._scatter()
        for row in self.rows:
            row.where = None

    def _scatter(self) -> None:
        """Gives up the arrays of the last step, because rows join, leave or move; transitions go back to their rows."""
        if self._arrays is not None and self._arrays[0].transition is not None:
            for index, row in enumerate(self.rows):
                row.transition = _row_of(dict(self._arrays[0].transition), np.int32(index))
        self._arrays = None

    def _deliver(self, row: DecodeRow) -> None:
        """Gives the caller the latest token.

        Raises:
          NotFiniteError: the logits were not finite.
        """
        if row.token == INVALID_TOKEN:
            raise NotFiniteError(
                f"answer: got logits with NaN or infinity, or all -infinity, at token {row.count - 1} after the "
                "question; expected a finite largest one"
            )
        row.request.results.put(row.token)

    def _locate(self, request: DecodeRequest) -> tuple[Paged, int]:
        """Returns the pages of an answer's context, question and tokens, and the number of tokens of the context."""
        pieces = self.executor.books.ordered(request.branch)
        where = Paged.of(self.executor.pool.vectors.engine, all_slots(pieces), TABLES)
        where = _widened(where, -(-LEAST_KEYS // where.page_size))
        return where, sum(piece.length for piece in pieces if piece.id)

    def _gather(self) -> tuple[AnswerRows, Draws]:
        """Returns the rows as arrays on the device, padded to their bucket."""
        pages = 0
        for row in self.rows:
            if row.where is None:
                row.where, _ = self._locate(row.request)
            pages = max(pages, row.where.table.shape[1])

        # M-RoPE alone has fractional positions, of a question with a video.
        fractional = any(isinstance(row.position, float) for row in self.rows)
        rows, draws = [], []
        for row in self.rows:
            assert row.where is not None
            where, decoded = _widened(row.where, pages), row.count - 1
            token, place = np.array([row.token], np.int32), np.array([row.behind + decoded], np.int32)
            position = np.array([row.position + decoded], np.float32 if fractional else np.int32)
            index, keys = np.array([row.count], np.int32), (where.table, where.seen, where.places_of_keys())
            rows.append(AnswerRows(token, place, position, index, *keys, row.transition))
            draws.append(row.request.draws)
            row.transition = None  # from now on the arrays have it

        # Rows of padding take the likeliest token, whatever the first answer does: that needs no draw.
        padding = row_bucket(len(rows), self.size) - len(rows)
        rows += [no_row(rows[0])] * padding
        draws += [draws[0]._replace(temperature=np.zeros(1, np.float32))] * padding

        # On the device from the first step on, as the results of later steps are: one program for all.
        *columns, transitions = zip(*rows, strict=True)
        stacked: list[Any] = [np.concatenate(values) for values in columns]
        stacked_rows = AnswerRows(*stacked)
        if transitions[0] is not None:
            parts = {name: jnp.concatenate([own[name] for own in transitions], axis=1) for name in transitions[0]}
            stacked_rows = stacked_rows._replace(transition=parts)
        stacked_draws = Draws(*(np.concatenate(values) for values in zip(*draws, strict=True)))
        return jax.device_put((stacked_rows, stacked_draws))


@jax.jit
def _row_of(transition: dict[str, Array], index: Array) -> dict[str, Array]:
    """Returns the transition of one row of a batch, [L,1,R,K,W]."""
    return {name: jax.lax.dynamic_slice_in_dim(value, index, 1, axis=1) for name, value in transition.items()}


def _widened(where: Paged, pages: int) -> Paged:
    """Returns a context whose table has room for at least so many pages."""
    room = max(0, pages - where.table.shape[1])
    table = np.pad(np.asarray(where.table), ((0, 0), (0, room)), constant_values=NO_PAGE)
    keys = ((0, 0), (0, room * where.page_size))
    return Paged(
        where.pool, table, np.pad(np.asarray(where.seen), keys), np.pad(np.asarray(where.places_of_keys()), keys)
    )
