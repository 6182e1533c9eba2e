"""One thread that drives the answers of many sessions, while other threads run edits in between."""

import collections
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from ..errors import KVPatchError, PoolError, SessionBusyError, SessionClosedError
from ..sampling import TextPiece
from ..utils.background import start_thread
from ..window import PagedExecutor
from .decode_batch import DecodeBatch, DecodeRequest
from .fair_lock import FairLock, WaitQueue

LOOK = 0.1
"""Seconds after which a driver that has nothing to do looks whether somebody let go of an answer."""


class DecodeLoop:
    """Admits questions in their order, makes tokens of all of them together, and gives slots back.

    Everything but `TokenStream` is called by whoever has the turn. The thread lives while there is something to answer.

    Attributes:
      batch: the answers under way. asks: questions that wait for a row, or for room.
      room: threads that wait for slots. door: threads that wait to ask.
      ended, cancelled: answers, so far. busy: calls that waited in vain.
    """

    def __init__(self, executor: PagedExecutor, turns: FairLock, batch: int, lost: Callable[[BaseException], None]):
        """Nothing to do.

        Args:
          batch: rows at most. lost: told that the pool is gone.
        """
        self.executor, self.turns = executor, turns
        self.batch = DecodeBatch(executor, batch)
        self.asks: collections.deque[DecodeRequest] = collections.deque()
        self.room, self.door = WaitQueue(turns), WaitQueue(turns)
        self.ended, self.cancelled, self.busy = 0, 0, 0
        self._lost, self._exits = lost, False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # -------------------------------------------------------------------------------------------- from outside

    def take(self, ask: DecodeRequest) -> "TokenStream":
        """Puts a question in the line.

        Raises:
          RuntimeError: no thread can be started; nothing is in the line.
        """
        if self._thread is None:
            self._thread = start_thread(self._drive, self._exit, "sessions")  # it does nothing before it gets its turn
        self.asks.append(ask)
        self._wake.set()
        return TokenStream(self, ask)

    def wake(self) -> None:
        """Has the thread look again."""
        self._wake.set()

    def freed(self) -> None:
        """Takes down that slots may be free."""
        self.room.call()
        self._wake.set()

    def drop(self, error: KVPatchError, window: str | None = None) -> None:
        """Ends every answer with an error, or those about one branch."""
        for ask in [*self.asks, *(row.ask for row in self.batch.rows)]:
            if window in (None, ask.window):
                self._end(ask, error)

    def join(self) -> None:
        """Waits for the thread to end; not by whoever has the turn."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            thread.join()

    # ------------------------------------------------------------------------------------------------ inside

    def _exit(self, _: float) -> None:
        """Ends every answer after the step that is under way: the process exits, and nobody will read on."""
        self._exits = True
        self._wake.set()

    def _drive(self) -> None:
        try:
            while self._goes_on():
                pass
        except BaseException as error:  # whatever it is, nobody waits for an answer that will not come
            with self.turns:
                self._thread = None
                for ask in [*self.asks, *(row.ask for row in self.batch.rows)]:
                    self._end(ask, error)

    def _goes_on(self) -> bool:
        """Does what is to be done at once; returns whether there is more to come."""
        self.turns.acquire(first=True)
        try:
            if self._exits:
                self.drop(SessionClosedError("answer: the process exits; expected it read before"))
            for ask in [*self.asks, *(row.ask for row in self.batch.rows)]:
                if ask.cancelled:
                    self.cancelled += 1
                    self._end(ask, None)
            try:
                self._admit()
                if self.batch.rows:
                    for row in self.batch.step():
                        self._end(row.ask, None)
            except Exception as error:
                self._fail(error)
            if self.batch.rows:
                return True
            if not self.asks:
                self._thread = None
                return False
        finally:
            self.turns.release()
        self._wake.wait(LOOK)
        self._wake.clear()
        return True

    def _admit(self) -> None:
        """Has questions join while there are rows and room."""
        while self.asks and not self.batch.full and not self._waits_for_room(self.asks[0]):
            ask = self.asks[0]
            try:
                self.batch.reserve(ask)
            except PoolError as error:
                if self._hopeless(ask):
                    self._end(ask, error)
                    continue
                if time.monotonic() < ask.deadline:
                    return
                busy = SessionBusyError(f"ask: {error}; others held the pool for as long as the session waits")
                self.busy += 1
                self._end(ask, busy)
                continue
            try:
                row = self.batch.begin(ask)
            except Exception as error:
                self.executor.check_pool(error)
                self._end(ask, error)
                continue
            self.asks.popleft()
            self.door.call()
            if row.ended:
                self._end(ask, None)

    def _waits_for_room(self, ask: DecodeRequest) -> bool:
        """Whether somebody who came before waits for slots, and may get them: from rows that end, or those free now."""
        before = self.room.first
        if before is None or before.number > ask.number:
            return False
        return bool(self.batch.rows) or before.tried != self.room.news

    def _hopeless(self, ask: DecodeRequest) -> bool:
        """Whether there would be no room in the pool if the answer and its context had it for themselves."""
        allocator = self.executor.books.allocator
        pieces = [*(held.length for held in self.executor.pieces(ask.branch)), self.batch.needs(ask)]
        return sum(-(-length // allocator.page_size) for length in pieces) > allocator.pages

    def _end(self, ask: DecodeRequest, error: BaseException | None) -> None:
        """Gives an answer's slots back, and says that no token is to come."""
        if ask in self.asks:
            self.asks.remove(ask)
            self.door.call()
        for row in [row for row in self.batch.rows if row.ask is ask]:
            self.batch.leave(row)
        self.executor.release(ask.branch)
        self.ended += 1
        ask.made.put(error)
        self.freed()

    def _fail(self, error: BaseException) -> None:
        """Ends all answers: a launch failed. Where it took the pool along, it is begun anew."""
        if self.executor.lost:
            self._lost(error)
            return
        for ask in [row.ask for row in self.batch.rows] or list(self.asks):
            self._end(ask, error)


