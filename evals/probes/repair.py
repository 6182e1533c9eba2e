"""The main comparison: the page reused behind legends, by every arm, read with and without the legends in view."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.chunk import AnyArray
from kvpatch_jax.repair import REPAIRS, SplicedCache, count_of_equal_bytes, fraction_to_count

from ..results.costs import ArmCost, ChunkCosts
from ..small_task import KINDS, Questions, scenes
from ..small_task.scenes import KV, Scene
from .results_table import ResultsTable

RANKS = (1, 2, 4, 8, 16, 32, 64)
SHOWN_RANK = 16
ROTATED_RANKS = (4, 8, 16, 32)
BUDGETS = (0.10, 0.15, 0.25, 0.50)
BYTE_RANKS = (8, 16)
SETTINGS = {"repair.visible": True, "repair.evicted": False}


class PageReuse:
    """One scene's page behind its legends: what was cached, what re-prefill gives, and caches for every arm.

    Attributes:
      scene: the contexts.
      page: the page's canonical, a batch of chunks.
      antecedent: ids of the legends in front of it, in order.
      start: where the page starts, int32, a scalar or one per axis.
      tokens: the prefix.
      conditioned: phase-free KV of the prefix, prefilled whole, {channel: [L, B, T, K, H]}.
      page_conditioned: the page's part of it.
      engine: the prefix in the engine frame, as re-prefill leaves it.
    """

    def __init__(self, scene: Scene):
        self.scene = scene
        self.page, self.antecedent = scene.chunks[-1], scene.antecedent
        self.tokens = scene.prefix()
        self.start = scene.start_of(self.tokens, -1)
        self.conditioned = dict(scene.backbone.prefill(self.tokens).kv)
        self.page_conditioned = scenes.cut(self.conditioned, scene.page)
        # The legends in front stand there as re-prefill has them: they did not move, only the page is reused.
        self.engine = scenes.engine(scene, self.conditioned, self.tokens)
        self._largest: dict[bool, kvp.Patch] = {}

    @functools.cached_property
    def costs(self) -> ChunkCosts:
        """What the arms' costs are shares of."""
        deeper = 0 if self.tokens.deepstack is None else self.tokens.deepstack.shape[2]
        width = self.tokens.embeddings.shape[-1] * (1 + deeper)
        backbone, page = self.scene.backbone, self.scene.page
        return ChunkCosts(backbone.forward_costs, backbone.layout, page.stop - page.start, page.start, width)

    @property
    def delta(self) -> KV:
        """The deficit, phase-free."""
        return difference(self.page_conditioned, self.page.kv)

    @property
    def rotated_delta(self) -> KV:
        """The deficit in the engine frame, where the paper's listing takes it."""
        return difference(scenes.cut(self.engine, self.scene.page), self.placed())

    def patch(self, rank: int, *, rotated: bool = False) -> kvp.Patch:
        """Forms the page's patch by a full SVD; `rotated`: in the engine frame, after the rotation, as the paper does.

        Factors are kept where they are no smaller than the deficit, so that every smaller rank is a slice of them: the
        SVD is done once, at the first call.
        """
        if rotated not in self._largest:
            where: dict[str, Any] = {"frame": "engine", "start": self.start} if rotated else {}
            self._largest[rotated] = kvp.form_patch(
                self.page, self.page_conditioned, max(RANKS), self.antecedent, method="exact", dense=False, **where
            )
        return leading(self._largest[rotated], rank)

    def placed(self, patch: kvp.Patch | None = None, *, allow_stale: bool = False) -> KV:
        """Places the reused page in the engine frame, rotated and patched, without a forward pass."""
        return dict(kvp.apply_patch(self.page, patch, self.start, self.antecedent, allow_stale=allow_stale))

    def cache(self, patch: kvp.Patch | None = None, *, allow_stale: bool = False) -> KV:
        """Makes a cache of the prefix in the engine frame with the page reused."""
        return scenes.with_page(self.scene, self.engine, self.placed(patch, allow_stale=allow_stale))

    def splice(self) -> SplicedCache:
        """Makes what token repairs start from: the blind cache and the page's tokens."""
        first, last = self.scene.page.start, self.scene.page.stop
        slots = np.broadcast_to(np.arange(first, last), (len(self.scene), last - first))
        page = self.tokens.take(first, last)
        return SplicedCache(page, self.cache(), jnp.asarray(slots), conditioned=self.page_conditioned)


def difference(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray]) -> KV:
    """Computes first − second in float32, channel by channel."""
    return {name: jnp.asarray(first[name], jnp.float32) - jnp.asarray(second[name], jnp.float32) for name in first}


def leading(patch: kvp.Patch, rank: int) -> kvp.Patch:
    """Keeps the best `rank` of a patch's factors; narrower channels keep all they have."""
    return kvp.truncate(patch, {name: min(rank, have) for name, have in patch.ranks.items() if have})


