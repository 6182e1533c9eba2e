"""block_product multiplies each block of rows by its matrix, in float64 to one rounding, by XLA and Hopper's kernel."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KernelError,
    KernelUnavailableError,
    block_product,
    preferring,
    targeting,
)
from pallas_kernels.block_product import what_runs
from tests.shared.arrays import placed

MATRICES, DEPTH, WIDTH, ROWS, BLOCKS = 5, 128, 192, 64, 3


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """The interpreter, to which races and uninitialised memory are errors."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def drawn(dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    """Rows of three blocks, and the matrices."""
    rng = np.random.default_rng(0)
    shapes = (BLOCKS * ROWS, DEPTH), (MATRICES, DEPTH, WIDTH)
    return placed(rng.standard_normal(shapes[0]), dtype), placed(rng.standard_normal(shapes[1]), dtype)


def exact(x: Any, stack: Any, which: list[int]) -> np.ndarray:
    """In float64."""
    rows, matrices = np.asarray(x, np.float64).reshape(len(which), -1, x.shape[1]), np.asarray(stack, np.float64)
    return np.concatenate([block @ matrices[number] for block, number in zip(rows, which, strict=True)])


def rounded_once(result: Any, expected: np.ndarray) -> None:
    """Sums in float32 may turn a rounding, no more."""
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(expected), 1e-3))) - 7)
    off = np.abs(np.asarray(result, np.float64) - expected)
    assert (off <= 0.51 * unit + 1e-4).all()


@pytest.mark.parametrize("platform", ["xla", "gpu"])
def test_each_block_is_multiplied_by_its_matrix(platform, interpreted):
    """Blocks behind the last are not looked at: their matrices need not exist, and their rows may hold anything."""
    x, stack = drawn()
    run = jax.jit(lambda *given: block_product(*given, implementation=platform))
    with targeting("gpu", interpreted):
        result = run(x, stack, placed([4, 0, 4], jnp.int32), jnp.int32(BLOCKS))
        alone = run(x.at[ROWS:].set(jnp.nan), stack, placed([2, 1 << 20, -7], jnp.int32), jnp.int32(1))
    assert result.dtype == x.dtype
    rounded_once(result, exact(x, stack, [4, 0, 4]))
    rounded_once(alone[:ROWS], exact(x[:ROWS], stack, [2]))


def test_derivatives_of_the_kernel_are_those_of_the_products(interpreted):
    x, stack = drawn()
    weights = np.random.default_rng(1).standard_normal((BLOCKS * ROWS, WIDTH)).astype(np.float32)

    def loss(x, stack):
        result = block_product(x, stack, placed([1, 3, 1], jnp.int32), jnp.int32(BLOCKS), implementation="gpu")
        return (weights * result.astype(jnp.float32)).sum()

    with targeting("gpu", interpreted):
        of_rows, of_matrices = jax.jit(jax.grad(loss, (0, 1)))(x, stack)
    rows, blocks = np.asarray(x, np.float64).reshape(BLOCKS, ROWS, DEPTH), weights.reshape(BLOCKS, ROWS, WIDTH)
    expected = np.zeros(stack.shape)
    np.add.at(expected, [1, 3, 1], np.swapaxes(rows, 1, 2) @ blocks)
    np.testing.assert_allclose(np.float32(of_matrices), expected, atol=0.02 * np.abs(expected).max())
    expected = (blocks @ np.swapaxes(np.asarray(stack, np.float64)[[1, 3, 1]], 1, 2)).reshape(x.shape)
    np.testing.assert_allclose(np.float32(of_rows), expected, atol=0.02 * np.abs(expected).max())


def test_the_implementation_follows_from_platform_and_sizes():
    stack = jax.ShapeDtypeStruct((5, 128, 192), jnp.bfloat16)
    assert what_runs(64, stack.dtype, stack) == "xla"
    with targeting("gpu"):
        assert what_runs(64, stack.dtype, stack) == "gpu"
        for rows, shape, dtype, words in (
            (32, (5, 128, 192), "bfloat16", r"blocks of 32 rows; expected one of \(64, 128\)"),
            (64, (5, 128, 192), "float32", "expected one dtype of 16 bits"),
            (64, (5, 100, 192), "bfloat16", "matrices of 100 × 192; expected multiples of 64 and 64"),
        ):
            other = jax.ShapeDtypeStruct(shape, dtype)
            assert what_runs(rows, other.dtype, other) == "xla"
            with pytest.raises(KernelUnavailableError, match=words):
                what_runs(rows, other.dtype, other, "gpu")
    with preferring("gpu"):  # but this is no GPU
        assert what_runs(64, stack.dtype, stack) == "xla"
    with pytest.raises(KernelUnavailableError, match="the platform is 'cpu'"):
        what_runs(64, stack.dtype, stack, "gpu")


def test_arrays_that_do_not_fit_are_refused(unchecked):
    x, stack = drawn()
    which, used = placed([1, 3, 1], jnp.int32), jnp.int32(BLOCKS)
    for rows, numbers, words in (
        (x[:-1], which, "191 rows in 3 blocks"),
        (x[:, :64], which, "rows of 64; expected 128"),
        (x.astype(jnp.float32), which, "rows of float32; expected bfloat16"),
    ):
        with pytest.raises(KernelError, match=words):
            block_product(rows, stack, numbers, used)
