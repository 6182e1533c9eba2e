"""Repairs that store something of KV that a prefill in context left: a patch, fewer bits, or a lower rank.

They read `splice.recorded` when they form what is kept, and nothing of it when they serve. A budget is bytes kept for
one antecedent: `kv_bytes`, or a share of the chunk's KV in the cache's dtype. FLOPs are those of serving alone.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import KVLayout, flatten_heads, to_engine
from ..core.ops import jitted_apply
from ..errors import InputError, RankError
from .repair_budget import RepairBudget, patch_numbers, rank_of_bytes
from .spliced_cache import (
    AnyArray,
    RepairBytes,
    Repaired,
    SplicedCache,
    blind_bytes,
    canonical_of,
    check_splice,
    kv_itemsize,
    live_tokens,
    required,
    token_layer_bytes,
    untouched,
    with_flops,
    write_slots,
)

BITS = (1, 2, 3, 4, 6, 8)
"""Bits that `quantised` keeps numbers in."""
GROUP = 32
"""Numbers that share a scale and a least value, as in KIVI (Liu et al. 2024, section 4)."""
SCALE_BYTES = 4
"""Bytes of a scale and a least value, 16 bits each."""
SHADOW_CHUNK = 8
"""Tokens of one landmark in ShadowKV (Sun et al. 2025, section 4.2)."""


def patched(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, *, rank: int | None = None
) -> Repaired:
    """Adds the low-rank patch of the deficit, R(p) · (canonical + u v): this library's method.

    Kamera eq. 1; the patch is formed by a full SVD of recorded − canonical in the phase-free frame.

    Args:
      budget: bytes of the patch's factors; the largest rank that fits is taken, and none if none fits.
      rank: of every channel, in place of the budget's.

    Raises:
      InputError: no recorded KV, or a budget in tokens or by layer. RankError: the rank is out of range. ShapeError,
        LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout = backbone.layout
    allowed = _allowed_bytes(layout, splice, budget, "patched")
    recorded = required(splice, "recorded", "patched", "KV that an earlier prefill behind the same antecedent left")
    tokens = splice.slots.shape[1]
    rank = rank_of_bytes(layout, allowed, tokens, kv_itemsize(splice)) if rank is None else rank
    if rank < 0 or rank > max(min(tokens, channel.features) for channel in layout.channels):
        raise RankError(f"patched.rank: got {rank}; expected 0 to the rank of {tokens} tokens' KV")
    if rank == 0:
        return untouched(layout, splice)

    # Where factors would take more than the deficit itself, that is kept whole: all its directions.
    ranks = {}
    for channel in layout.channels:
        whole = rank * (tokens + channel.features) >= tokens * channel.features
        ranks[channel.name] = min(tokens, channel.features) if whole else rank
    factors = _deficit_factors(dict(recorded), canonical_of(layout, splice), live_tokens(splice), tuple(ranks.items()))
    stored = patch_numbers(layout, rank, tokens) * layout.layers * kv_itemsize(splice)
    blind = blind_bytes(layout, splice)
    bytes = blind._replace(stored=stored, moved=blind.moved + stored)

    def serve(own: SplicedCache) -> Repaired:
        kv = jitted_apply(layout, canonical_of(layout, own), factors, own.tokens.positions, jnp.zeros((), jnp.int32))
        return _written(layout, own, kv, bytes)

    return with_flops(serve(splice), serve, splice, backbone, ("patched", tuple(ranks.items())))


@functools.partial(jax.jit, static_argnames=("ranks",))
def _deficit_factors(
    recorded: KV, canonical: KV, live: Array, ranks: tuple[tuple[str, int], ...]
) -> dict[str, tuple[Array, Array]]:
    factors = {}
    for name, rank in ranks:
        delta = flatten_heads(recorded[name].astype(jnp.float32) - canonical[name])
        factors[name] = factorise(jnp.where(live[..., None], delta, 0.0), rank, method="exact")
    return factors


