"""What plans need, read on threads of their own while the engine goes on: of few requests at once, for it is large."""

import collections
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ...utils.background import start_thread


class _QueuedWork(NamedTuple):
    make: Callable[[], Any]
    until: float  # counted from when the request came

    def is_over(self) -> bool:
        """Whether the request has waited longer than it may."""
        return time.monotonic() >= self.until


class _Begun(NamedTuple):
    future: concurrent.futures.Future[Any]
    until: float  # counted from when the request came
    thread_until: float  # counted from when its work began

    def is_over(self) -> bool:
        """Whether the request has waited longer than it may, for its work to begin and to end."""
        return time.monotonic() >= self.until

    def hangs(self) -> bool:
        """Whether the work itself takes longer than it may."""
        return time.monotonic() >= self.thread_until


class Prefetcher[Made]:
    """Work of requests, by their ids, begun in the order in which they came. Asked by one thread, the engine's.

    A request is *held* from when its work begins until it is let go, behind what becomes of the result: what is read
    for a request fills memory until it is placed. A request whose work has not ended within the patience, from when the
    request came, is given up: also where the work could not begin, for others were held and not placed. Work that is
    given up goes on until it ends, and has its thread until then; while no thread is left, everything is given up at
    once. Threads keep a process from ending for a second at most.
    """

    def __init__(self, threads: int, most: int, patience: float):
        """Begins nothing.

        Args:
          threads: that work at once.
          most: requests that are held at once; others wait.
          patience: seconds after which a request is given up, and a thread counted as one that hangs.
        """
        self.threads, self.most, self.patience = threads, most, patience
        self._waiting: collections.OrderedDict[str, _QueuedWork] = collections.OrderedDict()
        self._held: dict[str, _Begun | None] = {}  # None: what was made was taken
        self._running: list[_Begun] = []
        self._started, self._closed = 0, False
        self._changed = threading.Condition()

    def __contains__(self, id: str) -> bool:
        """Whether a request's work waits, goes on, or has ended and was not taken."""
        with self._changed:
            return id in self._waiting or self._held.get(id) is not None

    def add(self, id: str, make: Callable[[], Made]) -> None:
        """Adds work of a request; what was added before under its id is let go."""
        self.let_go(id)
        with self._changed:
            self._waiting[id] = _QueuedWork(make, time.monotonic() + self.patience)
            if self._started < self.threads:
                # A pool of the standard library is waited for when a process ends, whatever hangs in it; this a second.
                start_thread(self._serve, lambda _: self.close(), f"kvpatch-ahead-{self._started + 1}", 1.0)
                self._started += 1  # where a thread could not be started, the next request tries again
            self._changed.notify_all()

    def _serve(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """Does the next work there is to begin; returns whether more may come."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and len(self._held) < self.most))
            if self._closed:
                return False
            id, (make, until) = self._waiting.popitem(last=False)
            begun = _Begun(concurrent.futures.Future(), until, time.monotonic() + self.patience)
            self._held[id] = begun
            self._running.append(begun)
        made = error = None
        try:
            made = make()
        except BaseException as met:
            error = met
        with self._changed:
            self._running.remove(begun)
            if error is None:
                begun.future.set_result(made)
            else:
                begun.future.set_exception(error)
            del begun, made  # what was read is its request's alone, from now on
            self._changed.notify_all()
        return True

    @property
    def stuck(self) -> bool:
        """Whether every thread is at work that takes longer than the patience."""
        with self._changed:
            return sum(begun.hangs() for begun in self._running) >= self.threads

    def is_ready(self, id: str) -> bool:
        """Whether a request's work has ended, or is given up."""
        with self._changed:
            begun = self._held.get(id)
            if begun is not None:
                return begun.future.done() or begun.is_over()
            waiting = self._waiting.get(id)
            return waiting is not None and (waiting.is_over() or self.stuck)

    def ready(self, seconds: float = 0.0) -> list[str]:
        """Lists requests that are ready. Where there are none, waits until one is.

        Args:
          seconds: to wait at most.
        """
        found: list[str] = []

        def found_some() -> bool:
            # Of thousands that may wait few are looked at: they are given up all at once, or the oldest first.
            over = self._waiting.items() if self.stuck else itertools.takewhile(_is_over, self._waiting.items())
            found[:] = [id for id in self._held if self.is_ready(id)] + [id for id, _ in over]
            return bool(found) or not (self._running or self._waiting)

        with self._changed:
            self._changed.wait_for(found_some, seconds)
        return found

    def take(self, id: str) -> Made:
        """Takes what was made for a request that is ready; it is held on.

        Raises:
          TimeoutError: it was given up. Whatever the work raised.
        """
        with self._changed:
            begun = None if self._waiting.pop(id, None) else self._held[id]
            self._held[id] = None
        if begun is None or not begun.future.done():
            raise TimeoutError(
                f"was not read within {self.patience:g} s; expected a store that answers, or fewer requests that are "
                "read and not placed"
            )
        return begun.future.result()

    def let_go(self, id: str) -> None:
        """Holds a request no longer, whatever became of it, so that the next one's work can begin."""
        with self._changed:
            self._waiting.pop(id, None)
            self._held.pop(id, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Begins no more; what is being read ends by itself."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._held.clear()
            self._changed.notify_all()


def _is_over(item: tuple[str, _QueuedWork]) -> bool:
    return item[1].is_over()
