"""Runtime that many sessions share: one executor with its pool, one store, and the order of access.

Edits run on the thread that requests them. Answers are decoded on the thread of the decode loop, a token of all of them
between two edits. What finds no room in the pool waits in a queue, and is tried again when something is released.
"""

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..backbone import Tokens
from ..cache import brief
from ..core import KVEncoding
from ..errors import InputError, PoolError, PoolLostError, SessionBusyError, SessionClosedError
from ..patching import Rank
from ..sampling import Sampling, check_steps
from ..utils.sizes import Size, size_of
from ..window import (
    CANONICALS,
    ApplyPatch,
    Compact,
    Copy,
    Drop,
    Edit,
    Ledger,
    PagedExecutor,
    PatchFormer,
    Prefill,
    Window,
    encoding_choice,
)
from .argument_checks import check_rank, float_dtype
from .decode_batch import DecodeRequest
from .decode_loop import DecodeLoop
from .fair_lock import FairLock, WaitQueue, WaitTicket, arrival
from .runtime import PAGE_SIZE, PREFILLS, ExecutorRuntime, TokenIterator

LOST = -1
"""Pool number of a branch whose KV was lost, and which is not prefilled again yet."""


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """Options of sessions that share a runtime.

    Attributes:
      pages, page_size: of the pool, which does not grow.
      batch: the number of answers that are decoded together.
      waiting: the number of questions that may wait for a place among them.
      timeout: seconds that a call waits for other sessions before it raises SessionBusyError.
      dtype: of the pool. None: the dtype that the backbone computes in.
      rank: of the patches that are formed; 0 forms none. None: 16, from the first session that has a certificate or
        serves without one.
      prefills: bytes of prefills that may be added to the store, as of `SessionConfig`.
      encoding, canonicals: of what all these sessions keep, as of `SessionConfig`. A session with a certificate serves
        only canonicals as they were prefilled, and patches of them.

    Raises:
      InputError, RankError, DtypeError: an invalid option. `PagedExecutor` checks pages.
    """

    pages: int
    page_size: int = PAGE_SIZE
    batch: int = 8
    waiting: int = 64
    timeout: float = 60.0
    dtype: jax.typing.DTypeLike | None = None
    rank: Rank | None = None
    prefills: Size = PREFILLS
    encoding: KVEncoding | str | None = None
    canonicals: Size = CANONICALS

    def __post_init__(self) -> None:
        for name in ("batch", "waiting"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"sessions: got {name} {value!r:.80}; expected a number of questions, 1 or more")

        seconds = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not seconds or not self.timeout >= 0:
            raise InputError(f"sessions: got timeout {self.timeout!r:.80}; expected seconds, 0 or more")

        check_rank(self.rank, "sessions", 0)
        for name in ("prefills", "canonicals"):
            object.__setattr__(self, name, size_of(getattr(self, name), f"sessions.{name}", refused=InputError))
        object.__setattr__(self, "encoding", encoding_choice(self.encoding, "sessions.encoding"))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", float_dtype(self.dtype, "sessions"))


