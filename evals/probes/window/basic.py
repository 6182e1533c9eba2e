"""The window operations: reorder (orbit), slide (survivors), recall (stale against fresh)."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvpatch_jax as kvp

from ... import small_task
from ...arms.reused_page import KV, ReusedPage, cut, difference, joined
from ...results import intervals
from ...small_task import KINDS, LEGENDS, Questions, scenes
from ...small_task.scenes import Scene, reused_page
from ..results_table import ResultsTable

ORBIT_RANK, RECALL_RANK, REMOVAL_RANK = 16, 32, 32
SLIDE_KINDS = ("survivor", "evicted", "aggregate")
Tick = Callable[[str], None]


def probe_reorder(
    table: ResultsTable, scene: Scene, page: ReusedPage, rng: np.random.Generator, clusters: np.ndarray, tick: Tick
) -> None:
    """Compares, in every order of the three legends, the first order's patch, one orbit patch and the order's own.

    The orbit patch is formed of the five orders that are not tested. Adds items "reorder" and row order /
    relative_order_effect.
    """
    pages: list[ReusedPage] = []
    for order in itertools.permutations(range(LEGENDS)):
        reordered = scene.contexts.reordered(np.array(order))
        same = (reordered.order == scene.contexts.order).all()
        pages.append(page if same else reused_page(dataclasses.replace(scene, contexts=reordered)))

    table.sample("reorder", "order", "relative_order_effect", _order_effect(pages), clusters)

    first, before = pages[0].patch(ORBIT_RANK), None

    def add(total, other):
        return kvp.accumulate(total, other.page_conditioned, other.page, other.antecedent)

    for number, page in enumerate(pages):
        # Summed in their order, all but this one: those in front of it are summed already.
        others = functools.reduce(add, pages[number + 1 :], before)
        assert others is not None
        before = add(before, page)
        orbit = kvp.orbit_patch(others, ORBIT_RANK, method="exact")

        caches = {
            "re-prefill": page.reference,
            "blind": page.cache(),
            # Another order is another antecedent: served all the same, to see what that costs.
            "transfer": page.cache(first, allow_stale=True),
            "orbit": page.cache(orbit),
            "exact": page.cache(page.patch(ORBIT_RANK)),
        }
        questions = small_task.ask(page.contexts, rng, {"chain": 4, "aggregate": 3, "override": 4, "page": 1})
        said = {name: scenes.read(scene, cache, questions, sees_legends=True) for name, cache in caches.items()}
        table.items("reorder").add(questions, clusters, said)
        tick("reorder")


def _order_effect(pages: Sequence[ReusedPage]) -> np.ndarray:
    """Returns how far an order moves the deficit, [B]: root mean of ‖Δπ − Δid‖² / ‖Δid‖² over the other orders π."""
    identity = pages[0].delta
    apart = [squared(difference(page.delta, identity)) / squared(identity) for page in pages[1:]]
    return np.sqrt(np.stack(apart, axis=1)).mean(axis=1)


def squared(kv: KV) -> np.ndarray:
    """Sum of squares per context, [B]."""
    total = np.zeros(1)
    for value in kv.values():
        total = total + np.asarray((value * value).sum(axis=(0, 2, 3, 4)), np.float64)
    return total


def probe_slide(
    table: ResultsTable, scene: Scene, page: ReusedPage, rng: np.random.Generator, clusters: np.ndarray, tick: Tick
) -> None:
    """Lets the first legend leave, so that the other chunks move up. The reference is re-prefill without it.

    Arms: the survivors' conditioned KV only rotated (keep), with a removal patch, and all survivors blind. Questions
    through surviving legends ("survivor"), through the one that left ("evicted", whose truth the reference cannot
    know), and rows of the page ("aggregate"). Adds items "slide".
    """
    shown = np.ones((len(scene), LEGENDS), bool)
    shown[:, 0] = False
    tokens = scene.prefix(shown)
    without = dict(scene.backbone.prefill(tokens, mask=scenes.prefix_mask(scene, shown)).kv)

    reference = scenes.engine(scene, without, tokens)
    # No question sees the slots of the legend that left: every arm leaves there what the reference has.
    gone = cut(reference, scene.form.slices[0])
    pieces: dict[str, list[KV]] = {"keep": [gone], "removal": [gone], "blind": [gone]}
    chunks = scene.standing
    names = [chunk.id for chunk in chunks]

    for place in range(1, len(chunks)):
        chunk, where = chunks[place], scene.form.slices[place]
        target, base = cut(without, where), cut(page.conditioned, where)
        before, left, start = names[:place], names[1:place], scene.start_of(tokens, place)
        removal = kvp.removal_patch(chunk, target, base, REMOVAL_RANK, left, before, method="exact")
        kept: dict[str, Any] = {"base": base, "base_antecedent": before}
        pieces["keep"].append(dict(kvp.apply_patch(kvp.Placed(chunk, None, start, left, **kept))))
        pieces["removal"].append(dict(kvp.apply_patch(kvp.Placed(chunk, removal, start, left, **kept))))
        pieces["blind"].append(dict(kvp.apply_patch(kvp.Placed(chunk, None, start, left))))

    caches = {"re-prefill": reference, **{name: joined(parts) for name, parts in pieces.items()}}

    questions, kind = _slide_questions(scene, rng)
    said = {}
    for name, cache in caches.items():
        said[name] = scenes.read(scene, cache, questions, sees_legends=True, shown=shown)
    items = table.items("slide")
    items.kinds = SLIDE_KINDS
    items.add(questions, clusters, said, kind)
    tick("slide")


def _slide_questions(scene: Scene, rng: np.random.Generator) -> tuple[Questions, np.ndarray]:
    """Chain questions sorted by which legend holds the answer, and aggregates over all three legends."""
    contexts = scene.contexts
    questions = small_task.ask(contexts, rng, {"chain": 8, "aggregate": 4})
    # A chain question is about the legend that left where its glyph is defined there (and nowhere else).
    first = np.take_along_axis(contexts.legend_glyph, contexts.order[:, :1, None], axis=1)[:, 0]
    glyph = contexts.page_glyph[np.arange(len(contexts))[:, None], questions.row, questions.cell]
    gone = (glyph[..., None] == first[:, None, :]).any(axis=-1)
    chain = questions.kind == KINDS.index("chain")
    return questions, np.where(chain, np.where(gone, 1, 0), 2)


def probe_recall(
    table: ResultsTable,
    scene: Scene,
    page: ReusedPage,
    rng: np.random.Generator,
    clusters: np.ndarray,
    folder: Path,
    tick: Tick,
) -> None:
    """Puts the evicted page back behind legends of which 0 … 3 have changed their colours.

    Arms: blind, the patch frozen at eviction (stale), a fresh patch on the context as it is now, re-prefill. Adds a
    part of items "recall" per turnover.

    Args:
      folder: where the recoloured legends are written as PNG files.
    """
    frozen = page.patch(RECALL_RANK)
    for turnover in range(LEGENDS + 1):
        contexts = small_task.recolour(scene.contexts, rng, turnover)
        if turnover:
            page = reused_page(scenes.load_scene(scene.backbone, contexts, folder, scene))

        caches = {
            "re-prefill": page.reference,
            "blind": page.cache(),
            # Recoloured legends are other chunks, behind which `frozen` does not belong.
            "stale": page.cache(frozen, allow_stale=True),
            "fresh": page.cache(page.patch(RECALL_RANK)),
        }
        questions = small_task.ask(contexts, rng, {"chain": 8, "aggregate": 4, "page": 1})
        said = {}
        for name, cache in caches.items():
            said[f"{name}.turnover={turnover}"] = scenes.read(scene, cache, questions, sees_legends=True)
        items = table.items("recall", str(turnover), f"re-prefill.turnover={turnover}", f"blind.turnover={turnover}")
        items.add(questions, clusters, said)
        tick("recall")


def orbit_against_exact(table: ResultsTable) -> None:
    """Adds rows orbit / orbit_minus_exact.<kind>: the orbit patch's accuracy minus the order's own patch's, paired."""
    items = table.probes.get(("reorder", ""))
    if items is None:
        return

    kind, cluster, answer = (items.column(name) for name in ("kind", "cluster", "answer"))
    orbit, exact = (items.arm(name)[0] == answer for name in ("orbit", "exact"))
    for number, name in enumerate(items.kinds):
        here = kind == number
        if here.any():
            interval = intervals.paired_difference(orbit[here].astype(float), exact[here].astype(float), cluster[here])
            table.row("reorder", "orbit", f"orbit_minus_exact.{name}", interval)
