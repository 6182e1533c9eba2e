"""Whether an engine has room: what its scheduler has of requests, as the thread that forms canonicals sees it."""

import threading
import time


class EngineActivity:
    """The requests that an engine has, waiting or running, also those without stored chunks. Thread-safe."""

    def __init__(self):
        self._requests: set[str] = set()
        self._ended = time.monotonic()
        self._idle = threading.Condition()

    def begin(self, request: str) -> None:
        """Registers a request that has arrived."""
        with self._idle:
            self._requests.add(request)

    def end(self, request: str) -> None:
        """Unregisters a request. Does nothing if it is not registered."""
        with self._idle:
            if request in self._requests:
                self._requests.remove(request)
                self._ended = time.monotonic()
                self._idle.notify_all()

    def wait_idle(self, quiet: float, timeout: float) -> bool:
        """Waits until there has been no request for some time.

        Args:
          quiet: seconds without one.
          timeout: seconds to wait at most.

        Returns:
          Whether there has been none.
        """
        until = time.monotonic() + timeout
        with self._idle:
            while True:
                now = time.monotonic()
                if not self._requests and now - self._ended >= quiet:
                    return True
                if now >= until:
                    return False
                rest = until if self._requests else min(until, self._ended + quiet)
                self._idle.wait(rest - now)
