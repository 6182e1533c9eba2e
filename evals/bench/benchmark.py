"""What a benchmark is: one piece of work by several sides, checked, then timed in turns; its rows and their table.

Rows are the harness's: probe is what is done ("store.put"), model the case (a shape or a model), arm the side.
Imports jax and numpy alone, so that it runs on a bare machine.
"""

import collections
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..harness.frame import Row, aligned_table, measured_row
from ..harness.intervals import Interval


class Sides(NamedTuple):
    """What is compared, ready to run.

    Attributes:
      calls: seconds of one run of each side, ours first: `timed` makes them. Every side is divided by ours.
      check: measures each side's error over its tolerance; a side above 1, or NaN, is wrong and is not timed.
      moved: bytes that one run has to move; 0: no bandwidth is given.
      figures: further numbers, by side and metric, once all is timed.
      pause: seconds between two runs, where threads of one side would spin on into the next one's time.
      notes: sides that cannot run, with the reason.
    """

    calls: Mapping[str, Callable[[], float]]
    check: Callable[[], Mapping[str, float]] = dict
    moved: int = 0
    figures: Callable[[], Mapping[tuple[str, str], Sequence[float]]] = dict
    pause: float = 0.0
    notes: Mapping[str, str] = {}


class Benchmark(NamedTuple):
    """One comparison: what is done, on which shape or model, and how its sides are prepared.

    `large` ones take minutes or gigabytes, and run where --only names them.
    """

    name: str
    case: str
    prepare: Callable[[], Sides]
    large: bool = False

    @property
    def key(self) -> str:
        """What is done and the case."""
        return f"{self.name} {self.case}"


class BenchOptions(NamedTuple):
    """Options of every suite: tiny sizes or not, the seed, the folder of --out."""

    quick: bool = False
    seed: int = 0
    out: str | None = None
    torch_python: str | None = None


# ---------------------------------------------------------------------------------------------------------- timing


def timed(
    run: Callable[[], Any],
    *,
    before: Callable[[], object] | None = None,
    runs: int = 1,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[Any], object] = jax.block_until_ready,
) -> Callable[[], float]:
    """Makes a function that measures the seconds of one call of `run`, until its results are there.

    Args:
      run: what is timed; it returns what has to be waited for.
      before: what is prepared, untimed, before each measurement.
      runs: how many are queued one behind the other, so that the host's work hides behind the device's.
      calls: how many calls one run makes, of a compiled program with many.
      clock: seconds; `time.process_time` where others use the machine too.
      wait: waits for results.
    """

    def measure() -> float:
        if before is not None:
            before()
        begin = clock()
        for _ in range(runs):
            result = run()
        wait(result)
        return (clock() - begin) / (runs * calls)

    return measure


def interleave(calls: Mapping[str, Callable[[], float]], repeats: int, pause: float = 0.0) -> dict[str, list[float]]:
    """Measures the seconds of each side `repeats` times after a warm-up, in turns: a busy spell hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + repeats):
        for name, measure in calls.items():
            seconds = measure()
            if turn:
                samples[name].append(seconds)
            time.sleep(pause)
    return samples


def over_sets(call: Callable[[Any], Any], sets: Sequence[Any]) -> Callable[[], Any]:
    """Compiles one program that calls a function on every set of inputs, and returns every result.

    The sets are the program's arguments: what a jitted function closes over are constants, which XLA folds.
    """
    program = jax.jit(lambda inputs: [call(one_set) for one_set in inputs])
    return functools.partial(program, list(sets))


class ThroughPool:
    """A program that hands one donated pool through a call for every set of inputs, each after the one before."""

    def __init__(self, call: Callable[[Any, Any], Any], pool: Any, sets: Sequence[Any]):
        self.pool, self.sets = pool, list(sets)
        self.program = jax.jit(lambda pool, inputs: functools.reduce(call, inputs, pool), donate_argnums=0)

    def __call__(self) -> Any:
        """Runs the program; the pool that comes back is the next run's."""
        self.pool = self.program(self.pool, self.sets)
        return self.pool


