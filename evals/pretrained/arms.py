"""The arms that serve a passage, with what each stores and what it computes while serving.

`core` are those of every passage, `more` those of a named subset. Shares are of the passage's: bytes of its KV (16 bits
a number), FLOPs of re-prefilling it after its antecedent.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.core import flatten_heads
from kvpatch_jax.repair import (
    SplicedCache,
    deviation,
    first_k,
    fraction_to_count,
    largest,
    layer_counts,
    layer_sensitivity,
    live_tokens,
    oracle_delta,
    read_slots,
    recompute_tokens,
    vlcache,
)
from pallas_kernels import factorise

from .attention import attention_shift, layers_of, read_with_attention
from .passages import CHECK_LAYER, KV, Passages, cut, placed

CORE_RANKS, MORE_RANKS = (8, 16, 32), (4, 64)
BUDGET, LARGE_BUDGET = 0.15, 0.50
SMALL_BUDGET = 0.05
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


class PretrainedArm(NamedTuple):
    """One arm's cache and its costs.

    Attributes:
      name: of the arm and its settings.
      cache: what it serves.
      stored: bytes kept beside the canonical, for this place of reuse alone.
      serving: FLOPs while serving.
      forming: FLOPs that are paid once and shared by all reuses.
      logits: where the arm was read already.
      canonical: how much of the canonical is kept, one for all places of reuse.
    """

    name: str
    cache: KV
    stored: float = 0.0
    serving: float = 0.0
    forming: float = 0.0
    logits: Array | None = None
    canonical: float = 1.0


class PassageArms:
    """The arms of one batch of passages. Patches are slices of one SVD.

    Args:
      passages: the batch.
      by_layer: shares of the tokens that VLCache runs again, for each layer; None leaves that arm out.
    """

    def __init__(self, passages: Passages, by_layer: Sequence[float] | None = None):
        self.of, self.by_layer = passages, by_layer
        layout = passages.backbone.layout
        self.most = min(passages.length, *(channel.features for channel in layout.channels))
        self.whole = passages.patch(min(max(MORE_RANKS), self.most))
        self.splice = passages.splice()
        self.blind, self.attended = read_with_attention(passages.backbone, passages.after, self.splice.cache)

    def core(self) -> Iterator[PretrainedArm]:
        """Yields blind reuse, patches, and one budget of each token repair that a server could run."""
        yield PretrainedArm("blind", self.splice.cache, logits=self.blind)
        for rank in self.ranks(CORE_RANKS):
            yield self.patched(f"patch.rank={rank}", kvp.truncate(self.whole, rank))
        for name in ("first_k", "cacheblend", "kvshare", "query_aware"):
            yield self.repaired(name, BUDGET)

        if self.by_layer is not None:
            counts = [fraction_to_count(share, self.of.length) for share in self.by_layer]
            cache = vlcache(self.of.backbone, self.splice, counts).cache
            serving = sum(map(self.flops, counts)) / (len(counts) * self.flops(self.of.length))
            yield PretrainedArm(f"vlcache.budget={BUDGET:g}", cache, 0.0, serving, 0.0)

    def more(self) -> Iterator[PretrainedArm]:
        """Yields other ranks, dtypes, layers, budgets; oracles, random tokens; smaller KV(B|A); layers rerun."""
        for rank in self.ranks(MORE_RANKS):
            yield self.patched(f"patch.rank={rank}", kvp.truncate(self.whole, rank))
        for rank in self.ranks(CORE_RANKS[1:2]):
            for dtype in ("bfloat16", "int8"):
                patch = kvp.quantise(kvp.truncate(self.whole, rank), dtype)
                yield self.patched(f"patch.{dtype}.rank={rank}", patch)

        for rank in self.ranks(CORE_RANKS[1:]):
            for name, share in LAYER_SHARES.items():
                layers = self.of.backbone.layout.layers
                kept = kvp.keep_layers(kvp.truncate(self.whole, rank), range(round(share * layers), layers))
                yield self.patched(f"patch.{name}.rank={rank}", kept)

        for name in ("oracle_delta", "random", "prophetkv"):
            yield self.repaired(name, BUDGET)
        yield self.repaired("query_aware", SMALL_BUDGET)
        for name in ("first_k", "cacheblend", "oracle_delta", "query_aware"):
            yield self.repaired(name, LARGE_BUDGET)
        for bits in BITS:
            yield self.quantised(bits)
        yield from self.low_rank()
        yield from self.pooled()
        yield from self.run_again()

    def ranks(self, asked: tuple[int, ...]) -> list[int]:
        """Returns the ranks that these passages have room for."""
        return [rank for rank in asked if rank <= self.most]

    def patched(self, name: str, patch: kvp.Patch) -> PretrainedArm:
        """Serves a patch: u v per token, layer and channel while serving; a prefill after the antecedent to form it."""
        of, products = self.of, 0
        for channel, rank in patch.ranks.items():
            products += (rank or 0) * of.backbone.layout.channel(channel).features
        products *= len(patch.metadata.layers) * of.length
        # KV at 16 bits a number: factors in float32 are the same share of KV in float32, narrower ones are counted.
        narrow = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(dict(patch.factors)))
        stored = patch.nbytes / of.chunk.nbytes * (2 if narrow else 1)
        return PretrainedArm(name, of.serve(patch), stored, 2 * products / self.flops(of.length), 1.0)

    def repaired(self, method: str, budget: float) -> PretrainedArm:
        """Serves a token repair at a share of the tokens; queries are read once over the blind cache to choose them."""
        of = self.of
        count = fraction_to_count(budget, of.length)
        cache = REPAIRED[method](self, count)
        serving = self.flops(count)
        if method in ("cacheblend", "kvshare"):
            whole, layers = self.flops(of.length), of.backbone.layout.layers
            serving = whole * (CHECK_LAYER + 1) / layers + serving * (layers - CHECK_LAYER - 1) / layers

        if method in ("query_aware", "prophetkv"):
            serving += self.flops(self.of.ids.shape[1])
        return PretrainedArm(f"{method}.budget={budget:g}", cache, 0.0, serving / self.flops(of.length), 0.0)

    def flops(self, tokens: int) -> int:
        """Counts FLOPs of a forward over some of the passage's tokens, that see on average what all of them see."""
        of, costs = self.of, self.of.backbone.forward_costs
        return costs.flops(of.length, of.start) * tokens // of.length

    def quantised(self, bits: int) -> PretrainedArm:
        """Serves KV(B|A) itself at few bits, without the canonical: keys by feature, values by token, as in KIVI."""
        of = self.of
        kv = {name: rounded(value, bits, 2 if name == "k" else 4) for name, value in of.conditioned.items()}
        scales = sum(2 * value.size // value.shape[2 if name == "k" else 4] for name, value in of.conditioned.items())
        numbers = sum(value.size for value in of.conditioned.values())
        stored = (bits * numbers + 16 * scales) / (16 * numbers)
        return PretrainedArm(f"kv.bits={bits}", of.cache(of.rotate(kv, of.start)), stored, 0.0, 1.0, canonical=0.0)

    def low_rank(self) -> Iterator[PretrainedArm]:
        """Yields KV(B|A) itself, phase-free, without the canonical: truncated SVD of all of it, or of its keys.

        Keys low in rank before their rotation, values whole: as ShadowKV (arXiv 2410.21465, section 3) has them; its
        landmarks and outliers choose what is read of a long cache and have no part here.
        """
        of = self.of
        factors = {
            name: factorise(flatten_heads(value), self.most, method="exact") for name, value in of.conditioned.items()
        }
        whole = sum(channel.features for channel in of.backbone.layout.channels) * of.length

        for rank in self.ranks(LOW_RANKS):
            reduced = {name: _product(u, v, rank, of.conditioned[name].shape) for name, (u, v) in factors.items()}
            for arm, names in ((f"kv.svd.rank={rank}", tuple(reduced)), (f"shadowkv.rank={rank}", ("k",))):
                kv = {name: reduced[name] if name in names else value for name, value in of.conditioned.items()}
                widths = [of.backbone.layout.channel(name).features for name in names]
                saved = sum(width * of.length - rank * (width + of.length) for width in widths)
                products = 2 * rank * sum(widths) * of.length * of.backbone.layout.layers
                serving = products / self.flops(of.length)
                yield PretrainedArm(
                    arm, of.cache(of.rotate(kv, of.start)), 1 - saved / whole, serving, 1.0, canonical=0.0
                )

    def pooled(self) -> Iterator[PretrainedArm]:
        """Yields the deficit in directions that the document's other passages' deficits share; none of one passage.

        Coefficients are stored for each passage, directions once for all: they are not counted.
        """
        of = self.of
        if of.rows == 1:
            return

        delta = {name: value - jnp.asarray(of.chunk.kv[name]) for name, value in of.conditioned.items()}
        for rank in self.ranks(POOLED_RANKS):
            kv = {name: of.chunk.kv[name] + _in_others_directions(value, rank) for name, value in delta.items()}
            widths = [channel.features for channel in of.backbone.layout.channels]
            products = 2 * rank * sum(widths) * of.length * of.backbone.layout.layers
            stored, serving = rank * len(widths) / sum(widths), products / self.flops(of.length)
            yield PretrainedArm(f"pooled.rank={rank}", of.cache(of.rotate(kv, of.start)), stored, serving, 1.0)

    def run_again(self) -> Iterator[PretrainedArm]:
        """Yields layers from one up run again after the antecedent, from the residual that entered it when alone.

        The residual is kept in place of the KV of these layers.
        """
        of, count = self.of, self.of.backbone.layout.layers
        starts = sorted({max(1, round(depth * count)) for depth in RESIDUAL_DEPTHS})
        alone = of.backbone.prefill(placed(of.tokens, 0), hidden_at=tuple(starts)).hidden
        numbers = sum(channel.features for channel in of.backbone.layout.channels) * count

        for layer in starts:
            tokens = of.tokens._replace(embeddings=alone[layer])
            upper = of.backbone.prefill(tokens, context=dict(of.front), start_layer=layer).kv
            kv = {name: jnp.concatenate([jnp.asarray(of.chunk.kv[name])[:layer], upper[name]]) for name in upper}
            serving = of.backbone.forward_costs.flops(of.length, of.start, layer) / self.flops(of.length)
            stored, kept = alone[layer].shape[-1] / numbers, layer / count
            cache = of.cache(of.rotate(kv, of.start))
            yield PretrainedArm(f"residual.layer={layer}", cache, stored, serving, 0.0, canonical=kept)


@functools.partial(jax.jit, static_argnames=("rank", "shape"))
def _product(u: Float[Array, "L B T M"], v: Float[Array, "L B M F"], rank: int, shape: tuple[int, ...]) -> Array:
    return (u[..., :rank] @ v[..., :rank, :]).reshape(shape)


@functools.partial(jax.jit, static_argnames="rank")
def _in_others_directions(delta: Float[Array, "L B T K H"], rank: int) -> Float[Array, "L B T K H"]:
    """Projects each row on the `rank` strongest directions of all other rows."""
    flat = flatten_heads(delta)
    gram = jnp.einsum("lbtf,lbtg->lbfg", flat, flat)
    directions = jnp.linalg.eigh(gram.sum(1, keepdims=True) - gram)[1][..., -rank:]
    return jnp.einsum("lbtf,lbfm,lbgm->lbtg", flat, directions, directions).reshape(delta.shape)


@functools.partial(jax.jit, static_argnames=("bits", "axis"))
def rounded(value: Float[Array, "L B T K H"], bits: int, axis: int) -> Float[Array, "L B T K H"]:
    """Rounds to 2^bits levels between the least and the largest value along an axis."""
    least = value.min(axis, keepdims=True)
    step = jnp.maximum((value.max(axis, keepdims=True) - least) / (2**bits - 1), 1e-12)
    return least + jnp.round((value - least) / step) * step


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

        def loss(cache: KV, of: Passages = of) -> float:
            return float(np.mean([score["kl"] for score in of.scored(of.read(cache))]))

        needs += layer_sensitivity(layout, of.splice(), counts, loss, blocks=size)

    found = layer_counts(needs, counts, int(BUDGET * length * blocks), spend=True)
    return tuple(LAYER_BUDGETS[counts.index(count)] for count in found for _ in range(size))


def _lower_whole(arms: PassageArms) -> SplicedCache:
    """Runs all tokens again through CHECK_LAYER: after an exact antecedent, these layers equal the conditioned KV's."""
    of, splice = arms.of, arms.splice
    true = of.rotate(of.conditioned, of.start)
    layers = jnp.arange(of.backbone.layout.layers)[:, None, None, None, None] <= CHECK_LAYER
    own = {name: jnp.where(layers, true[name], cut(splice.cache, of.start, of.length)[name]) for name in true}
    return splice._replace(cache=of.cache(own))


def _cacheblend(arms: PassageArms, count: int) -> KV:
    """Runs `repair.cacheblend`, whose first step is known here."""
    of, splice = arms.of, arms.splice
    lower = _lower_whole(arms)
    fresh, blind = (read_slots(cache, splice.slots, CHECK_LAYER) for cache in (lower.cache, splice.cache))
    score = deviation(fresh, blind, live_tokens(splice))
    return recompute_tokens(of.backbone, lower, largest(score, count))


def _kvshare(arms: PassageArms, count: int) -> KV:
    """Runs KVShare (arXiv 2503.16525), as VLCache and its abstract describe it.

    Tokens are chosen by how far attention maps over reused and recomputed KV deviate. Our reading of its prefill stage:
    at CHECK_LAYER, of the passage's own queries; above it these tokens run. Its decode stage is left out.
    """
    of, splice = arms.of, arms.splice
    lower = _lower_whole(arms)
    keys = lower.cache["k"][CHECK_LAYER], splice.cache["k"][CHECK_LAYER]
    score = attention_shift(of.backbone, CHECK_LAYER, of.checked, of.tokens.positions, *keys)
    return recompute_tokens(of.backbone, lower, largest(score, count))


def _most_attended(arms: PassageArms, count: int, layers: Sequence[int]) -> KV:
    of = arms.of
    attended = arms.attended[np.asarray(layers), :, of.start : of.start + of.length].sum(0)
    return recompute_tokens(of.backbone, arms.splice, largest(attended, count))


def _query_aware(arms: PassageArms, count: int) -> KV:
    return _most_attended(arms, count, layers_of(arms.of.backbone))


def _prophetkv(arms: PassageArms, count: int) -> KV:
    """Runs ProphetKV (arXiv 2602.02579), as its abstract describes it.

    Attention of the query over the reused cache, of all layers fused into one set of tokens (here by their sum), which
    a second stage recomputes.
    """
    return _most_attended(arms, count, range(arms.of.backbone.layout.layers))


def _random(arms: PassageArms, count: int) -> KV:
    of = arms.of
    # Seeded by the text that follows, so that every passage draws its own.
    score = np.random.default_rng([count, *of.ids.ravel().tolist()]).random((of.rows, of.length), np.float32)
    return recompute_tokens(of.backbone, arms.splice, largest(jnp.asarray(score), count))


REPAIRED: dict[str, Callable[[PassageArms, int], Mapping[str, Array]]] = {
    "first_k": lambda arms, count: first_k(arms.of.backbone, arms.splice, count).cache,
    "cacheblend": _cacheblend,
    "kvshare": _kvshare,
    "query_aware": _query_aware,
    "prophetkv": _prophetkv,
    "oracle_delta": lambda arms, count: oracle_delta(arms.of.backbone, arms.splice, count).cache,
    "random": _random,
}
