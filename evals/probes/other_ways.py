"""Other ways of reuse that could win: KV(B|A) kept smaller, layers run again, random tokens, means of classes, a basis.

Each takes a page reused and gives what it costs and the cache of the prefix. A way that is not asked for is not made.
Axis letters: B contexts, T tokens of the page, L layers, F features of a channel, C classes, M rank.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.core import flatten_heads
from kvpatch_jax.patching import fit_basis
from kvpatch_jax.repair import fraction_to_count, repair_everywhere
from pallas_kernels import factorise

from ..results.costs import NUMBER_BITS, ArmCost
from ..rules import RULES
from ..small_task import LEGENDS, scenes
from ..small_task.scenes import KV
from .repair import PageReuse

SCALE_AND_ZERO = 2 * NUMBER_BITS
"""Bits beside each group of numbers that are kept in fewer bits."""


class Made(NamedTuple):
    """One way of reuse: what it costs, and the prefix's cache in the engine frame."""

    cost: ArmCost
    cache: KV


Make = Callable[["Workshop"], Made]


class Workshop:
    """One scene's page, and what several ways are made of, each made at first use."""

    def __init__(self, reuse: PageReuse, layers: Iterable[int]):
        """`layers`: those that the page is run again from."""
        self.reuse, self.layers = reuse, tuple(layers)

    @functools.cached_property
    def singular(self) -> dict[str, tuple[Array, Array]]:
        """Thin factors of the page's conditioned KV, phase-free, u [L,B,T,M] and v [L,B,M,F] by channel."""
        found = {}
        for name, value in self.reuse.page_conditioned.items():
            flat = flatten_heads(jnp.asarray(value, jnp.float32))
            rank = min(max(RULES.arms.ranks), *flat.shape[-2:])
            found[name] = factorise(flat, rank, method="exact")
        return found

    @functools.cached_property
    def hidden(self) -> dict[int, Array]:
        """The residual of the page alone as it enters each layer that is tried."""
        return self.reuse.scene.backbone.prefill(self.reuse.scene.images[-1], hidden_at=self.layers).hidden

    @functools.cached_property
    def bases(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Directions [L,M,F] by channel: those of the odd contexts' deficits, then those of the even ones'."""
        reuse, rank = self.reuse, max(RULES.arms.pooled_ranks)
        ranks = {channel.name: min(rank, channel.features) for channel in reuse.page.layout.channels}
        found = []
        for part in (slice(1, None, 2), slice(0, None, 2)):
            half = {name: np.asarray(value)[:, part] for name, value in reuse.page.kv.items()}
            conditioned = {name: np.asarray(value)[:, part] for name, value in reuse.page_conditioned.items()}
            basis = fit_basis([(dataclasses.replace(reuse.page, kv=half), conditioned)], ranks)
            found.append({name: jnp.asarray(value) for name, value in basis.directions.items()})
        return found[0], found[1]

    def served(self, kv: Mapping[str, Array]) -> KV:
        """The prefix's cache with this phase-free KV for the page."""
        page = self.reuse.scene.page
        positions = np.asarray(self.reuse.tokens.positions)[:, page]
        turned = kvp.to_engine(self.reuse.page.layout, dict(kv), positions, 0)
        return scenes.with_page(self.reuse.scene, self.reuse.engine, dict(turned))


def other_ways(layout: kvp.KVLayout) -> dict[str, Make]:
    """Lists the ways by name, in the order of tables."""
    arms = RULES.arms
    ways: dict[str, Make] = {}
    for rank in arms.int8_ranks:
        ways[f"patch.int8.rank={rank}"] = functools.partial(_int8_patch, rank=rank)
    for rank in arms.pooled_ranks:
        ways[f"pooled.rank={rank}"] = functools.partial(_pooled, rank=rank)
    for bits in arms.bits:
        ways[f"quantised.bits={bits}"] = functools.partial(_quantised, bits=bits)
    for rank in arms.ranks:
        ways[f"svd.rank={rank}"] = functools.partial(_truncated, names=layout.names, rank=rank)
    keys = tuple(channel.name for channel in layout.channels if channel.rotates)
    for rank in arms.byte_ranks:
        ways[f"shadowkv.rank={rank}"] = functools.partial(_truncated, names=keys, rank=rank)
    for rank in arms.byte_ranks:
        ways[f"shadowkv.keys_alone.rank={rank}"] = functools.partial(_low_rank_keys, names=keys, rank=rank)
    for layer in residual_layers(layout):
        ways[f"residual.layer={layer}"] = functools.partial(_from_residual, layer=layer)
    ways[f"random_tokens.budget={arms.random_budget:g}"] = _random_tokens
    ways["class_mean"] = _class_mean
    return ways


def residual_layers(layout: kvp.KVLayout) -> list[int]:
    """Lists the layers that the page is run again from."""
    return sorted({max(1, round(depth * layout.layers)) for depth in RULES.arms.residual_depths})


# ------------------------------------------------------------------------------------------ forms of the patch


def _int8_patch(shop: Workshop, rank: int) -> Made:
    """The patch with its factors in 8 bits, a float32 scale per direction."""
    patch = kvp.quantise(shop.reuse.patch(rank), jnp.int8)
    return Made(shop.reuse.costs.of_patch(patch), shop.reuse.cache(patch))


def _pooled(shop: Workshop, rank: int) -> Made:
    """The deficit in directions that all pages share, found on other contexts: of those in the other half of the scene.

    What is kept of a page are its coefficients, as `kvp.form_in_basis` makes them; the directions are kept once.
    """
    reuse, costs = shop.reuse, shop.reuse.costs
    served, coefficients, shared = {}, 0, 0
    for channel in reuse.page.layout.channels:
        name, own = channel.name, min(rank, channel.features)
        odd, even = (basis[name][:, :own] for basis in shop.bases)
        served[name] = jnp.asarray(reuse.page.kv[name]) + _in_halves(reuse.delta[name], odd, even)
        coefficients += own * costs.tokens * costs.layout.layers
        shared += own * channel.features * costs.layout.layers
    adding = sum(
        2 * min(rank, channel.features) * channel.features * costs.tokens * costs.layout.layers
        for channel in reuse.page.layout.channels
    )
    cost = ArmCost(
        stored=NUMBER_BITS * coefficients,
        shared=NUMBER_BITS * shared,
        serving=costs.rotation + adding,
        forming=costs.alone + costs.prefill + adding,
    )
    return Made(cost, shop.served(served))


@jax.jit
def _in_halves(
    delta: Float[Array, "L B T K H"], odd: Float[Array, "L M F"], even: Float[Array, "L M F"]
) -> Float[Array, "L B T K H"]:
    """Projects even contexts on the odd ones' directions and the reverse."""
    flat = flatten_heads(delta)
    is_even = (jnp.arange(flat.shape[1]) % 2 == 0)[None, :, None, None]
    project = lambda v: jnp.einsum("lbtf,lmf,lmg->lbtg", flat, v, v, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(is_even, project(odd), project(even)).reshape(delta.shape)


# ----------------------------------------------------------------------------------------- KV(B|A), kept smaller


def _quantised(shop: Workshop, bits: int) -> Made:
    """KV(B|A), phase-free, in `bits` bits: each feature of each layer and head has a scale and a least value.

    Both in 16 bits, over all tokens of the chunk. KIVI (arXiv 2402.02750) does so with keys, by groups of tokens; here
    values are kept the same way, which costs the fewest bytes. In 16 bits it is the numbers themselves, as bfloat16.
    """
    reuse, costs = shop.reuse, shop.reuse.costs
    if bits == NUMBER_BITS:
        whole = {name: _rounded(jnp.asarray(value)) for name, value in reuse.page_conditioned.items()}
        return Made(costs.of_conditioned(bits * costs.numbers, 0), shop.served(whole))
    served = {name: _in_few_bits(jnp.asarray(value), bits) for name, value in reuse.page_conditioned.items()}
    groups = costs.numbers // costs.tokens
    cost = costs.of_conditioned(bits * costs.numbers + SCALE_AND_ZERO * groups, 2 * costs.numbers)
    return Made(cost, shop.served(served))


def _rounded(value: Array) -> Array:
    """Rounds to bfloat16."""
    return value.astype(jnp.bfloat16).astype(value.dtype)


@functools.partial(jax.jit, static_argnames=("bits",))
def _in_few_bits(value: Float[Array, "L B T K H"], bits: int) -> Float[Array, "L B T K H"]:
    least, most = value.min(axis=2, keepdims=True), value.max(axis=2, keepdims=True)
    least, scale = _rounded(least), _rounded((most - least) / (2**bits - 1))
    safe = jnp.where(scale > 0, scale, 1.0)
    return least + scale * jnp.clip(jnp.round((value - least) / safe), 0, 2**bits - 1)


def _truncated(shop: Workshop, names: tuple[str, ...], rank: int) -> Made:
    """KV(B|A), phase-free, of which some channels are kept as thin factors and the others whole.

    All channels: truncated SVD, at the bytes of a patch of this rank. The keys alone: as ShadowKV (arXiv 2410.21465,
    section 3) keeps them, low in rank before their rotation, with whole values; its landmarks and outliers, which
    choose what is read of a long cache, have no part here.
    """
    reuse, costs = shop.reuse, shop.reuse.costs
    served, numbers, product = dict(reuse.page_conditioned), 0, 0
    for channel in reuse.page.layout.channels:
        name, own = channel.name, min(rank, channel.features, costs.tokens)
        if name not in names:
            numbers += costs.tokens * channel.features
            continue
        u, v = shop.singular[name]
        served[name] = _product(u[..., :own], v[..., :own, :]).reshape(reuse.page_conditioned[name].shape)
        numbers += own * (costs.tokens + channel.features)
        product += 2 * own * costs.tokens * channel.features
    layers = costs.layout.layers
    return Made(costs.of_conditioned(NUMBER_BITS * numbers * layers, product * layers, names), shop.served(served))


@jax.jit
def _product(u: Float[Array, "L B T M"], v: Float[Array, "L B M F"]) -> Float[Array, "L B T F"]:
    return jnp.einsum("lbtm,lbmf->lbtf", u, v, precision=jax.lax.Precision.HIGHEST)


def _low_rank_keys(shop: Workshop, names: tuple[str, ...], rank: int) -> Made:
    """The canonical with KV(B|A)'s keys in its keys' place, low in rank: what Kamera's Table 6 may have measured.

    It calls its row "low-rank-K reconstruction (ShadowKV-style)" and says no more. This reading stores the bytes of a
    patch of keys alone; the values stay as they were.
    """
    reuse, costs = shop.reuse, shop.reuse.costs
    served, numbers, product = dict(reuse.page.kv), 0, 0
    for channel in reuse.page.layout.channels:
        if channel.name in names:
            own = min(rank, channel.features, costs.tokens)
            u, v = shop.singular[channel.name]
            served[channel.name] = _product(u[..., :own], v[..., :own, :]).reshape(served[channel.name].shape)
            numbers += own * (costs.tokens + channel.features)
            product += 2 * own * costs.tokens * channel.features
    layers = costs.layout.layers
    whole = sum(channel.features for channel in costs.layout.channels)
    values = sum(channel.features for channel in costs.layout.channels if channel.name not in names)
    cost = ArmCost(
        stored=NUMBER_BITS * numbers * layers,
        canonical=values / whole,
        serving=costs.rotation + product * layers,
        forming=costs.alone + costs.prefill + costs.factorising(names),
    )
    return Made(cost, shop.served({name: jnp.asarray(value) for name, value in served.items()}))


# ------------------------------------------------------------------------------------------------- run again


def _from_residual(shop: Workshop, layer: int) -> Made:
    """The page run again from a layer up, behind its true context, from the residual that entered the layer alone.

    The layers below keep the canonical's KV. In place of the layers above, the residual is kept: `input_bytes`.
    """
    reuse, costs = shop.reuse, shop.reuse.costs
    scene, page = reuse.scene, reuse.scene.page
    tokens = reuse.tokens.take(page.start, page.stop)._replace(embeddings=shop.hidden[layer])
    context = scenes.cut(reuse.engine, slice(page.start))
    upper = scene.backbone.prefill(tokens, context, start_layer=layer).kv
    served = {name: jnp.concatenate([jnp.asarray(reuse.page.kv[name])[:layer], upper[name]]) for name in upper}
    cost = ArmCost(
        canonical=layer / costs.layout.layers,
        inputs=costs.tokens,
        serving=costs.rotation + costs.forward.flops(costs.tokens, costs.behind, layer),
        forming=costs.alone,
    )
    return Made(cost, shop.served(served))


def _random_tokens(shop: Workshop) -> Made:
    """Tokens drawn at random and recomputed in context at every layer: what choosing has to beat."""
    reuse, splice = shop.reuse, shop.reuse.splice()
    rows, tokens = splice.slots.shape
    count = fraction_to_count(RULES.arms.random_budget, tokens)
    seeds = reuse.scene.contexts.ink_seed
    drawn = [np.random.default_rng([int(seed), 1]).permutation(tokens)[:count] for seed in seeds]
    repaired = repair_everywhere(reuse.scene.backbone, splice, jnp.asarray(np.sort(drawn, axis=1).reshape(rows, count)))
    cost = reuse.costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots))
    return Made(cost, dict(repaired.cache))


