"""The arms that serve a passage, with what each stores and what it computes while serving.

Where the arithmetic is that of `evals.arms`, its makers are used; the others are here. Shares are of the passage's:
bytes of its KV (16 bits a number), FLOPs of re-prefilling it after its antecedent. Axis letters as in `passages`, and
M rank, S keys.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.core import flatten_heads
from kvpatch_jax.repair import (
    METHODS,
    RepairBudget,
    Repaired,
    fraction_to_count,
    infoflow,
    layer_counts,
    layer_sensitivity,
    random_tokens,
    vlcache,
)

from ..arms import AlternativeArm, ArmFactory
from ..arms.conditioned_kv import make_truncated
from ..arms.patches import make_patch
from ..arms.recomputed_tokens import make_residual
from ..arms.reused_page import KV
from ..results.costs import NUMBER_BITS, ArmCost, ChunkCosts
from .passages import CHECK_LAYER, Passages

CORE_RANKS, MORE_RANKS = (8, 16, 32), (4, 64)
BUDGET, LARGE_BUDGET, SMALL_BUDGET = 0.15, 0.50, 0.05
BITS = (2, 3, 4, 8)
LOW_RANKS = (16, 32, 64)
"""Of KV(B|A) itself, and of its keys."""
POOLED_RANKS = (16, 32)
RESIDUAL_DEPTHS = (0.25, 0.5)
"""The layers from which a passage is run again, as shares of all."""
BLOCKS = 10
"""Blocks of layers, at most, that VLCache's shares are fitted for."""
LAYER_BUDGETS = (0.0, 0.05, 0.15, 0.30)
"""Shares of a passage's tokens that a layer may run again, where layers differ; the largest is VLCache's."""
LAYER_SHARES = {"deep_half": 0.5, "deep_three_quarters": 0.25}
"""The first layer that keeps its patch, as a share of all."""
COSTS = ("canonical", "stored", "serving", "forming")
"""Of an arm, in records."""
Cache = Mapping[str, Array]
"""An engine-frame cache of antecedent and passage."""


class PretrainedArm(NamedTuple):
    """One arm's cache and its costs.

    Attributes:
      name: of the arm and its settings.
      cache: what it serves.
      canonical: how much of the canonical is kept, one for all places of reuse.
      stored: bytes kept beside the canonical, for this place of reuse alone.
      serving: FLOPs while serving.
      forming: FLOPs that are paid once and shared by all reuses.
    """

    name: str
    cache: KV
    canonical: float = 1.0
    stored: float = 0.0
    serving: float = 0.0
    forming: float = 0.0


