"""Timeouts, retries and a circuit breaker for a remote store (Nygard, "Release It!")."""

import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable

from ...errors import InputError, StoreUnreachableError


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Time limits and retries of calls of a remote store.

    Attributes:
      timeout: seconds per try, plus the time for the bytes at `rate`.
      rate: bytes per second.
      tries: number of tries per operation.
      deadline: seconds for all tries of an operation, plus the time for the bytes.
      pause: seconds before the second try, doubled before each further one. Each pause is shortened at random by up to
        half, so that clients that failed together do not retry together.
      failures: number of consecutive failed tries after which the store is not called for `rest` seconds. Then a
        single try decides.
      rest: seconds.

    Raises:
      InputError: a number is not finite and above 0, or `tries` or `failures` is not whole.
    """

    timeout: float | int = 5.0
    rate: float | int = 1e6
    tries: int = 3
    deadline: float | int = 10.0
    pause: float | int = 0.1
    failures: int = 4
    rest: float | int = 30.0

    def __post_init__(self) -> None:
        invalid = {}
        for name, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf or (name in ("tries", "failures") and value != int(value)):
                invalid[name] = value
        if invalid:
            raise InputError(f"patience: got {invalid}; expected finite numbers above 0, whole tries and failures")


class CircuitBreaker:
    """Circuit breaker of a service: retries calls, and prevents them for a while after several failures.

    Args:
      patience: limits and retries, for all callers together.
      clock: returns monotonic seconds.
      sleep: waits for some seconds.
    """

    def __init__(
        self,
        patience: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.patience, self._clock, self._sleep = patience, clock, sleep
        self._failed, self._until, self._probing = 0, 0.0, False
        self._lock = threading.Lock()

    def attempt[T](self, what: str, call: Callable[[float], T], nbytes: int = 0) -> T:
        """Calls a function with the seconds that it may take, and again if it raises StoreUnreachableError.

        Raises:
          StoreUnreachableError: the last try failed, the breaker is open, or `call` did not ask the service.
          Any other exception of `call`: it counts as an answer, and is not retried.
        """
        transfer = nbytes / self.patience.rate
        deadline = self._clock() + self.patience.deadline + transfer

        for number in range(int(self.patience.tries)):
            self._admit(what)
            answered: bool | None = False
            try:
                limit = min(self.patience.timeout + transfer, deadline - self._clock())
                value = call(max(limit, 0.001))
                answered = True
                return value
            except StoreUnreachableError as error:
                answered = False if error.asked else None
                pause = self.patience.pause * 2**number * random.uniform(0.5, 1)
                if not error.asked or number + 1 == self.patience.tries or self._clock() + pause >= deadline:
                    raise
            except Exception:
                answered = True
                raise
            finally:
                self._record(answered)
            self._sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")

    def _admit(self, what: str) -> None:
        with self._lock:
            if self._failed < self.patience.failures:
                return
            if self._probing or self._clock() < self._until:
                raise StoreUnreachableError(
                    f"remote store: {what}: got no answer (not asked, for {self._failed} tries in a row failed); "
                    "expected one",
                    asked=False,
                )
            self._probing = True

    def _record(self, answered: bool | None) -> None:
        with self._lock:
            self._probing = False
            if answered is None:
                return  # the service was not asked
            self._failed = 0 if answered else self._failed + 1
            self._until = self._clock() + self.patience.rest