# ------------------------------------------------------------------------------------------------ diagnostics


def page_classes(reuse: PageReuse) -> Int[np.ndarray, "B T"]:
    """Numbers what each token of the page shows: its glyph, or a class for headers, one for each other token."""
    form, contexts = reuse.scene.form, reuse.scene.contexts
    page, cells = reuse.scene.page, form.cells(LEGENDS)
    glyphs = contexts.page_glyph
    header = int(glyphs.max()) + 1
    with_header = np.concatenate([np.full((*glyphs.shape[:2], 1), header), glyphs], axis=2).reshape(len(contexts), -1)
    numbers = np.tile(header + 1 + np.arange(page.stop - page.start), (len(contexts), 1))
    numbers[:, cells.start - page.start : cells.stop - page.start] = with_header
    _, dense = np.unique(numbers, return_inverse=True)
    return dense.reshape(numbers.shape).astype(np.int32)


def class_means(reuse: PageReuse) -> KV:
    """The deficit with each token's replaced by the mean over the tokens of its page that show the same."""
    classes = page_classes(reuse)
    mean = functools.partial(_class_means, count=int(classes.max()) + 1)
    return {name: mean(value, jnp.asarray(classes)) for name, value in reuse.delta.items()}


@functools.partial(jax.jit, static_argnames=("count",))
def _class_means(delta: Float[Array, "L B T K H"], classes: Int[Array, "B T"], count: int) -> Float[Array, "L B T K H"]:
    belongs = jax.nn.one_hot(classes, count, dtype=jnp.float32)
    share = belongs / jnp.maximum(belongs.sum(axis=1, keepdims=True), 1.0)
    high = jax.lax.Precision.HIGHEST
    means = jnp.einsum("btc,lbtkh->lbckh", share, delta, precision=high)
    return jnp.einsum("btc,lbckh->lbtkh", belongs, means, precision=high)


