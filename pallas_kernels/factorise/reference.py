"""Truncated factorisations: exact, and by a randomised range finder."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

HIGHEST = jax.lax.Precision.HIGHEST


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

    A random sketch of the range, sharpened by power iterations that re-orthogonalise after every half step, then an
    exact factorisation of the small projected matrix (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1). The
    sketch lies on the feature side, so rows of zeros (padding) change nothing.
    """
    tokens, features = matrix.shape[-2:]
    size = min(rank + oversample, tokens, features)
    sketch = jax.random.normal(key, (features, size), jnp.float32)
    basis = jnp.linalg.qr(_matmul(matrix, sketch))[0]
    for _ in range(iterations):
        other = jnp.linalg.qr(_matmul(_transpose(matrix), basis))[0]
        basis = jnp.linalg.qr(_matmul(matrix, other))[0]
    right, small = jnp.linalg.qr(_matmul(_transpose(matrix), basis))
    u, s, vt = jnp.linalg.svd(_transpose(small), full_matrices=False)
    left = _matmul(basis, u[..., :rank]) * s[..., None, :rank]
    return left, _matmul(vt[..., :rank, :], _transpose(right))
