"""What a request's plan needs, read on threads of their own while the engine goes on with other requests."""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class _Begun(NamedTuple):
    request: Any
    future: concurrent.futures.Future[Any]
    until: float


class Ahead[Made]:
    """Work begun for requests that wait, by their ids. Asked by one thread, the engine's."""

    def __init__(self, threads: int, patience: float):
        """Begins nothing.

        Args:
          threads: that work at once; more work waits for them.
          patience: seconds after which work is given up.
        """
        self.patience = patience
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="kvpatch-ahead")
        self._begun: dict[str, _Begun] = {}

    def __contains__(self, id: str) -> bool:
        """Whether something was begun for a request and not taken."""
        return id in self._begun

    def begin(self, request: Any, make: Callable[[], Made]) -> None:
        """Begins work for a request."""
        until = time.monotonic() + self.patience
        self._begun[request.request_id] = _Begun(request, self._threads.submit(make), until)

    def is_ready(self, id: str) -> bool:
        """Whether a request's work has ended, or is given up."""
        begun = self._begun[id]
        return begun.future.done() or time.monotonic() >= begun.until

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

    def take(self, id: str) -> tuple[Any, Made]:
        """Takes what was made for a request that is ready.

        Returns:
          The request, and what was made.

        Raises:
          TimeoutError: it was given up. Whatever the work raised.
        """
        request, future, _ = self._begun.pop(id)
        if not future.done():
            future.cancel()
            raise TimeoutError(f"its chunks were not read within {self.patience:g} s")
        return request, future.result()

    def drop(self, id: str) -> None:
        """Forgets a request, if something was begun for it."""
        begun = self._begun.pop(id, None)
        if begun is not None:
            begun.future.cancel()

    def close(self) -> None:
        """Begins no more; what is being read ends by itself."""
        self._begun.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
