"""Truncated factorisations: exact, by a randomised range finder, of a sharded matrix, and of sums of factors."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

HIGHEST = jax.lax.Precision.HIGHEST
SHIFT = 8.0
"""What a Gram matrix is shifted by before its Cholesky factorisation, in roundings of its trace."""


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _transpose(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


# Inlined where the caller is traced; called eagerly they are one program, not one for every operation.
@functools.partial(jax.jit, static_argnames=("rank",), inline=True)
def exact(matrix: Float[Array, "*batch T F"], rank: int) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns the best rank-`rank` factors (U·S, Vᵀ), singular values falling, by a full SVD."""
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return u[..., :rank] * s[..., None, :rank], vt[..., :rank, :]


@functools.partial(jax.jit, static_argnames=("rank", "oversample", "iterations", "orthonormal"), inline=True)
def randomised(
    matrix: Float[Array, "*batch T F"],
    rank: int,
    key: Key[Array, ""],
    oversample: int,
    iterations: int,
    orthonormal: str = "qr",
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Computes nearly the best rank-`rank` factors (U·S, Vᵀ).

    A random sketch, sharpened by power iterations that re-orthogonalise after every product, then an exact
    factorisation of the small projected matrix (Halko, Martinsson & Tropp 2011, algorithms 4.4 and 5.1). The sketch
    lies on the feature side, so rows of zeros (padding) change nothing. No Gram matrix of the matrix itself is formed:
    in float32 it would hide directions below 2e-4 of the largest; so only those at rounding (1e-7) are.

    `orthonormal` says how the iterations orthogonalise: "qr" by Householder's, "cholesky" by `cholesky_qr2`.
    """
    tokens, features = matrix.shape[-2:]
    size = min(rank + oversample, tokens, features)
    basis = jax.random.normal(key, (features, size), jnp.float32)
    wide = features > tokens
    long = _transpose(matrix) if wide else matrix
    spread = _orthonormal if orthonormal == "qr" else cholesky_qr2
    if wide:
        basis = spread(_matmul(matrix, basis))

    for step in range(iterations):
        other = spread(_matmul(long, basis))
        # The last basis is what the right factor is made of, and must be orthonormal whatever the matrix.
        last = _orthonormal if step == iterations - 1 else spread
        basis = last(_matmul(_transpose(long), other))

    if not iterations:
        basis = _orthonormal(basis)
    other, small = jnp.linalg.qr(_matmul(long, basis))
    u, s, vt = jnp.linalg.svd(small, full_matrices=False)
    left, right = _matmul(other, u[..., :rank]), _matmul(vt[..., :rank, :], _transpose(basis))
    if wide:
        left, right = _transpose(right), _transpose(left)
    return left * s[..., None, :rank], right


def _orthonormal(a: Array) -> Array:
    return jnp.linalg.qr(a)[0]


def cholesky_qr2(a: Float[Array, "*batch T N"]) -> Float[Array, "*batch T N"]:
    """Returns a basis of the columns' span, by two Cholesky factorisations of shifted Gram matrices (Fukaya et al.
    2020).

    Matrix products and triangular solves of [N, N] where Householder's QR goes column by column, which GPUs are slow
    at. The shift keeps the Gram matrix positive whatever its rank; each pass brings up what lies below it, so that
    two leave directions down to 1e-5 of the largest with length near one. Those further below, of deficient columns
    too, come out short, not orthonormal.
    """
    size = a.shape[-1]
    for _ in range(2):
        # Products may only overflow where the matrix itself nearly does.
        a = a / jnp.maximum(jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True), 1e-30)
        whole = _matmul(_transpose(a), a)
        trace = jnp.trace(whole, axis1=-2, axis2=-1)[..., None, None]
        shift = SHIFT * jnp.finfo(jnp.float32).eps * trace + 1e-30
        lower = jnp.linalg.cholesky(whole + shift * jnp.eye(size), symmetrize_input=False)
        a = jax.lax.linalg.triangular_solve(lower, a, left_side=False, lower=True, transpose_a=True)

    return a


def merge(
    first: tuple[Float[Array, "..."], Float[Array, "..."]],
    second: tuple[Float[Array, "..."], Float[Array, "..."]],
    rank: int,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns the best rank-`rank` factors of u₁v₁ + u₂v₂ without forming it, by two thin QRs and a small SVD; (U·S,
    Vᵀ).
    """
    u = jnp.concatenate([first[0], second[0]], axis=-1).astype(jnp.float32)
    v = jnp.concatenate([first[1], second[1]], axis=-2).astype(jnp.float32)
    left, small_left = jnp.linalg.qr(u)
    right, small_right = jnp.linalg.qr(_transpose(v))
    core_u, s, core_vt = jnp.linalg.svd(_matmul(small_left, _transpose(small_right)), full_matrices=False)
    return (
        _matmul(left, core_u[..., :rank]) * s[..., None, :rank],
        _matmul(core_vt[..., :rank, :], _transpose(right)),
    )
