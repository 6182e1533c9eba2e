"""GEAR: KV in few bits, low-rank factors of its rounding error, and outliers in 16 bits."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import factorise

from ..backbone import KV, Backbone
from ..core import BITS, AnyArray, KVEncoding, flatten_heads
from ..errors import InputError
from .repair_budget import RepairBudget
from .repaired import RepairBytes, Repaired, method
from .spliced_cache import SplicedCache, live_tokens, required
from .stored_forms import allowed_bytes, decode_rows, encode_rows, most_bits, serve_form

GEAR_RANK, GEAR_OUTLIERS = 4, 0.02
"""GEAR's rank of each head's error, and its share of numbers that are kept whole, by default."""


@method()
def gear(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget,
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
    """
    layout, tokens, live = backbone.layout, splice.slots.shape[1], live_tokens(splice)
    allowed, recorded = allowed_bytes(layout, splice, budget), required(splice, "recorded")
    if not 0 <= outliers <= 0.5:
        raise InputError(f"gear.outliers: got {outliers}; expected a share of 0 to 0.5")
    highest = min(min(tokens, channel.width) for channel in layout.channels)
    if not 0 <= rank <= highest:
        raise InputError(f"gear.rank: got {rank}; expected 0 to {highest}, the rank of a head's KV")

    extra, sparse, rest = 0, {}, {}
    for channel in layout.channels:
        # Outliers lie along the axis of the groups, whatever their size.
        _, axis = KVEncoding().of_channel(channel)
        along, across = (tokens, channel.features) if axis == -2 else (channel.features, tokens)
        count = int(along * outliers / 2 + 0.5)
        extra += 2 * count * across * (2 + (2 if along <= 65_536 else 4))
        extra += 2 * rank * channel.heads * (tokens + channel.width)
        sparse[channel.name], rest[channel.name] = _without_outliers(recorded[channel.name], live, axis, count)
    extra *= layout.layers
    if bits is None:
        encoding = most_bits(layout, tokens, KVEncoding(), BITS, allowed - extra)
    else:
        encoding = KVEncoding(bits, bits)
    dense, factors = encode_rows(layout, rest, encoding, splice.length), {}
    for name, decoded in decode_rows(dense).items():
        # Where numbers are kept whole there is no error.
        inside = live[..., None, None] & ~sparse[name][0]
        factors[name] = _error_factors(rest[name], decoded, inside, rank)

    def decode() -> KV:
        return {name: _gear_sum(value, *factors[name], *sparse[name]) for name, value in decode_rows(dense).items()}

    size = extra + encoding.nbytes(layout, tokens)
    return serve_form(backbone, splice, RepairBytes(stored=size, moved=size), decode, 2 * layout.numbers * tokens)


@functools.partial(jax.jit, static_argnames=("axis", "count"))
def _without_outliers(
    kv: Float[AnyArray, "L B T K H"], live: Array, axis: int, count: int
) -> tuple[tuple[Array, Array], Array]:
    """Returns which numbers are kept whole, with the numbers in bfloat16 (zero elsewhere), and KV without them."""
    value = jnp.asarray(kv).astype(jnp.float32)
    flat = flatten_heads(value)
    live_numbers = jnp.broadcast_to(live[..., None], flat.shape)
    # Ranks from either end, padding last in both.
    order = jnp.argsort(jnp.argsort(jnp.where(live_numbers, -flat, jnp.inf), axis=axis), axis=axis)
    back = jnp.argsort(jnp.argsort(jnp.where(live_numbers, flat, jnp.inf), axis=axis), axis=axis)
    marked = ((order < count) | (back < count)) & live_numbers
    others = live_numbers & ~marked
    low = jnp.min(jnp.where(others, flat, jnp.inf), axis=axis, keepdims=True)
    high = jnp.max(jnp.where(others, flat, -jnp.inf), axis=axis, keepdims=True)
    middle = jnp.where(jnp.isfinite(low) & jnp.isfinite(high), (low + high) / 2, 0.0)
    rest = jnp.where(marked, middle, flat).reshape(value.shape)
    marked = marked.reshape(value.shape)
    return (marked, jnp.where(marked, value, 0.0).astype(jnp.bfloat16)), rest


@functools.partial(jax.jit, static_argnames=("rank",))
def _error_factors(rest: Array, decoded: Array, inside: Array, rank: int) -> tuple[Array, Array]:
    """Factorises each head's rounding error, in bfloat16."""
    error = jnp.swapaxes(jnp.where(inside, rest - decoded, 0.0), -3, -2)
    u, v = factorise(error, max(1, rank), method="exact")
    return u[..., :rank].astype(jnp.bfloat16), v[..., :rank, :].astype(jnp.bfloat16)


@jax.jit
def _gear_sum(dense: Array, u: Array, v: Array, marked: Array, numbers: Array) -> Float[Array, "L B T K H"]:
    error = jnp.matmul(u.astype(jnp.float32), v.astype(jnp.float32))
    return jnp.where(marked, numbers.astype(jnp.float32), dense + jnp.swapaxes(error, -3, -2))
