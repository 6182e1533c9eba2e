"""Truncated factorisations: exact, by a randomised range finder, of a sharded matrix, and of sums of factors."""

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


def gram(
    matrix: Float[Array, "*batch T F"],
    rank: int,
    key: Key[Array, ""],
    oversample: int,
    iterations: int,
    axis_name: str | tuple[str, ...],
    sharded: str,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The factors (U·S, Vᵀ) of a matrix whose tokens or features lie over a mesh axis; one sum over that axis.

    The Gram matrix over the whole side is summed, and every device finds the same leading subspace of it by the same
    sketch and power iterations; the side that is sharded is then a product with what the device holds. Directions below
    2e-4 of the largest are found only roughly.
    """
    long = matrix if sharded == "tokens" else _transpose(matrix)
    whole = jax.lax.psum(_matmul(_transpose(long), long), axis_name)
    side = whole.shape[-1]
    basis = jax.random.normal(key, (side, min(rank + oversample, side)), jnp.float32)
    for _ in range(iterations + 1):
        basis = jnp.linalg.qr(_matmul(whole, basis))[0]
    small = _matmul(_transpose(basis), _matmul(whole, basis))
    energy, vectors = jnp.linalg.eigh((small + _transpose(small)) / 2)
    # eigh rises; the leading ones come last.
    leading = _matmul(basis, vectors[..., ::-1][..., :rank])
    other = _matmul(long, leading)
    if sharded == "tokens":
        return other, _transpose(leading)
    singular = jnp.sqrt(jnp.maximum(energy[..., ::-1][..., None, :rank], 0.0))
    return leading * singular, _transpose(jnp.where(singular > 0, other / singular, 0.0))


def merge(
    first: tuple[Float[Array, "..."], Float[Array, "..."]],
    second: tuple[Float[Array, "..."], Float[Array, "..."]],
    rank: int,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """The best rank-`rank` factors of u₁v₁ + u₂v₂ without forming it, by two thin QRs and a small SVD; (U·S, Vᵀ)."""
    u = jnp.concatenate([first[0], second[0]], axis=-1).astype(jnp.float32)
    v = jnp.concatenate([first[1], second[1]], axis=-2).astype(jnp.float32)
    left, small_left = jnp.linalg.qr(u)
    right, small_right = jnp.linalg.qr(_transpose(v))
    core_u, s, core_vt = jnp.linalg.svd(_matmul(small_left, _transpose(small_right)), full_matrices=False)
    return (
        _matmul(left, core_u[..., :rank]) * s[..., None, :rank],
        _matmul(core_vt[..., :rank, :], _transpose(right)),
    )
