"""Timing of calls in turns: what is compared is interleaved, so that a busy spell of the machine hits all alike.

`mean_seconds` and `stopwatch` are of `transformers_worker`, which another interpreter runs without this
project, so that both sides are timed by the same rule.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import jax

from .transformers_worker import LEAST_SECONDS as LEAST_SECONDS
from .transformers_worker import mean_seconds as mean_seconds
from .transformers_worker import stopwatch as stopwatch

Samples = dict[str, list[float]]
"""Seconds of each side, repeat by repeat."""


def interleave(
    sides: Mapping[str, Callable[[], float]], repeats: int, *, warm_ups: int = 0, pause: float = 0.02
) -> Samples:
    """Measures each side `repeats` times, in turns.

    Args:
      sides: functions that return the seconds they count.
      repeats: measurements of each side.
      warm_ups: rounds before them that are not counted.
      pause: seconds between two calls: threads of the other side that still spin for work would take ours away.

    Returns:
      Seconds of each side, [repeats].
    """
    samples: Samples = {name: [] for name in sides}
    for turn in range(warm_ups + repeats):
        for name, measure in sides.items():
            seconds = measure()
            if turn >= warm_ups:
                samples[name].append(seconds)
            time.sleep(pause)
    return samples


def interleave_calls(calls: Mapping[str, Callable[[], object]], repeats: int) -> Samples:
    """Times calls of jax in turns until their arrays are there, after one warm-up each; seconds, [repeats]."""
    sides = {name: lambda call=call: stopwatch(lambda: jax.block_until_ready(call())) for name, call in calls.items()}
    return interleave(sides, repeats, warm_ups=1, pause=0.0)


def interleave_cpu(calls: Mapping[str, Callable[[], object]], repeats: int, times: int = 1) -> Samples:
    """Measures CPU seconds of calls of jax in turns until their arrays are there, after one warm-up each."""
    sides = {}
    for name, call in calls.items():
        sides[name] = lambda call=call: cpu_seconds(lambda: jax.block_until_ready(call()), times)
    return interleave(sides, repeats, warm_ups=1, pause=0.0)


def cpu_seconds(call: Callable[[], object], times: int = 1) -> float:
    """Measures the CPU seconds that `call` takes: all threads of the process, mean of `times`."""
    begin = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begin) / times


def timed[Value](call: Callable[[], Value]) -> tuple[Value, float, float]:
    """Calls once and waits for the arrays: the value, seconds on the clock, CPU seconds of all threads."""
    begin, spent = time.perf_counter(), time.process_time()
    value = jax.block_until_ready(call())
    return value, time.perf_counter() - begin, time.process_time() - spent


def ratios(above: Sequence[float | int], below: Sequence[float | int]) -> list[float]:
    """Divides two sides' figures, repeat by repeat."""
    return [first / second for first, second in zip(above, below, strict=True)]
