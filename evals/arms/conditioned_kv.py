"""Arms that keep the page's conditioned KV smaller: in fewer bits, or low in rank.

Axis letters: B contexts, T tokens of the page, L layers, F features of a channel, M rank.
"""

import functools

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

    Both in 16 bits, over all tokens of the chunk. KIVI (arXiv 2402.02750) does so with keys, by groups of tokens; here
    values are kept the same way, which costs the fewest bytes. In 16 bits it is the numbers themselves, as bfloat16.
    """
    page, costs = factory.page, factory.costs
    if bits == NUMBER_BITS:
        whole = {name: _rounded(jnp.asarray(value)) for name, value in page.page_conditioned.items()}
        return AlternativeArm(costs.of_conditioned(bits * costs.numbers, 0), page.served(whole))
    served = {name: in_few_bits(jnp.asarray(value), bits) for name, value in page.page_conditioned.items()}
    groups = costs.numbers // costs.tokens
    cost = costs.of_conditioned(bits * costs.numbers + SCALE_AND_ZERO * groups, 2 * costs.numbers)
    return AlternativeArm(cost, page.served(served))


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
    served, numbers, product = dict(page.page_conditioned), 0, 0
    for channel in page.page.layout.channels:
        name, own = channel.name, min(rank, channel.features, costs.tokens)
        if name not in names:
            numbers += costs.tokens * channel.features
            continue
        u, v = factory.singular[name]
        served[name] = _product(u[..., :own], v[..., :own, :]).reshape(page.page_conditioned[name].shape)
        numbers += own * (costs.tokens + channel.features)
        product += 2 * own * costs.tokens * channel.features

    layers = costs.layout.layers
    cost = costs.of_conditioned(NUMBER_BITS * numbers * layers, product * layers, names)
    return AlternativeArm(cost, page.served(served))


@jax.jit
def _product(u: Float[Array, "L B T M"], v: Float[Array, "L B M F"]) -> Float[Array, "L B T F"]:
    return jnp.einsum("lbtm,lbmf->lbtf", u, v, precision=jax.lax.Precision.HIGHEST)


def _low_rank_keys(factory: ArmFactory, names: tuple[str, ...], rank: int) -> AlternativeArm:
    """Returns the canonical with the conditioned keys in its keys' place, low in rank: what Kamera's Table 6 may
    have measured.

    It calls its row "low-rank-K reconstruction (ShadowKV-style)" and says no more. This reading stores the bytes of a
    patch of keys alone; the values stay as they were.
    """
    page, costs = factory.page, factory.costs
    served, numbers, product, whole, values = dict(page.page.kv), 0, 0, 0, 0
    for channel in page.page.layout.channels:
        whole += channel.features
        if channel.name not in names:
            values += channel.features
            continue

        own = min(rank, channel.features, costs.tokens)
        u, v = factory.singular[channel.name]
        served[channel.name] = _product(u[..., :own], v[..., :own, :]).reshape(served[channel.name].shape)
        numbers += own * (costs.tokens + channel.features)
        product += 2 * own * costs.tokens * channel.features

    layers = costs.layout.layers
    cost = ArmCost(
        stored=NUMBER_BITS * numbers * layers,
        canonical=values / whole,
        serving=costs.rotation + product * layers,
        forming=costs.alone + costs.prefill + costs.factorising(names),
    )
    return AlternativeArm(cost, page.served({name: jnp.asarray(value) for name, value in served.items()}))
