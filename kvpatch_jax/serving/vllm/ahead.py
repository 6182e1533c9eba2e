"""What plans need, read on threads of their own while the engine goes on: of few requests at once, for it is large."""

import collections
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class _Begun(NamedTuple):
    future: concurrent.futures.Future[Any]
    until: float


class Ahead[Made]:
    """Work of requests, by their ids, begun in the order in which they came. Asked by one thread, the engine's.

    A request is *held* from when its work begins until it is let go, behind what becomes of the result: what is read
    for a request fills memory until it is placed.
    """

    def __init__(self, threads: int, most: int, patience: float):
        """Begins nothing.

        Args:
          threads: that work at once.
          most: requests that are held at once; others wait.
          patience: seconds after its begin at which work is given up.
        """
        self.most, self.patience = most, patience
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="kvpatch-ahead")
        self._waiting: collections.OrderedDict[str, Callable[[], Made]] = collections.OrderedDict()
        self._begun: dict[str, _Begun] = {}
        self._taken: set[str] = set()

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
            self._begun[id] = _Begun(self._threads.submit(make), time.monotonic() + self.patience)

    def is_ready(self, id: str) -> bool:
        """Whether a request's work has ended, or is given up."""
        begun = self._begun.get(id)
        return begun is not None and (begun.future.done() or time.monotonic() >= begun.until)

    def ready(self, seconds: float = 0.0) -> list[str]:
        """Lists requests that are ready. Where there are none, waits until one is.

        Args:
          seconds: to wait at most.
        """
        found = [id for id in self._begun if self.is_ready(id)]
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
        future, _ = self._begun.pop(id)
        self._taken.add(id)
        if not future.done():
            future.cancel()
            raise TimeoutError(f"not read within {self.patience:g} s; expected a store that answers")
        return future.result()

    def let_go(self, id: str) -> None:
        """Holds a request no longer, whatever became of it, and begins the next one's work."""
        self._waiting.pop(id, None)
        begun = self._begun.pop(id, None)
        if begun is not None:
            begun.future.cancel()
        self._taken.discard(id)
        self._begin()

    def close(self) -> None:
        """Begins no more; what is being read ends by itself."""
        self._waiting.clear()
        self._begun.clear()
        self._taken.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
