"""Corrections in few bits, beside a base in few bits: patches, differences without low rank, and sparse ones.

A deficit is taken against the *decoded* base, so that a correction mends the base's rounding too. A budget is bytes
kept for one antecedent; the base is kept once for all and counts in `RepairBytes.canonical` or `shared`.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import KVEncoding, KVLayout, Leaf, flatten_heads, value_of
from ..core.encoding import GROUP
from ..core.ops import factor_bits, jitted_apply, stored
from ..errors import InputError, RankError
from ..patching.byte_budget import choose_directions, direction_bytes
from .repair_budget import RepairBudget
from .spliced_cache import Repaired, SplicedCache, live_tokens, required, with_flops
from .stored_kv import (
    WHOLE,
    Axes,
    Base,
    KVPrecision,
    allowed_bytes,
    array_bytes,
    decode_kv_rows,
    encode_kv_rows,
    encode_rows,
    engine_written,
    most_bits,
    phase_free_written,
    stored_base,
)

Encoding = KVPrecision | KVEncoding | str | int | None
"""Of a base: a precision, an encoding or its word, bits; None: the cache's dtype."""
Ranks = Literal["uniform", "by_energy"]
"""One rank of all layers and channels, or a rank for each, by the energy of directions."""
RECORDED = "KV that an earlier prefill behind the same antecedent left"
BLOCK_TOKENS = 16
"""Tokens of a block of TokenDance: a page of its engine's cache."""


