"""Background reading of the stored chunks that request plans need.

`Prefetcher` reads from the store on daemon threads while the engine goes on. It limits how many requests have their
data in memory at once, because that data is large.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from ...utils.background import start_thread

EXIT_SECONDS = 1.0
"""Seconds for which a reading thread is waited for when the process ends: a read may hang."""


@dataclasses.dataclass(eq=False)
class _Work:
    """A request's work: `deadline` counts from its arrival, `thread_deadline` from its start."""

    read: Callable[[], Any]
    deadline: float
    thread_deadline: float = 0.0
    future: concurrent.futures.Future[Any] = dataclasses.field(default_factory=concurrent.futures.Future)


class Prefetcher[Result]:
    """Reads for requests on threads, in the order of arrival; called by one thread, the engine's.

    A request is *held* from the start of its work until it is released, because what was read for it fills memory
    until it is placed. At most `limit` requests are held. A request expires if its work has not ended within the
    patience, counted from its arrival, whether the read was slow or could not begin. Expired work goes on and keeps its
    thread until it ends; while no thread is left, every request expires at once.

    Args:
      threads: number of reading threads.
      limit: number of requests that are held at once; others wait.
      patience: seconds after which a request expires, and after which a thread counts as hanging.
    """

    def __init__(self, threads: int, limit: int, patience: float):
        self.threads, self.limit, self.patience = threads, limit, patience
        self._waiting: collections.OrderedDict[str, _Work] = collections.OrderedDict()
        self._held: dict[str, _Work | None] = {}  # None: the result was taken
        self._running: list[_Work] = []
        self._thread_count, self._closed = 0, False
        self._changed = threading.Condition()

    def __contains__(self, id: str) -> bool:
        """Returns whether a request's work waits, runs, or has ended with a result that was not taken."""
        with self._changed:
            return id in self._waiting or self._held.get(id) is not None

    @property
    def backlog(self) -> tuple[int, int]:
        """Numbers of requests that wait for their work to begin, and that are held."""
        with self._changed:
            return len(self._waiting), len(self._held)

    def add(self, id: str, read: Callable[[], Result]) -> None:
        """Queues a request's work, and releases any earlier work of the same id.

        Raises:
          RuntimeError: no thread could be started.
        """
        self.release(id)
        with self._changed:
            self._waiting[id] = _Work(read, time.monotonic() + self.patience)
            if self._thread_count < self.threads:
                # Not a pool of the standard library: at exit that waits without limit for a read that hangs.
                name = f"kvpatch-ahead-{self._thread_count + 1}"
                start_thread(self._run, lambda _: self.close(), name, EXIT_SECONDS)
                self._thread_count += 1  # after the start, so that the next request tries again if it failed
            self._changed.notify_all()

    def _run(self) -> None:
        """Works until the prefetcher is closed."""
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next work that may begin; returns False once the prefetcher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and len(self._held) < self.limit))
            if self._closed:
                return False
            id, work = self._waiting.popitem(last=False)
            work.thread_deadline = time.monotonic() + self.patience
            self._held[id] = work
            self._running.append(work)
        try:
            finish = functools.partial(work.future.set_result, work.read())
        except BaseException as error:
            finish = functools.partial(work.future.set_exception, error)
        with self._changed:
            self._running.remove(work)
            finish()
            self._changed.notify_all()
        # A thread that waits for its next work keeps nothing of this one alive, whose frame ends here.
        return True

    @property
    def stuck(self) -> bool:
        """Whether every thread has been at one piece of work for longer than the patience."""
        with self._changed:
            now = time.monotonic()
            return sum(now >= work.thread_deadline for work in self._running) >= self.threads

    def is_ready(self, id: str) -> bool:
        """Returns whether a request's work has ended, or has expired."""
        with self._changed:
            now, held, waiting = time.monotonic(), self._held.get(id), self._waiting.get(id)
            if held is not None:
                return held.future.done() or now >= held.deadline
            return waiting is not None and (now >= waiting.deadline or self.stuck)

    def ready(self, seconds: float = 0.0) -> list[str]:
        """Returns the ids of requests that are ready, and waits for one if there is none.

        Args:
          seconds: longest time to wait.
        """
        ids: list[str] = []

        def find() -> bool:
            ids[:] = [id for id in self._held if self.is_ready(id)]
            # Thousands may wait. They expire all together, or the oldest first, so the rest is not looked at.
            for id in self._waiting:
                if not self.is_ready(id):
                    break
                ids.append(id)
            return bool(ids) or not (self._running or self._waiting)

        with self._changed:
            self._changed.wait_for(find, seconds)
        return ids

    def take(self, id: str) -> Result:
        """Returns the result of a request that is ready. The request stays held until it is released.

        Raises:
          TimeoutError: its work expired. Any exception that the work raised.
        """
        with self._changed:
            work = None if self._waiting.pop(id, None) else self._held[id]
            self._held[id] = None
        if work is None or not work.future.done():
            raise TimeoutError(
                f"prefetch: got no result within {self.patience:g} s; expected a store that answers, or fewer requests "
                "that are read and not placed"
            )
        return work.future.result()

    def release(self, id: str) -> None:
        """Forgets a request, in any state, so that the next one's work can begin."""
        with self._changed:
            self._waiting.pop(id, None)
            self._held.pop(id, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Forgets every request and begins no more work. Work that runs ends by itself."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._held.clear()
            self._changed.notify_all()
