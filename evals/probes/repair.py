"""The main comparison: the page reused behind legends, by every arm, read with and without the legends in view."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax import ops
from kvpatch_jax.layout import KVLayout
from kvpatch_jax.repair import REPAIRS, SplicedCache, count_of_equal_bytes, fraction_to_count

from ..small_task import KINDS, Questions, scenes
from ..small_task.scenes import KV, Scene
from .results_table import ResultsTable

RANKS = (1, 2, 4, 8, 16, 32, 64)
SHOWN_RANK = 16
ROTATED_RANKS = (4, 8, 16, 32)
BUDGETS = (0.10, 0.15, 0.25, 0.50)
BYTE_RANKS = (8, 16)
Thin = dict[str, tuple[Array, Array]]
SETTINGS = {"repair.visible": True, "repair.evicted": False}


@functools.lru_cache
def full_plan(layout: KVLayout, frame: ops.PatchFrame, rank: int = max(RANKS)) -> ops.FormPlan:
    """Exact factors at the largest rank (of narrower channels, their width); smaller ranks are the leading columns."""
    ranks = tuple((channel.name, min(rank, channel.features)) for channel in layout.channels)
    return ops.FormPlan(ranks, method="exact", frame=frame)


def factorise(scene: Scene, delta: KV, frame: ops.PatchFrame = "phase_free", rank: int = max(RANKS)) -> Thin:
    """Exact factors of a deficit {channel: [L,B,T,K,H]} at the largest rank asked for."""
    return ops.jitted_factorise(delta, jax.random.key(0), plan=full_plan(scene.backbone.layout, frame, rank))


def leading(factors: Thin, rank: int, only: str | None = None, first_layer: int = 0) -> Thin:
    """The best `rank` of larger exact factors; other channels, or layers below `first_layer`, zeroed."""
    cut = {}
    for name, (u, v) in factors.items():
        weight = float(only is None or only == name) * (np.arange(u.shape[0]) >= first_layer)
        u = u * jnp.asarray(weight, u.dtype).reshape(-1, *[1] * (u.ndim - 1))
        cut[name] = (u[..., :rank], v[..., :rank, :])
    return cut


class PageReuse:
    """One scene's page behind its legends: what was cached, what re-prefill gives, and caches for every arm."""

    def __init__(self, scene: Scene):
        self.scene = scene
        self.tokens = scene.prefix()
        self.conditioned = scene.backbone.prefill(self.tokens).kv
        self.page = {name: value[:, :, scene.page] for name, value in self.conditioned.items()}
        self.engine = scenes.engine(scene, self.conditioned, self.tokens)
        self.canonical = scene.canonical[-1]
        self.delta = ops.deficit(self.page, self.canonical)

    def cache(self, factors: Thin | None = None, frame: ops.PatchFrame = "phase_free") -> KV:
        """The prefix in the engine frame with the page reused: rotated, patched by `factors`."""
        page = scenes.place_page(self.scene, self.canonical, self.tokens, factors, frame)
        return scenes.with_page(self.scene, self.engine, page)

    def splice(self) -> SplicedCache:
        """What token repairs start from: the blind cache and the page's tokens."""
        first, last = self.scene.page.start, self.scene.page.stop
        slots = np.broadcast_to(np.arange(first, last), (len(self.scene), last - first))
        page = self.tokens.take(first, last)
        return SplicedCache(page, self.cache(), jnp.asarray(slots), conditioned=self.page)

    def rotated_delta(self) -> KV:
        """The deficit in the engine frame, where the paper's listing takes it."""
        placed = scenes.place_page(self.scene, self.canonical, self.tokens)
        return {name: self.engine[name][:, :, self.scene.page] - placed[name] for name in placed}


def patch_bytes_share(scene: Scene, rank: int, only: str | None = None, layers_share: float = 1.0) -> float:
    """Bytes of a rank-`rank` patch over the page's KV bytes, by the paper's count; `only`: of this channel alone."""
    tokens = scene.page.stop - scene.page.start
    features = {channel.name: channel.features for channel in scene.backbone.layout.channels}
    kept = features if only is None else {only: features[only]}
    whole = sum(tokens * F for F in features.values())
    return layers_share * sum(min(rank, F) * (tokens + F) for F in kept.values()) / whole