class TokenStream:
    """The tokens of one answer as they come, each with the text that it completes. Letting go of it ends the work."""

    def __init__(self, driver: DecodeLoop, ask: DecodeRequest):
        """An answer that is in the line."""
        self._ask, self._driver = ask, driver
        self._process = os.getpid()
        backbone: Any = driver.executor.backbone
        self._pieces: Iterator[TextPiece] = backbone.answer_pieces(_blocks(weakref.ref(self)), ask.steps, ask.stop)

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the work: slots are given back before the next token of the others."""
        self._ask.cancelled = True
        self._driver.wake()

    def __del__(self) -> None:
        # May run in the middle of anything, on any thread: nothing that takes a lock.
        self._ask.cancelled = True

    def token(self) -> int | None:
        """Waits for the next token; None at the end.

        Raises:
          What went wrong. SessionClosedError: in a process that was forked off, where nobody drives.
        """
        if os.getpid() != self._process:
            raise SessionClosedError("answer: in a process that was forked off; expected the one that asked")
        if self._ask.cancelled:
            return None
        turns, depth = self._driver.turns, 0
        if turns.held:  # else the driver could not make the token that is waited for
            depth = turns.pause()
        try:
            found = self._ask.made.get()
        finally:
            if depth:
                turns.acquire(depth=depth)
        if isinstance(found, BaseException):
            raise found
        return found


def _blocks(answer: "weakref.ref[TokenStream]") -> Iterator[Int[np.ndarray, "1 1"]]:
    """Tokens as `generate` makes them in blocks. It must not keep alive what ends the work when it is let go of."""
    while (own := answer()) is not None and (token := own.token()) is not None:
        del own
        yield np.array([[token]], np.int32)
