"""Repairs that store something of KV that a prefill in context left: a patch, fewer bits, or a lower rank.

They read `splice.recorded` when they form what is kept, and nothing of it when they serve. A budget is bytes kept for
one antecedent: `kv_bytes`, or a share of the chunk's KV in the cache's dtype. FLOPs are those of serving alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import flatten_heads, to_engine
from ..core.encoding import GROUP
from ..core.ops import jitted_apply
from ..errors import InputError, RankError
from .repair_budget import RepairBudget, patch_numbers, rank_of_bytes
from .spliced_cache import (
    RepairBytes,
    Repaired,
    SplicedCache,
    blind_bytes,
    canonical_of,
    kv_itemsize,
    live_tokens,
    required,
    untouched,
    with_flops,
)
from .stored_kv import (
    WHOLE,
    Axes,
    KVPrecision,
    allowed_bytes,
    check_fit,
    decode_kv_rows,
    encode_kv_rows,
    engine_written,
    most_bits,
    phase_free_written,
)

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
    allowed = allowed_bytes(layout, splice, budget, "patched")
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
        return engine_written(layout, own, kv, bytes)

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
    keys: int | None = None,
    values: int | None = None,
    group: int | None = GROUP,
    axes: Axes = "kivi",
) -> Repaired:
    """Serves the recorded KV itself in few bits, in the canonical's place.

    Keys by feature in groups of tokens, before rotation, and all else by token in groups of features, each group with
    a least value and a scale of 16 bits. Source: KIVI (Liu et al. 2024, arXiv 2402.02750), section 3 and 4; its
    residual of recent tokens in full precision has no counterpart, because a chunk does not grow.

    Args:
      budget: bytes of the quantised KV with its scales; the most bits that fit are taken, keys and values alike.
      bits: in place of the budget's; 1 to 8, or 16: bfloat16.
      keys, values: likewise, of keys (channels that rotate) and of the others.
      group: numbers that share a scale; None: all tokens of a feature, or all features of a token.
      axes: "kivi", or all channels by "token" or by "feature".

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, or too small for 1 bit; unknown bits or axes, or keys
        without values. ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "quantised")
    recorded = required(splice, "recorded", "quantised", "KV that an earlier prefill behind the same antecedent left")
    if (keys is None) != (values is None) or (bits is not None and keys is not None):
        found = f"bits {bits}, keys {keys}, values {values}"
        raise InputError(f"quantised: got {found}; expected bits, or keys and values, or none of them")
    if bits is None and keys is None:
        precision = most_bits(layout, allowed, tokens, "quantised", KVPrecision(group=group, axes=axes))
    else:
        keys, values = (bits, bits) if bits is not None else (keys, values)
        precision = KVPrecision(keys, values, group, axes)  # pyright: ignore[reportArgumentType]

    stored = encode_kv_rows(layout, recorded, precision, splice.length)
    size = precision.nbytes(layout, tokens)
    bytes = RepairBytes(stored=size, moved=size)

    def serve(own: SplicedCache) -> Repaired:
        return phase_free_written(layout, own, decode_kv_rows(stored), bytes)

    return with_flops(serve(splice), serve, splice, backbone, ("quantised", precision))


def sixteen_bits(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Serves the recorded KV in bfloat16: what a cache of every version of a chunk keeps.

    Raises:
      InputError: no recorded KV, or a budget in tokens or by layer, or too small. As `quantised`.
    """
    return _of_precision(backbone, splice, budget, "sixteen_bits", WHOLE, WHOLE)


def polykv(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Serves the recorded KV with keys in 8 bits and values in 3.

    Source: PolyKV (arXiv 2604.24971), its bits; the pool that agents share has no counterpart, and groups are KIVI's.

    Raises:
      InputError: no recorded KV, or a budget in tokens or by layer, or too small. As `quantised`.
    """
    return _of_precision(backbone, splice, budget, "polykv", 8, 3)


def kv_adaquant(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Serves the recorded KV with keys in 4 bits and values in 2.

    Source: KV-AdaQuant (arXiv 2502.15075), the split that it finds best; groups are KIVI's.

    Raises:
      InputError: no recorded KV, or a budget in tokens or by layer, or too small. As `quantised`.
    """
    return _of_precision(backbone, splice, budget, "kv_adaquant", 4, 2)


def _of_precision(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, method: str, keys: int, values: int
) -> Repaired:
    allowed = allowed_bytes(backbone.layout, splice, budget, method)
    check_fit(KVPrecision(keys, values).nbytes(backbone.layout, splice.slots.shape[1]), allowed, method)
    return quantised(backbone, splice, budget, keys=keys, values=values)


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
    allowed = allowed_bytes(layout, splice, budget, method)
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
        return engine_written(layout, own, to_engine(layout, kv, own.tokens.positions, 0), bytes)

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
