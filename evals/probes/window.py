"""The window operations: reorder (orbit), slide (survivors), recall (stale against fresh)."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kvpatch_jax import ops

from .. import small_task
from ..results import intervals
from ..small_task import KINDS, LEGENDS, Questions, scenes
from ..small_task.scenes import KV, Scene
from .repair import PageReuse, factorise
from .results_table import ResultsTable

ORBIT_RANK, RECALL_RANK, REMOVAL_RANK = 16, 32, 32
SLIDE_KINDS = ("survivor", "evicted", "aggregate")
Tick = Callable[[str], None]


def probe_reorder(
    ledger: ResultsTable, scene: Scene, rng: np.random.Generator, clusters: np.ndarray, tick: Tick
) -> None:
    """Every order of the three legends: the identity's patch, one orbit patch (the tested order held out), its own.

    Adds sheet "reorder" and row order / relative_order_effect: ‖Δπ − Δid‖ / ‖Δid‖ over the non-identity orders.
    """
    orders = [np.array(order) for order in itertools.permutations(range(LEGENDS))]
    reuses = [PageReuse(dataclasses.replace(scene, contexts=scene.contexts.reordered(order))) for order in orders]
    deltas = [reuse.delta for reuse in reuses]
    total = {name: sum(delta[name] for delta in deltas) for name in deltas[0]}
    identity = factorise(scene, deltas[0], rank=ORBIT_RANK)
    apart = [_squared(_minus(delta, deltas[0])) / _squared(deltas[0]) for delta in deltas[1:]]
    effect = np.sqrt(np.stack(apart, axis=1)).mean(axis=1)
    ledger.sample("reorder", "order", "relative_order_effect", effect, clusters)
    for reuse, delta in zip(reuses, deltas, strict=True):
        held_out = {name: (total[name] - delta[name]) / (len(orders) - 1) for name in total}
        questions = small_task.ask(reuse.scene.contexts, rng, {"chain": 4, "aggregate": 3, "override": 4, "page": 1})
        arms = {
            "re-prefill": reuse.engine,
            "blind": reuse.cache(),
            "transfer": reuse.cache(identity),
            "orbit": reuse.cache(factorise(scene, held_out, rank=ORBIT_RANK)),
            "exact": reuse.cache(factorise(scene, delta, rank=ORBIT_RANK)),
        }
        said = {name: scenes.read(reuse.scene, cache, questions, sees_legends=True) for name, cache in arms.items()}
        ledger.sheet("reorder").add(questions, clusters, said)
        tick("reorder")


def _minus(first: KV, second: KV) -> KV:
    return {name: first[name] - second[name] for name in first}


def _squared(kv: KV) -> np.ndarray:
    """Sum of squares per context, [B]."""
    return np.asarray(sum(jnp.square(value).sum(axis=(0, 2, 3, 4)) for value in kv.values()), np.float64)


def probe_slide(ledger: ResultsTable, scene: Scene, rng: np.random.Generator, clusters: np.ndarray, tick: Tick) -> None:
    """The first legend leaves; the other chunks move up. The reference is re-prefill without it.

    Arms: the survivors' conditioned KV only rotated (keep), with a removal patch, and all survivors blind. Questions
    through surviving legends ("survivor"), through the one that left ("evicted", whose truth the reference cannot
    know), and rows of the page ("aggregate").
    """
    reuse = PageReuse(scene)
    shown = np.ones((len(scene), LEGENDS), bool)
    shown[:, 0] = False
    tokens = scene.prefix(shown)
    without = scene.backbone.prefill(tokens, mask=scenes.prefix_mask(scene, shown)).kv
    canonical = scene.legends_canonical()
    alone = {name: jnp.concatenate([canonical[name], scene.canonical[-1][name]], axis=2) for name in canonical}
    removal = _minus(without, reuse.conditioned)
    forget = _low_rank(scene, removal, REMOVAL_RANK)
    kept = {name: value + forget[name] for name, value in reuse.conditioned.items()}
    arms = {"re-prefill": without, "keep": reuse.conditioned, "removal": kept, "blind": alone}
    caches = {name: scenes.engine(scene, kv, tokens) for name, kv in arms.items()}
    questions, kind = _slide_questions(scene, rng)
    said = {
        name: scenes.read(scene, cache, questions, sees_legends=True, shown=shown) for name, cache in caches.items()
    }
    sheet = ledger.sheet("slide")
    sheet.kinds = SLIDE_KINDS
    sheet.add(questions, clusters, said, kind)
    tick("slide")


def _low_rank(scene: Scene, delta: KV, rank: int) -> KV:
    """Each chunk's own rank-`rank` approximation of a deficit over the whole prefix."""
    layout = scene.backbone.layout
    own = lambda piece: factorise(scene, _cut(delta, piece), rank=min(rank, piece.stop - piece.start))
    pieces = [ops.correction(layout, {**own(piece)}) for piece in scene.form.slices]
    return {name: jnp.concatenate([piece[name] for piece in pieces], axis=2) for name in delta}