class PassageArms:
    """The arms of one batch of passages.

    Args:
      passages: the batch.
      by_layer: shares of the tokens that VLCache runs again, for each layer; None leaves that arm out.
    """

    def __init__(self, passages: Passages, by_layer: Sequence[float] | None = None):
        self.of, self.by_layer = passages, by_layer
        layers = passages.backbone.layout.layers
        self.residual_layers = sorted({max(1, round(depth * layers)) for depth in RESIDUAL_DEPTHS})
        self.factory = ArmFactory(passages.page, self.residual_layers)
        self.splice = self.factory.splice.replace(question=passages.after)

    def core(self) -> Iterator[PretrainedArm]:
        """Yields blind reuse, patches, and one budget of each token repair that a server could run."""
        yield PretrainedArm("blind", dict(self.splice.cache))
        for rank in self._ranks(CORE_RANKS):
            yield self._made(f"patch.rank={rank}", make_patch, rank=rank)
        for name in ("first_k", "cacheblend", "kvshare", "query_aware"):
            yield self._repaired(name, BUDGET)

        if self.by_layer is not None:
            of, counts = self.of, [fraction_to_count(share, self.of.length) for share in self.by_layer]
            schedule = RepairBudget(by_layer=tuple(count / of.length for count in counts))
            cache = vlcache(of.backbone, self.splice, schedule).cache
            serving = sum(map(self._flops, counts)) / (len(counts) * self._flops(of.length))
            yield PretrainedArm(f"vlcache.budget={BUDGET:g}", dict(cache), serving=serving)

    def more(self) -> Iterator[PretrainedArm]:
        """Yields other ranks, dtypes, layers, budgets; oracles, random tokens; smaller KV(B|A); layers rerun."""
        layout = self.of.backbone.layout
        for rank in self._ranks(MORE_RANKS):
            yield self._made(f"patch.rank={rank}", make_patch, rank=rank)
        for rank in self._ranks(CORE_RANKS[1:2]):
            for dtype in ("bfloat16", "int8"):
                narrow = functools.partial(kvp.quantise, dtype=dtype)
                yield self._made(f"patch.{dtype}.rank={rank}", make_patch, rank=rank, part=narrow)
        for rank in self._ranks(CORE_RANKS[1:]):
            for name, share in LAYER_SHARES.items():
                deep = functools.partial(kvp.keep_layers, layers=range(round(share * layout.layers), layout.layers))
                yield self._made(f"patch.{name}.rank={rank}", make_patch, rank=rank, part=deep)

        for name in ("oracle_delta", "random", "prophetkv"):
            yield self._repaired(name, BUDGET)
        yield self._repaired("query_aware", SMALL_BUDGET)
        for name in ("first_k", "cacheblend", "oracle_delta", "query_aware"):
            yield self._repaired(name, LARGE_BUDGET)

        for bits in BITS:
            yield self._made(f"kv.bits={bits}", _few_bits, bits=bits)
        for rank in self._ranks(LOW_RANKS):
            yield self._made(f"kv.svd.rank={rank}", make_truncated, names=layout.names, rank=rank)
            yield self._made(f"shadowkv.rank={rank}", make_truncated, names=("k",), rank=rank)
        # Directions are pooled over the document's other passages: one passage alone has none.
        for rank in self._ranks(POOLED_RANKS) if self.of.rows > 1 else ():
            yield self._made(f"pooled.rank={rank}", _pooled, rank=rank)
        for layer in self.residual_layers:
            yield self._made(f"residual.layer={layer}", make_residual, layer=layer)

    def _ranks(self, asked: tuple[int, ...]) -> list[int]:
        """Returns the ranks that these passages have room for."""
        return [rank for rank in asked if rank <= self.of.most]

    def _made(self, name: str, make: Callable[..., AlternativeArm], **settings: Any) -> PretrainedArm:
        """Makes an arm of `evals.arms`."""
        arm = make(self.factory, **settings)
        return PretrainedArm(name, arm.cache, *published_costs(arm.cost, self.factory.costs))

    def _repaired(self, method: str, budget: float) -> PretrainedArm:
        """Makes a token repair at a share of the tokens; queries are read once over the blind cache to choose them."""
        count = fraction_to_count(budget, self.of.length)
        tokens = RepairBudget(tokens=count)
        if method in CHOSEN:
            cache = CHOSEN[method](self, tokens).cache
        else:
            cache = METHODS[method](self.of.backbone, self.splice, tokens).cache

        serving = self._flops(count)
        if method in ("cacheblend", "kvshare"):
            whole, layers = self._flops(self.of.length), self.of.backbone.layout.layers
            serving = whole * (CHECK_LAYER + 1) / layers + serving * (layers - CHECK_LAYER - 1) / layers
        if method in ("query_aware", "prophetkv"):
            serving += self._flops(self.of.ids.shape[1])
        return PretrainedArm(f"{method}.budget={budget:g}", dict(cache), serving=serving / self._flops(self.of.length))

    def _flops(self, tokens: int) -> int:
        """Counts FLOPs of a forward over some of the passage's tokens, that see on average what all of them see."""
        return self.factory.costs.prefill * tokens // self.of.length


def published_costs(cost: ArmCost, costs: ChunkCosts) -> tuple[float, float, float, float]:
    """Computes an arm's `COSTS` as the rows of this suite have them, which were published before `results.costs`.

    They differ from `ChunkCosts.shares` in three respects: rotating the keys is not counted, forming counts whole
    prefills in context and nothing else, and what layers are run again from counts as stored.
    """
    shares = costs.shares(cost)
    stored = shares["stored_bytes"] + shares["input_bytes"]
    serving, forming = (cost.serving - costs.rotation) / costs.prefill, float(cost.forming >= costs.prefill)
    return cost.canonical, stored, serving, forming


# ------------------------------------------------------------------------------------------------- KV kept smaller


def _few_bits(factory: ArmFactory, bits: int) -> AlternativeArm:
    """Makes KV(B|A) itself at few bits, without the canonical: keys by feature, values by token, as in KIVI.

    `conditioned_kv` keeps both by feature, in bfloat16 scales; these rows came first.
    """
    page, scales = factory.page, 0
    kv = {}
    for name, value in page.page_conditioned.items():
        axis = 2 if name == "k" else 4
        kv[name] = rounded(value, bits, axis)
        scales += 2 * value.size // value.shape[axis] // len(page)
    cost = factory.costs.of_conditioned(bits * factory.costs.numbers + NUMBER_BITS * scales, 0)
    return AlternativeArm(cost, page.served(kv))


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def rounded(value: Float[Array, "L B T K H"], bits: int, axis: int) -> Float[Array, "L B T K H"]:
    """Rounds to 2^bits levels between the least and the largest value along an axis."""
    least = value.min(axis, keepdims=True)
    step = jnp.maximum((value.max(axis, keepdims=True) - least) / (2**bits - 1), 1e-12)
    return least + jnp.round((value - least) / step) * step


