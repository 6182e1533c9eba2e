"""Arms that keep the page's conditioned KV smaller: in fewer bits, or low in rank.

Axis letters: B contexts, T tokens of the page, L layers, F features of a channel, M rank.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import kvpatch_jax as kvp

from ..results.costs import NUMBER_BITS, ArmCost
from ..rules import RULES
from .arm import AlternativeArm, ArmFactory, ArmMaker

SCALE_AND_ZERO = 2 * NUMBER_BITS
"""Bits beside each group of numbers that are kept in fewer bits."""


def conditioned_makers(layout: kvp.KVLayout) -> dict[str, ArmMaker]:
    """Lists the forms of the conditioned KV: fewer bits, truncated SVD, and low-rank keys as ShadowKV keeps them."""
    arms = RULES.arms
    keys = tuple(channel.name for channel in layout.channels if channel.rotates)
    makers: dict[str, ArmMaker] = {
        f"quantised.bits={bits}": functools.partial(_quantised, bits=bits) for bits in arms.bits
    }
    for rank in arms.ranks:
        makers[f"svd.rank={rank}"] = functools.partial(make_truncated, names=layout.names, rank=rank)
    for rank in arms.byte_ranks:
        makers[f"shadowkv.rank={rank}"] = functools.partial(make_truncated, names=keys, rank=rank)
    for rank in arms.byte_ranks:
        makers[f"shadowkv.keys_alone.rank={rank}"] = functools.partial(_low_rank_keys, names=keys, rank=rank)
    return makers


def _quantised(factory: ArmFactory, bits: int) -> AlternativeArm:
    """Returns the conditioned KV in `bits` bits: each feature of each layer and head has a scale and a least value.

    Both in 16 bits, over all tokens of the chunk, or the rows of a transition's map or state. KIVI (arXiv 2402.02750)
    does so with keys, by groups of tokens; here values are kept the same way, which costs the fewest bytes. In 16 bits
    it is the numbers themselves, as bfloat16.
    """
    page, costs = factory.page, factory.costs
    kv, stored, bringing_back = {}, 0, 0
    for name, value in page.page_conditioned.items():
        numbers, rows = costs.numbers_of(name), costs.layout.channel(name).rows_for(costs.tokens)
        # A range over the few inputs of a convolution's tail would take what it saves.
        if bits == NUMBER_BITS or name == "tail":
            kv[name] = _rounded(jnp.asarray(value))
            stored += NUMBER_BITS * numbers
        else:
            # Two FLOPs a number: its product with the scale, and the least value added.
            kv[name] = in_few_bits(jnp.asarray(value), bits=bits)
            stored += bits * numbers + SCALE_AND_ZERO * numbers // rows
            bringing_back += 2 * numbers
    return AlternativeArm(costs.of_conditioned(stored, bringing_back), page.served(kv))


def _rounded(value: Array) -> Array:
    """Rounds to bfloat16."""
    return value.astype(jnp.bfloat16).astype(value.dtype)


@functools.partial(jax.jit, static_argnames=("bits",))
def in_few_bits(value: Float[Array, "L B T K H"], bits: int) -> Float[Array, "L B T K H"]:
    """Rounds numbers to `bits` bits between the least and the largest over the tokens."""
    least, most = value.min(axis=2, keepdims=True), value.max(axis=2, keepdims=True)
    least, scale = _rounded(least), _rounded((most - least) / (2**bits - 1))
    safe = jnp.where(scale > 0, scale, 1.0)
    return least + scale * jnp.clip(jnp.round((value - least) / safe), 0, 2**bits - 1)


def make_truncated(factory: ArmFactory, names: tuple[str, ...], rank: int) -> AlternativeArm:
    """Returns the conditioned KV of which some channels are kept as thin factors and the others whole.

    All channels: truncated SVD, at the bytes of a patch of this rank. The keys alone: as ShadowKV (arXiv 2410.21465,
    section 3) keeps them, low in rank before their rotation, with whole values; its landmarks and outliers, which
    choose what is read of a long cache, have no part here.
    """
    page, costs = factory.page, factory.costs
    reduced, numbers, product = _reduced(factory, names, rank)
    for channel in page.page.layout.channels:
        if channel.name not in names:
            numbers += costs.numbers_of(channel.name)
    cost = costs.of_conditioned(NUMBER_BITS * numbers, product, names)
    return AlternativeArm(cost, page.served({**page.page_conditioned, **reduced}))


def _low_rank_keys(factory: ArmFactory, names: tuple[str, ...], rank: int) -> AlternativeArm:
    """Returns the canonical with the conditioned keys in its keys' place, low in rank: what Kamera's Table 6 may
    have measured.

    It calls its row "low-rank-K reconstruction (ShadowKV-style)" and says no more. This reading stores the bytes of a
    patch of keys alone; the values stay as they were.
    """
    page, costs = factory.page, factory.costs
    reduced, numbers, product = _reduced(factory, names, rank)
    features = {channel.name: channel.features for channel in page.page.layout.channels}
    values = sum(width for name, width in features.items() if name not in names)
    cost = ArmCost(
        stored=NUMBER_BITS * numbers,
        canonical=values / sum(features.values()),
        serving=costs.rotation + product,
        forming=costs.alone + costs.prefill + costs.factorising(names),
    )
    kv: dict[str, Any] = {**page.page.kv, **reduced}
    return AlternativeArm(cost, page.served(kv))


def _reduced(factory: ArmFactory, names: tuple[str, ...], rank: int) -> tuple[dict[str, Array], int, int]:
    """Returns channels of the conditioned KV low in rank, how many numbers are kept of them, FLOPs of the product."""
    costs, reduced, numbers, product = factory.costs, {}, 0, 0
    for name in names:
        channel, depth = costs.layout.channel(name), costs.layout.depth(name)
        width, rows = channel.features, channel.rows_for(costs.tokens)
        # A narrow channel or a short page has no more directions than this.
        own = min(rank, width, rows)
        u, v = factory.singular[name]
        reduced[name] = _product(u[..., :own], v[..., :own, :]).reshape(factory.page.page_conditioned[name].shape)
        numbers += own * (rows + width) * depth
        product += 2 * own * rows * width * depth
    return reduced, numbers, product


@jax.jit
def _product(u: Float[Array, "L B T M"], v: Float[Array, "L B M F"]) -> Float[Array, "L B T F"]:
    return jnp.einsum("lbtm,lbmf->lbtf", u, v, precision=jax.lax.Precision.HIGHEST)
