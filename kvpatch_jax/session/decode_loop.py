"""Thread that decodes the answers of many sessions, while other threads run edits in between."""

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

POLL_SECONDS = 0.1
"""How often an idle loop looks for answers that were dropped by their readers."""


class DecodeLoop:
    """Loop that admits questions in order, decodes all answers together, and releases their slots.

    Callers hold `lock`, except for those of `TokenStream`. The thread exists while there is something to answer.

    Attributes:
      batch: the answers under way.
      requests: questions that wait for a row, or for room.
      room: threads that wait for slots.
      door: threads that wait to queue a question.
      ended, cancelled: answers so far.
      busy: calls that waited in vain.
    """

    def __init__(
        self, executor: PagedExecutor, lock: FairLock, batch: int, on_pool_loss: Callable[[BaseException], None]
    ):
        """Starts idle.

        Args:
          batch: the largest number of rows.
          on_pool_loss: called when a launch has lost the pool.
        """
        self.executor, self.lock = executor, lock
        self.batch = DecodeBatch(executor, batch)
        self.requests: collections.deque[DecodeRequest] = collections.deque()
        self.room, self.door = WaitQueue(lock), WaitQueue(lock)
        self.ended, self.cancelled, self.busy = 0, 0, 0
        self._on_pool_loss, self._exiting = on_pool_loss, False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, request: DecodeRequest) -> "TokenStream":
        """Queues a question.

        Raises:
          RuntimeError: no thread can be started. Nothing is queued.
        """
        if self._thread is None:
            # Sessions that never ask have no thread. It waits for the lock, which the caller holds, and so finds the
            # request.
            self._thread = start_thread(self._run, self._stop_at_exit, "sessions")
        self.requests.append(request)
        self._wake.set()
        return TokenStream(self, request)

    def wake(self) -> None:
        """Makes the thread look for work."""
        self._wake.set()

    def notify_freed(self) -> None:
        """Notes that slots may have become free."""
        self.room.call()
        self._wake.set()

    def drop(self, error: KVPatchError, window: str | None = None) -> None:
        """Ends all answers with an error, or those about one branch."""
        for request in self._all_requests():
            if window in (None, request.window):
                self._end(request, error)

    def join(self) -> None:
        """Waits for the thread to end. The caller must not hold the lock."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._wake.set()
            thread.join()

    # ------------------------------------------------------------------------------------------------ thread

    def _stop_at_exit(self, _: float) -> None:
        """Ends all answers after the current step, because the process exits and nobody will read them."""
        self._exiting = True
        self._wake.set()

    def _run(self) -> None:
        try:
            while self._iterate():
                pass
        except BaseException as error:
            # Whatever it is, no reader may wait for a token that does not come.
            with self.lock:
                self._thread = None
                for request in self._all_requests():
                    self._end(request, error)

    def _iterate(self) -> bool:
        """Admits questions and decodes one token of every row. Returns whether the loop continues."""
        # First, because the loop takes the lock for every token, and each waiting thread goes in between.
        self.lock.acquire(first=True)
        try:
            if self._exiting:
                self.drop(SessionClosedError("answer: got cut off as the process exits; expected it read before"))
            for request in self._all_requests():
                if request.cancelled:
                    self.cancelled += 1
                    self._end(request, None)

            try:
                self._admit()
                if self.batch.rows:
                    for row in self.batch.step():
                        self._end(row.request, None)
            except Exception as error:
                # A launch failed. It may have taken the pool along, which was donated to it.
                if self.executor.pool.lost:
                    self._on_pool_loss(error)
                else:
                    # Which answer it was is unknown, so all under way end; without any, it was a question's.
                    failed = [row.request for row in self.batch.rows] or list(self.requests)
                    for request in failed:
                        self._end(request, error)

            if self.batch.rows:
                return True
            if not self.requests:
                self._thread = None
                return False
        finally:
            self.lock.release()

        # Questions wait for room. A cancelled answer cannot wake the loop from its `__del__`, so it polls.
        self._wake.wait(POLL_SECONDS)
        self._wake.clear()
        return True

    def _admit(self) -> None:
        """Moves questions into the batch while there are rows and room."""
        while self.requests and not self.batch.full and not self._yields_room(self.requests[0]):
            request = self.requests[0]
            try:
                self.batch.reserve(request)
            except PoolError as error:
                # The answer and its context may be larger than the whole pool. Waiting would be in vain.
                allocator = self.executor.books.allocator
                lengths = [request.slots, *(piece.length for piece in self.executor.books.ordered(request.branch))]
                if sum(-(-length // allocator.page_size) for length in lengths) > allocator.pages:
                    self._end(request, error)
                elif time.monotonic() < request.deadline:
                    return
                else:
                    self.busy += 1
                    found = f"ask: {error}; others held the pool for as long as the session waits"
                    self._end(request, SessionBusyError(found))
                continue

            # An error of one question (logits that are not finite) ends it alone, unless the pool is lost.
            try:
                row = self.batch.begin(request)
            except Exception as error:
                self.executor.pool.check(error)
                self._end(request, error)
                continue

            self.requests.popleft()
            self.door.call()
            if row.ended:
                self._end(request, None)

    def _yields_room(self, request: DecodeRequest) -> bool:
        """Returns whether a thread that came earlier waits for slots, and may get them: from rows, or free ones."""
        # An edit that has tried in vain since the last release takes nothing; then the question may.
        first = self.room.first
        if first is None or first.number > request.number:
            return False
        return bool(self.batch.rows) or first.tried != self.room.news

    def _end(self, request: DecodeRequest, error: BaseException | None) -> None:
        """Releases an answer's slots, and notes that no token follows."""
        # It is queued, in the batch, or neither while it is admitted.
        if request in self.requests:
            self.requests.remove(request)
            self.door.call()

        for row in list(self.batch.rows):
            if row.request is request:
                self.batch.leave(row)

        self.executor.release(request.branch)
        self.ended += 1
        request.results.put(error)
        self.notify_freed()

    def _all_requests(self) -> list[DecodeRequest]:
        return [*self.requests, *(row.request for row in self.batch.rows)]


