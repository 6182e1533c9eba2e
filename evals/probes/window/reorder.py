"""Reorder: one orbit patch against the order's own patch and another order's, K = 3, 4 and 6 images in front."""

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.patching import Accumulated, orders_of

from ... import small_task
from ...small_task import LEGENDS
from ..results_table import ResultsTable
from .common import Step, add, patch_of, setting
from .image_sequence import KV, ImageSequence, read
from .probe_images import ProbeImages

ORBIT_RANK = 16
QUESTIONS = {"chain": 4, "aggregate": 3, "override": 4, "page": 1}


def measure_reorder(
    table: ResultsTable, stock: ProbeImages, count: int, most: int, lead: bool, rng: np.random.Generator, step: Step
) -> None:
    """Serves the page behind `count` images in every order, all or `most` of them.

    The images are the three legends and, beyond them, legends that do not matter. Arms: "orbit", the mean over the
    other orders; "transfer", the first order's patch (the second's where the first is tested); "oracle", the order's
    own patch, which was formed of the very prefill it is scored against. Override questions depend on the order.
    Adds items "window.reorder" and a row of the order effect.
    """
    part, front = setting(k=count, lead=lead), stock.front(lead)
    images = [*stock.legends, *stock.distractors][:count]
    orders = orders_of(count, most)
    lines = [ImageSequence(stock.backbone, [*front, *(images[i] for i in order), stock.page]) for order in orders]
    conditioned = [line.prefill() for line in lines]
    members = lines[0].antecedent(len(lines[0]) - 1)

    page = [parts[-1] for parts in conditioned]
    total = None
    for kv in page:
        total = kvp.accumulate(total, kv, stock.page.chunk, members)
    assert total is not None
    table.sample("window.reorder", f"order.{part}", "relative_order_effect", _effect(stock, page), stock.clusters)

    own = [
        patch_of(stock.page, kv, line.antecedent(len(line) - 1), ORBIT_RANK)
        for line, kv in zip(lines, page, strict=True)
    ]

    for number, (order, line, parts) in enumerate(zip(orders, lines, conditioned, strict=True)):
        orbit = kvp.orbit_patch(without(total, page[number]), ORBIT_RANK, method="exact")
        whole, place = line.engine(parts), len(line) - 1

        def serve(patch, line=line, whole=whole, place=place):
            return line.with_served(whole, {place: line.serve(place, patch)})

        caches = {
            "re-prefill": whole,
            "blind": serve(None),
            "transfer": serve(own[1 if number == 0 else 0]),
            "orbit": serve(orbit),
            "oracle": serve(own[number]),
        }
        contexts = stock.contexts.reordered(np.array([image for image in order if image < LEGENDS]))
        questions = small_task.ask(contexts, rng, QUESTIONS)
        said = read(line, caches, questions)
        add(table, "reorder", part, questions, stock.clusters, said)
        step(f"reorder {part}")


def without(total: Accumulated, conditioned: KV) -> Accumulated:
    """Takes one order out of a sum over orders: the mean of what is left never saw it."""
    gone = kvp.accumulate(None, conditioned, total.chunk, total.antecedent)
    left = {name: value - gone.total[name] for name, value in total.total.items()}
    return Accumulated(left, total.count - 1, total.chunk, total.antecedent)


def _effect(stock: ProbeImages, page: list[KV]) -> np.ndarray:
    """Returns how far an order moves the deficit, [B]: root mean of ‖Δπ − Δid‖² / ‖Δid‖² over the other orders π."""
    first = _apart(page[0], stock.page.canonical)
    apart = [_apart(kv, page[0]) / first for kv in page[1:]]
    return np.sqrt(np.stack(apart, axis=1)).mean(axis=1)


def _apart(a: KV, b: KV) -> np.ndarray:
    """Squared distance per context, [B]."""
    change = [np.asarray(a[name], np.float64) - np.asarray(b[name], np.float64) for name in a]
    return np.sum([(each**2).sum(axis=(0, 2, 3, 4)) for each in change], axis=0)
