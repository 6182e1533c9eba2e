"""Many sessions on one executor: a worker thread runs their calls in order, and decodes all answers together.

Only the worker touches the executor. Between two calls every answer gets a token, from one launch for all of them.
Axis letters: B rows, N pages of a table, O slots of a page.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..answers import AnswerRows, Draws, TextPiece, check_steps
from ..backbone import Tokens
from ..cache import brief
from ..core import NO_PAGE, Buckets, Paged, end_position, identity
from ..errors import NotFiniteError, PoolError, SessionError
from ..utils.background import start_thread
from ..window import Executor, Window
from .runtime import AnswerOptions

TABLES = Buckets(smallest=64, steps=1)
"""Keys of a row are rounded up to powers of two, so that a batch has few programs, whatever its contexts."""
INVALID_TOKEN = -1
"""The token of a row whose logits are not finite."""
IDLE_SECONDS = 1.0
"""How long the worker waits for another call before its thread ends."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """A job of another thread that waits for the worker.

    Attributes:
      window: that the job brings; None if it needs no room.
      deadline: of waiting for room, of `time.monotonic`.
      results: of a call its value and its error; of a question the tokens one by one, then None or an error.
      cancelled: set by the caller, on any thread, when it waits no longer.
      ended: set by the worker.
      shortage: why it waits for room; None until it was tried.
    """

    window: Window | None
    deadline: float
    job: Callable[[], Any] | None = None
    results: "queue.SimpleQueue[Any]" = dataclasses.field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    ended: bool = False
    shortage: PoolError | None = None


@dataclasses.dataclass(eq=False, kw_only=True)
class Question(Call):
    """A question with its answer: it waits for a row of the batch and for room, and is decoded there.

    Its window is in a branch of the answer's own, so that later changes of the session's window leave the answer alone.

    Attributes:
      tokens, length: the question behind the window, padded, and how many of its tokens count.
      steps: the largest number of tokens of the answer.
      draws, stop: how tokens are chosen, and which end the answer.
      behind: the number of tokens of context and question.
      position: of the answer's first token, on every axis.
      where: its pages, which of their slots it owns, and their places.
      token, count: the latest token, and the number so far.
      transition: of a hybrid model, that of all tokens but the latest, {part: [L,1,R,K,W]}; None while the arrays of
        the batch have it.
    """

    window: Window
    tokens: Tokens
    length: int
    steps: int
    draws: Draws
    stop: tuple[int, ...]
    behind: int = 0
    position: int | float = 0
    where: Any = None
    token: int = INVALID_TOKEN
    count: int = 0
    transition: Mapping[str, Array] | None = None

    @property
    def asked(self) -> str:
        """Branch of the session's window."""
        return self.window.branch.partition("//")[0]

    @property
    def slots(self) -> int:
        """Slots of the question and of its longest answer, whose last token's KV is never written."""
        return self.length + self.steps - 1

    @property
    def complete(self) -> bool:
        """Whether the latest token is the last."""
        return self.count >= self.steps or self.token in self.stop

    def deliver(self, token: int) -> None:
        """Gives the reader the next token. Raises NotFiniteError if the logits were not finite."""
        if token == INVALID_TOKEN:
            raise NotFiniteError(
                f"answer: got logits with NaN or infinity, or all -infinity, at token {self.count} after the question; "
                "expected a finite largest one"
            )
        self.token, self.count = token, self.count + 1
        self.results.put(token)


