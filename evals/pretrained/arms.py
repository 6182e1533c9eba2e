"""Every way of serving a passage, with what it stores and what it computes while serving.

`core` is what every passage gets, `more` what a named subset gets beside it. Shares are of the passage's own: bytes of
its KV (16 bits a number), FLOPs of re-prefilling it behind its antecedent. `canonical`: how much of the canonical is
kept, one for all places of reuse; `stored`: what is kept beside it for this one. `forming`: FLOPs that are paid once
and shared by all reuses.
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

from .attention import attention_shift, layers_of, read_and_look
from .passages import CHECK_LAYER, KV, Passages, cut, placed

CORE_RANKS, MORE_RANKS = (8, 16, 32), (4, 64)
BUDGET, LARGE_BUDGET = 0.15, 0.50
SMALL_BUDGET = 0.05
BITS = (2, 3, 4, 8)
LOW_RANKS = (16, 32, 64)
"""Of KV(B|A) itself, and of its keys."""
POOLED_RANKS = (16, 32)
RESIDUAL_DEPTHS = (0.25, 0.5)
"""Where a passage is run again from, as shares of the layers."""
BLOCKS = 10
"""Blocks of layers, at most, that VLCache's shares are found for."""
LAYER_BUDGETS = (0.0, 0.05, 0.15, 0.30)
"""Shares of a passage's tokens that a layer may run again, where layers differ; the largest is VLCache's."""
LAYER_SHARES = {"deep_half": 0.5, "deep_three_quarters": 0.25}
"""Where the layers that keep their patch begin."""


COSTS = ("canonical", "stored", "serving", "forming")
"""Of an arm, in records."""


class Arm(NamedTuple):
    """A name, the cache it serves, and shares: stored bytes, FLOPs while serving, FLOPs of forming, the canonical's.

    logits: where the arm was read already.
    """

    name: str
    cache: KV
    stored: float = 0.0
    serving: float = 0.0
    forming: float = 0.0
    logits: Array | None = None
    canonical: float = 1.0


