"""Float32 factors as sums of bfloat16 pieces, so that tensor cores multiply them to nearly float32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

RANK_STEP, TILE_ROWS = 16, 8
"""What the rank of factors, and the tokens of u, are padded to a multiple of."""


@functools.partial(jax.named_call, name="split_factors")
def bfloat16_factors(u: Array, v: Array, pieces: int) -> tuple[Array, Array]:
    """Factors whose product in bfloat16 is that of u and v; the rank padded to a multiple of 16, u's tokens of 8.

    A float32 factor becomes the sum of `pieces` of bfloat16, 8 bits of significand each; products of pieces that reach
    below the last one are left out. They lie one behind the other along the rank.
    """
    us, vs = _pieces(u, pieces), _pieces(v, pieces)
    pairs = [(a, b) for i, a in enumerate(us) for j, b in enumerate(vs) if i + j < pieces]
    u, v = (jnp.concatenate(side, axis) for side, axis in zip(zip(*pairs, strict=True), (-1, -2), strict=True))
    ranks, tokens = -u.shape[-1] % RANK_STEP, -u.shape[-2] % TILE_ROWS
    pad = lambda side, *ends: jnp.pad(side, [(0, 0)] * (side.ndim - 2) + [(0, end) for end in ends])
    return pad(u, tokens, ranks), pad(v, ranks, 0)


def _pieces(value: Array, count: int) -> list[Array]:
    if value.dtype == jnp.bfloat16:
        return [value]
    pieces = []
    for _ in range(count):
        # Not a conversion there and back: XLA may leave that out.
        piece = jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)
        pieces.append(piece.astype(jnp.bfloat16))
        value = value - piece
    return pieces


def padded_rank(rank: int, u_dtype, v_dtype, pieces: int) -> int:
    """The rank that `bfloat16_factors` returns."""
    counts = [1 if dtype == jnp.bfloat16 else pieces for dtype in (u_dtype, v_dtype)]
    products = sum(i + j < pieces for i in range(counts[0]) for j in range(counts[1]))
    return -(-rank * products // RANK_STEP) * RANK_STEP
