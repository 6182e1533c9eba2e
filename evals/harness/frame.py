"""The rows of every result, long-form: probe, model, arm, metric, value, low, high, n."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .intervals import UNDEFINED, Interval

COLUMNS = ("probe", "model", "arm", "metric", "value", "low", "high", "n")
Row = dict[str, Any]


def measured_row(probe: str, model: str, arm: str, metric: str, interval: Interval) -> Row:
    """Makes one row; what is undefined is NaN (`without_nan` makes null of it)."""
    return {"probe": probe, "model": model, "arm": arm, "metric": metric, **interval._asdict()}


def without_nan(rows: Iterable[Mapping[str, Any]], digits: int = 17) -> list[Row]:
    """Makes rows that strict JSON can hold: None for what is not finite.

    Args:
      digits: of each number; six in files that documents are written from, for more would change with every run.
    """
    cleaned = []
    for row in rows:
        numbers: dict[str, Any] = {name: value for name, value in row.items() if isinstance(value, float)}
        for name, value in numbers.items():
            numbers[name] = float(f"{value:.{digits}g}") if math.isfinite(value) else None
        cleaned.append({**row, **numbers})
    return cleaned


def write_rows(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Writes results.json as strict JSON; returns what it holds, with None for what is not finite in rows."""
    written = {**results, "rows": without_nan(results["rows"])}
    (folder / "results.json").write_text(json.dumps(written, indent=1) + "\n")
    return written


def rounded(value: float) -> float:
    """Rounds to six significant digits."""
    return float(f"{value:.6g}")


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


def aligned_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Makes a table for a terminal: columns padded to their widest cell, two spaces apart."""
    columns = []
    for cells in zip(head, *lines, strict=True):
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return "\n".join("  ".join(row) for row in zip(*columns, strict=True))
