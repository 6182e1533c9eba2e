"""Rows of results.json from the records of finished parts: every interval is over documents."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..harness import intervals
from ..harness.frame import Row, measured_rows
from ..harness.intervals import Interval
from .arms import COSTS
from .plan import TASKS

Record = Mapping[str, Any]
Found = Iterator[tuple[str, str, str, Interval]]
"""Probe, arm, metric and statistic."""
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
    return measured_rows(_statistics(by_kind), model)


def _statistics(by_kind: Mapping[str, Sequence[Record]]) -> Found:
    """Yields every statistic of the records, which come by the kind of their parts."""
    everything = [*by_kind["text"], *by_kind["long"]]
    scored = [record for record in everything if "kl" in record]
    yield from _compared("text", scored)
    wide = _with_every_arm(scored)
    yield from _compared(EVERY_ARM, wide)
    # What the intervals of these rows resample.
    documents = float(len({record["document"] for record in wide}))
    yield EVERY_ARM, "blind", "documents", Interval(documents, documents, documents, int(documents))

    for group in GROUPS:
        for value, chosen in _by(group, scored).items():
            yield from _compared(f"text.{group}={value}", chosen, ("eta", "kl", "flips", "loss_difference"))

    yield from _costs(scored)
    yield from means("greedy", everything, ("greedy_tokens", "greedy_all"))
    profiled = [record for record in everything if "profile" in record]
    # Wide documents have more metrics of it than others.
    for metric in dict.fromkeys(itertools.chain.from_iterable(record["profile"] for record in profiled)):
        yield from _by_layer(metric, [record for record in profiled if metric in record["profile"]])

    windows = by_kind["window"]
    yield from means("reorder", windows, ("relative_order_effect",))
    compared = [record for record in windows if "kl" in record]
    yield from _compared("reorder", [record for record in compared if record["probe"] == "reorder"])
    drift = [record for record in compared if record["probe"] == "drift"]
    for case, chosen in _by("case", drift).items():
        yield from _compared(f"drift.{case}", chosen)
    yield from _compared("slide", by_kind["slide"])

    by_task = _by("group", by_kind["behaviour"])
    for task in TASKS:
        answers = by_task.get(task, [])
        yield from means(f"behaviour.{task}", answers, ("right", "tokens", "agrees", "kl", "chosen"), "row")
        yield from _against_reference(f"behaviour.{task}", answers, ("right", "chosen"))


def means(
    probe: str, records: Sequence[Record], metrics: Iterable[str], cluster: str = "document", arm: str = "arm"
) -> Found:
    """Yields the mean of every metric over each arm's records that have it.

    Args:
      cluster, arm: names of the columns that intervals resample, and that name the arm.
    """
    for metric in metrics:
        having = [record for record in records if metric in record]
        for name, of_arm in _by(arm, having).items():
            yield probe, name, metric, intervals.mean(_column(of_arm, metric), _column(of_arm, cluster))


def _by(column: str, records: Iterable[Record]) -> dict[Any, list[Record]]:
    """Groups records by what a column of theirs says, in order of appearance."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        groups[record[column]].append(record)
    return groups


def _column(records: Sequence[Record], name: str) -> np.ndarray:
    return np.array([record[name] for record in records])


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
            f"{probe}: got an item and arm measured twice; expected items that differ in domain, document or passage"
        )

    reference = {_key(record): record for record in scored if record["arm"] == "re-prefill"}
    blind = {_key(record): record for record in scored if record["arm"] == "blind"}
    for arm, of_arm in _by("arm", scored).items():
        cluster = _column(of_arm, "document")

        for metric in metrics:
            if metric == "eta":
                blind_kl = _column([blind[_key(record)] for record in of_arm], "kl")
                interval = intervals.eta(_column(of_arm, "kl"), blind_kl, cluster)
            elif metric == "loss_difference":
                expected = _column([reference[_key(record)] for record in of_arm], "loss")
                interval = intervals.paired_difference(_column(of_arm, "loss"), expected, cluster)
            else:
                interval = intervals.mean(_column(of_arm, metric), cluster)
            yield probe, arm, metric, interval


def _with_every_arm(scored: Sequence[Record]) -> list[Record]:
    """Picks the records of the items that most arms were measured on."""
    arms: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for record in scored:
        arms[_key(record)].add(record["arm"])
    most = max(map(len, arms.values()), default=0)
    return [record for record in scored if len(arms[_key(record)]) == most]


def _costs(scored: Sequence[Record]) -> Found:
    """Yields what every arm stores and computes, as shares, of the passages of the most frequent length."""
    lengths = [record["length"] for record in scored]
    common = max(set(lengths), key=lengths.count) if lengths else None
    # All passages of one length cost the same, so the first one's numbers are every one's.
    first: dict[str, Record] = {}
    for record in scored:
        if record["length"] == common and "stored" in record:
            first.setdefault(record["arm"], record)
    for arm, record in first.items():
        for name in COSTS:
            yield "text", arm, name, Interval(record[name], float("nan"), float("nan"), 1)


def _by_layer(metric: str, profiled: Sequence[Record]) -> Found:
    """Yields a metric of the deficit by layer and channel: means over passages."""
    cluster = _column(profiled, "document")
    for channel in profiled[0]["profile"][metric]:
        values = np.array([record["profile"][metric][channel] for record in profiled])
        for layer in range(values.shape[1]):
            yield "deficit", f"layer={layer}.{channel}", metric, intervals.mean(values[:, layer], cluster)


def _against_reference(probe: str, records: Sequence[Record], metrics: Iterable[str]) -> Found:
    """Yields each arm's difference from re-prefill, question by question."""
    reference = {record["row"]: record for record in records if record["arm"] == "re-prefill"}
    for arm, of_arm in _by("arm", records).items():
        paired, cluster = [reference[record["row"]] for record in of_arm], _column(of_arm, "row")
        for metric in metrics:
            if metric in of_arm[0]:
                values, expected = _column(of_arm, metric), _column(paired, metric)
                yield probe, arm, f"{metric}_difference", intervals.paired_difference(values, expected, cluster)