def _cut(kv: KV, piece: slice) -> KV:
    return {name: value[:, :, piece] for name, value in kv.items()}


def _slide_questions(scene: Scene, rng: np.random.Generator) -> tuple[Questions, np.ndarray]:
    """Chain questions sorted by which legend holds the answer, and aggregates over all three legends."""
    contexts = scene.contexts
    questions = small_task.ask(contexts, rng, {"chain": 8, "aggregate": 4})
    first = np.take_along_axis(contexts.legend_glyph, contexts.order[:, :1, None], axis=1)[:, 0]
    glyph = contexts.page_glyph[np.arange(len(contexts))[:, None], questions.row, questions.cell]
    gone = (glyph[..., None] == first[:, None, :]).any(axis=-1)
    chain = questions.kind == KINDS.index("chain")
    return questions, np.where(chain, np.where(gone, 1, 0), 2)


def probe_recall(
    ledger: ResultsTable, scene: Scene, rng: np.random.Generator, clusters: np.ndarray, folder: Path, tick: Tick
) -> None:
    """The page was evicted and comes back behind legends of which 0 … 3 have changed their colours.

    Arms: blind, the patch frozen at eviction (stale), a fresh patch on the context as it is now, re-prefill.
    """
    frozen = factorise(scene, PageReuse(scene).delta, rank=RECALL_RANK)
    for turnover in range(LEGENDS + 1):
        contexts = small_task.recolour(scene.contexts, rng, turnover)
        now = scenes.load_scene(scene.backbone, contexts, folder) if turnover else scene
        reuse = PageReuse(now)
        questions = small_task.ask(contexts, rng, {"chain": 8, "aggregate": 4, "page": 1})
        arms = {
            "re-prefill": reuse.engine,
            "blind": reuse.cache(),
            "stale": reuse.cache(frozen),
            "fresh": reuse.cache(factorise(now, reuse.delta, rank=RECALL_RANK)),
        }
        said = {
            f"{name}.turnover={turnover}": scenes.read(now, cache, questions, sees_legends=True)
            for name, cache in arms.items()
        }
        sheet = ledger.sheet("recall", str(turnover), f"re-prefill.turnover={turnover}", f"blind.turnover={turnover}")
        sheet.add(questions, clusters, said)
        tick("recall")


def orbit_against_exact(ledger: ResultsTable) -> None:
    """Rows orbit / orbit_minus_exact.<kind>: the orbit patch's accuracy minus the ordering's own patch's, paired."""
    sheet = ledger.sheets.get(("reorder", ""))
    if sheet is None:
        return
    kind, cluster, answer = (sheet.column(name) for name in ("kind", "cluster", "answer"))
    orbit, exact = (sheet.arm(name)[0] == answer for name in ("orbit", "exact"))
    for number, name in enumerate(sheet.kinds):
        here = kind == number
        if here.any():
            interval = intervals.paired_difference(orbit[here].astype(float), exact[here].astype(float), cluster[here])
            ledger.row("reorder", "orbit", f"orbit_minus_exact.{name}", interval)