def encoded_patch(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    encoding: Encoding = "k4v4",
    base: Base = "canonical",
    rank: int | None = None,
    dtype: str = "int4",
    ranks: Ranks = "uniform",
) -> Repaired:
    """Adds a low-rank patch in few bits to an encoded base: this library's method at the bytes of its encodings.

    The deficit is taken against the decoded base, factorised by a full SVD, and its factors are rounded to `dtype`.

    Args:
      budget: bytes of the factors; the largest rank that fits is taken, and none if none fits.
      encoding: of the base, such as "k4v4", "k6v6g64" or 16 (bfloat16); None: the cache's dtype.
      base: "canonical"; "mean" or "first" of `splice.others`.
      rank: of every channel, in place of the budget's; 0: the decoded base alone.
      dtype: of the factors, as `form_patch` takes it: "int2" to "int8", "bfloat16", …
      ranks: "uniform": one rank; "by_energy": a rank for each layer and channel of each row, as a `ByteBudget` chooses,
        with its table in the bytes, which are the rows' mean. Not inside a trace.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, another base, encoding or dtype, no KV of others, a
        rank together with ranks by energy, or these inside a trace. RankError: the rank is out of range. ShapeError,
        LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "encoded_patch")
    recorded = required(splice, "recorded", "encoded_patch", RECORDED)
    _check_factor_dtype(dtype)
    if ranks not in get_args(Ranks) or (ranks == "by_energy" and rank is not None):
        raise InputError(
            f"encoded_patch.ranks: got {ranks!r:.80}, rank {rank}; expected 'uniform', or 'by_energy' alone"
        )
    kept = stored_base(layout, splice, base, encoding, "encoded_patch")
    live = live_tokens(splice)
    if ranks == "by_energy":
        factors, size = _ragged_factors(layout, _directions(dict(recorded), kept.kv, live), live, dtype, allowed)
    else:
        highest = max(min(tokens, channel.features) for channel in layout.channels)
        rank = _largest_rank(layout, tokens, highest, dtype, allowed) if rank is None else rank
        if not 0 <= rank <= highest:
            raise RankError(f"encoded_patch.rank: got {rank}; expected 0 to {highest}, the rank of {tokens} tokens' KV")
        size = patch_bytes(layout, tokens, rank, dtype)
        # Programs of the decomposition do not depend on the rank, and those of the rest are small.
        factors = _truncated(_directions(dict(recorded), kept.kv, live), rank, dtype) if rank else {}
    bytes = kept.bytes._replace(stored=size, moved=kept.bytes.moved + size)

    def serve(own: SplicedCache) -> Repaired:
        if not factors:
            return phase_free_written(layout, own, kept.read(own), bytes)
        kv = jitted_apply(layout, kept.read(own), factors, own.tokens.positions, jnp.zeros((), jnp.int32))
        return engine_written(layout, own, kv, bytes)

    shapes = tuple((name, value_of(pair[1]).shape) for name, pair in factors.items())
    return with_flops(serve(splice), serve, splice, backbone, ("encoded_patch", shapes, dtype, base, str(encoding)))


def _ragged_factors(
    layout: KVLayout, directions: dict[str, tuple[Array, Array]], live: Array, dtype: str, allowed: int
) -> tuple[dict[str, tuple[Array, Array]], int]:
    """Factors of each row with ranks of its own, decoded, zero beyond them; and the mean bytes of `RaggedFactors`."""
    _check_concrete((directions, live), "encoded_patch.ranks")
    tokens, lengths = live.shape[1], np.asarray(live).sum(1).tolist()
    energies = {name: np.asarray(jnp.linalg.norm(u, axis=-2)) for name, (u, _) in directions.items()}
    costs = {channel.name: direction_bytes(tokens, channel.features, dtype) for channel in layout.channels}
    ranks: dict[str, list[np.ndarray]] = {name: [] for name in directions}
    sizes = []
    for row, length in enumerate(lengths):
        values, columns = {}, {}
        for name, own in energies.items():
            # Rounding must not let values ascend, nor the tail of a thin deficit count as energy.
            host = np.minimum.accumulate(own[:, row, :length], axis=-1)
            values[name] = np.where(host > 1e-7 * host[:, :1], host, 0.0)
            short = min(values[name].size, allowed // costs[name]) < 1 << 15
            columns[name] = layout.layers * (2 if short else 4)
        found = choose_directions(values, costs, allowed, per_byte=True, column_bytes=columns)
        sizes.append(sum(int(own.sum()) * costs[name] + int(own.max()) * columns[name] for name, own in found.items()))
        for name, own in found.items():
            ranks[name].append(own)

    factors = {}
    for name, (u, v) in directions.items():
        own = np.stack(ranks[name], axis=1)
        # A multiple of 8, as operators pad ragged factors, so that many patches share a program.
        most = min(v.shape[-2], -(-int(own.max()) // 8) * 8)
        if most:
            factors[name] = _masked(u[..., :most], v[..., :most, :], jnp.asarray(own), dtype)
    return factors, round(float(np.mean(sizes)))


@functools.partial(jax.jit, static_argnames=("dtype",))
def _masked(u: Array, v: Array, ranks: Array, dtype: str) -> tuple[Array, Array]:
    """Factors as they are stored, decoded, with zeros for directions that a row [L,B] does not have."""
    taken = jnp.arange(v.shape[-2]) < ranks[..., None]
    u, v = value_of(stored(u, dtype, -2)), value_of(stored(v, dtype, -1))
    return jnp.where(taken[..., None, :], u, 0).astype(jnp.float32), v.astype(jnp.float32)


def patch_bytes(layout: KVLayout, tokens: int, rank: int, dtype: str) -> int:
    """Counts the bytes of one row's patch of this rank, in every channel and layer, scales included.

    Raises:
      InputError: factors cannot be kept in this dtype.
    """
    _check_factor_dtype(dtype)
    if rank < 1:
        return 0
    return layout.layers * sum(
        _factor_bytes(tokens, channel.features, min(rank, tokens, channel.features), dtype)
        for channel in layout.channels
    )


def _largest_rank(layout: KVLayout, tokens: int, highest: int, dtype: str, allowed: int) -> int:
    """The largest rank whose patch takes at most these bytes, which grow with the rank; found by halving."""
    rank = 0
    while rank < highest:
        middle = (rank + highest + 1) // 2
        fits = patch_bytes(layout, tokens, middle, dtype) <= allowed
        rank, highest = (middle, highest) if fits else (rank, middle - 1)
    return rank


@functools.cache
def _factor_bytes(tokens: int, features: int, rank: int, dtype: str) -> int:
    """Bytes of u and v of one matrix, as `stored` makes them."""

    def factors() -> tuple[Leaf, Leaf]:
        return stored(jnp.zeros((tokens, rank)), dtype, -2), stored(jnp.zeros((rank, features)), dtype, -1)

    leaves = jax.tree.leaves(jax.eval_shape(factors))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _check_concrete(values: object, what: str) -> None:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values)):
        raise InputError(f"{what}: got KV inside a trace; expected arrays, because its bytes depend on their values")


def _check_factor_dtype(dtype: str) -> None:
    if factor_bits(dtype) is not None:
        return
    try:
        known = jnp.issubdtype(jnp.dtype(dtype), jnp.floating) or jnp.dtype(dtype) == jnp.int8
    except TypeError:
        known = False
    if not known:
        raise InputError(f"patch.dtype: got {dtype!r:.80}; expected int2 to int8, or a floating-point dtype")


@jax.jit
def _directions(recorded: KV, base: KV, live: Array) -> dict[str, tuple[Array, Array]]:
    """Factors of full rank of the deficit, the strongest direction first."""
    factors = {}
    for name, value in base.items():
        delta = flatten_heads(recorded[name].astype(jnp.float32) - value)
        factors[name] = factorise(jnp.where(live[..., None], delta, 0.0), min(delta.shape[-2:]), method="exact")
    return factors


@functools.partial(jax.jit, static_argnames=("rank", "dtype"))
def _truncated(directions: dict[str, tuple[Array, Array]], rank: int, dtype: str) -> dict[str, tuple[Leaf, Leaf]]:
    factors: dict[str, tuple[Leaf, Leaf]] = {}
    for name, (u, v) in directions.items():
        factors[name] = stored(u[..., :rank], dtype, -2), stored(v[..., :rank, :], dtype, -1)
    return factors


def encoded_deficit(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    bits: int | None = None,
    encoding: Encoding = "k4v4",
    base: Base = "canonical",
    group: int | None = GROUP,
    axes: Axes = "kivi",
    symmetric: bool = False,
) -> Repaired:
    """Adds the whole deficit in few bits to an encoded base: a patch without low rank, as DeltaKV-like residuals.

    Args:
      budget: bytes of the deficit; the most bits that fit are taken, and nothing is added if none do.
      bits: in place of the budget's, 1 to 8 or 16.
      encoding, base: what it is added to, as `encoded_patch`.
      group, axes, symmetric: of the deficit's scales, as `KVPrecision`.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, another base, encoding, bits or axes, or no KV of
        others. ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "encoded_deficit")
    recorded = required(splice, "recorded", "encoded_deficit", RECORDED)
    kept = stored_base(layout, splice, base, encoding, "encoded_deficit")
    fewest = 2 if symmetric else 1
    like = KVPrecision(fewest, fewest, group, axes, symmetric)
    if bits is not None:
        precision = KVPrecision(bits, bits, group, axes, symmetric)
    elif like.nbytes(layout, tokens) <= allowed:
        precision = most_bits(layout, allowed, tokens, "encoded_deficit", like)
    else:
        precision = None

    size = 0 if precision is None else precision.nbytes(layout, tokens)
    bytes = kept.bytes._replace(stored=size, moved=kept.bytes.moved + size)
    delta = {}
    if precision is not None:
        exact = {name: jnp.asarray(recorded[name]).astype(jnp.float32) - kept.kv[name] for name in layout.names}
        delta = encode_kv_rows(layout, exact, precision, splice.length)

    def serve(own: SplicedCache) -> Repaired:
        return phase_free_written(layout, own, _sum(kept.read(own), decode_kv_rows(delta)), bytes)

    setting = ("encoded_deficit", precision, base, str(encoding))
    return with_flops(serve(splice), serve, splice, backbone, setting)


