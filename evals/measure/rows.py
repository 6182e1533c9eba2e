"""Rows of results.json from the records of finished parts: every interval resamples whole clusters.

Of each kind of item, and of all: score and its difference from re-prefill, KL, answers that differ from re-prefill's,
and two shares of what blind reuse loses that an arm brings back: η of KL, "closed" of the score. Each is given only
where blind reuse loses something that can be told from nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from ..harness import intervals
from ..harness.frame import Row, measured_row
from ..harness.intervals import UNDEFINED, Interval
from ..probes.results_table import DAMAGE
from .arms import BLIND, REFERENCE

PROBE, ALL = "measure", "all"
Records = Sequence[Mapping[str, Any]]
Column = Shaped[np.ndarray, " items"]


def records_in(finished: Records) -> list[dict[str, Any]]:
    """Returns the records of parts, in the order of the plan, whichever shard measured them."""
    ordered = sorted(finished, key=lambda part: int(part["part"].partition(":")[0]))
    return [record for part in ordered for record in part["records"]]


def rows_of(finished: Records, model: str) -> list[Row]:
    """Makes the rows of finished parts."""
    measured = [record for record in records_in(finished) if "refused" not in record]
    rows = []
    for kind, records in by_kind(measured).items():
        for arm in arms_in(measured):
            for metric, interval in _metrics(records, arm):
                rows.append(measured_row(PROBE, model, arm, f"{metric}.{kind}", interval))

    # Costs are of contexts: items of one context have the same ones but for what a question adds.
    for arm in arms_in(measured):
        own = [record for record in measured if arm in record["costs"]]
        cluster = np.array([record["cluster"] for record in own])
        for metric in own[0]["costs"][arm] if own else ():
            values = np.array([record["costs"][arm][metric] for record in own])
            rows.append(measured_row(PROBE, model, arm, metric, intervals.mean(values, cluster)))
    return rows


def by_kind(records: Records) -> dict[str, Records]:
    """Returns records by their kind, all of them first; kinds only where there are several."""
    kinds: dict[str, Any] = {ALL: records}
    names = sorted({record["kind"] for record in records})
    for name in names if len(names) > 1 else ():
        kinds[name or "without a kind"] = [record for record in records if record["kind"] == name]
    return kinds


def arms_in(records: Records) -> list[str]:
    """Lists the arms, in the order in which they were asked."""
    return list(dict.fromkeys(arm for record in records for arm in record["arms"]))


def _metrics(records: Records, arm: str) -> Iterator[tuple[str, Interval]]:
    """Yields an arm's metrics over the items that it, re-prefill and blind reuse answered."""
    answered = [
        record for record in records if all("score" in record["arms"].get(name, {}) for name in (REFERENCE, BLIND, arm))
    ]
    if not answered:
        return
    cluster = np.array([record["cluster"] for record in answered])

    def column(name: str, metric: str) -> Column:
        return np.array([float(record["arms"][name][metric]) for record in answered])

    score, reference, blind = (column(name, "score") for name in (arm, REFERENCE, BLIND))
    yield "accuracy", intervals.mean(score, cluster)
    yield "difference", intervals.paired_difference(score, reference, cluster)
    yield "kl", intervals.mean(column(arm, "kl"), cluster)
    yield "kl_first", intervals.mean(column(arm, "kl_first"), cluster)
    yield "flips", intervals.mean(1 - column(arm, "agrees"), cluster)
    yield "flips_first", intervals.mean(1 - column(arm, "first_agrees"), cluster)

    lost = intervals.mean(column(BLIND, "kl"), cluster)
    harmed = lost.value >= DAMAGE and (math.isnan(lost.low) or lost.low > 0)
    yield "eta", intervals.eta(column(arm, "kl"), column(BLIND, "kl"), cluster) if harmed else UNDEFINED
    gap = intervals.paired_difference(reference, blind, cluster)
    yield "closed", intervals.ratio(score - blind, reference - blind, cluster) if _is_told(gap) else UNDEFINED


def _is_told(difference: Interval) -> bool:
    """Says whether an interval excludes 0."""
    return difference.low > 0 or difference.high < 0