class AnswerBatch:
    """Questions whose answers get their next tokens in one launch.

    Attributes:
      rows: in the order in which they joined, at most `size`.
      steps: launches so far.
    """

    def __init__(self, executor: Executor, size: int):
        """Starts an empty batch."""
        self.rows, self.steps, self.size = list[Question](), 0, size
        self._executor, self._backbone = executor, cast(Any, executor.backbone)
        # The rows on the device; None where one joined or left since the last step.
        self._arrays: tuple[AnswerRows, Draws] | None = None

    @property
    def full(self) -> bool:
        """Whether no other row fits."""
        return len(self.rows) >= self.size

    def begin(self, question: Question) -> None:
        """Runs a question in slots that are reserved for its longest answer. It joins unless one token completes it.

        Raises PoolError if there is no room, with nothing changed.
        """
        executor, branch, length = self._executor, question.window.branch, question.length
        context = executor.context(question.window)
        transition = None if context is None else context.transition
        if context is None and executor.layout.parts:
            transition = identity(executor.layout, (1,))
        reserved = executor.reserve(branch, question.slots)

        # The question sees its context and itself, but not the slots that are reserved for the answer.
        slots = np.concatenate([resident.slots for resident in executor.branches[branch].values()])
        where, behind = Paged.of(executor.pools.engine, slots, TABLES), len(slots) - len(reserved)
        seen = where.seen & (where.places_of_keys() < behind)
        front = where._replace(seen=seen, transition=transition)
        first, pool, question.transition = self._backbone.begin_answer(
            question.tokens, length, front, reserved[:length], question.draws, question.steps
        )
        executor.pools = executor.pools._replace(engine=dict(pool))

        position = end_position(np.asarray(question.tokens.positions)[:1, :length])[0] + 1
        question.where, question.behind, question.position = where, behind + length, position.item()
        question.deliver(int(np.asarray(first)[0]))
        if not question.complete:
            self._scatter()
            self.rows.append(question)

    def step(self) -> list[tuple[Question, NotFiniteError | None]]:
        """Decodes the next token of every row. Returns the questions whose answers end, with their errors."""
        executor = self._executor
        rows, draws = self._gather() if self._arrays is None else self._arrays
        rows, pool = self._backbone.advance_answers(executor.pools.engine, rows, draws)
        executor.pools = executor.pools._replace(engine=dict(pool))
        self._arrays, self.steps = (rows, draws), self.steps + 1
        ending = []
        # Rows beyond those of the batch are padding.
        for question, token in zip(self.rows, np.asarray(rows.token).tolist(), strict=False):
            try:
                question.deliver(token)
            except NotFiniteError as error:
                ending.append((question, error))
            else:
                ending += [(question, None)] if question.complete else []
        return ending

    def leave(self, question: Question) -> None:
        """Removes a row, if it is one."""
        if question in self.rows:
            self._scatter()
            self.rows.remove(question)

    def _scatter(self) -> None:
        """Gives up the arrays of the last step; transitions go back to their rows."""
        if self._arrays is not None and self._arrays[0].transition is not None:
            for index, row in enumerate(self.rows):
                row.transition = _row_of(dict(self._arrays[0].transition), np.int32(index))
        self._arrays = None

    def _gather(self) -> tuple[AnswerRows, Draws]:
        """Returns the rows as arrays on the device, padded to 1, 4, 16, … rows of equally many pages."""
        pages = max(row.where.table.shape[1] for row in self.rows)
        # M-RoPE alone has fractional positions, of a question with a video.
        dtype = np.float32 if any(isinstance(row.position, float) for row in self.rows) else np.int32
        rows = []
        for row in self.rows:
            decoded, room = row.count - 1, pages - row.where.table.shape[1]
            token, place, index = np.array([[row.token], [row.behind + decoded], [row.count]], np.int32)
            position = np.array([row.position + decoded], dtype)
            table = np.pad(np.asarray(row.where.table), ((0, 0), (0, room)), constant_values=NO_PAGE)
            keys = ((0, 0), (0, room * row.where.page_size))
            seen, places = np.pad(row.where.seen, keys), np.pad(row.where.places_of_keys(), keys)
            rows.append(AnswerRows(token, place, position, index, table, seen, places, row.transition))
            row.transition = None

        # Each size compiles a program, so there are few. Decoding reads the weights once, whatever the padding.
        size = 1
        while size < len(rows):
            size *= 4
        padding = min(size, self.size) - len(rows)
        draws = [row.draws for row in self.rows]
        # Rows of padding take the likeliest token, whatever the first answer does: that needs no draw.
        draws += [draws[0]._replace(temperature=np.zeros(1, np.float32))] * padding
        empty = jax.tree.map(lambda value: np.zeros(value.shape, value.dtype), rows[0])
        empty.table[:] = NO_PAGE
        empty.owned[:, :1] = True  # a row of padding sees itself: a softmax over no key is NaN
        rows += [empty] * padding

        # On the device from the first step on, as the results of later steps are: one program for all.
        *columns, transitions = zip(*rows, strict=True)
        arrays: list[Any] = [np.concatenate(values) for values in columns]
        stacked = AnswerRows(*arrays)
        if transitions[0] is not None:
            parts = {name: jnp.concatenate([row[name] for row in transitions], axis=1) for name in transitions[0]}
            stacked = stacked._replace(transition=parts)
        return jax.device_put((stacked, Draws(*(np.concatenate(values) for values in zip(*draws, strict=True)))))


