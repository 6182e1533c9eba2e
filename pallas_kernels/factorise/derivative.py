"""The derivative of truncated factors, which passes through none of what found them.

Differentiating the range finder divides by singular values of a sketch, most of which are rounding where the matrix is
of low rank, padded or zero. What the factors satisfy tells their derivative as well: A v = u s, Aᵀ u = v s.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

ROUNDS = 16
"""Steps of the iteration for what leaves the factors' span; each brings the ratio of the first cut to the last kept
singular value, squared."""
NEGLIGIBLE = 16 * float(jnp.finfo(jnp.float32).eps)
"""Singular values below this share of the largest, and squares that are as near to each other, divide nothing."""

Factors = tuple[Float[Array, "*batch T M"], Float[Array, "*batch M F"]]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def factors(
    matrix: Float[Array, "*batch T F"], key: Key[Array, ""], find: Callable[[Array, Array], Factors]
) -> Factors:
    """Returns `find(matrix, key)`, with the derivative of the best factors: finite also where the matrix is zero or
    padded.

    Where singular values coincide, or the matrix is zero, the factors have no derivative; the product's is then that
    within the span of v.
    """
    return find(matrix, key)


@factors.defjvp
def _(find, primals, tangents):
    u, v = factors(*primals, find)
    return (u, v), _tangents(primals[0], u, v, tangents[0])


@functools.partial(jax.jit, inline=True)
def _tangents(matrix: Array, u: Array, v: Array, change: Array) -> Factors:
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def transposed(value):
        return jnp.swapaxes(value, -1, -2)

    singular = jnp.linalg.norm(u, axis=-2, keepdims=True)
    largest = singular.max(-1, keepdims=True)
    inverse = _reciprocal(singular, NEGLIGIBLE * largest)
    left, right = u * inverse, transposed(v)
    along = product(change, right)
    core = product(transposed(left), along)

    # What stays in the span: rotations among the directions that are kept, and the singular values themselves.
    squares = singular**2
    apart = _reciprocal(squares - transposed(squares), NEGLIGIBLE * largest**2)
    turned_left = apart * (core * singular + transposed(singular) * transposed(core))
    turned_right = apart * (transposed(singular) * core + transposed(core) * singular)

    # What leaves it, each side driving the other through what was cut off.
    rest = matrix - product(u, v)
    out_left = along - product(left, core)
    out_right = product(transposed(change), left) - product(right, transposed(core))
    moved_right = out_right * inverse
    for _ in range(ROUNDS):
        moved_left = out_left + product(rest, moved_right)
        moved_right = (out_right + product(transposed(rest), moved_left * inverse)) * inverse

    moved_left = out_left + product(rest, moved_right)
    diagonal = jnp.diagonal(core, axis1=-2, axis2=-1)[..., None, :]
    du = product(left, turned_left) * singular + left * diagonal + moved_left
    return du, transposed(product(right, turned_right) + moved_right)


def _reciprocal(value: Array, least: Array) -> Array:
    """Returns 1 / value, zero where |value| is not above `least`."""
    kept = jnp.abs(value) > least
    return jnp.where(kept, 1.0 / jnp.where(kept, value, 1.0), 0.0)
