"""`python -m evals.run --suite=window`: every operation of the window, with a pinned lead and without."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from models import ModelBackbone

from ... import small_task
from ...harness import intervals
from ..results_table import ProbeItems, ResultsTable
from .common import setting
from .drift import measure_drift
from .operations import measure_many, measure_recall, measure_reorder, measure_slide
from .parts import ProbeParts
from .probe_images import load_probe_images

Probe = Callable[..., None]
"""Measures one batch: (table, stock, rng=…, step=…)."""
PAIRS = {
    "window.reorder": ("orbit", "oracle"),
    "window.slide": ("keep", "blind"),
    "window.recall": ("fixed_earlier", "fresh"),
    "window.drift": ("rebuilt", "stored"),
    "window.many": ("kept", "transfer"),
}
"""Arms whose difference, question by question, is rows of its own: kl_minus_<other> and accuracy_minus_<other>."""


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


class PlannedProbe(NamedTuple):
    """One probe on one batch of contexts.

    name: of its part on disk. run: measures it. steps: how often it tells what was done. work: of each step, in about
    equal amounts of time.
    """

    name: str
    run: Probe
    steps: int
    work: int


@runtime_checkable
class Watch(Protocol):
    """Is told what was done, and what need not be done."""

    def __call__(self, name: str, work: int = 1) -> None:
        """Takes note of a step."""
        ...

    def skip(self, work: int) -> None:
        """Takes note of steps that an earlier run has done."""
        ...


def planned(sizes: WindowSizes, batch: int) -> list[PlannedProbe]:
    """Lists what is run on a batch of contexts, by its number."""
    listed = []

    def plan(name: str, run: Probe, steps: int, work: int) -> None:
        listed.append(PlannedProbe(f"batch={batch}.{name}", run, steps, work))

    first = batch == 0

    for lead in (False, True):
        last = setting(lead=lead)
        for count in sizes.counts if first else sizes.counts[:1]:
            run = partial(measure_reorder, count=count, most=sizes.orders, lead=lead)
            plan(f"reorder.k={count}.{last}", run, min(sizes.orders, math.factorial(count)), 2)

        plan(f"slide.{last}", partial(measure_slide, lead=lead), small_task.LEGENDS, 4)
        plan(f"recall.{last}", partial(measure_recall, lead=lead), small_task.LEGENDS + 1, 4)
        plan(f"drift.{last}", partial(measure_drift, lead=lead), 2 * (small_task.LEGENDS + 1), 4)
        for count in sizes.chunks if first else ():
            plan(f"many.chunks={count}.{last}", partial(measure_many, count=count, lead=lead), 1, 2 * count)

    return listed


def measure_window(
    table: ResultsTable,
    backbone: ModelBackbone,
    sizes: WindowSizes,
    seed: int,
    folder: Path,
    watch: Watch,
    parts: ProbeParts | None = None,
) -> None:
    """Runs every window probe on a backbone and adds its items and rows, all named "window.…".

    Args:
      seed: of the contexts and questions. folder: where images are written. watch: is told what was done.
      parts: what an earlier run has finished is taken from there, the rest is kept there.
    """
    parts = ProbeParts(None, {}) if parts is None else parts
    for number in range(-(-sizes.contexts // sizes.batch)):
        first = number * sizes.batch
        stock = None
        for place, probe in enumerate(planned(sizes, number)):
            if parts.has(probe.name):
                found = parts.read(probe.name, table.model)
                watch.skip(probe.steps * probe.work)
            else:
                if stock is None:
                    contexts = small_task.sample_contexts(np.random.default_rng([seed, number]), sizes.batch)
                    stock = load_probe_images(backbone, contexts, first + np.arange(sizes.batch), seed, folder)

                found = ResultsTable(table.model)

                def step(name, work=probe.work):
                    return watch(name, work)

                # A generator per probe, so that a probe draws the same questions whichever others are run.
                rng = np.random.default_rng([seed, first, 100 + place])
                probe.run(found, stock, rng=rng, step=step)
                parts.keep(probe.name, found)

            # Parts are merged in the planned order, whether they were just measured or read.
            table.take(found)

    for (probe, part), items in list(table.probes.items()):
        if probe.startswith("window."):
            _flips(table, items)
            # The pair of arms that the probe is about.
            first, second = (f"{arm}.{part}" for arm in PAIRS.get(items.label, ("", "")))
            if first in items.predicted:
                for kind, metric, interval in items.paired(first, second):
                    table.row(items.label, first, f"{metric}_minus_{PAIRS[items.label][1]}.{kind}", interval)


def work_of(sizes: WindowSizes) -> int:
    """Adds up the work that a run of the suite tells of."""
    work = 0
    for number in range(-(-sizes.contexts // sizes.batch)):
        work += sum(probe.steps * probe.work for probe in planned(sizes, number))
    return work


def _flips(table: ResultsTable, items: ProbeItems) -> None:
    """Adds rows flips.<kind>: the share of decisions that differ from the reference's."""
    cluster, reference = items.column("cluster"), items.arm(items.reference)[0]
    for name, here in items.by_kind():
        for arm in items.predicted:
            flipped = (items.arm(arm)[0] != reference)[here]
            table.row(items.label, arm, f"flips.{name}", intervals.mean(flipped.astype(float), cluster[here]))
