"""factorise: optimality, determinism, padding, rank deficiency, sharding, updates, and what it refuses."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import KernelError, KernelUnavailableError, factorise
from pallas_kernels.factorise import merge
from pallas_kernels.shapes import MATRICES, MatrixShape
from tests.shared.arrays import placed
from tests.shared.examples import examples

ROOT = Path(__file__).parents[2]


def matrix(shape: MatrixShape, decay: float = 12.0) -> jax.Array:
    rng = np.random.default_rng(1)
    size = min(shape.tokens, shape.features)
    left = np.linalg.qr(rng.standard_normal((*shape.batch, shape.tokens, size)))[0]
    right = np.linalg.qr(rng.standard_normal((*shape.batch, shape.features, size)))[0]
    return placed((left * np.exp(-np.arange(size) / decay)) @ np.swapaxes(right, -1, -2), jnp.float32)


@pytest.mark.parametrize("method", ["exact", "randomised"])
@pytest.mark.parametrize("shape", MATRICES, ids=lambda shape: shape.name)
def test_is_nearly_optimal(shape: MatrixShape, method: str):
    a = matrix(shape)
    u, v = factorise(a, shape.rank, method=method)
    singular = np.linalg.svd(np.asarray(a, np.float64), compute_uv=False)
    best = (singular[..., shape.rank :] ** 2).sum(-1)
    error = ((np.asarray(a, np.float64) - np.asarray(u, np.float64) @ np.asarray(v, np.float64)) ** 2).sum((-1, -2))
    total = (singular**2).sum(-1)
    assert ((error - best) / total).max() < (1e-6 if method == "exact" else 5e-3)
    identity = np.broadcast_to(np.eye(shape.rank), (*shape.batch, shape.rank, shape.rank))
    np.testing.assert_allclose(v @ jnp.swapaxes(v, -1, -2), identity, atol=1e-5)
    norms = np.linalg.norm(u, axis=-2)
    assert (np.diff(norms, axis=-1) <= 1e-5).all()


def test_energy_on_a_slow_spectrum():
    a = matrix(MatrixShape("slow", (2,), 256, 128, 8), decay=25.0)
    u, v = factorise(a, 8)
    singular = np.linalg.svd(np.asarray(a), compute_uv=False)
    captured = (singular**2).sum(-1) - np.square(a - u @ v).sum((-1, -2))
    assert (captured / (singular[:, :8] ** 2).sum(-1)).min() > 0.995


def test_is_deterministic_by_key():
    a = matrix(MATRICES[0])
    first, again, other = (factorise(a, 4, key=jax.random.key(seed)) for seed in (3, 3, 4))
    assert (first[0] == again[0]).all()
    assert not (first[0] == other[0]).all()


@pytest.mark.parametrize("shape", MATRICES[:2], ids=lambda shape: shape.name)
@pytest.mark.parametrize("method", ["exact", "randomised"])
def test_rows_of_zeros_change_nothing(shape: MatrixShape, method: str):
    a = matrix(shape)
    padded = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, 9), (0, 0)])
    u, v = factorise(a, shape.rank, method=method)
    wide_u, wide_v = factorise(padded, shape.rank, method=method)
    np.testing.assert_allclose(wide_u[..., : shape.tokens, :] @ wide_v, u @ v, atol=2e-5)
    assert np.abs(wide_u[..., shape.tokens :, :]).max() < 1e-6


@pytest.mark.parametrize("rank", [1, 5])
def test_low_rank_and_zero_matrices_stay_finite(rank: int):
    a = matrix(MATRICES[0])
    thin = a[..., :, :2] @ a[..., :2, :]
    for value in (thin, jnp.zeros_like(a)):
        u, v = factorise(value, rank)
        assert np.isfinite(u).all()
        assert np.isfinite(v).all()
        if rank == 5:
            np.testing.assert_allclose(u @ v, value, atol=1e-5)


def test_ranks_and_methods_that_do_not_exist_are_refused(unchecked):
    a = matrix(MATRICES[0])
    for rank in (0, 25):
        with pytest.raises(KernelError, match=f"rank {rank}"):
            factorise(a, rank)
    with pytest.raises(KernelError, match="'guess'"):
        factorise(a, 2, method="guess")
    with pytest.raises(KernelUnavailableError, match="'tpu'"):
        factorise(a, 2, implementation="tpu")


# Any key, of few shapes: every shape is compiled anew, and two of them draw from the same programs.
@pytest.mark.nightly
@given(padding=st.sampled_from([1, 8]), seed=st.integers(0, 2**32 - 1), rank=st.sampled_from([1, 5]))
@examples(8)
def test_padding_and_repetition_change_nothing_for_any_key(padding: int, seed: int, rank: int):
    a = matrix(MATRICES[0])
    padded = jnp.pad(a, ((0, 0), (0, padding), (0, 0)))
    key = jax.random.key(seed)
    u, v = factorise(a, rank, key=key)
    wide_u, wide_v = factorise(padded, rank, key=key)
    np.testing.assert_allclose(wide_u[:, : MATRICES[0].tokens] @ wide_v, u @ v, atol=2e-5)
    again = factorise(a, rank, key=key)
    assert (again[0] == u).all()
    assert (again[1] == v).all()


def test_sums_refuse_ranks_out_of_range(unchecked):
    a = matrix(MATRICES[0])
    u, v = factorise(a, 3)
    with pytest.raises(KernelError, match="rank 7; expected 1 to 6"):
        merge((u, v), (u, v), 7)
