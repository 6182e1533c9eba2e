"""Seconds of a call on a device: many calls in one compiled program, on inputs that the program is handed."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

AT_ONCE = 4
"""Runs of the program that are queued together, so that the host's work on the next hides behind the device's."""


class OverSets:
    """A program that calls a function on every set of inputs; every result is kept, so that none is left out.

    The sets are the program's arguments: what a jitted function closes over are constants, which XLA folds.
    """

    def __init__(self, call: Callable[[Any], Array], sets: Sequence[Any]):
        self.sets = list(sets)
        self.jitted = jax.jit(lambda given: [call(one) for one in given])

    def __call__(self) -> list[Array]:
        return self.jitted(self.sets)


class ThroughPool:
    """A program that hands one donated pool through a call for every set of inputs, each after the one before.

    The pool is made when it is first wanted, and is gone with the program.
    """

    def __init__(self, call: Callable[[Array, Any], Array], make_pool: Callable[[], Array], sets: Sequence[Any]):
        def through(pool: Array, given: Sequence[Any]) -> Array:
            for one in given:
                pool = call(pool, one)
            return pool

        self.sets, self.make_pool = list(sets), make_pool
        self.jitted = jax.jit(through, donate_argnums=0)
        self.pool: Array | None = None

    def __call__(self) -> Array:
        pool = self.make_pool() if self.pool is None else self.pool
        self.pool = pool = self.jitted(pool, self.sets)
        return pool


def seconds_of(program: Callable[[], Any], calls: int, repeats: int) -> list[float]:
    """Measures seconds of one call in each of many rounds, after two that are not counted.

    Args:
      program: runs `calls` calls on the device and returns what they left there.
      calls: how many calls one run makes.
      repeats: rounds that are counted.
    """
    # The first round compiles; the second finds caches and clocks as those that count do.
    taken = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        for _ in range(AT_ONCE):
            result = program()
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - begin) / (calls * AT_ONCE))
    return taken[2:]


def median_seconds(program: Callable[[], Any], calls: int, repeats: int) -> float:
    """Measures the median of `seconds_of`."""
    return statistics.median(seconds_of(program, calls, repeats))
