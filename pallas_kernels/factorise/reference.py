"""Truncated factorisations: exact, and by a randomised range finder."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

HIGHEST = jax.lax.Precision.HIGHEST
GRAM_LIMIT = 1024
"""Longest shorter side whose Gram matrix is formed."""


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _transpose(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def exact(matrix: Float[Array, "*batch T F"], rank: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The best rank-`rank` factors (U·S, Vᵀ), singular values falling, by a full SVD."""
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return u[..., :rank] * s[..., None, :rank], vt[..., :rank, :]


def randomised(
    matrix: Float[Array, "*batch T F"], rank: int, key: Key[Array, ""], oversample: int, iterations: int
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Nearly the best rank-`rank` factors (U·S, Vᵀ).

    A random sketch, sharpened by power iterations on the shorter side that re-orthogonalise every time, then an exact
    factorisation of the small projected matrix (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1). The sketch
    lies on the feature side, so rows of zeros (padding) change nothing. A power step multiplies by the Gram matrix,
    formed once where it is small; directions below 2e-4 of the largest are then found only roughly.
    """
    tokens, features = matrix.shape[-2:]
    size = min(rank + oversample, tokens, features)
    basis = jax.random.normal(key, (features, size), jnp.float32)
    wide = features > tokens
    long = _transpose(matrix) if wide else matrix
    if wide:
        basis = jnp.linalg.qr(_matmul(matrix, basis))[0]
    gram = _matmul(_transpose(long), long) if long.shape[-1] <= GRAM_LIMIT else None
    for _ in range(iterations):
        step = _matmul(_transpose(long), _matmul(long, basis)) if gram is None else _matmul(gram, basis)
        basis = jnp.linalg.qr(step)[0]
    other, small = jnp.linalg.qr(_matmul(long, basis))
    u, s, vt = jnp.linalg.svd(small, full_matrices=False)
    left, right = _matmul(other, u[..., :rank]), _matmul(vt[..., :rank, :], _transpose(basis))
    if wide:
        left, right = _transpose(right), _transpose(left)
    return left * s[..., None, :rank], right