class Arms:
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
        self.blind, self.looked = read_and_look(passages.backbone, passages.after, self.splice.cache)

    def core(self) -> Iterator[Arm]:
        """Blind reuse, patches, and one budget of each token repair that a server could run."""
        yield Arm("blind", self.splice.cache, logits=self.blind)
        for rank in self.ranks(CORE_RANKS):
            yield self.patched(f"patch.rank={rank}", kvp.truncate(self.whole, rank))
        for name in ("first_k", "cacheblend", "kvshare", "query_aware"):
            yield self.repaired(name, BUDGET)
        if self.by_layer is not None:
            counts = [fraction_to_count(share, self.of.length) for share in self.by_layer]
            cache = vlcache(self.of.backbone, self.splice, counts).cache
            serving = sum(map(self.flops, counts)) / (len(counts) * self.flops(self.of.length))
            yield Arm(f"vlcache.budget={BUDGET:g}", cache, 0.0, serving, 0.0)

    def more(self) -> Iterator[Arm]:
        """Other ranks, dtypes, layers, budgets; oracles, random tokens; KV(B|A) itself kept smaller; layers rerun."""
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
        """Those that these passages have room for."""
        return [rank for rank in asked if rank <= self.most]

    def patched(self, name: str, patch: kvp.Patch) -> Arm:
        """A patch: u v for every token, layer and channel while serving; a prefill behind the antecedent to form it."""
        of, products = self.of, 0
        for channel, rank in patch.ranks.items():
            products += (rank or 0) * of.backbone.layout.channel(channel).features
        products *= len(patch.metadata.layers) * of.length
        # KV at 16 bits a number: factors in float32 are the same share of KV in float32, narrower ones are counted.
        narrow = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(dict(patch.factors)))
        stored = patch.nbytes / of.chunk.nbytes * (2 if narrow else 1)
        return Arm(name, of.serve(patch), stored, 2 * products / self.flops(of.length), 1.0)

    def repaired(self, method: str, budget: float) -> Arm:
        """A token repair at a share of the tokens; queries are read once over the blind cache to choose by them."""
        of = self.of
        count = fraction_to_count(budget, of.length)
        cache = REPAIRED[method](self, count)
        serving = self.flops(count)
        if method in ("cacheblend", "kvshare"):
            whole, layers = self.flops(of.length), of.backbone.layout.layers
            serving = whole * (CHECK_LAYER + 1) / layers + serving * (layers - CHECK_LAYER - 1) / layers
        if method in ("query_aware", "prophetkv"):
            serving += self.flops(self.of.ids.shape[1])
        return Arm(f"{method}.budget={budget:g}", cache, 0.0, serving / self.flops(of.length), 0.0)

    def flops(self, tokens: int) -> int:
        """Of a forward over some of the passage's tokens, that see on average what all of them see."""
        of, costs = self.of, self.of.backbone.forward_costs
        return costs.flops(of.length, of.start) * tokens // of.length

    def quantised(self, bits: int) -> Arm:
        """KV(B|A) itself at few bits, in place of the canonical: keys by feature, values by token, as KIVI has it."""
        of = self.of
        kv = {name: rounded(value, bits, 2 if name == "k" else 4) for name, value in of.conditioned.items()}
        scales = sum(2 * value.size // value.shape[2 if name == "k" else 4] for name, value in of.conditioned.items())
        numbers = sum(value.size for value in of.conditioned.values())
        stored = (bits * numbers + 16 * scales) / (16 * numbers)
        return Arm(f"kv.bits={bits}", of.cache(of.turned(kv, of.start)), stored, 0.0, 1.0, canonical=0.0)

    def low_rank(self) -> Iterator[Arm]:
        """KV(B|A) itself, phase-free, in place of the canonical: truncated SVD of all of it, or of its keys.

        Keys low in rank before their rotation, values whole: as ShadowKV (arXiv 2410.21465, section 3) has them; its
        landmarks and outliers choose what is read of a long cache and have no part here.
        """
        of = self.of
        factors = {
            name: factorise(flatten_heads(value), self.most, method="exact") for name, value in of.conditioned.items()
        }
        whole = sum(channel.features for channel in of.backbone.layout.channels) * of.length
        for rank in self.ranks(LOW_RANKS):
            near = {name: _product(u, v, rank, of.conditioned[name].shape) for name, (u, v) in factors.items()}
            for arm, names in ((f"kv.svd.rank={rank}", tuple(near)), (f"shadowkv.rank={rank}", ("k",))):
                kv = {name: near[name] if name in names else value for name, value in of.conditioned.items()}
                widths = [of.backbone.layout.channel(name).features for name in names]
                saved = sum(width * of.length - rank * (width + of.length) for width in widths)
                products = 2 * rank * sum(widths) * of.length * of.backbone.layout.layers
                serving = products / self.flops(of.length)
                yield Arm(arm, of.cache(of.turned(kv, of.start)), 1 - saved / whole, serving, 1.0, canonical=0.0)

    def pooled(self) -> Iterator[Arm]:
        """The deficit in directions that the document's other passages' deficits share; of one passage there is none.

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
            yield Arm(f"pooled.rank={rank}", of.cache(of.turned(kv, of.start)), stored, serving, 1.0)

    def run_again(self) -> Iterator[Arm]:
        """Layers from one up run again behind the antecedent, from the residual that entered it when alone.

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
            cache = of.cache(of.turned(kv, of.start))
            yield Arm(f"residual.layer={layer}", cache, stored, serving, 0.0, canonical=kept)


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
    """Finds VLCache's shares of tokens for each layer on passages that nothing is measured on, of one length.

    Of caches that VLCache serves, in which all layers below have their first tokens mended too, and for the whole
    budget: measured one layer alone, most layers seem to need nothing, and two of 15 % of the tokens were spent.
    """
    layout, length = batches[0].backbone.layout, batches[0].length
    blocks = max(count for count in range(1, BLOCKS + 1) if layout.layers % count == 0)
    size = layout.layers // blocks
    counts = [fraction_to_count(share, length) for share in LAYER_BUDGETS]
    needs = np.zeros((blocks, len(counts)))
    for of in batches:
        lost = lambda cache, of=of: float(np.mean([each["kl"] for each in of.scored(of.read(cache))]))
        needs += layer_sensitivity(layout, of.splice(), counts, lost, blocks=size)
    found = layer_counts(needs, counts, int(BUDGET * length * blocks), spend=True)
    return tuple(LAYER_BUDGETS[counts.index(count)] for count in found for _ in range(size))


def _lower_whole(arms: Arms) -> SplicedCache:
    """The splice with all tokens run again through CHECK_LAYER: behind an
    exact antecedent the lower layers, recomputed whole, are the conditioned KV's own."""
    of, splice = arms.of, arms.splice
    true = of.turned(of.conditioned, of.start)
    layers = jnp.arange(of.backbone.layout.layers)[:, None, None, None, None] <= CHECK_LAYER
    own = {name: jnp.where(layers, true[name], cut(splice.cache, of.start, of.length)[name]) for name in true}
    return splice._replace(cache=of.cache(own))


def _cacheblend(arms: Arms, count: int) -> KV:
    """`repair.cacheblend`, whose first step is known here."""
    of, splice = arms.of, arms.splice
    lower = _lower_whole(arms)
    checked = lambda cache: read_slots(cache, splice.slots, CHECK_LAYER)
    score = deviation(checked(lower.cache), checked(splice.cache), live_tokens(splice))
    return recompute_tokens(of.backbone, lower, largest(score, count))


def _kvshare(arms: Arms, count: int) -> KV:
    """KVShare (arXiv 2503.16525), as VLCache and its abstract describe it: tokens chosen by how far attention maps over
    reused and recomputed KV deviate. Our reading of its prefill stage: at CHECK_LAYER, of the passage's own queries;
    above it these tokens run. Its decode stage recomputes more while it answers and is left out."""
    of, splice = arms.of, arms.splice
    lower = _lower_whole(arms)
    keys = lower.cache["k"][CHECK_LAYER], splice.cache["k"][CHECK_LAYER]
    score = attention_shift(of.backbone, CHECK_LAYER, of.checked, of.tokens.positions, *keys)
    return recompute_tokens(of.backbone, lower, largest(score, count))


def _most_looked_at(arms: Arms, count: int, layers: Sequence[int]) -> KV:
    of = arms.of
    own = arms.looked[np.asarray(layers), :, of.start : of.start + of.length].sum(0)
    return recompute_tokens(of.backbone, arms.splice, largest(own, count))


def _query_aware(arms: Arms, count: int) -> KV:
    return _most_looked_at(arms, count, layers_of(arms.of.backbone))


def _prophetkv(arms: Arms, count: int) -> KV:
    """ProphetKV (arXiv 2602.02579), as its abstract describes it: attention of the query over the reused cache, of all
    layers fused into one set of tokens (here by their sum), which a second stage recomputes."""
    return _most_looked_at(arms, count, range(arms.of.backbone.layout.layers))


def _random(arms: Arms, count: int) -> KV:
    of = arms.of
    # Seeded by the text behind, so that every passage draws its own.
    score = np.random.default_rng([count, *of.ids.ravel().tolist()]).random((of.rows, of.length), np.float32)
    return recompute_tokens(of.backbone, arms.splice, largest(jnp.asarray(score), count))


REPAIRED: dict[str, Callable[[Arms, int], Mapping[str, Array]]] = {
    "first_k": lambda arms, count: first_k(arms.of.backbone, arms.splice, count).cache,
    "cacheblend": _cacheblend,
    "kvshare": _kvshare,
    "query_aware": _query_aware,
    "prophetkv": _prophetkv,
    "oracle_delta": lambda arms, count: oracle_delta(arms.of.backbone, arms.splice, count).cache,
    "random": _random,
}