class TokenStream:
    """Tokens of one answer as they are decoded, each with the text that it completes.

    Dropping the last reference ends the work.
    """

    def __init__(self, loop: DecodeLoop, request: DecodeRequest):
        self._loop, self._request = loop, request
        self._process = os.getpid()
        backbone: Any = loop.executor.backbone
        self._pieces: Iterator[TextPiece] = backbone.answer_pieces(
            _blocks(weakref.ref(self)), request.steps, request.stop
        )

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> TextPiece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the work. Its slots are released before the next token of other answers."""
        self._request.cancelled = True
        self._loop.wake()

    def __del__(self) -> None:
        # May run at any point of any thread, so it must not take a lock.
        self._request.cancelled = True

    def token(self) -> int | None:
        """Waits for the next token. Returns None after the last.

        Raises:
          The error that ended the answer. SessionClosedError: in a forked process, which has no decode loop.
        """
        if os.getpid() != self._process:
            raise SessionClosedError("answer: got read in a process that was forked off; expected the one that asked")
        # What was decoded after the cancellation is not read.
        if self._request.cancelled:
            return None

        # The loop needs the lock to decode the token. A caller may hold it, several times over.
        lock, depth = self._loop.lock, 0
        if lock.held:
            depth = lock.pause()

        try:
            result = self._request.results.get()
        finally:
            if depth:
                lock.acquire(depth=depth)

        if isinstance(result, BaseException):
            raise result
        return result


def _blocks(stream: "weakref.ref[TokenStream]") -> Iterator[Int[np.ndarray, "1 1"]]:
    """Yields tokens in blocks, as `generate` does. A strong reference here would keep an abandoned stream alive."""
    while (strong := stream()) is not None and (token := strong.token()) is not None:
        del strong
        yield np.array([[token]], np.int32)
