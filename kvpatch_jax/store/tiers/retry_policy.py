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
    """Limits on waiting for a remote store.

    Attributes:
      timeout: seconds that one try may take, and `rate` bytes per second are waited for beyond that.
      tries: of one operation at most. deadline: seconds of all its tries, not counting the bytes.
      pause: seconds before the second try, twice as many before the third, …; each is cut by up to half at random, so
        that many who failed together do not come again together.
      failures: tries that fail in a row, after which the store is not asked for `rest` seconds. Then one try decides.

    Raises:
      InputError: a number that is not finite and above 0, or not whole where tries are counted.
    """

    timeout: float | int = 5.0
    rate: float | int = 1e6
    tries: int = 3
    deadline: float | int = 10.0
    pause: float | int = 0.1
    failures: int = 4
    rest: float | int = 30.0

    def __post_init__(self) -> None:
        given = dataclasses.asdict(self)
        number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
        wrong = {name: value for name, value in given.items() if not number(value) or not 0 < value < math.inf}
        for name in ("tries", "failures"):
            if name not in wrong and given[name] != int(given[name]):
                wrong[name] = given[name]
        if wrong:
            raise InputError(f"patience: {wrong}; expected finite numbers above 0, whole tries and failures")


class CircuitBreaker:
    """Retries calls of a service, and holds them back for a while after several failed; shared by all its callers.

    Args:
      clock: seconds, rising.
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
        """Calls a function with the seconds that it may take, and again where it raises StoreUnreachableError.

        Raises:
          StoreUnreachableError: the last try failed, or the breaker was open. Whatever else `call` raises counts as
          an answer, and is raised at once.
        """
        more = nbytes / self.patience.rate
        until = self._clock() + self.patience.deadline + more
        for number in range(int(self.patience.tries)):
            self._admit(what)
            answered = False
            try:
                limit = min(self.patience.timeout + more, until - self._clock())
                value = call(max(limit, 0.001))
                answered = True
                return value
            except StoreUnreachableError:
                pause = self.patience.pause * 2**number * random.uniform(0.5, 1)
                if number + 1 == self.patience.tries or self._clock() + pause >= until:
                    raise
            except Exception:
                answered = True
                raise
            finally:
                self._told(answered)
            self._sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")

    def _admit(self, what: str) -> None:
        with self._lock:
            if self._failed < self.patience.failures:
                return
            if self._probing or self._clock() < self._until:
                raise StoreUnreachableError(
                    f"remote store: {what}: not asked, for {self._failed} tries in a row had failed; expected answers",
                    asked=False,
                )
            self._probing = True

    def _told(self, answered: bool) -> None:
        with self._lock:
            self._probing = False
            self._failed = 0 if answered else self._failed + 1
            self._until = self._clock() + self.patience.rest