def quantised(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    bits: int | None = None,
    group: int = GROUP,
) -> Repaired:
    """Serves the recorded KV itself in few bits, in the canonical's place.

    Keys by feature in groups of tokens, before rotation, and all else by token in groups of features, each group with
    a least value and a scale of 16 bits. Source: KIVI (Liu et al. 2024, arXiv 2402.02750), section 3 and 4; its
    residual of recent tokens in full precision has no counterpart, because a chunk does not grow.

    Args:
      budget: bytes of the quantised KV with its scales; the most bits that fit are taken.
      bits: in place of the budget's.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, or too small for 1 bit; unknown bits. ShapeError,
        LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout = backbone.layout
    allowed = _allowed_bytes(layout, splice, budget, "quantised")
    recorded = required(splice, "recorded", "quantised", "KV that an earlier prefill behind the same antecedent left")
    sizes = {number: quantised_bytes(layout, splice.slots.shape[1], number, group) for number in BITS}
    if bits is None:
        bits = max((number for number in BITS if sizes[number] <= allowed), default=0)
    if bits not in BITS or group < 1:
        found = f"{allowed} bytes, bits {bits}, group {group}"
        raise InputError(f"quantised: got {found}; expected bits of {BITS}, and at least {sizes[1]} bytes")

    codes = {}
    for channel in layout.channels:
        by_token = not channel.rotates
        codes[channel.name] = quantise_groups(jnp.asarray(recorded[channel.name]), bits, group, by_token=by_token)
    bytes = RepairBytes(stored=sizes[bits], moved=sizes[bits])

    def serve(own: SplicedCache) -> Repaired:
        kv = {}
        for channel in layout.channels:
            shape = tuple(recorded[channel.name].shape)
            kv[channel.name] = restore_groups(codes[channel.name], shape, by_token=not channel.rotates)
        return _written(layout, own, to_engine(layout, kv, own.tokens.positions, 0), bytes)

    return with_flops(serve(splice), serve, splice, backbone, ("quantised", bits, group))


def quantised_bytes(layout: KVLayout, tokens: int, bits: int, group: int = GROUP) -> int:
    """Counts the bytes of a chunk's KV in few bits, with its scales; see `quantised`."""
    total = 0
    for channel in layout.channels:
        along, across = (tokens, channel.features) if channel.rotates else (channel.features, tokens)
        total += -(-bits * tokens * channel.features // 8) + SCALE_BYTES * across * -(-along // group)
    return total * layout.layers


@functools.partial(jax.jit, static_argnames=("bits", "group", "by_token"))
def quantise_groups(
    value: Float[Array, "L B T K H"], bits: int, group: int, by_token: bool
) -> tuple[Array, Array, Array]:
    """Rounds numbers to 2^bits levels between each group's least and largest.

    Groups run over tokens of one feature, or with `by_token` over features of one token; the last may be shorter.

    Returns:
      Codes uint8 [L,B,groups,group,rest], and least values and scales bfloat16 [L,B,groups,1,rest].
    """
    flat = flatten_heads(value)
    flat = jnp.swapaxes(flat, -1, -2) if by_token else flat
    L, B, along, across = flat.shape
    short = -along % group
    # Repeating the last number leaves its group's extremes.
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, short), (0, 0)), mode="edge")
    grouped = flat.reshape(L, B, (along + short) // group, group, across).astype(jnp.float32)
    least = grouped.min(3, keepdims=True).astype(jnp.bfloat16)
    scale = ((grouped.max(3, keepdims=True) - least) / (2**bits - 1)).astype(jnp.bfloat16)
    safe = jnp.where(scale > 0, scale, 1).astype(jnp.float32)
    codes = jnp.clip(jnp.round((grouped - least) / safe), 0, 2**bits - 1).astype(jnp.uint8)
    return codes, least, scale


@functools.partial(jax.jit, static_argnames=("shape", "by_token"))
def restore_groups(
    code: tuple[Array, Array, Array], shape: tuple[int, ...], by_token: bool
) -> Float[Array, "L B T K H"]:
    """Restores numbers [L,B,T,K,H] in float32 from `quantise_groups`."""
    codes, least, scale = code
    L, B, T, K, H = shape
    flat = (codes.astype(jnp.float32) * scale + least).reshape(L, B, -1, codes.shape[-1])
    flat = jnp.swapaxes(flat[:, :, : K * H], -1, -2) if by_token else flat[:, :, :T]
    return flat.reshape(shape)


def low_rank(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    rank: int | None = None,
    channels: tuple[str, ...] | None = None,
) -> Repaired:
    """Serves the recorded KV itself in a lower rank, in the canonical's place: truncated SVD in the phase-free frame.

    Args:
      budget: bytes of the factors, and of the channels that are kept whole; the largest rank that fits is taken.
      rank: in place of the budget's.
      channels: those that are reduced; None: all.

    Raises:
      InputError: no recorded KV, or a budget in tokens or by layer. RankError: no rank fits, or it is out of range.
        LayoutError: an unknown channel. ShapeError, DtypeError: the splice does not match the backbone.
    """
    layout = backbone.layout
    names = layout.names if channels is None else channels
    return _reduced(backbone, splice, budget, rank, names, "low_rank", shadow=False)


def shadowkv(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, *, rank: int | None = None
) -> Repaired:
    """Serves the recorded KV with keys of low rank, landmarks' outliers whole, and whole values.

    Source: ShadowKV (Sun et al. 2025, arXiv 2410.21465), sections 3 and 4: keys before rotation are low in rank;
    values stay as they are (there on the host); of chunks of 8 tokens, whose landmark is the mean of their rotated
    keys, those whose keys are least like it are outliers and keep their keys (48 of some 15 000 there; here one of
    each 64, at least one). Reading only the chunks that a query's landmarks choose saves bandwidth and no quality, and
    is left out, which favours this method. Kamera's Table 6 has it as "low-rank-K reconstruction (ShadowKV-style)".

    Args:
      budget: bytes of factors, outliers, landmarks and values; the largest rank that fits is taken.
      rank: of the keys, in place of the budget's.

    Raises:
      InputError, RankError, ShapeError, LayoutError, DtypeError: as `low_rank`.
    """
    names = tuple(channel.name for channel in backbone.layout.channels if channel.rotates)
    return _reduced(backbone, splice, budget, rank, names, "shadowkv", shadow=True)


def _reduced(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    rank: int | None,
    names: tuple[str, ...],
    method: str,
    shadow: bool,
) -> Repaired:
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = _allowed_bytes(layout, splice, budget, method)
    recorded = required(splice, "recorded", method, "KV that an earlier prefill behind the same antecedent left")
    widths = {name: layout.channel(name).features for name in names}
    itemsize = kv_itemsize(splice)
    blocks = -(-tokens // SHADOW_CHUNK)
    outliers = max(1, blocks // 64) if shadow else 0

    def size(number: int) -> int:
        kept = sum(channel.features for channel in layout.channels if channel.name not in names) * tokens
        for width in widths.values():
            kept += min(number * (tokens + width), tokens * width)
            # Outliers keep their keys, and every chunk its landmark.
            kept += (min(tokens, outliers * SHADOW_CHUNK) + blocks) * width if shadow else 0
        return kept * layout.layers * itemsize

    highest = max(min(tokens, width) for width in widths.values())
    if rank is None:
        rank = max((number for number in range(1, highest + 1) if size(number) <= allowed), default=0)
    if not 1 <= rank <= highest:
        raise RankError(f"{method}.rank: got {rank} for {allowed} bytes; expected 1 to {highest}, from {size(1)} bytes")

    live = live_tokens(splice)
    factors = _kv_factors(dict(recorded), live, tuple((name, min(rank, tokens, widths[name])) for name in names))
    whole = {name: jnp.asarray(value) for name, value in recorded.items() if name not in names}
    kept = None
    if shadow:
        rotated = to_engine(layout, recorded, splice.tokens.positions, 0)
        kept = {name: _outlier_tokens(rotated[name], live, outliers) for name in names}
    bytes = RepairBytes(stored=size(rank), moved=size(rank))
    originals = {name: jnp.asarray(recorded[name]) for name in names}

    def serve(own: SplicedCache) -> Repaired:
        kv: dict[str, Any] = dict(whole)
        for name, (u, v) in factors.items():
            value = jnp.matmul(u, v).reshape(originals[name].shape)
            kv[name] = value if kept is None else jnp.where(kept[name][..., None, None], originals[name], value)
        return _written(layout, own, to_engine(layout, kv, own.tokens.positions, 0), bytes)

    return with_flops(serve(splice), serve, splice, backbone, (method, rank, names))


@functools.partial(jax.jit, static_argnames=("ranks",))
def _kv_factors(recorded: KV, live: Array, ranks: tuple[tuple[str, int], ...]) -> dict[str, tuple[Array, Array]]:
    factors = {}
    for name, rank in ranks:
        flat = jnp.where(live[..., None], flatten_heads(recorded[name].astype(jnp.float32)), 0.0)
        factors[name] = factorise(flat, rank, method="exact")
    return factors


@functools.partial(jax.jit, static_argnames=("outliers",))
def _outlier_tokens(keys: Float[Array, "L B T K H"], live: Array, outliers: int) -> Array:
    """Marks the tokens [L,B,T] of the chunks whose keys are least like their landmark, by their least cosine."""
    L, B, T, K, H = keys.shape
    short = -T % SHADOW_CHUNK
    there = jnp.pad(live, ((0, 0), (0, short))).reshape(B, -1, SHADOW_CHUNK)
    padded = jnp.pad(keys, ((0, 0), (0, 0), (0, short), (0, 0), (0, 0))).reshape(L, B, -1, SHADOW_CHUNK, K, H)
    weight = there[None, ..., None, None]
    landmark = (padded * weight).sum(3, keepdims=True) / jnp.maximum(weight.sum(3, keepdims=True), 1)
    norms = jnp.linalg.norm(padded, axis=-1) * jnp.linalg.norm(landmark, axis=-1)
    cosine = (padded * landmark).sum(-1) / jnp.maximum(norms, 1e-9)
    least = jnp.where(there[None, ..., None], cosine, 1.0).min((3, 4))
    _, index = jax.lax.top_k(-least, min(outliers, least.shape[-1]))
    marked = jnp.zeros(least.shape, bool)
    marked = marked.at[jnp.arange(L)[:, None, None], jnp.arange(B)[:, None], index].set(True)
    return jnp.repeat(marked, SHADOW_CHUNK, axis=-1)[..., :T]


def _allowed_bytes(layout: KVLayout, splice: SplicedCache, budget: RepairBudget | float, method: str) -> int:
    """Returns the bytes per row of a budget that is given in bytes, or as a share of the chunk's KV."""
    check_splice(layout, splice)
    budget = RepairBudget.of(budget)
    if splice.chunks is not None:
        raise InputError(f"{method}.chunks: got {splice.chunks}; expected a splice of one chunk")
    if budget.kv_bytes is not None:
        return budget.kv_bytes
    if budget.share is None:
        raise InputError(f"{method}.budget: got {budget}; expected bytes, or a share of the chunk's KV")
    return int(budget.share * token_layer_bytes(layout, splice) * splice.slots.shape[1] * layout.layers)


def _written(layout: KVLayout, splice: SplicedCache, kv: Mapping[str, AnyArray], bytes: RepairBytes) -> Repaired:
    """Returns the cache with engine-frame KV at the splice's slots; no token was run."""
    cache = write_slots(dict(splice.cache), jnp.asarray(splice.slots), dict(kv), live_tokens(splice))
    return dataclasses.replace(untouched(layout, splice), cache=cache, bytes=bytes)
