"""Factors as bfloat16, for tensor cores: float32 ones as sums of pieces, eight-bit ones widened."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

RANK_STEP, TILE_ROWS = 16, 8
"""What the rank of factors, and the tokens of u, are padded to a multiple of."""


def widened_factors(u: Array, v: Array, u_scale: Array | None, v_scale: Array | None) -> tuple[Array, Array]:
    """Eight-bit factors as bfloat16, which holds them exactly; with their scales on one side, which is float32 then.

    The scales [..., 1, M] and [..., M, 1] are one number per direction, so that either side may take both: v does,
    but where u alone is float32 already.
    """
    u, v = (side.astype(jnp.bfloat16) if side.dtype.itemsize == 1 else side for side in (u, v))
    scales = [] if u_scale is None else [jnp.swapaxes(u_scale, -1, -2)]
    scales += [] if v_scale is None else [v_scale]
    if not scales:
        return u, v
    scale = functools.reduce(jnp.multiply, scales)
    if _scaled_side(u.dtype, v.dtype) == "u":
        return u * jnp.swapaxes(scale, -1, -2), v
    return u, v.astype(jnp.float32) * scale


def _scaled_side(u_dtype, v_dtype) -> str:
    return "u" if u_dtype == jnp.float32 and v_dtype != jnp.float32 else "v"


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


def padded_rank(rank: int, u_dtype, v_dtype, pieces: int, scaled: bool = False) -> int:
    """The rank that `bfloat16_factors` returns for factors of such dtypes, `scaled` where they have scales."""
    wide = [dtype == jnp.float32 for dtype in (u_dtype, v_dtype)]
    if scaled:
        wide["uv".index(_scaled_side(u_dtype, v_dtype))] = True
    counts = [pieces if each else 1 for each in wide]
    products = sum(i + j < pieces for i in range(counts[0]) for j in range(counts[1]))
    return -(-rank * products // RANK_STEP) * RANK_STEP