@jax.jit
def explained(delta: Mapping[str, Array], means: Mapping[str, Array]) -> dict[str, Float[Array, "B L"]]:
    """Computes the share of ‖Δ‖² that the means explain, by context and layer; 0 where Δ is 0."""
    energy = lambda value: jnp.square(value).sum(axis=(2, 3, 4))
    found = {}
    for name, value in delta.items():
        whole, left = energy(value), energy(value - means[name])
        found[name] = jnp.where(whole > 0, 1 - left / jnp.where(whole > 0, whole, 1.0), 0.0).T
    return found


def _class_mean(shop: Workshop) -> Made:
    """A diagnostic, no way to serve: it is told which tokens show the same glyph. The means are what is kept."""
    reuse, costs = shop.reuse, shop.reuse.costs
    means, classes = class_means(reuse), page_classes(reuse)
    kinds = float(np.mean([len(np.unique(row)) for row in classes]))
    served = {name: jnp.asarray(reuse.page.kv[name]) + value for name, value in means.items()}
    per_token = costs.numbers // costs.tokens
    cost = ArmCost(
        stored=NUMBER_BITS * kinds * per_token + 8 * costs.tokens,
        serving=costs.rotation + costs.numbers,
        forming=costs.alone + costs.prefill + costs.numbers,
    )
    return Made(cost, shop.served(served))
