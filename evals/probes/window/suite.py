"""`python -m evals.run --suite=window`: every operation of the window, with a pinned lead and without."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from models import ModelBackbone

from ... import small_task
from ...results import intervals
from ..results_table import ProbeItems, ResultsTable
from .common import Step
from .drift import Safety, measure_drift
from .gate import gate_rows
from .many import measure_many
from .recall import measure_recall
from .reorder import measure_reorder
from .slide import measure_slide
from .stock import load_stock

Probe = Callable[..., None]
"""Measures one batch: (table, stock, rng=…, step=…)."""
PAIRS = {
    "window.reorder": ("orbit", "oracle"),
    "window.slide": ("keep", "blind"),
    "window.recall": ("fixed_earlier", "fresh"),
    "window.drift": ("rebuilt", "stored"),
    "window.many": ("kept", "transfer"),
}
"""Arms whose difference, question by question, is a row of its own."""


@dataclasses.dataclass(frozen=True)
class WindowSizes:
    """How much the suite measures.

    contexts: in all; those of the first batch alone go into reorder beyond K = 3 and into many chunks.
    batch: contexts in one forward. orders: at most, per K. counts: K, images in front of the page that are reordered.
    chunks: images in the window.
    """

    contexts: int = 32
    batch: int = 16
    orders: int = 24
    counts: tuple[int, ...] = (3, 4, 6)
    chunks: tuple[int, ...] = (8, 16, 32)


FULL = WindowSizes()
QUICK = WindowSizes(contexts=8, batch=8, orders=6, counts=(3, 4), chunks=(8,))


def probes_of(sizes: WindowSizes, first: bool, safety: Safety) -> Iterator[Probe]:
    """Yields what is run on a batch. `first`: whether it is the first one."""
    for lead in (False, True):
        for count in sizes.counts if first else sizes.counts[:1]:
            yield partial(measure_reorder, count=count, most=sizes.orders, lead=lead)
        yield partial(measure_slide, lead=lead)
        yield partial(measure_recall, lead=lead)
        yield partial(measure_drift, lead=lead, safety=None if lead else safety)
        for count in sizes.chunks if first else ():
            yield partial(measure_many, count=count, lead=lead)


def measure_window(
    table: ResultsTable, backbone: ModelBackbone, sizes: WindowSizes, seed: int, folder: Path, step: Step
) -> None:
    """Runs every window probe on a backbone and adds its items and rows, all named "window.…".

    Args:
      seed: of the contexts and questions. folder: where images are written. step: is told what was done.
    """
    safety = Safety()
    for number in range(-(-sizes.contexts // sizes.batch)):
        contexts = small_task.sample_contexts(np.random.default_rng([seed, number]), sizes.batch)
        clusters = number * sizes.batch + np.arange(sizes.batch)
        stock = load_stock(backbone, contexts, clusters, seed, folder)
        for place, probe in enumerate(probes_of(sizes, number == 0, safety)):
            probe(table, stock, rng=np.random.default_rng([seed, int(clusters[0]), 100 + place]), step=step)
    for (probe, part), items in list(table.probes.items()):
        if probe.startswith("window."):
            _flips(table, items)
            _paired(table, items, part)
    gate_rows(table, safety)


def steps_of(sizes: WindowSizes) -> int:
    """Counts how often a run of the suite calls `step`."""
    orders = [min(sizes.orders, math.factorial(count)) for count in sizes.counts]
    each = orders[0] + small_task.LEGENDS + (small_task.LEGENDS + 1) + 2 * (small_task.LEGENDS + 1)
    batches = -(-sizes.contexts // sizes.batch)
    return 2 * (batches * each + sum(orders[1:]) + len(sizes.chunks))


def _flips(table: ResultsTable, items: ProbeItems) -> None:
    """Adds rows flips.<kind>: the share of decisions that differ from the reference's."""
    kind, cluster = items.column("kind"), items.column("cluster")
    reference = items.arm(items.reference)[0]
    for number, name in enumerate(items.kinds):
        here = kind == number
        for arm in items.predicted if here.any() else ():
            flipped = (items.arm(arm)[0] != reference)[here]
            table.row(items.label, arm, f"flips.{name}", intervals.mean(flipped.astype(float), cluster[here]))


def _paired(table: ResultsTable, items: ProbeItems, part: str) -> None:
    """Adds rows kl_minus_<other>.<kind> and accuracy_minus_<other>.<kind> of the pair that the probe is about."""
    first, second = PAIRS.get(items.label, (None, None))
    if f"{first}.{part}" not in items.predicted:
        return
    kind, cluster, answer = (items.column(name) for name in ("kind", "cluster", "answer"))
    (said, kl), (other_said, other_kl) = items.arm(f"{first}.{part}"), items.arm(f"{second}.{part}")
    right, other_right = (said == answer).astype(float), (other_said == answer).astype(float)
    for number, name in enumerate(items.kinds):
        here = kind == number
        if here.any():
            for metric, a, b in (("kl", kl, other_kl), ("accuracy", right, other_right)):
                interval = intervals.paired_difference(a[here], b[here], cluster[here])
                table.row(items.label, f"{first}.{part}", f"{metric}_minus_{second}.{name}", interval)
