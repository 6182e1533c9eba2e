"""The rows of every result, long-form: probe, model, arm, metric, value, low, high, n."""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .intervals import UNDEFINED, Interval

VISIBLE = "repair.visible"
"""The main comparison: a page reused, with all in front of it in view."""
COLUMNS = ("probe", "model", "arm", "metric", "value", "low", "high", "n")
Row = dict[str, Any]


def measured_row(probe: str, model: str, arm: str, metric: str, interval: Interval) -> Row:
    """Makes one row; what is undefined is NaN (`without_nan` makes null of it)."""
    return {"probe": probe, "model": model, "arm": arm, "metric": metric, **interval._asdict()}


def measured_rows(found: Iterable[tuple[str, str, str, Interval]], model: str) -> list[Row]:
    """Makes rows of statistics, each with its probe, arm and metric."""
    return [measured_row(probe, model, arm, metric, interval) for probe, arm, metric, interval in found]


def without_nan(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Makes rows that strict JSON can hold: None for what is not finite."""
    cleaned = []
    for row in rows:
        undefined = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        cleaned.append({**row, **dict.fromkeys(undefined)})
    return cleaned


def write_rows(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Writes results.json as strict JSON; returns what it holds, with None for what is not finite in rows."""
    written = {**results, "rows": without_nan(results["rows"])}
    (folder / "results.json").write_text(json.dumps(written, indent=1) + "\n")
    return written


def rounded_row(row: Mapping[str, Any]) -> Row:
    """Makes a row for a file that a document is written from: six digits of each number, None for what is not finite.

    More digits would change with every run, and no document shows them.
    """
    numbers = {name: row[name] for name in ("value", "low", "high")}
    for name, value in numbers.items():
        numbers[name] = None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
    return {**row, **numbers}


def verdict(what: str, value: float, at_most: float) -> dict[str, Any]:
    """Holds a figure against its bar: {"what", "value", "at_most", "within"}."""
    return {"what": what, "value": value, "at_most": at_most, "within": value <= at_most}


class Rows:
    """The rows of a results dictionary by (probe, arm, metric) for one model. What is missing reads as UNDEFINED.

    Args:
      results: {"config", "environment", "rows"}; only "rows" and config["model"] are read.
      model: whose rows; by default config["model"], else the first model that is not a "…_no_window" control.
    """

    def __init__(self, results: Mapping[str, Any], model: str | None = None) -> None:
        self.results = results
        rows: Sequence[Mapping[str, Any]] = results.get("rows", [])
        self.models = list(dict.fromkeys(row["model"] for row in rows))

        chosen = model or results.get("config", {}).get("model")
        if chosen not in self.models:
            main = [name for name in self.models if not name.endswith("_no_window")]
            chosen = model or (main or self.models or [""])[0]

        self.model: str = chosen

        self.table: dict[tuple[str, str, str], Interval] = {}
        for row in rows:
            if row["model"] == self.model:
                # Undefined numbers are null in results.json and NaN in rows that were not written yet.
                ends = [row["value"], row.get("low"), row.get("high")]
                value, low, high = (math.nan if number is None else float(number) for number in ends)
                interval = Interval(value, low, high, int(row.get("n") or 0))
                self.table[row["probe"], row["arm"], row["metric"]] = interval

    def get(self, probe: str, arm: str, metric: str) -> Interval:
        """Reads the statistic, or UNDEFINED."""
        return self.table.get((probe, arm, metric), UNDEFINED)

    def accuracy(self, arm: str, kind: str, probe: str = VISIBLE) -> Interval:
        """Reads the share of questions of a kind that an arm answers right, or UNDEFINED."""
        return self.get(probe, arm, f"accuracy.{kind}")

    def measured(self, probe: str, arms: Iterable[str], *metrics: str) -> bool:
        """Returns whether a statistic of one of the arms is defined."""
        found = itertools.product(arms, metrics)
        return any(math.isfinite(self.get(probe, arm, metric).value) for arm, metric in found)

    def gap(self, probe: str, arm: str, kind: str) -> float:
        """Computes the accuracy of an arm minus re-prefill's (−1…1), NaN where either is missing."""
        return self.accuracy(arm, kind, probe).value - self.accuracy("re-prefill", kind, probe).value

    def arms(self, probe: str, prefix: str = "") -> list[str]:
        """Lists the arms of a probe that begin with `prefix`, in order of appearance."""
        return list(dict.fromkeys(arm for where, arm, _ in self.table if where == probe and arm.startswith(prefix)))

    def kinds(self, probe: str, metric: str = "accuracy") -> list[str]:
        """Lists the question kinds for which the probe reports `metric`, in order of appearance."""
        names = (name for where, _, name in self.table if where == probe and name.startswith(metric + "."))
        return list(dict.fromkeys(name.split(".", 1)[1] for name in names))

    def settings(self, probe: str, prefix: str) -> list[tuple[float, str]]:
        """Lists (setting, arm) of the arms named `prefix`<number>, ascending: ("patch.rank=" gives ranks)."""
        found = [(arm.removeprefix(prefix), arm) for arm in self.arms(probe, prefix)]
        return sorted((float(setting), arm) for setting, arm in found if setting.replace(".", "", 1).isdigit())


class Lookup:
    """Rows by (probe, model, arm, metric); what is missing reads as UNDEFINED."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        self.table: dict[tuple[str, str, str, str], Interval] = {}
        for row in rows:
            ends = [row["value"], row.get("low"), row.get("high")]
            value, low, high = (math.nan if number is None else float(number) for number in ends)
            key = (row["probe"], row["model"], row["arm"], row["metric"])
            self.table[key] = Interval(value, low, high, int(row.get("n") or 0))

    @classmethod
    def read(cls, path: Path) -> "Lookup":
        """Reads a file of results."""
        return cls(json.loads(path.read_text())["rows"])

    def get(self, probe: str, model: str, arm: str, metric: str) -> Interval:
        """Reads a statistic, or UNDEFINED."""
        return self.table.get((probe, model, arm, metric), UNDEFINED)

    def values(self, column: str, where: Mapping[str, str]) -> list[str]:
        """Lists the values of a column in rows that agree with `where`, in order of appearance."""
        names = ("probe", "model", "arm", "metric")
        place = names.index(column)
        fixed = [(names.index(name), value) for name, value in where.items() if name in names and name != column]
        keys = (key for key in self.table if all(key[index] == value for index, value in fixed))
        return list(dict.fromkeys(key[place] for key in keys))


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Makes a pandas frame of rows, the eight columns in their order."""
    import pandas

    return pandas.DataFrame(list(rows), columns=list(COLUMNS))