def _pooled(factory: ArmFactory, rank: int) -> AlternativeArm:
    """Makes the deficit in directions that the document's other passages' deficits share.

    Coefficients are stored for each passage, directions once for all: they are not counted.
    """
    page, costs = factory.page, factory.costs
    kv = {name: page.page.kv[name] + _in_others_directions(value, rank) for name, value in page.delta.items()}
    channels, vectors = costs.layout.channels, costs.tokens * costs.layout.layers
    adding = 2 * rank * sum(channel.features for channel in channels) * vectors
    cost = ArmCost(
        stored=NUMBER_BITS * rank * len(channels) * vectors,
        serving=costs.rotation + adding,
        forming=costs.alone + costs.prefill,
    )
    return AlternativeArm(cost, page.served(kv))


@functools.partial(jax.jit, static_argnames="rank")
def _in_others_directions(delta: Float[Array, "L B T K H"], rank: int) -> Float[Array, "L B T K H"]:
    """Projects each row on the `rank` strongest directions of all other rows."""
    flat = flatten_heads(delta)
    gram = jnp.einsum("lbtf,lbtg->lbfg", flat, flat)
    directions = jnp.linalg.eigh(gram.sum(1, keepdims=True) - gram)[1][..., -rank:]
    return jnp.einsum("lbtf,lbfm,lbgm->lbtg", flat, directions, directions).reshape(delta.shape)


# --------------------------------------------------------------------------------- repairs that choose by attention


def _query_aware(arms: PassageArms, budget: RepairBudget) -> Repaired:
    """Recomputes what the query attends to at a quarter, a half, three quarters and the whole of the depth."""
    layers = arms.of.backbone.layout.layers
    wanted = sorted({layers // 4, layers // 2, 3 * layers // 4, layers - 1})
    return infoflow(arms.of.backbone, arms.splice, budget, layers=tuple(wanted))


def _prophetkv(arms: PassageArms, budget: RepairBudget) -> Repaired:
    """Recomputes what the query attends to at all layers together, by the sum over them.

    ProphetKV (arXiv 2602.02579), as its abstract describes it; `repair.prophetkv` divides by each layer's sum.
    """
    return infoflow(arms.of.backbone, arms.splice, budget, layers=tuple(range(arms.of.backbone.layout.layers)))


def _random(arms: PassageArms, budget: RepairBudget) -> Repaired:
    # Seeded by the text that follows, so that every passage draws its own.
    seeds = [(budget.tokens or 0, *row) for row in arms.of.ids.tolist()]
    return random_tokens(arms.of.backbone, arms.splice, budget, seed=seeds)


CHOSEN: dict[str, Callable[[PassageArms, RepairBudget], Repaired]] = {
    "query_aware": _query_aware,
    "prophetkv": _prophetkv,
    "random": _random,
}
"""Token repairs with this suite's own settings, by arm; the others are `kvpatch_jax.repair.METHODS`."""


def shares_by_layer(batches: Sequence[Passages]) -> tuple[float, ...]:
    """Fits VLCache's shares of tokens for each layer on passages that nothing is measured on, of one length.

    On caches that VLCache serves, in which all layers below have their first tokens recomputed too, and for the whole
    budget: measured one layer alone, most layers seem to need nothing, and two of 15 % of the tokens were spent.
    """
    layout, length = batches[0].backbone.layout, batches[0].length
    blocks = max(count for count in range(1, BLOCKS + 1) if layout.layers % count == 0)
    size = layout.layers // blocks
    counts = [fraction_to_count(share, length) for share in LAYER_BUDGETS]
    needs = np.zeros((blocks, len(counts)))

    for of in batches:

        def loss(cache: Cache, of: Passages = of) -> float:
            return float(np.mean([score["kl"] for score in of.scored(of.read(dict(cache)))]))

        needs += layer_sensitivity(layout, of.page.splice(), counts, loss, blocks=size)

    found = layer_counts(needs, counts, int(BUDGET * length * blocks), spend=True)
    shares = [LAYER_BUDGETS[counts.index(count)] for count in found]
    # Every layer of a block has the block's share.
    return tuple(np.repeat(shares, size).tolist())
