"""FIFO lock, and queues of threads that wait for a resource under it."""

import collections
import itertools
import threading
import time
from typing import NamedTuple

from ..errors import SessionBusyError

_numbers = itertools.count()


def arrival() -> int:
    """Returns a number larger than that of all earlier arrivals."""
    return next(_numbers)


class _LockRequest(NamedTuple):
    thread: int
    granted: threading.Event
    depth: int


class FairLock:
    """Re-entrant lock that is handed on in the order of requests.

    Python's own locks go to the quickest thread. A thread that releases and acquires in a loop, as the decode loop
    does, would keep all others out.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: collections.deque[_LockRequest] = collections.deque()
        self._holder: int | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._holder == threading.get_ident()

    @property
    def queued(self) -> int:
        """The number of threads that wait for the lock."""
        return len(self._queue)

    def acquire(self, first: bool = False, depth: int = 1) -> None:
        """Waits for the lock.

        Args:
          first: whether to go before all other waiting threads.
          depth: the number of releases that undo this call.
        """
        request = _LockRequest(threading.get_ident(), threading.Event(), depth)
        with self._mutex:
            if self._holder == request.thread:
                self._depth += depth
                return
            if self._holder is None:
                self._holder, self._depth = request.thread, depth
                return
            # The holder hands the lock on to the first of the queue, so that no third thread can take it in between.
            (self._queue.appendleft if first else self._queue.append)(request)

        try:
            request.granted.wait()
        except BaseException:
            # A KeyboardInterrupt. The lock may have been handed to this thread already, which will not release it.
            with self._mutex:
                if request in self._queue:
                    self._queue.remove(request)
                else:
                    self._hand_on()
            raise

    def release(self) -> None:
        """Undoes one `acquire`."""
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._hand_on()

    def pause(self) -> int:
        """Releases the lock, however often it was acquired. `acquire(depth=...)` with the result restores that."""
        with self._mutex:
            depth = self._depth
            self._hand_on()
        return depth

    def _hand_on(self) -> None:
        """Gives the lock to the next request. Holds the mutex."""
        self._holder, self._depth = None, 0
        if self._queue:
            request = self._queue.popleft()
            self._holder, self._depth = request.thread, request.depth
            request.granted.set()

    def __enter__(self) -> "FairLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WaitTicket:
    """Ticket of a thread in a `WaitQueue`.

    Attributes:
      number: smaller for earlier tickets, over all queues.
      tried: the queue's `news` when the thread last tried in vain.
      called: set when there is reason to try again.
    """

    def __init__(self) -> None:
        self.number, self.tried = arrival(), -1
        self.called = threading.Event()


class WaitQueue:
    """FIFO queue of threads that wait for one resource. Callers hold the lock.

    Attributes:
      news: how often there was reason to try again.
    """

    def __init__(self, lock: FairLock) -> None:
        self._lock, self.news = lock, 0
        self._tickets: list[WaitTicket] = []

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def first(self) -> WaitTicket | None:
        """The ticket that may try next, or None."""
        return self._tickets[0] if self._tickets else None

    def enter(self) -> WaitTicket:
        """Appends a ticket for the calling thread."""
        ticket = WaitTicket()
        self._tickets.append(ticket)
        return ticket

    def leave(self, ticket: WaitTicket) -> None:
        """Removes a ticket. The next one may try."""
        self._tickets.remove(ticket)
        self.call()

    def call(self, everybody: bool = False) -> None:
        """Wakes the first thread, or everybody, because something changed."""
        self.news += 1
        for ticket in self._tickets if everybody else self._tickets[:1]:
            ticket.called.set()

    def wait(self, ticket: WaitTicket, deadline: float, operation: str) -> None:
        """Releases the lock until there is reason to try again.

        Args:
          deadline: of `time.monotonic`.
          operation: begins the error message.

        Raises:
          SessionBusyError: the deadline has passed.
        """
        # Noted before the lock is released, so that no later news is missed.
        ticket.tried = self.news
        depth = self._lock.pause()
        try:
            called = ticket.called.wait(max(0.0, deadline - time.monotonic()))
            ticket.called.clear()
        finally:
            self._lock.acquire(depth=depth)

        if not called:
            raise SessionBusyError(
                f"{operation}: got a timeout while other sessions held the resource; expected less load, or a longer "
                "timeout"
            )
