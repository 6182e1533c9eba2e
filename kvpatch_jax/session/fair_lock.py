"""Taking turns: a lock that is handed on in the order of asking, and lines of threads that wait for something."""

import collections
import itertools
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import SessionBusyError

_numbers = itertools.count()


def arrival() -> int:
    """A number larger than that of everybody who came before."""
    return next(_numbers)


class _Asker(NamedTuple):
    thread: int
    granted: threading.Event
    depth: int


class FairLock:
    """A lock that a thread may take again, handed on in the order of asking.

    Python's own locks go to whoever is quickest, and a thread that lets go and takes again at once, as one that drives
    does, keeps all others out.
    """

    def __init__(self) -> None:
        """Nobody's turn."""
        self._mutex = threading.Lock()
        self._queue: collections.deque[_Asker] = collections.deque()
        self._holder: int | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether it is the calling thread's turn."""
        return self._holder == threading.get_ident()

    def acquire(self, first: bool = False, depth: int = 1) -> None:
        """Waits for a turn.

        Args:
          first: before all others who wait. depth: how many releases end it.
        """
        asker = _Asker(threading.get_ident(), threading.Event(), depth)
        with self._mutex:
            if self._holder == asker.thread:
                self._depth += depth
                return
            if self._holder is None:
                self._holder, self._depth = asker.thread, depth
                return
            (self._queue.appendleft if first else self._queue.append)(asker)
        try:
            asker.granted.wait()
        except BaseException:  # a KeyboardInterrupt: nobody would take the turn that comes
            with self._mutex:
                if asker in self._queue:
                    self._queue.remove(asker)
                else:
                    self._hand_on()
            raise

    def release(self) -> None:
        """Ends what `acquire` began."""
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._hand_on()

    def pause(self) -> int:
        """Ends the turn, however often it was taken; `acquire(depth=…)` with what comes back takes it up again."""
        with self._mutex:
            depth = self._depth
            self._hand_on()
        return depth

    def _hand_on(self) -> None:
        self._holder, self._depth = None, 0
        if self._queue:
            asker = self._queue.popleft()
            self._holder, self._depth = asker.thread, asker.depth
            asker.granted.set()

    def __enter__(self) -> "FairLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WaitTicket:
    """A thread's place in a line.

    Attributes:
      number: smaller of who came earlier, in any line.
      tried: the line's `news` when it last tried in vain.
    """

    def __init__(self) -> None:
        """The place of who comes now."""
        self.number, self.tried = arrival(), -1
        self.called = threading.Event()


class WaitQueue:
    """Threads that wait for the same thing, in the order in which they came. Everything but `wait` needs the turn.

    Attributes:
      news: how often there was reason to try again.
    """

    def __init__(self, turns: FairLock) -> None:
        """Nobody waits."""
        self._turns, self.news = turns, 0
        self._places: list[WaitTicket] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[WaitTicket]:
        return iter(self._places)

    @property
    def first(self) -> WaitTicket | None:
        """Whose turn it is to try."""
        return self._places[0] if self._places else None

    def enter(self) -> WaitTicket:
        """Takes the last place."""
        place = WaitTicket()
        self._places.append(place)
        return place

    def leave(self, place: WaitTicket) -> None:
        """Gives a place up; the next one tries."""
        self._places.remove(place)
        self.call()

    def call(self, everybody: bool = False) -> None:
        """Has the first one try again, or everybody: something changed."""
        self.news += 1
        for place in self._places if everybody else self._places[:1]:
            place.called.set()

    def wait(self, place: WaitTicket, deadline: float, what: str) -> None:
        """Lets go of the turn until there is reason to try again.

        Raises:
          SessionBusyError: the deadline, of `time.monotonic`, is over.
        """
        place.tried = self.news
        depth = self._turns.pause()
        try:
            called = place.called.wait(max(0.0, deadline - time.monotonic()))
            place.called.clear()
        finally:
            self._turns.acquire(depth=depth)
        if not called:
            raise SessionBusyError(f"{what}: others held what it waited for; expected less load, or a longer timeout")
