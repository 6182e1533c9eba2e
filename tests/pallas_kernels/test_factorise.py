"""factorise equals LAPACK's truncated SVD within 2 %, whatever the spectrum, and so does its derivative."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError, KernelUnavailableError, factorise, targeting
from pallas_kernels.factorise import merge
from pallas_kernels.shapes import MATRICES, MatrixShape
from tests.shared.arrays import placed

nightly = pytest.mark.nightly
SPECTRA = {
    "σ₁ = 1e4": np.r_[1e4, np.exp(-np.arange(1, 128) / 40)],
    "0.7 to the k": 0.7 ** np.arange(128),
    "slow": np.exp(-np.arange(128) / 60),
    "zero": np.zeros(128),
    "of rank 3": np.r_[np.ones(3), np.zeros(125)],
}


def drawn(spectrum: np.ndarray, tokens: int, features: int, batch: tuple[int, ...] = ()) -> np.ndarray:
    """Float64 matrices with these singular values."""
    rng = np.random.default_rng(1)
    basis = lambda size: np.linalg.qr(rng.standard_normal((*batch, size, len(spectrum))))[0]
    return (basis(tokens) * spectrum) @ np.swapaxes(basis(features), -1, -2)


def check_factors(matrix: np.ndarray, rank: int, factors: Any, over: float) -> None:
    """v's rows are orthonormal, u's columns fall; what is left is at most `over` of the least, by LAPACK in float64."""
    u, v = (np.asarray(factor, np.float64) for factor in factors)
    singular = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    least, largest = np.sqrt((singular[..., rank:] ** 2).sum(-1)), singular.max(initial=1e-30)
    left = np.linalg.norm(matrix - u @ v, axis=(-1, -2))
    assert (left <= over * least + 4e-6 * largest).all()
    norms = np.linalg.norm(u, axis=-2)
    assert (np.diff(norms, axis=-1) <= 1e-5 * largest).all()
    np.testing.assert_allclose(norms, singular[..., :rank], rtol=0.05, atol=1e-4 * largest)
    identity = np.broadcast_to(np.eye(rank), (*v.shape[:-2], rank, rank))
    np.testing.assert_allclose(v @ np.swapaxes(v, -1, -2), identity, atol=1e-5)


@pytest.mark.parametrize("method", ["exact", "randomised"])
@pytest.mark.parametrize("shape", MATRICES, ids=lambda shape: shape.name)
def test_small_matrices_of_every_shape(shape: MatrixShape, method: str):
    spectrum = np.exp(-np.arange(min(shape.tokens, shape.features)) / 12)
    matrix = drawn(spectrum, shape.tokens, shape.features, shape.batch).astype(np.float32)
    check_factors(matrix, shape.rank, factorise(placed(matrix), shape.rank, method=method), 1.001)


@pytest.mark.parametrize("orthonormal", ["qr", "cholesky"])
@pytest.mark.parametrize("size", [(160, 128), pytest.param((128, 160), marks=nightly)], ids=["tall", "wide"])
def test_steep_and_deficient_spectra_are_factorised_as_well_as_flat_ones(size: tuple[int, int], orthonormal: str):
    for spectrum in (*SPECTRA.values(), 1e20 * SPECTRA["slow"]):
        matrix = drawn(spectrum, *size).astype(np.float32)
        factors = factorise(placed(matrix), 16, orthonormal=orthonormal)
        check_factors(matrix, 16, factors, 1.02)
        # A smaller rank is a slice.
        check_factors(matrix, 4, (factors[0][:, :4], factors[1][:4]), 1.02)


@pytest.mark.parametrize("method", ["exact", "randomised"])
def test_rows_of_zeros_change_nothing_and_the_key_says_all(method: str):
    matrix = drawn(np.exp(-np.arange(24) / 12), 40, 24, (2,)).astype(np.float32)
    padded = np.pad(matrix, [(0, 0), (0, 9), (0, 0)])
    key = jax.random.key(3)
    (u, v), (wide_u, wide_v) = (factorise(placed(value), 4, method=method, key=key) for value in (matrix, padded))
    np.testing.assert_allclose(wide_u[:, :40] @ wide_v, u @ v, atol=2e-5)
    assert np.abs(wide_u[:, 40:]).max() < 1e-6
    assert (factorise(placed(matrix), 4, method=method, key=key)[0] == u).all()
    assert (factorise(placed(matrix), 4, method=method)[0] == u).all() == (method == "exact")


def test_gpus_orthogonalise_by_cholesky_and_others_by_qr():
    matrix = jax.ShapeDtypeStruct((160, 128), jnp.float32)
    program = lambda: str(jax.make_jaxpr(functools.partial(factorise, rank=8))(matrix))
    assert "cholesky" not in program()
    with targeting("gpu"):
        assert "cholesky" in program()
    with targeting("tpu"):
        assert "cholesky" not in program()


def test_sums_have_the_best_factors_of_both():
    matrix = drawn(np.exp(-np.arange(24) / 4), 40, 24, (2,)).astype(np.float32)
    first = factorise(placed(matrix), 3, method="exact")
    second = factorise(placed(matrix - np.matmul(*first)), 5, method="exact")
    check_factors(np.asarray(first[0] @ first[1] + second[0] @ second[1]), 6, merge(first, second, 6), 1.001)
    with pytest.raises(KernelError, match="rank 9; expected 1 to 8"):
        merge(first, second, 9)


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


@functools.partial(jax.jit, static_argnames=("method",))
def slope(value, weights, method: str):
    def loss(value):
        u, v = factorise(value, 4, method=method, oversample=4)
        return (weights * (u @ v)).sum()

    return jax.grad(loss)(value)


@pytest.mark.parametrize(
    ("method", "size", "decay"),
    [("randomised", (20, 12), 0.5), pytest.param("exact", (12, 20), None, marks=nightly)],
)
def test_gradient_is_that_of_the_best_factors(method: str, size: tuple[int, int], decay: float | None):
    """Against differences of float64 SVDs."""
    weights = np.random.default_rng(1).standard_normal(size)
    spectrum = np.where(np.arange(12) < 4, 0.5 ** np.arange(12), 0.0) if decay is None else decay ** np.arange(12)
    matrix, expected = drawn(spectrum, *size), np.zeros(size)
    result = slope(placed(matrix, jnp.float32), placed(weights, jnp.float32), method)
    for place in np.ndindex(size):
        step = np.zeros(size)
        step[place] = 1e-6
        expected[place] = (weights * (best(matrix + step, 4) - best(matrix - step, 4))).sum() / 2e-6
    np.testing.assert_allclose(result, expected, atol=5e-3 * np.abs(expected).max())
    assert np.isfinite(slope(placed(0 * matrix, jnp.float32), placed(weights, jnp.float32), method)).all()


def test_ranks_and_methods_that_do_not_exist_are_refused(unchecked):
    matrix = jnp.zeros((40, 24))
    refusals: list[tuple[int, dict[str, Any], str]] = [
        (0, {}, "rank 0"),
        (25, {}, "rank 25"),
        (2, {"method": "guess"}, "'guess'"),
        (2, {"orthonormal": "gram"}, "'gram'"),
    ]
    for rank, settings, words in refusals:
        with pytest.raises(KernelError, match=words):
            factorise(matrix, rank, **settings)
    with pytest.raises(KernelUnavailableError, match="'tpu'"):
        factorise(matrix, 2, implementation="tpu")
