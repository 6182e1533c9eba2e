"""How benchmarks time: calls in turns, medians with their extremes.

`mean_seconds` and `stopwatch` are defined in `transformers_worker`, which another interpreter runs without this
project, so that both sides are timed by the same rule.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .transformers_worker import LEAST_SECONDS as LEAST_SECONDS
from .transformers_worker import mean_seconds as mean_seconds
from .transformers_worker import stopwatch as stopwatch

Turns = dict[str, list[float]]
"""Seconds of each side, turn by turn."""


def take_turns(
    sides: Mapping[str, Callable[[], float]], repeats: int, *, warm_ups: int = 0, pause: float = 0.02
) -> Turns:
    """Times each side `repeats` times in turns, so that a busy spell of the machine hits all alike.

    Args:
      sides: functions that return the seconds they count.
      repeats: turns of each.
      warm_ups: turns before them that are not counted.
      pause: seconds between two calls: threads of the other side that still spin for work would take ours away.

    Returns:
      Seconds of each side, [repeats].
    """
    turns: Turns = {name: [] for name in sides}
    for turn in range(warm_ups + repeats):
        for name, seconds in sides.items():
            taken = seconds()
            if turn >= warm_ups:
                turns[name].append(taken)
            time.sleep(pause)
    return turns


def time_calls(calls: Mapping[str, Callable[[], object]], repeats: int) -> Turns:
    """Times calls of jax in turns until their arrays are there, after one warm-up each; seconds, [repeats]."""
    sides = {name: lambda call=call: stopwatch(lambda: jax.block_until_ready(call())) for name, call in calls.items()}
    return take_turns(sides, repeats, warm_ups=1, pause=0.0)


def cpu_seconds(call: Callable[[], object], times: int = 1) -> float:
    """Measures CPU seconds of one call, the process's threads together: the mean over `times` calls."""
    begin = time.process_time()
    for _ in range(times):
        jax.block_until_ready(call())
    return (time.process_time() - begin) / times


def timed[Value](call: Callable[[], Value]) -> tuple[Value, float, float]:
    """Calls once and waits for the arrays: what came, seconds on the clock, CPU seconds of all threads."""
    begin, spent = time.perf_counter(), time.process_time()
    value = jax.block_until_ready(call())
    return value, time.perf_counter() - begin, time.process_time() - spent


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Finds median and extremes, as rows have them."""
    return {"value": statistics.median(values), "low": min(values), "high": max(values)}
