"""Rows of results.json from the records of finished parts: every interval is over documents."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..results import intervals
from ..results.intervals import Interval
from ..results.rows import Row, measured_row
from .arms import COSTS
from .plan import TASKS

Record = Mapping[str, Any]
GROUPS = ("domain", "antecedent", "length")
EVERY_ARM = "text.every_arm"
"""The probe of the passages that all arms were measured on: there arms can be compared with one another."""
METRICS = ("kl", "eta", "flips", "loss", "loss_difference")


def rows_of(parts: Sequence[Record], model: str) -> list[Row]:
    """Makes all rows of all parts."""
    by_kind: dict[str, list[Record]] = defaultdict(list)
    for part in parts:
        kind, group, _ = (*part["part"].split(", "), "", "")[:3]
        for record in part["records"]:
            by_kind[kind].append({**record, "group": group})

    found: list[tuple[str, str, str, Interval]] = []
    everything = [*by_kind["text"], *by_kind["long"]]
    scored = [record for record in everything if "kl" in record]
    found += _compared("text", scored)
    wide = _with_every_arm(scored)
    found += _compared(EVERY_ARM, wide)
    # What the intervals of these rows resample.
    documents = float(len({record["document"] for record in wide}))
    found.append((EVERY_ARM, "blind", "documents", Interval(documents, documents, documents, int(documents))))

    for group in GROUPS:
        for value in dict.fromkeys(record[group] for record in scored):
            chosen = [record for record in scored if record[group] == value]
            found += _compared(f"text.{group}={value}", chosen, ("eta", "kl", "flips", "loss_difference"))

    found += _costs(scored)
    found += _greedy([record for record in everything if "greedy_all" in record])
    found += _profiles([record for record in everything if "profile" in record])
    found += _windows(by_kind["window"])
    found += _compared("slide", by_kind["slide"])
    for task in TASKS:
        found += _behaviour(task, [record for record in by_kind["behaviour"] if record["group"] == task])
    return [measured_row(probe, model, arm, metric, interval) for probe, arm, metric, interval in found]


Found = Iterator[tuple[str, str, str, Interval]]


def _key(record: Record) -> tuple[Any, ...]:
    # A module can give code to one domain and its doctests to another.
    return tuple(record.get(name) for name in ("domain", "document", "length", "passage", "case"))


def _compared(probe: str, scored: Sequence[Record], metrics: Sequence[str] = METRICS) -> Found:
    """Yields KL, η, flips and loss of every arm, over the items that it has.

    Raises:
      ValueError: an item was measured twice.
    """
    if len({(_key(record), record["arm"]) for record in scored}) != len(scored):
        raise ValueError(
            f"{probe}: an item and arm were measured twice; expected items that differ in domain, document or passage"
        )

    reference = {_key(record): record for record in scored if record["arm"] == "re-prefill"}
    blind = {_key(record): record for record in scored if record["arm"] == "blind"}
    for arm in dict.fromkeys(record["arm"] for record in scored):
        of_arm = [record for record in scored if record["arm"] == arm]
        items = {name: _column(of_arm, name) for name in ("kl", "flips", "loss")}
        blind_kl = np.array([blind[_key(record)]["kl"] for record in of_arm])
        reference_loss = np.array([reference[_key(record)]["loss"] for record in of_arm])
        cluster = _column(of_arm, "document")

        for metric in metrics:
            if metric == "eta":
                interval = intervals.eta(items["kl"], blind_kl, cluster)
            elif metric == "loss_difference":
                interval = intervals.paired_difference(items["loss"], reference_loss, cluster)
            else:
                interval = intervals.mean(items[metric], cluster)
            yield probe, arm, metric, interval


def _column(records: Sequence[Record], name: str) -> np.ndarray:
    return np.array([record[name] for record in records])


def _with_every_arm(scored: Sequence[Record]) -> list[Record]:
    arms: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for record in scored:
        arms[_key(record)].add(record["arm"])
    most = max(map(len, arms.values()), default=0)
    return [record for record in scored if len(arms[_key(record)]) == most]


def _costs(scored: Sequence[Record]) -> Found:
    """Yields what every arm stores and computes, as shares, of the passages of the most frequent length."""
    lengths = [record["length"] for record in scored]
    common = max(set(lengths), key=lengths.count) if lengths else None
    seen = set()
    for record in scored:
        if record["length"] == common and "stored" in record and record["arm"] not in seen:
            seen.add(record["arm"])
            for name in COSTS:
                yield "text", record["arm"], name, Interval(record[name], float("nan"), float("nan"), 1)


def _greedy(records: Sequence[Record]) -> Found:
    for arm in dict.fromkeys(record["arm"] for record in records):
        of_arm = [record for record in records if record["arm"] == arm]
        for metric in ("greedy_tokens", "greedy_all"):
            yield "greedy", arm, metric, intervals.mean(_column(of_arm, metric), _column(of_arm, "document"))


def _profiles(records: Sequence[Record]) -> Found:
    """Yields the deficit by layer and channel: means over passages."""
    for metric in dict.fromkeys(metric for record in records for metric in record["profile"]):
        profiled = [record for record in records if metric in record["profile"]]
        cluster = _column(profiled, "document")
        for channel in profiled[0]["profile"][metric]:
            values = np.array([record["profile"][metric][channel] for record in profiled])
            for layer in range(values.shape[1]):
                interval = intervals.mean(values[:, layer], cluster)
                yield "deficit", f"layer={layer}.{channel}", metric, interval


def _windows(records: Sequence[Record]) -> Found:
    """Yields reorder over its orders; drift by what was changed."""
    effects = [record for record in records if "relative_order_effect" in record]
    if effects:
        interval = intervals.mean(_column(effects, "relative_order_effect"), _column(effects, "document"))
        yield "reorder", "order", "relative_order_effect", interval

    scored = [record for record in records if "kl" in record]
    yield from _compared("reorder", [record for record in scored if record["probe"] == "reorder"])
    drift = [record for record in scored if record["probe"] == "drift"]
    for case in dict.fromkeys(record["case"] for record in drift):
        yield from _compared(f"drift.{case}", [record for record in drift if record["case"] == case])


def _behaviour(task: str, records: Sequence[Record]) -> Found:
    """Yields shares of right answers, right tokens and answers equal to re-prefill's; differences from it."""
    reference = {record["row"]: record for record in records if record["arm"] == "re-prefill"}
    for arm in dict.fromkeys(record["arm"] for record in records):
        of_arm = [record for record in records if record["arm"] == arm]
        cluster = _column(of_arm, "row")
        for metric in ("right", "tokens", "agrees", "kl", "chosen"):
            if metric not in of_arm[0]:
                continue
            values = _column(of_arm, metric)
            yield f"behaviour.{task}", arm, metric, intervals.mean(values, cluster)
            if metric in ("right", "chosen"):
                expected = np.array([reference[record["row"]][metric] for record in of_arm])
                difference = intervals.paired_difference(values, expected, cluster)
                yield f"behaviour.{task}", arm, f"{metric}_difference", difference
