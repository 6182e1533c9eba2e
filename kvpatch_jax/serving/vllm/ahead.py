"""What plans need, read on threads of their own while the engine goes on: of few requests at once, for it is large."""

import collections
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Future = concurrent.futures.Future[Any]


class _Begun(NamedTuple):
    future: Future
    until: float


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
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Made]] | None] = queue.SimpleQueue()
        self._started = 0
        self._waiting: collections.OrderedDict[str, Callable[[], Made]] = collections.OrderedDict()
        self._begun: dict[str, _Begun] = {}
        self._taken: set[str] = set()
        self._left: list[_Begun] = []

    def __contains__(self, id: str) -> bool:
        """Whether a request's work waits, goes on, or has ended and was not taken."""
        return id in self._waiting or id in self._begun

    def add(self, id: str, make: Callable[[], Made]) -> None:
        """Adds work of a request that is not held."""
        self._waiting[id] = make
        self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self._begun) + len(self._taken) < self.most:
            id, make = self._waiting.popitem(last=False)
            self._begun[id] = _Begun(Future(), time.monotonic() + self.patience)
            self._jobs.put((self._begun[id].future, make))
            if self._started < self.threads:
                self._started += 1
                # A pool of the standard library is waited for when a process ends, whatever hangs in it.
                threading.Thread(target=self._work, name=f"kvpatch-ahead-{self._started}", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, make = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
            del job, future, make  # or what was read is held until there is more to read

    @property
    def stuck(self) -> bool:
        """Whether every thread is at work that takes longer than the patience, and that nobody waits for."""
        self._left, now = [begun for begun in self._left if not begun.future.done()], time.monotonic()
        return sum(now >= begun.until for begun in self._left) >= self.threads

    def is_ready(self, id: str) -> bool:
        """Whether a request's work has ended, or is given up."""
        begun = self._begun.get(id)
        if begun is not None and (begun.future.done() or time.monotonic() >= begun.until):
            return True
        return id in self and self.stuck

    def ready(self, seconds: float = 0.0) -> list[str]:
        """Lists requests that are ready. Where there are none, waits until one is.

        Args:
          seconds: to wait at most.
        """
        found = [id for id in (*self._begun, *self._waiting) if self.is_ready(id)]
        if not found and self._begun and seconds > 0:
            waited = [begun.future for begun in self._begun.values()]
            concurrent.futures.wait(waited, seconds, concurrent.futures.FIRST_COMPLETED)
            found = [id for id in self._begun if self.is_ready(id)]
        return found

    def take(self, id: str) -> Made:
        """Takes what was made for a request that is ready; it is held on.

        Raises:
          TimeoutError: it was given up. Whatever the work raised.
        """
        begun = self._begun.pop(id, None)
        self._taken.add(id)
        if begun is None:
            self._waiting.pop(id)
        elif begun.future.done():
            return begun.future.result()
        elif not begun.future.cancel():
            self._left.append(begun)
        hangs = ", as do all before it" if self.stuck else ""
        raise TimeoutError(f"takes more than {self.patience:g} s to read{hangs}; expected a store that answers")

    def let_go(self, id: str) -> None:
        """Holds a request no longer, whatever became of it, and begins the next one's work."""
        self._waiting.pop(id, None)
        begun = self._begun.pop(id, None)
        if begun is not None and not begun.future.cancel():
            self._left.append(begun)
        self._taken.discard(id)
        self._begin()

    def close(self) -> None:
        """Begins no more; what is being read ends by itself."""
        self._waiting.clear()
        self._begun.clear()
        self._taken.clear()
        for _ in range(self._started):
            self._jobs.put(None)