def arm_caches(reuse: PageReuse) -> Iterator[tuple[str, float, Callable[[], KV]]]:
    """Every arm: its name, its extra bytes as a share of the page's KV, and how its cache is made."""
    scene, layout = reuse.scene, reuse.scene.backbone.layout
    factors = factorise(scene, reuse.delta)
    rotated = factorise(scene, reuse.rotated_delta(), rank=max(ROTATED_RANKS))
    half = layout.layers // 2
    yield "re-prefill", 1.0, lambda: reuse.engine
    yield "blind", 0.0, reuse.cache
    for rank in RANKS:
        make = lambda rank=rank: reuse.cache(leading(factors, rank))
        yield f"patch.rank={rank}", patch_bytes_share(scene, rank), make
    deep = lambda: reuse.cache(leading(factors, SHOWN_RANK, first_layer=half))
    yield f"patch.deepest_half.rank={SHOWN_RANK}", patch_bytes_share(scene, SHOWN_RANK, None, 0.5), deep
    for name in (channel.name for channel in layout.channels):
        only = lambda name=name: reuse.cache(leading(factors, SHOWN_RANK, only=name))
        yield f"patch.{name}_only.rank={SHOWN_RANK}", patch_bytes_share(scene, SHOWN_RANK, name), only
    for rank in ROTATED_RANKS:
        turned = lambda rank=rank: reuse.cache(leading(rotated, rank), "engine")
        yield f"patch.rotated_frame.rank={rank}", patch_bytes_share(scene, rank), turned
    yield from _token_arms(reuse)


def _token_arms(reuse: PageReuse) -> Iterator[tuple[str, float, Callable[[], KV]]]:
    scene, splice = reuse.scene, reuse.splice()
    tokens = splice.slots.shape[1]
    for method, repair in REPAIRS.items():
        budgets = [(f"budget={share:g}", fraction_to_count(share, tokens)) for share in BUDGETS]
        budgets += [
            (f"bytes_of_rank={rank}", min(tokens, count_of_equal_bytes(scene.backbone.layout, rank, tokens)))
            for rank in BYTE_RANKS
        ]
        for mark, count in budgets:
            make = lambda repair=repair, count=count: dict(repair(scene.backbone, splice, count).cache)
            yield f"{method}.{mark}", count / tokens, make


def arm_count(layout: KVLayout) -> int:
    """How many arms `arm_caches` yields."""
    patches = len(RANKS) + 1 + len(layout.channels) + len(ROTATED_RANKS)
    return 2 + patches + len(REPAIRS) * (len(BUDGETS) + len(BYTE_RANKS))


def compare_repairs(
    ledger: ResultsTable,
    scene: Scene,
    questions: Questions,
    clusters: np.ndarray,
    tick: Callable[[str], None] = lambda _: None,
    arms: Iterable[str] | None = None,
) -> PageReuse:
    """Ask every question over every arm's cache, with the legends in view and with the page alone in the window."""
    reuse = PageReuse(scene)
    answers: dict[str, dict[str, scenes.Answers]] = {probe: {} for probe in SETTINGS}
    for name, share, make in arm_caches(reuse):
        if arms is not None and name not in arms:
            continue
        cache = make()
        for probe, sees in SETTINGS.items():
            answers[probe][name] = scenes.read(scene, cache, questions, sees_legends=sees)
        if not any(row["arm"] == name and row["metric"] == "bytes" for row in ledger.plain):
            ledger.value("repair.visible", name, "bytes", share, len(scene))
        tick(name)
    answers["repair.visible"]["mask_4d"] = _mask_control(ledger, reuse, questions, answers["repair.visible"]["blind"])
    for probe in SETTINGS:
        ledger.sheet(probe).add(_askable(questions, probe), clusters, answers[probe])
    return reuse


def _askable(questions: Questions, probe: str) -> Questions:
    """Questions about a legend make no sense once the legends have left the window."""
    if SETTINGS[probe]:
        return questions
    return dataclasses.replace(questions, valid=questions.valid & (questions.kind != KINDS.index("legend")))


def _mask_control(
    ledger: ResultsTable, reuse: PageReuse, questions: Questions, blind: scenes.Answers
) -> scenes.Answers:
    """One forward over everything in which the page may not look at the legends; must equal blind reuse."""
    scene = reuse.scene
    mask = scenes.prefix_mask(scene, page_sees_legends=False)
    masked = scene.backbone.prefill(reuse.tokens, mask=mask).kv
    answers = scenes.read(scene, scenes.engine(scene, masked, reuse.tokens), questions, sees_legends=True)
    apart = np.abs(np.exp(answers.log_probabilities) - np.exp(blind.log_probabilities)).max()
    keys = max(
        float(
            jnp.abs(masked[name][:, :, scene.page] - reuse.canonical[name]).max() / jnp.abs(reuse.canonical[name]).max()
        )
        for name in masked
    )
    ledger.largest("mask", "mask_4d", "probability_difference", float(apart), len(scene))
    ledger.largest("mask", "mask_4d", "kv_difference", keys, len(scene))
    return answers
