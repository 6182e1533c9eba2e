"""Methods that store something of KV that a prefill in context left, in the canonical's place: fewer bits, lower rank.

They read `splice.recorded` when they form what is kept, and nothing of it when they serve. A budget is bytes kept for
one antecedent: `kv_bytes`, or a share of the chunk's KV. FLOPs are those of serving alone.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import flatten_heads, to_engine
from ..core.few_bits import GROUP
from ..errors import RankError
from .repair_budget import NUMBER_BYTES, RepairBudget
from .spliced_cache import (
    RepairBytes,
    Repaired,
    SplicedCache,
    factorising_flops,
    live_tokens,
    recorded_of,
    with_flops,
)
from .stored_kv import (
    Axes,
    KVPrecision,
    Precision,
    allowed_bytes,
    decode_kv_rows,
    encode_kv_rows,
    engine_written,
    most_bits,
    phase_free_written,
)

SHADOW_CHUNK = 8
"""Tokens of one landmark in ShadowKV (Sun et al. 2025, section 4.2)."""


def quantised(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float = 1.0,
    *,
    bits: Precision | None = None,
    axes: Axes | None = None,
) -> Repaired:
    """Serves the recorded KV itself in few bits, in the canonical's place.

    Source: KIVI (Liu et al. 2024, arXiv 2402.02750), sections 3 and 4: keys by feature in groups of tokens, before
    rotation, and all else by token in groups of features; its residual of recent tokens in full precision has no
    counterpart, because a chunk does not grow. PolyKV (arXiv 2604.24971) keeps "k8v3", KV-AdaQuant (arXiv 2502.15075)
    "k4v2".

    Args:
      budget: bytes of the quantised KV with its scales, where there are no bits: the most that fit, keys and values
        alike.
      bits: of every channel, 1 to 8, each feature with a range over all tokens; 16: bfloat16; a word such as "k4v2g32":
        KIVI's groups. Hybrid models: 16.
      axes: in place of those that follow from bits, in groups of 32: "token" keeps keys by token too, which models with
        outlier features do not bear.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, or too small for 1 bit; unknown bits. LayoutError: a
        hybrid model in fewer bits than 16. ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    precision = None if bits is None else KVPrecision.of(bits)
    if precision is not None and axes is not None:
        precision = dataclasses.replace(precision, axes=axes, group=GROUP)
    hybrid = precision is not None and precision.decoding == 0
    allowed = allowed_bytes(layout, splice, budget, "quantised", hybrid=hybrid)
    recorded = recorded_of(splice, "quantised")
    if precision is None:
        precision = most_bits(layout, allowed, tokens, "quantised", KVPrecision.of(1))

    stored = encode_kv_rows(layout, recorded, precision, splice.length)
    size = precision.nbytes(layout, tokens)
    bytes = RepairBytes(stored=size, moved=size)

    def serve(own: SplicedCache) -> Repaired:
        return phase_free_written(layout, own, decode_kv_rows(stored), bytes)

    decoding = precision.decoding * layout.numbers * tokens
    return with_flops(serve(splice), serve, splice, backbone, ("quantised", precision), decoding)


def low_rank(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float = 1.0,
    *,
    rank: int | None = None,
    channels: str | None = None,
) -> Repaired:
    """Serves the recorded KV itself in a lower rank, in the canonical's place: truncated SVD in the phase-free frame.

    Args:
      budget: bytes of the factors, and of the channels that are kept whole; the largest rank that fits is taken.
      rank: in place of the budget's.
      channels: the only channel that is reduced; None: all.

    Raises:
      InputError: no recorded KV, or a budget in tokens or by layer. RankError: no rank fits, or it is out of range.
        LayoutError: an unknown channel. ShapeError, DtypeError: the splice does not match the backbone.
    """
    layout = backbone.layout
    names = layout.names if channels is None else (layout.channel(channels).name,)
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
    recorded = recorded_of(splice, method)
    widths = {name: layout.channel(name).features for name in names}
    blocks = -(-tokens // SHADOW_CHUNK)
    outliers = max(1, blocks // 64) if shadow else 0

    def size(number: int) -> int:
        kept = sum(channel.features for channel in layout.channels if channel.name not in names) * tokens
        for width in widths.values():
            kept += min(number * (tokens + width), tokens * width)
            # Outliers keep their keys, and every chunk its landmark.
            kept += (min(tokens, outliers * SHADOW_CHUNK) + blocks) * width if shadow else 0
        return kept * layout.layers * NUMBER_BYTES

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

    repaired = with_flops(serve(splice), serve, splice, backbone, (method, rank, names))
    return dataclasses.replace(repaired, forming_flops=factorising_flops(layout, tokens, names))


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