class BatchScheduler:
    """Scheduler of many sessions: one worker thread, which exists while there is something to do.

    Calls run in the order of their arrival. A call or question that finds no room waits in a line and is tried again
    when slots were released; those behind it that need room wait too, others pass it.

    Attributes:
      batch: the answers that are decoded.
      ended, cancelled: answers so far, and those of them that their readers dropped.
      busy: calls and questions that waited in vain.
    """

    def __init__(self, executor: Executor, *, batch: int, waiting: int, timeout: float | int):
        """Takes an executor, which nobody else may use. The numbers are those of `Sessions`."""
        self.batch = AnswerBatch(executor, batch)
        self.ended, self.cancelled, self.busy = 0, 0, 0
        self._executor, self._most_waiting, self._timeout = executor, waiting, timeout
        # The inbox is the one way to the worker: `put` takes no lock, so finalizers may call it. None wakes it.
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._calls, self._line = collections.deque[Call](), list[Call]()
        # Whether what waits in the line may find a place now.
        self._changed = False
        self._numbers, self._process = itertools.count(), os.getpid()
        # Of starting and ending the worker, never held while it works.
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of calls and questions that wait."""
        return len(self._line) + len(self._calls)

    def do[Result](self, job: Callable[[], Result], window: Window | None = None) -> Result:
        """Runs a job on the worker. Raises PoolError if others hold the room; else as `InlineScheduler.do`."""
        if threading.current_thread() is self._worker:
            return job()
        if os.getpid() != self._process:
            raise SessionError("sessions: got used in a process that was forked off; expected their own")
        call = Call(job=job, window=window, deadline=time.monotonic() + self._timeout)
        try:
            with self._lock:
                if self._closed:
                    raise SessionError("sessions: got used after they were closed; expected them open")
                if self._worker is None:
                    self._worker = start_thread(self._work, self._stop_at_exit, "sessions")
                self._inbox.put(call)
            value, error = call.results.get()
        except BaseException:
            call.cancelled = True
            raise
        if error is not None:
            raise error
        return value

    def answer(self, window: Window, tokens: Tokens, length: int, options: AnswerOptions) -> Any:
        """Returns an iterator over an answer's tokens, with `close`. The question is in the line when this returns.

        Raises:
          InputError: invalid options or length. SessionError: another window than the branch has. Here and from the
          iterator, PoolError: no place or room within the timeout. PoolError, SessionError.
        """
        check_steps(options.steps)
        backbone: Any = self._executor.backbone
        draws, stop = backbone.answer_choices(options.sampling, options.key, options.stop)
        tokens, length = self._executor.question(window, tokens, length)
        if not options.steps:
            return (piece for piece in ())

        def enter() -> AnswerStream:
            if sum(isinstance(call, Question) for call in self._line) >= self._most_waiting:
                raise PoolError(f"ask: got {self._most_waiting} questions that wait; expected a place among them")
            # Names of sessions and forks are not empty, so no other branch has "//" in its name.
            branch = f"{window.branch}//{next(self._numbers)}"
            self._executor.share(window, branch)
            shared, deadline = dataclasses.replace(window, branch=branch), time.monotonic() + self._timeout
            asked = {"tokens": tokens, "length": length, "steps": options.steps, "draws": draws, "stop": stop}
            question = Question(window=shared, deadline=deadline, **asked)
            self._line.append(question)
            self._changed = True
            return AnswerStream(self, question, backbone)

        return self.do(enter)

    def drop(self, branch: str) -> None:
        """Ends the answers about a branch."""

        def job() -> None:
            for question in self._questions():
                if question.asked == branch:
                    found = f"answer: got branch {brief(branch)!r}, which was released"
                    self._end(question, SessionError(f"{found}; expected an open session"))

        with contextlib.suppress(SessionError):
            self.do(job)

    def close(self) -> None:
        """Ends all answers and waiting calls with SessionError, and the worker. Idempotent."""
        # A forked process has no worker, and perhaps a lock that nobody releases.
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed, worker = True, self._worker
            self._inbox.put(None)
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    # -------------------------------------------------------------------------------------------------------- readers

    def cancel(self, question: Question) -> None:
        """Ends an answer before its next token. May run at any point of any thread, so it takes no lock."""
        question.cancelled = True
        if not question.ended:
            self._inbox.put(None)

    def tokens(self, question: Question) -> Iterator[Int[np.ndarray, "1 1"]]:
        """Yields the tokens of an answer in blocks, as `generate` does. Raises the error that ended it."""
        while not question.cancelled:
            if os.getpid() != self._process:
                raise SessionError("answer: got read in a process that was forked off; expected its own")
            # A job may read an answer on the worker itself, which then decodes until there is a result.
            while threading.current_thread() is self._worker and question.results.empty():
                if question not in self._line or self.batch.full:
                    self._step()
                elif not self._attempt(question):
                    # The job that reads may be what holds the room.
                    self._end(question, question.shortage)
            result = question.results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                return
            yield np.array([[result]], np.int32)

    # --------------------------------------------------------------------------------------------------------- worker

    def _stop_at_exit(self, _: float) -> None:
        """Has everything ended after the current step, because the process exits."""
        self._closed = True
        self._inbox.put(None)

    def _work(self) -> None:
        """Runs on the worker, until nothing came for a while."""
        with self._lock:
            # An interrupt may have kept `do` from noting this thread, and another one was started instead.
            if self._worker not in (None, threading.current_thread()):
                return
            self._worker = threading.current_thread()
        error: BaseException = SessionError("sessions: got closed, or the process exits; expected them open")
        try:
            while not self._closed:
                if not self._receive() and self._left():
                    return
                # One call at most between two tokens: one that waits and may find room now, else the next one.
                self._sweep()
                if not (self._changed and self._serve(self._line)) and self._calls:
                    self._serve([self._calls.popleft()])
                self._step()
        except BaseException as failure:
            # Whatever it is, nobody may wait for a result that does not come.
            error = failure
        while True:
            self._receive(wait=False)
            for call in [*self._calls, *self._line, *self._questions()]:
                with contextlib.suppress(Exception):
                    self._end(call, error)
            self._calls.clear()
            if self._left():
                return

    def _left(self) -> bool:
        """Ends the worker, unless a call has come meanwhile. Returns whether it has ended."""
        with self._lock:
            if not self._inbox.empty():
                return False
            self._worker = None
            return True

    def _receive(self, wait: bool = True) -> bool:
        """Takes the calls that have arrived; waits for one if there is nothing else to do. Returns whether there is."""
        idle = wait and not self._calls and not self.batch.rows and not self._changed
        deadlines = [call.deadline for call in self._line]
        seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else IDLE_SECONDS
        try:
            while True:
                call = self._inbox.get(block=idle, timeout=seconds)
                idle = False
                self._calls += [] if call is None else [call]
        except queue.Empty:
            return not idle or bool(deadlines)

    def _sweep(self) -> None:
        """Ends what was cancelled, what has waited too long, and answers whose pool was lost."""
        now, questions = time.monotonic(), self._questions()
        for call in {*self._calls, *self._line, *questions}:
            if call.cancelled:
                self.cancelled += isinstance(call, Question)
                self._end(call, None)
            elif call.shortage is not None and call in self._line and now >= call.deadline:
                self.busy += 1
                waited = f"{call.shortage}; other sessions held the room for {self._timeout:g} s"
                self._end(call, PoolError(waited))
        if questions and self._executor.lost:
            self._lose(None)

    def _serve(self, calls: Sequence[Call]) -> bool:
        """Tries calls and questions in order, up to the first call that runs. Returns whether one did.

        What finds no room waits in the line, and what needs room waits behind it.
        """
        shortage = None
        if calls is self._line:
            self._changed = False
        else:
            shortage = next((call.shortage for call in self._line if call.window is not None and call.shortage), None)
        for call in list(calls):
            asked = isinstance(call, Question)
            if call.ended or (asked and (call in self.batch.rows or self.batch.full)):
                continue
            if shortage and call.window is not None and (asked or self._executor.missing_pages(call.window)):
                call.shortage = shortage
            elif self._attempt(call):
                if not asked:
                    return True
                continue
            elif call.window is not None:
                shortage = call.shortage
            if call not in self._line:
                self._line.append(call)
        return False

    def _attempt(self, call: Call) -> bool:
        """Runs a call, or begins an answer. Returns False if there is no room for it yet."""
        executor = self._executor
        owners = executor.slots.counts.sum()
        try:
            if isinstance(call, Question):
                self.batch.begin(call)
                self._line.remove(call)
                self._changed = True
                if call.complete:
                    self._end(call, None)
            else:
                assert call.job is not None
                self._end(call, None, call.job())
        except BaseException as error:
            if executor.lost:
                self._lose(error)
            lost = executor.lost or getattr(error, "lost", False)
            if isinstance(error, PoolError) and not lost and not self._hopeless(call):
                call.shortage = error
                return False
            self._end(call, error)
        self._changed |= bool(executor.slots.counts.sum() < owners)
        return True

    def _hopeless(self, call: Call) -> bool:
        """Returns whether there is no room even if all others release theirs."""
        executor, window = self._executor, call.window
        if window is None:
            return False
        size, pages, branches = executor.slots.page_size, executor.missing_pages(window, shared=False), [window.branch]
        if isinstance(call, Question):
            pages += -(-call.slots // size)
            branches.append(call.asked)
        occupied = set[int]()
        for branch in branches:
            for resident in executor.branches.get(branch, {}).values():
                occupied.update((resident.slots // size).tolist())
        return pages > executor.slots.pages - len(occupied)

    def _step(self) -> None:
        """Decodes one token of every answer."""
        if not self.batch.rows:
            return
        try:
            ending = self.batch.step()
        except Exception as error:
            if self._executor.lost:
                self._lose(error)
            # Which answer it was is unknown.
            ending = [(question, error) for question in self.batch.rows]
        for question, error in ending:
            self._end(question, error)

    def _lose(self, cause: BaseException | None) -> None:
        """Ends all answers, because a launch has lost the pool."""
        for question in self._questions():
            error = PoolError("answer: got its pool lost; expected the question again, after `reprefill`", lost=True)
            error.__cause__ = cause
            self._end(question, error)
        self._changed = True

    def _end(self, call: Call, error: BaseException | None, value: Any = None) -> None:
        """Ends a call, or an answer, whose slots are released before its reader knows."""
        if call.ended:
            return
        call.ended = True
        if call in self._line:
            self._line.remove(call)
            self._changed = True
        result = error if isinstance(call, Question) else (value, error)
        try:
            if isinstance(call, Question):
                self.ended, self._changed = self.ended + 1, True
                self.batch.leave(call)
                self._executor.release(call.window.branch)
        finally:
            call.results.put(result)

    def _questions(self) -> list[Question]:
        """Lists the questions that wait or are answered."""
        return [call for call in self._line if isinstance(call, Question)] + self.batch.rows


class AnswerStream:
    """Tokens of one answer as they are decoded, with the text that each completes. Dropping it ends the answer."""

    def __init__(self, scheduler: BatchScheduler, question: Question, backbone: Any):
        self._scheduler, self._question = scheduler, question
        # The generator refers to the question and not to the stream, which is therefore dropped at once.
        tokens = scheduler.tokens(question)
        self._pieces: Iterator[TextPiece] = backbone.answer_pieces(tokens, question.steps, question.stop)

    def __iter__(self) -> "AnswerStream":
        return self

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the answer. Its slots are released before the next token of others."""
        self._scheduler.cancel(self._question)

    __del__ = close


@jax.jit
def _row_of(transition: dict[str, Array], index: Array) -> dict[str, Array]:
    """Returns the transition of one row of a batch, [L,1,R,K,W]."""
    return {name: jax.lax.dynamic_slice_in_dim(value, index, 1, axis=1) for name, value in transition.items()}