# ------------------------------------------------------------------------------------------------------------ rows


def median_interval(values: Sequence[float]) -> Interval:
    """Finds the median, and the closest two of the values that hold it with 95 % (binomial), or the extremes."""
    ordered, count = sorted(values), len(values)
    skip = 0
    while 2 * sum(math.comb(count, index) for index in range(skip + 2)) <= 0.05 * 2**count:
        skip += 1
    return Interval(statistics.median(ordered), ordered[skip], ordered[count - 1 - skip], count)


def measure(benchmark: Benchmark, repeats: int) -> tuple[list[Row], list[str]]:
    """Checks the sides of a benchmark, and times those that are right.

    Returns:
      Its rows: "error" of each side that is checked, over its tolerance; "seconds"; "over first": a side's seconds over
      those of the first side in the same turn, above 1 where ours is faster; "GB/s"; and its figures. Notes: sides that
      were wrong or could not run.
    """
    sides = benchmark.prepare()
    errors = sides.check()
    wrong = [arm for arm, error in errors.items() if not error <= 1]
    notes = [f"{benchmark.key}: {arm}: {reason}" for arm, reason in sides.notes.items()]
    notes += [f"{benchmark.key}: {arm}: WRONG, {errors[arm]:.3g} of its tolerance; it is not timed" for arm in wrong]
    figures: dict[tuple[str, str], Sequence[float]] = {(arm, "error"): [error] for arm, error in errors.items()}

    calls = {arm: call for arm, call in sides.calls.items() if arm not in wrong}
    samples = interleave(calls, repeats, sides.pause)
    ours = next(iter(sides.calls), "")
    for arm, seconds in samples.items():
        figures[arm, "seconds"] = seconds
        if arm != ours and ours in samples:
            figures[arm, "over first"] = [theirs / first for theirs, first in zip(seconds, samples[ours], strict=True)]
        if sides.moved:
            figures[arm, "GB/s"] = [sides.moved / 1e9 / value for value in seconds]
    if not wrong:
        figures |= sides.figures()

    rows = []
    for (arm, metric), values in figures.items():
        rows.append(measured_row(benchmark.name, benchmark.case, arm, metric, median_interval(values)))
    return rows, notes


def wrong_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names the sides that computed something else."""
    wrong = []
    for row in rows:
        # What is not finite is null in files.
        if row["metric"] == "error" and not (row["value"] is not None and row["value"] <= 1):
            wrong.append(f"{row['probe']} {row['model']}: {row['arm']}")
    return wrong


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows: a line for each side of each case, a column for each metric of a suite."""
    cells: dict[tuple[str, str, str], dict[str, str]] = collections.defaultdict(dict)
    for row in rows:
        cells[row["probe"], row["model"], row["arm"]][row["metric"]] = _cell(row)

    head = list(dict.fromkeys(row["metric"] for row in rows))
    lines = []
    for place, columns in cells.items():
        lines.append([*place, *(columns.get(metric, "") for metric in head)])
    return aligned_table(["benchmark", "case", "side", *head], lines) + "\n"


def _cell(row: Mapping[str, Any]) -> str:
    """Formats a value with its interval; seconds in the unit that suits them."""
    numbers = [row[name] if row[name] is not None else math.nan for name in ("value", "low", "high")]
    unit, scale = "", 1.0
    if row["metric"] == "seconds":
        units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
        scale, unit = next(((size, name) for size, name in units if abs(numbers[0]) >= size), units[-1])
    shown = [f"{number / scale:.3g}" for number in numbers]
    interval = f" [{shown[1]}, {shown[2]}]" if row["n"] > 1 and shown[1] != shown[2] else ""
    return f"{shown[0]}{' ' * bool(unit)}{unit}{interval}"
