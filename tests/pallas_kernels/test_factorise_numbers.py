"""factorise's numbers: steep spectra, orthogonalising by Cholesky beside the QR it replaces, and derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, factorise, targeting
from pallas_kernels.factorise import reference
from tests.shared.arrays import placed

SPECTRA = {
    "σ₁ = 1e3": np.r_[1e3, np.exp(-np.arange(1, 128) / 40)],
    "σ₁ = 1e4": np.r_[1e4, np.exp(-np.arange(1, 128) / 40)],
    "0.7 to the k": 0.7 ** np.arange(128),
    "slow": np.exp(-np.arange(128) / 60),
}


def drawn(spectrum: np.ndarray, tokens: int, features: int, seed: int = 0) -> np.ndarray:
    """A float64 matrix with these singular values."""
    rng = np.random.default_rng(seed)
    basis = lambda size: np.linalg.qr(rng.standard_normal((size, len(spectrum))))[0]
    return (basis(tokens) * spectrum) @ basis(features).T


def residual_over_optimal(matrix: np.ndarray, rank: int, **how) -> float:
    """Of the float32 matrix that `factorise` is given; the optimum from a float64 SVD."""
    given = matrix.astype(np.float32)
    u, v = factorise(placed(given), rank, **how)
    left = given.astype(np.float64) - np.asarray(u, np.float64) @ np.asarray(v, np.float64)
    singular = np.linalg.svd(given.astype(np.float64), compute_uv=False)
    return float(np.linalg.norm(left) / np.linalg.norm(singular[rank:]))


@pytest.mark.parametrize("orthonormal", ["qr", pytest.param("cholesky", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "shape", [(320, 128), pytest.param((128, 320), marks=pytest.mark.nightly)], ids=["tall", "wide"]
)
@pytest.mark.parametrize("name", SPECTRA)
def test_steep_spectra_are_factorised_as_well_as_flat_ones(name: str, shape: tuple[int, int], orthonormal: str):
    matrix = drawn(SPECTRA[name], *shape)
    for rank in (16, 32):
        assert residual_over_optimal(matrix, rank, orthonormal=orthonormal) <= 1.02


@pytest.mark.parametrize(
    "spectrum",
    [*SPECTRA.values(), np.zeros(128), np.r_[np.ones(3), np.zeros(125)]],
    ids=[*SPECTRA, "zero", "of rank 3"],
)
def test_cholesky_finds_what_the_range_finder_finds(spectrum: np.ndarray):
    matrix = placed(np.stack([drawn(spectrum, 200, 128, seed) for seed in range(2)]), jnp.float32)
    matrix = matrix.at[:, 180:].set(0.0)
    (u, v), (own_u, own_v) = (factorise(matrix, 16, orthonormal=name) for name in ("qr", "cholesky"))
    identity = np.broadcast_to(np.eye(16), (2, 16, 16))
    np.testing.assert_allclose(own_v @ jnp.swapaxes(own_v, -1, -2), identity, atol=1e-5)
    scale = max(float(jnp.linalg.norm(matrix)), 1e-30)
    assert np.abs(own_u[:, 180:]).max() <= 1e-6 * scale
    rest, own_rest = (float(jnp.linalg.norm(matrix - left @ right)) for left, right in ((u, v), (own_u, own_v)))
    assert own_rest <= 1.01 * rest + 1e-6 * scale


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e15])
def test_cholesky_basis_spans_what_qr_does_at_any_scale(scale: float):
    rng = np.random.default_rng(3)
    tall = placed(scale * rng.standard_normal((3, 90, 12)) * 0.4 ** np.arange(12), jnp.float32)
    q, own = jnp.linalg.qr(tall)[0], reference.cholesky_qr2(tall)
    np.testing.assert_allclose(own @ jnp.swapaxes(own, -1, -2), q @ jnp.swapaxes(q, -1, -2), atol=2e-2)


def test_gpus_orthogonalise_by_cholesky_and_others_by_qr():
    matrix = placed(drawn(SPECTRA["slow"], 160, 128), jnp.float32)
    program = lambda: str(jax.make_jaxpr(functools.partial(factorise, rank=8))(matrix))
    assert "cholesky" not in program()
    with targeting("gpu"):
        assert "cholesky" in program()
    with targeting("tpu"):
        assert "cholesky" not in program()
    with pytest.raises(KernelError, match="'gram'"):
        factorise(matrix, 8, orthonormal="gram")


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@functools.partial(jax.jit, static_argnames=("method",))
def slope_of_the_product(value, weights, method: str):
    def loss(value):
        u, v = factorise(value, 4, method=method, oversample=4)
        return (weights * (u @ v)).sum()

    return jax.grad(loss)(value)


@pytest.mark.parametrize("method", ["exact", "randomised"])
@pytest.mark.parametrize("shape", [(20, 12), pytest.param((12, 20), marks=pytest.mark.nightly)], ids=["tall", "wide"])
@pytest.mark.parametrize(
    "decay",
    [0.5, *(pytest.param(decay, marks=pytest.mark.nightly) for decay in (0.7, None))],
    ids=["steep", "flat", "low rank"],
)
def test_gradient_is_that_of_the_best_factors(shape: tuple[int, int], decay: float | None, method: str):
    """Against differences of float64 SVDs."""
    rank, weights = 4, np.random.default_rng(1).standard_normal(shape)
    spectrum = np.where(np.arange(12) < rank, 0.5 ** np.arange(12), 0.0) if decay is None else decay ** np.arange(12)
    matrix = drawn(spectrum, *shape)
    found = slope_of_the_product(placed(matrix, jnp.float32), placed(weights, jnp.float32), method)
    wanted = np.zeros(shape)
    for place in np.ndindex(shape):
        step = np.zeros(shape)
        step[place] = 1e-6
        wanted[place] = (weights * (best(matrix + step, rank) - best(matrix - step, rank))).sum() / 2e-6
    np.testing.assert_allclose(found, wanted, atol=5e-3 * np.abs(wanted).max())


def slope_of_both(value, weights, method: str):
    def loss(value):
        u, v = factorise(value, 4, method=method)
        return (weights * (u @ v)).sum() + (u**2).sum()

    return jax.grad(loss)(value)


one_slope = jax.jit(slope_of_both, static_argnames=("method",))


@functools.partial(jax.jit, static_argnames=("method",))
def mapped_slopes(values, weights, method: str):
    return jax.vmap(lambda value: slope_of_both(value, weights, method))(values)


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "method"), [(0, "randomised"), (3, "exact"), (20, "randomised")])
def test_gradients_of_zero_and_padded_matrices_are_finite(rows: int, method: str):
    matrix = drawn(SPECTRA["slow"][:12], 24, 12)
    matrix[rows:] = 0.0
    matrix = placed(matrix, jnp.float32)
    weights = placed(np.random.default_rng(1).standard_normal((24, 12)), jnp.float32)
    gradient = one_slope(matrix, weights, method)
    assert np.isfinite(gradient).all()
    if rows:
        assert np.abs(gradient).max() > 0
    mapped = mapped_slopes(np.stack([matrix, 2 * np.asarray(matrix)]), weights, method)
    np.testing.assert_allclose(mapped[0], gradient, atol=1e-3)
