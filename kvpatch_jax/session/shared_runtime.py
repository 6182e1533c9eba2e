"""What many sessions share: one executor with its pool, one store, and who waits for whom.

Edits run on the thread that asks for them, when its turn comes; answers grow on the driver's thread, a token of all of
them between two turns of others. What finds no room waits in a line, and tries again when something was given back.
"""

import collections
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..backbone import Backbone, Tokens
from ..cache import brief
from ..errors import InputError, PoolError, PoolLostError, SessionBusyError, SessionClosedError
from ..sampling import Sampling, check_steps
from ..window import (
    ApplyPatch,
    Compact,
    Copy,
    Drop,
    Edit,
    Ledger,
    PagedExecutor,
    PatchFormer,
    PatchStore,
    Prefill,
    Window,
)
from .decode_batch import DecodeRequest
from .decode_loop import DecodeLoop
from .fair_lock import FairLock, WaitTicket, arrival
from .runtime import TokenIterator

GONE = -1
"""In place of which pool a branch was placed in: its own is gone, and it is not placed again yet."""


class SharedRuntime:
    """One executor, and the order in which sessions get at it.

    Attributes:
      executor, store, former, backbone: as `Runtime` has them.
      driver: of the answers. renewed: how often the pool was lost and begun anew.
    """

    def __init__(
        self, executor: PagedExecutor, former: PatchFormer | None, *, batch: int, waiting: int, timeout: float
    ):
        """Nobody has a session yet.

        Args:
          batch: answers that grow together. waiting: questions that may wait for a place among them. timeout: seconds
            that a call waits for others.

        Raises:
          InputError: numbers that are none.
        """
        for word, value, least in (("batch", batch, 1), ("waiting", waiting, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"sessions: {word} {value!r:.80}; expected a number of questions, {least} or more")
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
            raise InputError(f"sessions: timeout {timeout!r:.80}; expected seconds, 0 or more")
        self.executor, self.former = executor, former
        self.backbone: Backbone = executor.backbone
        self.store: PatchStore | None = executor.store
        self.waiting, self.timeout = waiting, timeout
        self.turns = FairLock()
        self.driver = DecodeLoop(executor, self.turns, batch, self._lose)
        self.renewed, self.closed = 0, False
        self._process = os.getpid()
        self._given: collections.Counter[str] = collections.Counter()
        self._numbers = itertools.count()
        self._since: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------ pieces

    def locked(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps everybody else off the executor; a run that waits for room lets go of it meanwhile."""
        self.check_process()
        return self.turns

    def check_process(self) -> None:
        """Raises SessionClosedError in a process that was forked off: nobody drives there, or hands a turn on."""
        if os.getpid() != self._process:
            raise SessionClosedError("sessions: in a process that was forked off; expected the one that opened them")

    def check_open(self) -> None:
        """Raises SessionClosedError after `close`, and as `check_process`."""
        self.check_process()
        if self.closed:
            raise SessionClosedError("sessions: closed; expected them open")

    def provide(self, id: str, tokens: Tokens, length: int, content: str | None) -> None:
        """See `Runtime.provide`."""
        self.check_open()
        with self.locked():
            if not self._given[id]:
                self.executor.provide(id, tokens=tokens, length=length, content=content)
            self._given[id] += 1

    def forget(self, id: str) -> None:
        """See `Runtime.forget`."""
        with self.locked():
            self._given[id] -= 1
            if self._given[id] <= 0:
                del self._given[id]
                self.executor.forget(id)

    # ------------------------------------------------------------------------------------------------- edits

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """See `Runtime.run`.

        Raises:
          SessionBusyError: no room, for as long as it may wait. PoolError: more than the whole pool has.
          PoolLostError: the pool was lost, to this run or since the branch's last one; `reprefill` places the window.
          SessionClosedError: they were closed meanwhile. Else as `PagedExecutor.run`.
        """
        with self.locked():
            self.check_open()
            self._check_kept(window)
            return self._with_room(window, edits)

    def reprefill(self, window: Window) -> Window:
        """Places the pieces of a window again where the pool was lost; returns the window as it is served then.

        Raises:
          As `run`.
        """
        self.check_open()
        with self.locked():
            if self.executor.lost:
                self._lose(None)
            if self._since.get(window.branch) == self.renewed:
                return window
            self._since[window.branch] = GONE
            self.executor.release(window.branch)
            there, edits = window.anew()
            self._with_room(there, edits)
        return there

    def make_room(self, window: Window) -> bool:
        """Waits until a window that holds nothing yet fits into the pool; False where that does not happen in time."""
        with self.locked():
            self.check_open()
            line, deadline = self.driver.room, time.monotonic() + self.timeout
            pages = self._pages(window)
            if pages > self.executor.books.allocator.pages:
                return False
            place = line.enter()
            try:
                while line.first is not place or self.executor.books.allocator.free_pages < pages:
                    self._wait(line.wait, place, deadline, f"room for {window.tokens} tokens")
            except SessionBusyError:
                return False
            finally:
                line.leave(place)
        return True

    def release(self, branch: str) -> None:
        """See `Runtime.release`. Answers that grow behind it end."""
        with self.locked():
            self.driver.drop(SessionClosedError(f"answer: branch {branch!r} was let go of"), branch)
            self.executor.release(branch)
            self._since.pop(branch, None)
            self.driver.freed()

    def _check_kept(self, window: Window) -> None:
        """Refuses a window whose KV, or whose parent's, went with a pool.

        Raises:
          PoolLostError.
        """
        if self.executor.lost:
            self._lose(None)
        branch = window.branch
        if branch not in self._since and "/" in branch:  # a fork that holds nothing yet
            branch = branch.rpartition("/")[0]
        if self._since.get(branch, self.renewed) != self.renewed:
            raise PoolLostError(f"sessions: the pool with branch {brief(branch)!r} was lost; expected `reprefill`")

    def _lose(self, error: BaseException | None) -> None:
        """Begins the pool anew; every answer ends, and every session finds its window gone at its next call."""
        for branch in self.executor.books.branches:
            if "//" not in branch:  # no answer's
                self._since.setdefault(branch, self.renewed)
        self.executor.renew()
        self.renewed += 1
        lost = PoolLostError("answer: the pool was lost while it grew; expected the question again, after `reprefill`")
        lost.__cause__ = error
        self.driver.drop(lost)

    def _with_room(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Runs edits when there is room for them.

        Raises:
          As `run`.
        """
        line, deadline = self.driver.room, time.monotonic() + self.timeout
        place: WaitTicket | None = None
        renewed = self.renewed
        try:
            while True:
                # Who takes no more than it gives is let through: others may wait for what it gives.
                if place is not None or line.first is None or growth(window, edits) <= 0:
                    try:
                        ledger = self.executor.run(window, edits)
                        break
                    except PoolLostError as error:
                        self._lose(error)
                        raise
                    except PoolError:
                        if self._hopeless(window):
                            raise
                place = place or line.enter()
                self.driver.wake()
                self._wait(line.wait, place, deadline, f"room for {window.tokens} tokens")
                if self.executor.lost:
                    self._lose(None)
                if self.renewed != renewed:
                    raise PoolLostError("sessions: the pool was lost while this waited for room; expected `reprefill`")
        finally:
            if place is not None:
                line.leave(place)
                self.driver.wake()
        self._since[window.branch] = self.renewed
        if any(isinstance(edit, Compact) for edit in edits):
            self.driver.batch.moved()
        self.driver.freed()
        return ledger

    def _wait(
        self, wait: Callable[[WaitTicket, float, str], None], place: WaitTicket, deadline: float, what: str
    ) -> None:
        """Waits in a line, and counts those who waited in vain."""
        try:
            wait(place, deadline, what)
        except PoolError:
            self.check_open()
            self.driver.busy += 1
            raise
        self.check_open()

    def _hopeless(self, window: Window) -> bool:
        """Whether nobody could make room: the window is more than the pool, or nobody else holds anything."""
        books = self.executor.books
        return self._pages(window) > books.allocator.pages or not any(
            branch != window.branch for branch in books.branches
        )

    def _pages(self, window: Window) -> int:
        """Pages that a window takes, each piece on its own."""
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
        """See `Runtime.answer`. The question is in the line when this returns.

        Raises:
          InputError: steps, stop tokens or a length that are none, or a temperature without a key. WindowError: another
          window than the branch holds. SessionBusyError, from the iterator too: as many wait, or no room, for as long
          as it may wait. PoolLostError, SessionClosedError: as `run`, from the iterator too.
        """
        check_steps(steps)
        backbone: Any = self.backbone
        draws, stops = backbone.answer_choices(sampling, key, stop)
        question, count = self.executor.question(window, tokens, length)
        deadline = time.monotonic() + self.timeout
        with self.locked():
            self.check_open()
            self._check_kept(window)
            self._enter(deadline)
            self._check_kept(window)
            self.executor.check_current(window)
            if not steps:
                return (piece for piece in ())
            # No window has a branch of such a name: its forks' names are not empty.
            own = f"{window.branch}//{next(self._numbers)}"
            books = self.executor.books.copy()
            books.share(window.branch, own, [piece.entry.id for piece in window.pieces])
            self.executor.books = books
            ask = DecodeRequest(arrival(), own, window.branch, question, count, steps, draws, stops, deadline)
            try:
                return self.driver.take(ask)
            except BaseException:
                self.executor.release(own)
                raise

    def _enter(self, deadline: float) -> None:
        """Waits until fewer questions wait than may."""
        line = self.driver.door
        if len(self.driver.asks) < self.waiting and line.first is None:
            return
        place = line.enter()
        try:
            while line.first is not place or len(self.driver.asks) >= self.waiting:
                self._wait(line.wait, place, deadline, f"a place among {self.waiting} questions that wait")
        finally:
            line.leave(place)

    # -------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Ends every answer and every wait with SessionClosedError. Closing twice is allowed."""
        if os.getpid() != self._process:
            return
        with self.locked():
            if not self.closed:
                self.closed = True
                self.driver.drop(SessionClosedError("answer: its sessions were closed"))
                self.driver.room.call(everybody=True)
                self.driver.door.call(everybody=True)
        self.driver.join()
        if self.former is not None:
            self.former.close()


def growth(window: Window, edits: Sequence[Edit]) -> int:
    """How many tokens more a branch holds after edits; of a piece that it only shares with another branch, all."""
    places, gone, more = window.places, window.evicted_by_id, 0

    def size(id: str) -> int:
        if id in places:
            return window.pieces[places[id]].entry.tokens
        return gone[id].entry.tokens if id in gone else 0

    for edit in edits:
        if isinstance(edit, Drop):
            more -= size(edit.id)
        elif isinstance(edit, Prefill | ApplyPatch) or (isinstance(edit, Copy) and edit.source == "canonical"):
            more += size(edit.id)
    return more
