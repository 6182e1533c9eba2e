"""Factors as bfloat16, for tensor cores: float32 ones as sums of pieces, eight-bit ones widened."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

RANK_STEP, TILE_ROWS = 16, 8
"""What the rank of factors, and the tokens of u, are padded to a multiple of."""


def widened_factors(
    u: Num[Array, "*left T M"], v: Num[Array, "*right M columns"], scale: Float[Array, "*scaled M 1"] | None
) -> tuple[Float[Array, "*lefts T M"], Float[Array, "*rights M columns"]]:
    """Widens eight-bit factors to bfloat16, which holds them exactly; with a scale one side becomes float32.

    That side is v, but where u alone is float32 already.
    """
    u, v = (side.astype(jnp.bfloat16) if side.dtype.itemsize == 1 else side for side in (u, v))
    if scale is None:
        return u, v
    if _scaled_side(u.dtype, v.dtype) == "u":
        return u * jnp.swapaxes(scale, -1, -2), v
    return u, v.astype(jnp.float32) * scale


def _scaled_side(u_dtype, v_dtype) -> str:
    """Returns the factor that both scales multiply."""
    return "u" if u_dtype == jnp.float32 and v_dtype != jnp.float32 else "v"


@functools.partial(jax.named_call, name="split_factors")
def bfloat16_factors(
    u: Float[Array, "*left T M"], v: Float[Array, "*right M columns"], pieces: int
) -> tuple[Array, Array]:
    """Makes factors whose product in bfloat16 is that of u and v; the rank padded to a multiple of 16, u's tokens of 8.

    A float32 factor becomes the sum of `pieces` of bfloat16, 8 bits of significand each; products of pieces that reach
    below the last one are left out. They lie one behind the other along the rank.
    """
    us, vs = _pieces(u, pieces), _pieces(v, pieces)
    kept = _kept_products(len(us), len(vs), pieces)
    u = jnp.concatenate([us[i] for i, _ in kept], -1)
    v = jnp.concatenate([vs[j] for _, j in kept], -2)

    ranks, tokens = -u.shape[-1] % RANK_STEP, -u.shape[-2] % TILE_ROWS

    def pad(side, *ends):
        return jnp.pad(side, [(0, 0)] * (side.ndim - 2) + [(0, end) for end in ends])

    return pad(u, tokens, ranks), pad(v, ranks, 0)


def _kept_products(left: int, right: int, pieces: int) -> list[tuple[int, int]]:
    """Returns which pieces of u and of v are multiplied, by their numbers: those whose product reaches the result."""
    return [(i, j) for i, j in itertools.product(range(left), range(right)) if i + j < pieces]


def _pieces(value: Array, count: int) -> list[Array]:
    """Splits a value into that many bfloat16 numbers whose sum it is, the largest first; bfloat16 is one piece."""
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
    """Computes the rank that `bfloat16_factors` returns for factors of such dtypes, `scaled` where they have scales."""
    wide = [dtype == jnp.float32 for dtype in (u_dtype, v_dtype)]
    if scaled:
        wide["uv".index(_scaled_side(u_dtype, v_dtype))] = True
    left, right = (pieces if each else 1 for each in wide)
    return -(-rank * len(_kept_products(left, right, pieces)) // RANK_STEP) * RANK_STEP
