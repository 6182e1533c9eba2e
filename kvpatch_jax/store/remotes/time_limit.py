"""Time limits for calls that have none of their own: they run in threads, which are abandoned when the time is over."""

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable

_AT_ONCE = 64
"""Calls in progress per process, those included that were abandoned and have not returned."""
_GRACE = 0.05
"""Seconds that a call gets on top, so that the error of an adapter that ends it in time is heard."""


class _Calls:
    """Calls in progress. In a forked process there are none."""

    def __init__(self) -> None:
        self.forked()
        os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        self.slots, self.limit = threading.BoundedSemaphore(_AT_ONCE), threading.local()


_calls = _Calls()


def seconds_left() -> float | None:
    """Returns the seconds that are left to the call in this thread; None if it has no limit."""
    until = getattr(_calls.limit, "until", None)
    return None if until is None else max(until - time.monotonic(), 0.001)


def call_within[T](seconds: float, call: Callable[[], T]) -> T:
    """Calls a function in another thread and waits for it. A call that takes too long goes on, and nobody hears of it.

    Raises:
      TimeoutError: the time is over, or too many calls that were abandoned go on.
      Any exception of `call`.
    """
    calls, outcome = _calls, concurrent.futures.Future()
    slots, until = calls.slots, time.monotonic() + seconds

    def work() -> None:
        calls.limit.until = until
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            slots.release()

    if not slots.acquire(timeout=seconds):
        raise TimeoutError(f"got {_AT_ONCE} calls that do not end; expected fewer")
    try:
        # A thread of a pool would be waited for when the interpreter ends.
        threading.Thread(target=work, name="kvpatch-remote-call", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or there are too many threads
        work()
    return outcome.result(max(until - time.monotonic(), 0) + _GRACE)
