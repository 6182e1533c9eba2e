"""The page reused behind its legends: what was cached, its patches, and the published token repairs."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.core import AnyArray
from kvpatch_jax.repair import REPAIRS, SplicedCache, count_of_equal_bytes, fraction_to_count

from ..results.costs import ChunkCosts, input_width
from ..rules import RULES
from ..small_task import scenes
from ..small_task.scenes import KV, Scene

RANKS = RULES.arms.ranks
SHOWN_RANK = RULES.arms.shown_rank
ROTATED_RANKS = RULES.arms.rotated_ranks
BUDGETS = RULES.arms.budgets
BYTE_RANKS = RULES.arms.byte_ranks


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
        # The causal mask, written out: one program with the prefills that have another.
        self.conditioned = dict(scene.backbone.prefill(self.tokens, mask=scenes.prefix_mask(scene)).kv)
        self.page_conditioned = scenes.cut(self.conditioned, scene.page)
        # The legends in front stand there as re-prefill has them: they did not move, only the page is reused.
        self.engine = scenes.engine(scene, self.conditioned, self.tokens)
        # Two threads may ask for patches of one page.
        self._largest, self._factorising = dict[bool, kvp.Patch](), threading.Lock()

    @functools.cached_property
    def costs(self) -> ChunkCosts:
        """What the arms' costs are shares of."""
        backbone, page, width = self.scene.backbone, self.scene.page, input_width(self.tokens)
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
        with self._factorising:
            if rotated not in self._largest:
                where: dict[str, Any] = {"frame": "engine", "start": self.start} if rotated else {}
                self._largest[rotated] = kvp.form_patch(
                    self.page, self.page_conditioned, max(RANKS), self.antecedent, method="exact", dense=False, **where
                )
        return leading(self._largest[rotated], rank)

    def placed(self, patch: kvp.Patch | None = None, *, allow_stale: bool = False) -> KV:
        """Places the reused page in the engine frame, rotated and patched, without a forward pass."""
        return dict(kvp.apply_patch(kvp.Placed(self.page, patch, self.start, self.antecedent, allow_stale=allow_stale)))

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


def patch_names(layout: kvp.KVLayout) -> list[str]:
    """Names what `patch_arms` yields."""
    variants = ["deepest_half", *(f"{name}_only" for name in layout.names)]
    return [
        *(f"patch.rank={rank}" for rank in RANKS),
        *(f"patch.{variant}.rank={SHOWN_RANK}" for variant in variants),
        *(f"patch.rotated_frame.rank={rank}" for rank in ROTATED_RANKS),
    ]


def token_names() -> list[str]:
    """Names what `token_arms` yields."""
    settings = [*(f"budget={share:g}" for share in BUDGETS), *(f"bytes_of_rank={rank}" for rank in BYTE_RANKS)]
    return [f"{method}.{setting}" for method in REPAIRS for setting in settings]


def token_arms(reuse: PageReuse) -> Iterator[tuple[str, str, int]]:
    """Yields every token repair at every budget: the arm, the repair's name, how many tokens it recomputes."""
    tokens = reuse.page.tokens
    for method in REPAIRS:
        for share in BUDGETS:
            yield f"{method}.budget={share:g}", method, fraction_to_count(share, tokens)
        for rank in BYTE_RANKS:
            count = min(tokens, count_of_equal_bytes(reuse.page.layout, rank, tokens))
            yield f"{method}.bytes_of_rank={rank}", method, count
