"""GEAR: KV in few bits, low-rank factors of its rounding error, and outliers in 16 bits."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import BITS, KVEncoding, flatten_heads
from ..errors import InputError
from .repair_budget import RepairBudget
from .repaired import RepairBytes, Repaired
from .spliced_cache import SplicedCache, live_tokens
from .stored_kv import StoredForm, allowed_bytes, decode_rows, encode_rows, most_bits, recorded_kv, serve_form

GEAR_RANK, GEAR_OUTLIERS = 4, 0.02
"""GEAR's rank of each head's error, and its share of numbers that are kept whole, by default."""


def gear(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    bits: int | None = None,
    rank: int = GEAR_RANK,
    outliers: float | int = GEAR_OUTLIERS,
) -> Repaired:
    """Serves the recorded KV in few bits, with a low-rank approximation of the rest and a few numbers whole.

    Source: GEAR (Kang et al. 2024, arXiv 2403.05527): X ≈ D + L + S. S: of each feature over tokens (keys)
    or of each token over features (values), the largest and the smallest numbers, kept in 16 bits with an index; they
    are taken out, here replaced by the middle of the others, so that they widen no range. D: the rest in few bits.
    L: the error of D, head by head, in a low rank, its factors in bfloat16.

    Args:
      budget: bytes of all three; the most bits that fit are taken.
      bits: in place of the budget's; 1 to 8.
      rank: of each head's error; 0: none.
      outliers: share of numbers that S keeps, half of it at either end, rounded half up; 0: none ("GEAR-L").

    Raises:
      InputError: unknown bits, a share outside 0 … 0.5. InputError: the rank is out of range.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "gear")
    recorded = recorded_kv(splice, "gear")
    if not 0 <= outliers <= 0.5:
        raise InputError(f"gear.outliers: got {outliers}; expected a share of 0 to 0.5")
    highest = min(min(tokens, channel.width) for channel in layout.channels)
    if not 0 <= rank <= highest:
        raise InputError(f"gear.rank: got {rank}; expected 0 to {highest}, the rank of a head's KV")

    # Outliers lie along the axis of the groups, whatever their size.
    extra, ends, axis_of = 0, {}, {channel.name: KVEncoding().of_channel(channel)[1] for channel in layout.channels}
    for channel in layout.channels:
        by_feature = axis_of[channel.name] == -2
        along, across = (tokens, channel.features) if by_feature else (channel.features, tokens)
        count = int(along * outliers / 2 + 0.5)
        ends[channel.name] = count
        extra += 2 * count * across * (2 + (2 if along <= 65_536 else 4))
        extra += 2 * rank * channel.heads * (tokens + channel.width)
    extra *= layout.layers
    if bits is None:
        encoding = most_bits(layout, tokens, KVEncoding(), BITS, allowed - extra, "gear")
    else:
        encoding = KVEncoding(bits, bits)

    live = live_tokens(splice)
    sparse: dict[str, tuple[Array, Array]] = {}
    rest: dict[str, Array] = {}
    for name, value in recorded.items():
        wide = jnp.asarray(value).astype(jnp.float32)
        sparse[name], rest[name] = _without_outliers(wide, live, axis_of[name], ends[name])
    dense = encode_rows(layout, rest, encoding, splice.length)
    factors = _error_factors(rest, decode_rows(dense), sparse, live, rank)

    def decode() -> KV:
        return _gear_sum(decode_rows(dense), factors, sparse)

    size = extra + encoding.nbytes(layout, tokens)
    bytes, setting = RepairBytes(stored=size, moved=size), ("gear", encoding, rank, outliers)
    return serve_form(backbone, splice, StoredForm(decode, bytes, setting, 2 * layout.numbers * tokens))


@functools.partial(jax.jit, static_argnames=("axis", "count"))
def _without_outliers(
    value: Float[Array, "L B T K H"], live: Array, axis: int, count: int
) -> tuple[tuple[Array, Array], Array]:
    """Returns which numbers are kept whole, with the numbers in bfloat16 (zero elsewhere), and KV without them."""
    flat = flatten_heads(value)
    there = jnp.broadcast_to(live[..., None], flat.shape)
    if not count:
        return (jnp.zeros(value.shape, bool), jnp.zeros(value.shape, jnp.bfloat16)), value

    # Ranks from either end, padding last in both.
    order = jnp.argsort(jnp.argsort(jnp.where(there, -flat, jnp.inf), axis=axis), axis=axis)
    back = jnp.argsort(jnp.argsort(jnp.where(there, flat, jnp.inf), axis=axis), axis=axis)
    whole = ((order < count) | (back < count)) & there
    left = there & ~whole
    low = jnp.min(jnp.where(left, flat, jnp.inf), axis=axis, keepdims=True)
    high = jnp.max(jnp.where(left, flat, -jnp.inf), axis=axis, keepdims=True)
    middle = jnp.where(jnp.isfinite(low) & jnp.isfinite(high), (low + high) / 2, 0.0)
    rest = jnp.where(whole, middle, flat).reshape(value.shape)
    whole = whole.reshape(value.shape)
    return (whole, jnp.where(whole, value, 0.0).astype(jnp.bfloat16)), rest


@functools.partial(jax.jit, static_argnames=("rank",))
def _error_factors(
    rest: KV, decoded: KV, sparse: dict[str, tuple[Array, Array]], live: Array, rank: int
) -> dict[str, tuple[Array, Array]]:
    factors = {}
    for name, value in rest.items() if rank else ():
        # Where numbers are kept whole there is no error.
        error = jnp.where(live[..., None, None] & ~sparse[name][0], value - decoded[name], 0.0)
        u, v = factorise(jnp.swapaxes(error, -3, -2), rank, method="exact")
        factors[name] = u.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    return factors


@jax.jit
def _gear_sum(
    dense: dict[str, Array], factors: dict[str, tuple[Array, Array]], sparse: dict[str, tuple[Array, Array]]
) -> dict[str, Array]:
    total = {}
    for name, value in dense.items():
        if name in factors:
            u, v = (leaf.astype(jnp.float32) for leaf in factors[name])
            value = value + jnp.swapaxes(jnp.matmul(u, v), -3, -2)
        whole, numbers = sparse[name]
        total[name] = jnp.where(whole, numbers.astype(jnp.float32), value)
    return total
