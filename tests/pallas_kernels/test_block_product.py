"""block_product: the XLA path and the Hopper kernel, interpreted, against float64; what is refused; what runs where."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import (
    KernelError,
    KernelUnavailableError,
    block_product,
    preferring,
    targeting,
)
from pallas_kernels.block_product import what_runs
from tests.shared.arrays import placed

INTERPRETED = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
MATRICES, DEPTH, WIDTH, ROWS, BLOCKS = 5, 128, 192, 64, 3


def drawn(dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    """Rows of three blocks, and the matrices."""
    rng = np.random.default_rng(0)
    shapes = (BLOCKS * ROWS, DEPTH), (MATRICES, DEPTH, WIDTH)
    return placed(rng.standard_normal(shapes[0]), dtype), placed(rng.standard_normal(shapes[1]), dtype)


def exact(x: Any, stack: Any, which: list[int]) -> np.ndarray:
    """In float64."""
    rows, matrices = np.asarray(x, np.float64).reshape(len(which), -1, x.shape[1]), np.asarray(stack, np.float64)
    return np.concatenate([block @ matrices[number] for block, number in zip(rows, which, strict=True)])


def rounded_once(found: Any, wanted: np.ndarray) -> None:
    """Sums in float32 may turn a rounding, no more."""
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(wanted), 1e-3))) - 7)
    off = np.abs(np.asarray(found, np.float64) - wanted)
    assert (off <= 0.51 * unit + 1e-4).all()


@pytest.mark.parametrize("platform", ["xla", "gpu"])
def test_each_block_is_multiplied_by_its_matrix(platform):
    x, stack = drawn()
    which = [4, 0, 4]
    with targeting("gpu", INTERPRETED):
        run = jax.jit(lambda *given: block_product(*given, implementation=platform))
        found = run(x, stack, placed(which, jnp.int32), jnp.int32(BLOCKS))
    assert found.dtype == x.dtype
    rounded_once(found, exact(x, stack, which))


def test_blocks_behind_the_last_are_not_looked_at():
    """Their matrices need not exist, and their rows may hold anything."""
    x, stack = drawn()
    x = x.at[ROWS:].set(jnp.nan)
    with targeting("gpu", INTERPRETED):
        found = jax.jit(lambda *given: block_product(*given, implementation="gpu"))(
            x, stack, placed([2, 1 << 20, -7], jnp.int32), jnp.int32(1)
        )
    rounded_once(found[:ROWS], exact(x[:ROWS], stack, [2]))


@pytest.mark.nightly
def test_has_the_references_derivatives():
    x, stack = drawn()
    which, used = placed([1, 3, 1], jnp.int32), jnp.int32(BLOCKS)

    def slope(platform):
        loss = lambda x, stack: jnp.sum(
            jnp.sin(block_product(x, stack, which, used, implementation=platform).astype(jnp.float32))
        )
        return jax.jit(jax.grad(loss, (0, 1)))(x, stack)

    with targeting("gpu", INTERPRETED):
        found, wanted = slope("gpu"), slope("xla")
    for one, other in zip(found, wanted, strict=True):
        largest = float(jnp.abs(other).max())
        assert largest > 1
        # Results that round apart have other cosines: all but a few entries are the same.
        off = np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32))
        assert np.quantile(off, 0.99) <= 2**-6 * largest


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "words"),
    [
        (32, (5, 128, 192), "bfloat16", r"blocks of 32 rows; expected one of \(64, 128\)"),
        (64, (5, 128, 192), "float32", "expected one dtype of 16 bits"),
        (64, (5, 100, 192), "bfloat16", "matrices of 100 × 192; expected multiples of 64 and 64"),
        (64, (5, 128, 96), "bfloat16", "matrices of 128 × 96"),
    ],
)
def test_the_kernel_says_what_it_cannot_take(rows, shape, dtype, words):
    stack = jax.ShapeDtypeStruct(shape, dtype)
    with targeting("gpu"):
        assert what_runs(rows, stack.dtype, stack) == "xla"
        with pytest.raises(KernelUnavailableError, match=words):
            what_runs(rows, stack.dtype, stack, "gpu")


def test_the_implementation_follows_from_platform_and_sizes():
    stack = jax.ShapeDtypeStruct((5, 128, 192), jnp.bfloat16)
    assert what_runs(64, stack.dtype, stack) == "xla"
    with targeting("gpu"):
        assert what_runs(64, stack.dtype, stack) == "gpu"
    with preferring("gpu"):  # but this is no GPU
        assert what_runs(64, stack.dtype, stack) == "xla"
    with pytest.raises(KernelUnavailableError, match="the platform is 'cpu'"):
        what_runs(64, stack.dtype, stack, "gpu")
    with targeting("tpu"), pytest.raises(KernelUnavailableError, match="the operation has no such kernel"):
        what_runs(64, stack.dtype, stack, "tpu")


def test_arrays_that_do_not_fit_are_refused(unchecked):
    x, stack = drawn()
    which, used = placed([1, 3, 1], jnp.int32), jnp.int32(BLOCKS)
    with pytest.raises(KernelError, match="191 rows in 3 blocks"):
        block_product(x[:-1], stack, which, used)
    with pytest.raises(KernelError, match="192 rows in 0 blocks"):
        block_product(x, stack, which[:0], used)
    with pytest.raises(KernelError, match="rows of 64; expected 128"):
        block_product(x[:, :64], stack, which, used)
    with pytest.raises(KernelError, match="rows of float32; expected bfloat16"):
        block_product(x.astype(jnp.float32), stack, which, used)
