"""What plans need, read on threads of their own while the engine goes on: of few requests at once, for it is large."""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ...background import start_thread


class _Begun(NamedTuple):
    future: concurrent.futures.Future[Any]
    until: float

    def is_over(self) -> bool:
        """Whether it has taken longer than it may."""
        return time.monotonic() >= self.until


class Ahead[Made]:
    """Work of requests, by their ids, begun in the order in which they came. Asked by one thread, the engine's.

    A request is *held* from when its work begins until it is let go, behind what becomes of the result: what is read
    for a request fills memory until it is placed. Work that is given up goes on until it ends, and has its thread until
    then; while no thread is left, everything is given up at once. Threads do not keep a process from ending.
    """

    def __init__(self, threads: int, most: int, patience: float):
        """Begins nothing.

        Args:
          threads: that work at once.
          most: requests that are held at once; others wait.
          patience: seconds after its begin at which work is given up.
        """
        self.threads, self.most, self.patience = threads, most, patience
        self._waiting: collections.OrderedDict[str, Callable[[], Made]] = collections.OrderedDict()
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
            self._waiting[id] = make
            if self._started < self.threads:
                self._started += 1
                # A pool of the standard library is waited for when a process ends, whatever hangs in it; this a second.
                start_thread(self._serve, lambda _: self.close(), f"kvpatch-ahead-{self._started}", 1.0)
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
            id, make = self._waiting.popitem(last=False)
            begun = _Begun(concurrent.futures.Future(), time.monotonic() + self.patience)
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
            return sum(begun.is_over() for begun in self._running) >= self.threads

    def is_ready(self, id: str) -> bool:
        """Whether a request's work has ended, or is given up."""
        with self._changed:
            begun = self._held.get(id)
            if begun is not None:
                return begun.future.done() or begun.is_over()
            return id in self._waiting and self.stuck

    def ready(self, seconds: float = 0.0) -> list[str]:
        """Lists requests that are ready. Where there are none, waits until one is.

        Args:
          seconds: to wait at most.
        """
        found: list[str] = []

        def found_some() -> bool:
            # Of thousands that may wait none is looked at: they are given up all at once.
            found[:] = [id for id in self._held if self.is_ready(id)] + (list(self._waiting) if self.stuck else [])
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
            raise TimeoutError(f"takes more than {self.patience:g} s to read; expected a store that answers")
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
