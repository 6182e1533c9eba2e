"""Rows of tolerance: by task and number of pieces in front, each kind of history and form with clustered intervals."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..harness import intervals
from ..harness.frame import Row, measured_row
from .contexts import TASKS
from .histories import ALONE
from .served import WHOLE

SMALL_LOSS = 0.05
"""Nats of an answer: what a use of stored KV may lose to be called near."""
Record = Mapping[str, Any]


class Items(NamedTuple):
    """Answers behind one kind of history, in one order for all kinds: KL and flips, the context, its half."""

    kl: np.ndarray
    flips: np.ndarray
    cluster: np.ndarray
    held_out: np.ndarray


def probe_of(task: str, front: int) -> str:
    """Names the probe of a task with so many pieces in front."""
    return f"{task}.front={front}"


def arm_of(kind: str, form: str) -> str:
    """Names the arm of a kind of history and a form."""
    return kind if form == WHOLE else f"{kind}; {form}"


def items_of(records: Iterable[Record]) -> Items:
    """Joins the batches of one task, number of pieces, kind and form. Contexts of other numbers are other clusters."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for record in records:
        cluster = np.asarray(record["cluster"], int) + 10_000 * record["front"]
        parts = (record["kl"], record["flips"], cluster, np.full(len(cluster), record["held_out"]))
        for column, part in zip(columns, parts, strict=True):
            column.append(np.asarray(part))
    return Items(*map(np.concatenate, columns))


def grouped(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Groups records by columns, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def mean_rows(records: Sequence[Record]) -> list[Row]:
    """Makes KL, share of answers within `SMALL_LOSS`, flips, and η against the canonical, of every arm."""
    rows = []
    for (task, front), of_probe in grouped(records, "task", "front").items():
        arms = {key: items_of(found) for key, found in grouped(of_probe, "kind", "form").items()}
        blind = arms[ALONE, WHOLE].kl
        for (kind, form), items in arms.items():
            for metric, interval in _statistics(items, blind):
                rows.append(
                    measured_row(probe_of(task, front), TASKS[task].backbone, arm_of(kind, form), metric, interval)
                )
    return rows


def _statistics(items: Items, blind: np.ndarray) -> Iterator[tuple[str, intervals.Interval]]:
    yield "kl", intervals.mean(items.kl, items.cluster)
    yield "within", intervals.mean(items.kl <= SMALL_LOSS, items.cluster)
    yield "flips", intervals.mean(items.flips, items.cluster)
    yield "eta", intervals.eta(items.kl, blind, items.cluster)
