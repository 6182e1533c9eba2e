"""Conformal bounds of each kind of difference: from half of the contexts, tried on the other half and on another task.

Bounds and coverage are those of certificates (`evals.certify.scores`): contexts count alike, whatever they are asked.
"""

import math
from collections.abc import Sequence

from ..certify.scores import conformal_bound, covered, least_windows
from ..harness.frame import Row, measured_row
from ..harness.intervals import Interval
from .contexts import TASKS
from .rows import Items, Record, arm_of, grouped, items_of

LEVEL = 0.9


def bound_of(items: Items) -> float | None:
    """Computes the bound of the contexts that are not held out; None where they are too few for the level."""
    calibration = ~items.held_out
    if len(set(items.cluster[calibration].tolist())) < least_windows(LEVEL):
        return None
    return conformal_bound(items.kl[calibration], items.cluster[calibration], LEVEL)


def coverage_of(bound: float, items: Items) -> Interval:
    """Computes the share of answers within a bound, with its interval and the number of contexts."""
    share = covered(items.kl <= bound, items.cluster)
    return Interval(share.value, share.low, share.high, len(set(items.cluster.tolist())))


def bound_rows(records: Sequence[Record]) -> list[Row]:
    """Makes the bound of every arm of a task, its coverage on held-out contexts, and on all of another task's.

    A bound is one for all numbers of pieces in front.
    """
    by_task = {}
    for (task,), of_task in grouped(records, "task").items():
        by_task[task] = {key: items_of(found) for key, found in grouped(of_task, "kind", "form").items()}

    rows = []
    for task, arms in by_task.items():
        model, other = TASKS[task].backbone, by_task.get(TASKS[task].other, {})
        for (kind, form), items in arms.items():
            bound, arm = bound_of(items), arm_of(kind, form)
            if bound is None:
                continue

            held_out = Items(*(column[items.held_out] for column in items))
            count = len(set(items.cluster[~items.held_out].tolist()))
            rows.append(measured_row(task, model, arm, "bound", Interval(bound, math.nan, math.nan, count)))
            rows.append(measured_row(task, model, arm, "coverage", coverage_of(bound, held_out)))
            if (kind, form) in other:
                elsewhere = coverage_of(bound, other[kind, form])
                rows.append(measured_row(task, model, arm, "coverage elsewhere", elsewhere))
    return rows