class SharedRuntime(ExecutorRuntime):
    """One executor, and the order in which sessions access it.

    Attributes:
      executor, store, former, backbone: as of `Runtime`.
      lock: of the executor.
      decode_loop: decodes the answers.
      renewed: how often the pool was lost and allocated again.
      waiting, timeout: as of `SharedConfig`.
      closed: whether `close` was called.
    """

    def __init__(self, executor: PagedExecutor, former: PatchFormer | None, config: SharedConfig):
        """Starts without sessions, on an executor of the same config."""
        super().__init__(executor, former)
        self.waiting, self.timeout = config.waiting, config.timeout
        self.lock = FairLock()
        self.decode_loop = DecodeLoop(executor, self.lock, config.batch, self._renew_pool)
        self.renewed, self.closed = 0, False
        self._process = os.getpid()
        self._answer_numbers = itertools.count()
        # By branch, the number of pools that had been lost when its KV was last written.
        self._pool_of: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------ pieces

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the lock of the executor. A run that waits for room releases it meanwhile."""
        self.check_process()
        return self.lock

    def check_process(self) -> None:
        """Raises SessionClosedError in a forked process, which has no decode loop and no thread to hand the lock on."""
        if os.getpid() != self._process:
            raise SessionClosedError(
                "sessions: got used in a process that was forked off; expected the one that opened them"
            )

    def check_open(self) -> None:
        """Raises SessionClosedError after `close`, and as `check_process`."""
        self.check_process()
        if self.closed:
            raise SessionClosedError("sessions: got used after they were closed; expected them open")

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """Implements `Runtime.provide`. Raises SessionClosedError after `close`."""
        self.check_open()
        super().provide(id, tokens, length, content)

    # ------------------------------------------------------------------------------------------------- edits

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Implements `Runtime.run`.

        Raises:
          SessionBusyError: no room within the timeout. PoolError: more than the whole pool. PoolLostError: the pool was
          lost, to this run or since the last one of the branch; `reprefill` places the window again.
          SessionClosedError: closed meanwhile. Otherwise as `PagedExecutor.run`.
        """
        with self.locked():
            self.check_open()
            self._check_pool(window)
            return self._run_when_room(window, edits)

    def reprefill(self, window: Window) -> Window:
        """Prefills a window again if its pool was lost. Returns the window as it is served then.

        Raises:
          As `run`.
        """
        self.check_open()
        with self.locked():
            if self.executor.pool.lost:
                self._renew_pool(None)
            if self._pool_of.get(window.branch) == self.renewed:
                return window

            # Marked until the prefill has succeeded: if it raises, the next call must not use the branch.
            self._pool_of[window.branch] = LOST
            self.executor.release(window.branch)
            again, edits = window.anew()
            self._run_when_room(again, edits)

        return again

    def make_room(self, window: Window) -> bool:
        """Waits until a window without KV fits into the pool. Returns False if it does not within the timeout."""
        with self.locked():
            self.check_open()
            pages, deadline = self._pages(window), time.monotonic() + self.timeout
            if pages > self.executor.books.allocator.pages:
                return False

            def is_free() -> bool:
                return self.executor.books.allocator.free_pages >= pages

            try:
                self._wait_until(is_free, self.decode_loop.room, deadline, f"room for {window.tokens} tokens")
            except SessionBusyError:
                return False
        return True

    def release(self, branch: str) -> None:
        """Implements `Runtime.release`. Ends the answers after this branch."""
        with self.locked():
            # Before its KV is released, which the answers share.
            closed = SessionClosedError(f"answer: got branch {branch!r}, which was released; expected an open session")
            self.decode_loop.drop(closed, branch)
            self.executor.release(branch)
            self._pool_of.pop(branch, None)
            self.decode_loop.notify_freed()

    def _check_pool(self, window: Window) -> None:
        """Refuses a window whose KV, or whose parent's, was lost with a pool.

        Raises:
          PoolLostError.
        """
        # A forward outside of `run`, such as that of an audit, may have lost the pool.
        if self.executor.pool.lost:
            self._renew_pool(None)
        branch = window.branch
        if branch not in self._pool_of and "/" in branch:
            # A new fork, which has no KV of its own yet.
            branch = branch.rpartition("/")[0]
        if self._pool_of.get(branch, self.renewed) != self.renewed:
            raise PoolLostError(f"sessions: got branch {brief(branch)!r}, whose pool was lost; expected `reprefill`")

    def _renew_pool(self, error: BaseException | None) -> None:
        """Allocates a lost pool again. All answers end, and every session finds its window lost at its next call."""
        # Marked with the number of the lost pool, so that the next call finds their KV lost.
        for branch in self.executor.books.branches:
            # Branches of answers have "//" in their names.
            if "//" not in branch:
                self._pool_of.setdefault(branch, self.renewed)

        self.executor.renew()
        self.renewed += 1
        lost = PoolLostError(
            "answer: got its pool lost while it was decoded; expected the question again, after `reprefill`"
        )
        lost.__cause__ = error
        self.decode_loop.drop(lost)

    def _run_when_room(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Runs edits, as soon as there is room for them.

        Raises:
          As `run`.
        """
        loop, queue = self.decode_loop, self.decode_loop.room
        deadline, renewed = time.monotonic() + self.timeout, self.renewed
        ticket: WaitTicket | None = None

        try:
            while True:
                # Edits that take no more than they release go first: others may wait for what they release.
                if ticket is not None or queue.first is None or growth(window, edits) <= 0:
                    try:
                        ledger = self.executor.run(window, edits)
                        break
                    except PoolLostError as error:
                        self._renew_pool(error)
                        raise
                    except PoolError:
                        # Waiting is in vain if nobody else holds pages, or the window exceeds the pool.
                        others = any(branch != window.branch for branch in self.executor.books.branches)
                        if not others or self._pages(window) > self.executor.books.allocator.pages:
                            raise

                ticket = ticket or queue.enter()
                loop.wake()
                self._wait(queue, ticket, deadline, f"room for {window.tokens} tokens")
                if self.executor.pool.lost:
                    self._renew_pool(None)
                # While it waited, the KV that the edits start from was lost with another pool.
                if self.renewed != renewed:
                    raise PoolLostError("sessions: got the pool lost while waiting for room; expected `reprefill`")
        finally:
            if ticket is not None:
                queue.leave(ticket)
                loop.wake()

        # Compaction moved the slots of answers too, so their tables are stale.
        self._pool_of[window.branch] = self.renewed
        if any(isinstance(edit, Compact) for edit in edits):
            loop.batch.moved()
        loop.notify_freed()
        return ledger

    def _wait(self, queue: WaitQueue, ticket: WaitTicket, deadline: float, operation: str) -> None:
        """Waits in a queue, and counts calls that waited in vain."""
        try:
            queue.wait(ticket, deadline, operation)
        except SessionBusyError:
            self.check_open()
            self.decode_loop.busy += 1
            raise
        self.check_open()

    def _wait_until(self, ready: Callable[[], bool], queue: WaitQueue, deadline: float, operation: str) -> None:
        """Waits in a queue until this thread is the first and `ready` holds. The lock is released meanwhile."""
        ticket = queue.enter()
        try:
            while queue.first is not ticket or not ready():
                self._wait(queue, ticket, deadline, operation)
        finally:
            queue.leave(ticket)

    def _pages(self, window: Window) -> int:
        """Returns the pages of a window whose pieces share none."""
        size = self.executor.books.allocator.page_size
        return sum(-(-piece.entry.tokens // size) for piece in window.pieces)

    # ------------------------------------------------------------------------------------------------ answers

    def answer(
        self,
        window: Window,
        tokens: Tokens,
        length: int | None,
        steps: int,
        sampling: Sampling | None,
        key: int | None,
        stop: Sequence[int] | None,
    ) -> TokenIterator:
        """Implements `Runtime.answer`. The question is queued when this returns.

        Raises:
          InputError: invalid steps, stop tokens or length, or a temperature without a key. WindowError: another window
          than the branch has. SessionBusyError, also from the iterator: too many questions wait, or no room, within the
          timeout. PoolLostError, SessionClosedError: as `run`, also from the iterator.
        """
        # All checks that need no lock; afterwards the question is queued, or nothing has changed.
        check_steps(steps)
        backbone: Any = self.backbone
        draws, stops = backbone.answer_choices(sampling, key, stop)
        question, count = self.executor.question(window, tokens, length)
        loop, door, deadline = self.decode_loop, self.decode_loop.door, time.monotonic() + self.timeout

        with self.locked():
            self.check_open()
            self._check_pool(window)

            def has_place() -> bool:
                return len(loop.requests) < self.waiting

            # Threads that came earlier go first.
            if not has_place() or door.first is not None:
                self._wait_until(has_place, door, deadline, f"a place among {self.waiting} questions that wait")
                # Waiting releases the lock, so the pool may have been lost meanwhile.
                self._check_pool(window)

            self.executor.check_current(window)
            if not steps:
                return (piece for piece in ())

            # The answer shares the window's slots in a branch of its own. Names of forks are not empty, so that "//" is
            # in no other branch's name.
            branch = f"{window.branch}//{next(self._answer_numbers)}"
            books = self.executor.books.copy()
            books.share(window.branch, branch, [piece.entry.id for piece in window.pieces])
            self.executor.books = books
            request = DecodeRequest(arrival(), branch, window.branch, question, count, steps, draws, stops, deadline)

            try:
                return loop.submit(request)
            except BaseException:
                self.executor.release(branch)
                raise

    # -------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Ends all answers and waits with SessionClosedError, and forms pending patches. Idempotent."""
        # A forked process has copies of the locks, perhaps held by threads that it does not have.
        if os.getpid() != self._process:
            return

        with self.locked():
            if not self.closed:
                self.closed = True
                self.decode_loop.drop(SessionClosedError("answer: got its sessions closed; expected them open"))
                self.decode_loop.room.call(everybody=True)
                self.decode_loop.door.call(everybody=True)

        # Not under the lock, which the loop needs in order to end.
        self.decode_loop.join()
        if self.former is not None:
            self.former.close()


def growth(window: Window, edits: Sequence[Edit]) -> int:
    """Returns the tokens that edits add to a branch. A piece that it shares with another branch counts in full."""
    places, evicted, tokens = window.places, window.evicted_by_id, 0

    def size(id: str) -> int:
        if id in places:
            return window.pieces[places[id]].entry.tokens
        return evicted[id].entry.tokens if id in evicted else 0

    # All other edits work in place, or share slots.
    for edit in edits:
        if isinstance(edit, Drop):
            tokens -= size(edit.id)
        elif isinstance(edit, Prefill | ApplyPatch) or (isinstance(edit, Copy) and edit.source == "canonical"):
            tokens += size(edit.id)

    return tokens
