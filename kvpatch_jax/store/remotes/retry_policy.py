"""Timeouts and retries of calls of a remote store."""

import dataclasses
import math
import random
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

    Raises:
      InputError: a number is not finite and above 0, or `tries` is not whole.
    """

    timeout: float | int = 5.0
    rate: float | int = 1e6
    tries: int = 3
    deadline: float | int = 10.0
    pause: float | int = 0.1

    def __post_init__(self) -> None:
        invalid = {}
        for name, value in dataclasses.asdict(self).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf or (name == "tries" and value != int(value)):
                invalid[name] = value
        if invalid:
            raise InputError(f"patience: got {invalid}; expected finite numbers above 0, whole tries")

    def attempt[T](
        self,
        call: Callable[[float], T],
        nbytes: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> T:
        """Calls a function with the seconds that it may take, and again if it raises StoreUnreachableError.

        Raises:
          StoreUnreachableError: the last try failed, or `call` did not ask the service. Any other exception of `call`.
        """
        transfer = nbytes / self.rate
        deadline = clock() + self.deadline + transfer

        for number in range(int(self.tries)):
            try:
                return call(max(min(self.timeout + transfer, deadline - clock()), 0.001))
            except StoreUnreachableError as error:
                pause = self.pause * 2**number * random.uniform(0.5, 1)
                if not error.asked or number + 1 == self.tries or clock() + pause >= deadline:
                    raise
            sleep(pause)
        raise AssertionError("unreachable: the last try returns or raises")
