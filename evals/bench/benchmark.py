"""Declaration of a benchmark, the rows that benchmarks make, and the files that are written from them."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.tables import markdown_table
from .timing import Samples, ratios

Row = dict[str, Any]
"""One figure: "metric" and further labels; "value", "low", "high", "n"; with a bar "bar", "sense" and "passed"."""
AT_LEAST, AT_MOST = "at least", "at most"


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark of `python -m evals.bench`.

    Attributes:
      name: value of --suite.
      run: measures. Its parameters name the flags that it takes. Returns a dictionary ready for JSON: "config",
        "environment" and "rows", or what `table` reads instead of rows.
      labels: keys of rows that the table shows after the metric.
      table: formats a result as Markdown; None for `rows_table`.
      draw: draws a figure of a result into a file; None where there is none.
    """

    name: str
    run: Callable[..., dict[str, Any]]
    labels: tuple[str, ...] = ()
    table: Callable[[dict[str, Any]], str] | None = None
    draw: Callable[[Mapping[str, Any], Path], object] | None = None

    def format(self, result: dict[str, Any]) -> str:
        """Formats a result of `run` as Markdown."""
        text = rows_table(result["rows"], self.labels) if self.table is None else self.table(result)
        if result.get("config", {}).get("quick"):
            text += "\nTiny sizes: a preview, not a measurement.\n"
        return text

    def write(self, result: dict[str, Any], folder: Path) -> None:
        """Writes bench_<name>.json, bench_<name>.md and, where there is a figure, bench_<name>.png."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"bench_{self.name}.json").write_text(json.dumps(result, indent=2) + "\n")
        (folder / f"bench_{self.name}.md").write_text(self.format(result))
        if self.draw is not None:
            self.draw(result, folder / f"bench_{self.name}.png")


# ------------------------------------------------------------------------------------------------------------- rows


def measured_row(
    metric: str,
    values: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    value: float | None = None,
    valid: bool = True,
    **labels: Any,
) -> Row:
    """Makes the row of a figure from its repeats.

    Args:
      metric: what was measured.
      values: one number per repeat.
      at_least, at_most: the bar that the statistic of the values is held to; at most one of them.
      statistic: of the values. "low" and "high" are the interval of the median, the extremes for another statistic.
      value: the figure, where it is no statistic of the values.
      valid: whether what was timed computed the right thing; a row that did not never passes.
      labels: further keys of the row.
    """
    is_median = value is None and statistic is statistics.median
    low, high = median_interval(values) if is_median else (min(values), max(values))
    value = float(statistic(values)) if value is None else value
    row: Row = {"metric": metric} | labels | {"value": value, "low": low, "high": high, "n": len(values)}

    if at_least is not None:
        row |= {"bar": at_least, "sense": AT_LEAST, "passed": bool(valid and value >= at_least)}
    elif at_most is not None:
        row |= {"bar": at_most, "sense": AT_MOST, "passed": bool(valid and value <= at_most)}

    return row


def comparison_row(
    metric: str,
    samples: Samples,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    sense: str = AT_LEAST,
    items: int | None = None,
    **options: Any,
) -> Row:
    """Makes the row of ours beside theirs, from seconds of interleaved repeats.

    The value is a ratio of neighbouring repeats, so that a busy spell of the machine cancels: theirs / ours, which is
    above 1 where ours is faster; ours / theirs with the sense "at most", which the bar `at_most` implies.

    Args:
      samples: of "ours" and "theirs"; of "ours" alone, the row has no value and is not judged.
      items: what a repeat works through: "ours" and "theirs" are then items per second, otherwise median seconds.
      options: of `measured_row`.
    """
    sides = {side: statistics.median(seconds) for side, seconds in samples.items()}
    if items is not None:
        sides = {side: items / seconds for side, seconds in sides.items()}
    labels = sides | {"seconds": samples}
    if "theirs" not in samples:
        return {"metric": metric} | {name: value for name, value in options.items() if name != "valid"} | labels

    costs = at_most is not None or sense == AT_MOST
    above, below = ("ours", "theirs") if costs else ("theirs", "ours")
    values = ratios(samples[above], samples[below])
    return measured_row(metric, values, at_least=at_least, at_most=at_most, unit="×", **labels, **options)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Finds the closest two of the values that hold the median with 95 % (binomial), or the extremes."""
    ordered, count = sorted(values), len(values)
    skip = 0
    while 2 * sum(math.comb(count, index) for index in range(skip + 2)) <= 0.05 * 2**count:
        skip += 1
    return ordered[skip], ordered[count - 1 - skip]


# ------------------------------------------------------------------------------------------------------------ table


def rows_table(rows: Sequence[Row], labels: Sequence[str] = ()) -> str:
    """Formats rows as Markdown, with how many are within their bars.

    A row without a "value" was measured on one side alone: its figures are those of "ours" and "theirs".
    """
    sides = [name for name in ("ours", "theirs") if any(name in row for row in rows)]
    lines = []
    for row in rows:
        unit = row.get("unit", "")
        interval = f"{row['low']:.3g} to {row['high']:.3g}" if row.get("n", 1) > 1 else ""
        bar = f"{row['sense']} {row['bar']:g}{unit}" if "bar" in row else ""
        passed = {None: "", True: "yes", False: "no"}[row.get("passed")]
        value = f"{row['value']:.3g}{unit}" if "value" in row else ""
        cells = [f"{row[side]:.3g}" if side in row else "" for side in sides]
        lines.append(
            [row["metric"], *(str(row.get(label, "")) for label in labels), *cells, value, interval, bar, passed]
        )

    head = ["metric", *labels, *sides, "value", "from … to", "bar", "within"]
    table = markdown_table(head, lines) + "\n"
    judged = [row for row in rows if "passed" in row]
    if judged:
        table += f"\n{sum(row['passed'] for row in judged)} of {len(judged)} rows within their bars\n"
    return table