@jax.jit
def _sum(base: dict[str, Array], delta: dict[str, Array]) -> dict[str, Array]:
    return {name: value + delta[name] if name in delta else value for name, value in base.items()}


# ---------------------------------------------------------------------------------------------- sparse differences


def block_differences(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    bits: int = WHOLE,
    encoding: Encoding = WHOLE,
    base: Base = "canonical",
    block: int = BLOCK_TOKENS,
    group: int | None = GROUP,
) -> Repaired:
    """Adds the largest blocks of the deficit to a master copy: block-sparse differences.

    Source: TokenDance (arXiv 2604.03143), "Diff-Aware Storage": sibling caches as block-sparse differences against one
    master. There a block differs where tokens were recomputed, and is exact where not; here every block differs, since
    all tokens have absorbed another antecedent, so the blocks with the most energy per byte are kept that the
    budget allows. A block is the tokens of a page at one layer in one channel. The source has no differences in 4 bits.

    Args:
      budget: bytes of the blocks' differences and indices (16 bits each, or 32 beyond 65 536 blocks).
      bits: of a difference: 16 (bfloat16), or 2 to 8, about zero, in groups over a token's features.
      encoding, base: of the master, as `encoded_patch`; "first" is the KV of the first antecedent.
      block: tokens of a block; the last may be shorter.

    Raises:
      InputError: no recorded KV, a budget in tokens or by layer, another base, encoding or bits, no KV of others, no
        tokens in a block, or it is called inside a trace. ShapeError, LayoutError, DtypeError: the splice does not
        match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "block_differences")
    recorded = required(splice, "recorded", "block_differences", RECORDED)
    if block < 1:
        raise InputError(f"block_differences.block: got {block}; expected at least 1 token")
    # Checks the bits and the group.
    KVPrecision(bits, bits, group, "token", symmetric=True)
    kept = stored_base(layout, splice, base, encoding, "block_differences")
    costs = _block_costs(layout, tokens, block, bits, group)
    dense = {name: jnp.asarray(recorded[name]).astype(jnp.float32) - kept.kv[name] for name in layout.names}
    _check_concrete((dense, splice.length), "block_differences")
    marked = _marked_blocks(layout, dense, live_tokens(splice), costs, allowed, block)

    # Blocks of different channels may differ in size, so rows may fill their budget differently.
    size = round(float((np.asarray(marked) * costs).sum((-1, -2, -3)).mean()))
    bytes = kept.bytes._replace(stored=size, moved=kept.bytes.moved + size)
    masks = jnp.repeat(marked, block, axis=-1)[..., :tokens]
    delta = {}
    for place, name in enumerate(layout.names):
        value = jnp.where(jnp.moveaxis(masks[:, place], 0, 1)[..., None, None], dense[name], 0.0)
        # Groups lie within a token, so a block's codes are the same in whatever it is packed with.
        delta[name] = encode_rows(value, None, bits, group, -1, symmetric=True)

    def serve(own: SplicedCache) -> Repaired:
        return phase_free_written(layout, own, _sum(kept.read(own), decode_kv_rows(delta)), bytes)

    setting = ("block_differences", bits, block, base, str(encoding))
    return with_flops(serve(splice), serve, splice, backbone, setting)


def _block_costs(layout: KVLayout, tokens: int, block: int, bits: int, group: int | None) -> np.ndarray:
    """Bytes of each block with its index: [channels, layers, blocks]."""
    lengths = [min(block, tokens - first) for first in range(0, tokens, block)]
    index = 2 if len(layout.channels) * layout.layers * len(lengths) <= 65_536 else 4
    costs = []
    for channel in layout.channels:
        own = [index + array_bytes(length, channel.features, bits, group, -1, True) for length in lengths]
        costs.append([own] * layout.layers)
    return np.asarray(costs)


def _marked_blocks(
    layout: KVLayout, dense: dict[str, Array], live: Array, costs: np.ndarray, allowed: int, block: int
) -> Array:
    """Marks the blocks [B, channels, layers, blocks] with the most energy per byte, until the next one does not fit."""
    energies = []
    for channel in layout.channels:
        square = jnp.where(live, jnp.square(dense[channel.name]).sum((-1, -2)), 0.0)
        padded = jnp.pad(square, ((0, 0), (0, 0), (0, -square.shape[-1] % block)))
        energies.append(padded.reshape(*padded.shape[:2], -1, block).sum(-1))
    by_byte = jnp.moveaxis(jnp.stack(energies), 2, 0) / costs
    flat = by_byte.reshape(by_byte.shape[0], -1)
    order = jnp.argsort(-flat, axis=-1)
    spent = jnp.cumsum(jnp.asarray(costs.reshape(-1))[order], axis=-1)
    rows = jnp.arange(flat.shape[0])[:, None]
    fits = (spent <= allowed) & (jnp.take_along_axis(flat, order, -1) > 0)
    return jnp.zeros(flat.shape, bool).at[rows, order].set(fits).reshape(by_byte.shape)