def patch_arms(reuse: PageReuse, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[tuple[str, kvp.Patch]]:
    """Yields the patches that are wanted: all ranks; at one rank its deeper half and each channel alone; rotated."""
    layout = reuse.page.layout
    for rank in RANKS:
        yield f"patch.rank={rank}", reuse.patch(rank)

    shown = reuse.patch(SHOWN_RANK)
    deepest = range(layout.layers // 2, layout.layers)
    yield f"patch.deepest_half.rank={SHOWN_RANK}", kvp.keep_layers(shown, deepest)
    for name in layout.names:
        yield f"patch.{name}_only.rank={SHOWN_RANK}", kvp.Patch({name: shown.factors[name]}, shown.metadata)

    for rank in ROTATED_RANKS:
        # Asked for first: an SVD of its own is done for it.
        if wanted(name := f"patch.rotated_frame.rank={rank}"):
            yield name, reuse.patch(rank, rotated=True)


def token_arms(reuse: PageReuse) -> Iterator[tuple[str, str, int]]:
    """Yields every token repair at every budget: the arm, the repair's name, how many tokens it recomputes."""
    tokens = reuse.page.tokens
    for method in REPAIRS:
        for share in BUDGETS:
            yield f"{method}.budget={share:g}", method, fraction_to_count(share, tokens)
        for rank in BYTE_RANKS:
            count = min(tokens, count_of_equal_bytes(reuse.page.layout, rank, tokens))
            yield f"{method}.bytes_of_rank={rank}", method, count


class Arm(NamedTuple):
    """One way of reuse, made: its name, what it costs, its bytes as a share of the page's KV, the prefix's cache."""

    name: str
    cost: ArmCost
    share: float
    cache: KV


def made_arms(reuse: PageReuse, arms: Iterable[str] | None = None) -> Iterator[Arm]:
    """Makes the arms asked for (all for None)."""
    wanted, costs = lambda name: arms is None or name in arms, reuse.costs
    if wanted("re-prefill"):
        yield Arm("re-prefill", costs.of_reprefill(), 1.0, reuse.engine)
    if wanted("blind"):
        yield Arm("blind", costs.of_blind(), 0.0, reuse.cache())
    for name, patch in patch_arms(reuse, wanted):
        if wanted(name):
            yield Arm(name, costs.of_patch(patch), patch.nbytes / reuse.page.nbytes, reuse.cache(patch))

    splice = reuse.splice()
    for name, method, count in token_arms(reuse):
        if wanted(name):
            repaired = REPAIRS[method](reuse.scene.backbone, splice, count)
            cost = costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots))
            yield Arm(name, cost, count / reuse.page.tokens, dict(repaired.cache))


def arm_count(layout: kvp.KVLayout) -> int:
    """Counts the arms that `made_arms` yields."""
    patches = len(RANKS) + 1 + len(layout.channels) + len(ROTATED_RANKS)
    return 2 + patches + len(REPAIRS) * (len(BUDGETS) + len(BYTE_RANKS))


def compare_repairs(
    table: ResultsTable,
    scene: Scene,
    questions: Questions,
    clusters: np.ndarray,
    tick: Callable[[str], None] = lambda _: None,
    arms: Iterable[str] | None = None,
) -> PageReuse:
    """Asks every question over every arm's cache, with the legends in view and with the page alone in the window.

    Adds items "repair.visible" and "repair.evicted", each arm's bytes, and the control of `_mask_control`. `tick` is
    called with an arm's name when it is done. Returns the scene's page, for the probes that follow.
    """
    reuse = PageReuse(scene)
    answers: dict[str, dict[str, scenes.Answers]] = {probe: {} for probe in SETTINGS}
    for name, cost, share, cache in made_arms(reuse, arms):
        for probe, sees in SETTINGS.items():
            answers[probe][name] = scenes.read(scene, cache, questions, sees_legends=sees)
        # Every batch has the same shapes, so the first one says what an arm takes.
        if not any(row["arm"] == name and row["metric"] == "bytes" for row in table.plain):
            table.value("repair.visible", name, "bytes", share, len(scene))
            for probe in SETTINGS:
                for metric, value in reuse.costs.shares(cost).items():
                    table.value(probe, name, metric, value, len(scene))
        tick(name)
    answers["repair.visible"]["mask_4d"] = _mask_control(table, reuse, questions, answers["repair.visible"]["blind"])
    for probe in SETTINGS:
        table.items(probe).add(_askable(questions, probe), clusters, answers[probe])
    return reuse


def _askable(questions: Questions, probe: str) -> Questions:
    """Questions about a legend make no sense once the legends have left the window."""
    if SETTINGS[probe]:
        return questions
    return dataclasses.replace(questions, valid=questions.valid & (questions.kind != KINDS.index("legend")))


def _mask_control(table: ResultsTable, reuse: PageReuse, questions: Questions, blind: scenes.Answers) -> scenes.Answers:
    """One forward over everything in which the page may not look at the legends; must equal blind reuse."""
    scene = reuse.scene
    mask = scenes.prefix_mask(scene, page_sees_legends=False)
    masked = scene.backbone.prefill(reuse.tokens, mask=mask).kv
    answers = scenes.read(scene, scenes.engine(scene, masked, reuse.tokens), questions, sees_legends=True)
    apart = np.abs(np.exp(answers.log_probabilities) - np.exp(blind.log_probabilities)).max()
    table.largest("mask", "mask_4d", "probability_difference", float(apart), len(scene))

    page, canonical = scenes.cut(masked, scene.page), reuse.page.kv
    apart = [jnp.abs(page[name] - canonical[name]).max() / jnp.abs(canonical[name]).max() for name in canonical]
    table.largest("mask", "mask_4d", "kv_difference", max(map(float, apart)), len(scene))
    return answers
