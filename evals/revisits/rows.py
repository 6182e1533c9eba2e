"""Rows of revisits: sums over the traces of a model, and means of its answers with intervals over contexts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..harness.intervals import mean
from .served_visit import POINTS
from .visits import OTHER_ORDERS, VISITS
from .ways import COUNTED_WAYS, WAYS

SMALL_LOSS = 0.05
"""Nats of an answer: what a use of stored KV may lose to be called near."""
OTHER = "other orders"
"""The visits `OTHER_ORDERS` together."""
COUNTS = (
    "steps",
    "revisits",
    "hits",
    "forwards",
    "tokens",
    "flops",
    "written",
    "read",
    "canonicals",
    "patches",
    "prefills",
    "formed flops",
    "formed seconds",
)
KEY = ("model", "task", "window", "way", "visit")
Record = Mapping[str, Any]
Row = dict[str, Any]


def rows_of(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes a row for each model, task, window, way and visit, and one of all other orders together."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for part in finished:
        for record in part["records"]:
            for visit in (record["visit"], OTHER) if record["visit"] in OTHER_ORDERS else (record["visit"],):
                key = (*(record[name] for name in KEY[:-1]), visit)
                groups.setdefault(key, []).append(record)

    order = {way: number for number, way in enumerate((*WAYS, *COUNTED_WAYS))}
    shown = [*VISITS, OTHER]
    rows = [_row(dict(zip(KEY, key, strict=True)), found) for key, found in groups.items()]
    # Models and windows in the order in which they were measured.
    groups_seen = list(dict.fromkeys((row["model"], row["task"], row["window"]) for row in rows))
    rank = {group: number for number, group in enumerate(groups_seen)}

    def place(row: Row) -> tuple[int, int, int]:
        return rank[row["model"], row["task"], row["window"]], shown.index(row["visit"]), order[row["way"]]

    return sorted(rows, key=place)


def _row(labels: Row, records: Sequence[Record]) -> Row:
    """Makes one row. Baselines that are counted have no answers."""
    run = [record for record in records if "right" in record]
    row = labels | {"counted": not run, "traces": len({record["trace"] for record in records})}
    for name in COUNTS:
        row[name] = sum(record["counts"].get(name, 0) for record in records)
    for point in POINTS:
        row[point] = sum(record["points"].get(point, 0) for record in run)

    compared = [record for record in run if "kl" in record]
    if compared:
        cluster = _joined(compared, "cluster")
        kl = _joined(compared, "kl")
        for name, values in (("kl", kl), ("within", kl <= SMALL_LOSS), ("flips", _joined(compared, "flips"))):
            row |= _interval(name, values, cluster)
        row["largest kl"] = float(kl.max())
    if run:
        right = [
            (value, where) for record in run for value, where in zip(record["right"], record["cluster"], strict=True)
        ]
        known = [(value, where) for value, where in right if value is not None]
        row["answers"] = len(known)
        if known:
            row |= _interval(
                "accuracy", np.array([value for value, _ in known]), np.array([where for _, where in known])
            )
    return row


def _joined(records: Iterable[Record], name: str) -> np.ndarray:
    return np.concatenate([np.asarray(record[name], float) for record in records])


def _interval(name: str, values: np.ndarray, cluster: np.ndarray) -> Row:
    found = mean(values, cluster)
    return {name: found.value, f"{name} low": found.low, f"{name} high": found.high}


class RevisitRows:
    """The rows of a run by what they are of.

    Attributes:
      windows: in order.
      mains: the first model of each task, by task.
      models: all of them with their task, in order.
    """

    def __init__(self, results: Mapping[str, Any]):
        self._rows: dict[tuple[Any, ...], Row] = {}
        for row in results["rows"]:
            self._rows[tuple(row[name] for name in KEY)] = row
        self.windows = sorted({row["window"] for row in results["rows"]})
        self.models = list(dict.fromkeys((row["model"], row["task"]) for row in results["rows"]))
        self.mains: dict[str, str] = {}
        for model, task in self.models:
            self.mains.setdefault(task, model)

    def get(self, task: str, window: int, way: str, visit: str, model: str = "") -> Row | None:
        """Finds a row; of the task's first model by default."""
        return self._rows.get((model or self.mains[task], task, window, way, visit))
