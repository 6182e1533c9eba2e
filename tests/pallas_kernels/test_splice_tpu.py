"""splice's TPU kernel, interpreted on a CPU: races and uninitialised memory are errors. Held against the XLA path."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from kernel_cases import INTERPRET, arrays, narrow_arrays

from pallas_kernels import KernelUnavailableError, splice, targeting
from pallas_kernels._operands import Operands
from pallas_kernels.splice import tpu
from pallas_kernels.splice.shapes import LANES, SMALL, SpliceShape
from pallas_kernels.tpu import prepare
from pallas_kernels.tpu.prepare import Tile
from tests.arrays import placed

HEADS, ONE_HEAD, LATENT = LANES


def pool_of(shape: SpliceShape, dtype=jnp.float32) -> jax.Array:
    return placed(np.random.default_rng(7).standard_normal(shape.pool), dtype)


def scattered(shape: SpliceShape) -> np.ndarray:
    order = np.random.default_rng(3).permutation(shape.pages * shape.page_size)
    return order[: shape.chunk.tokens].astype(np.int32)


def compare(shape: SpliceShape, slots, given: dict, tile: Tile | None, length: int | None, dtype=jnp.float32) -> None:
    """The kernel against the XLA path: equal where slots say, bit-equal elsewhere."""
    counted = None if length is None else jnp.int32(length)
    slots = placed(slots, jnp.int32)
    wanted = splice(
        pool_of(shape, dtype), slots, **given, layout=shape.chunk.layout, length=counted, implementation="xla"
    )
    plan: dict[str, Any] = {"layout": shape.chunk.layout, "tile": tile, "interpret": INTERPRET}
    found = tpu.kernel(pool_of(shape, dtype), slots, Operands(**given), counted, **plan)
    found, wanted = (np.asarray(value.astype(jnp.float32)) for value in (found, wanted))
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0 if dtype == jnp.float32 else 2**-7)
    count = shape.chunk.tokens if length is None else int(length)
    before = np.asarray(pool_of(shape, dtype), np.float32)
    flat = lambda value: value.reshape(*shape.chunk.leading, -1, *shape.pool[-2:])
    others = np.setdiff1d(np.arange(shape.pages * shape.page_size), np.asarray(slots)[:count])
    np.testing.assert_array_equal(flat(found)[:, others], flat(before)[:, others])
    assert not interpret_pallas_call.races.races_found  # pyright: ignore[reportOptionalMemberAccess]


SLOW = pytest.mark.slow
"""For cases that others stand in for by default: interpreting one takes seconds."""


@pytest.mark.parametrize(("tile", "length"), [(8, 30)])
def test_rows_of_heads_at_scattered_slots(tile: int, length: int | None):
    compare(HEADS, scattered(HEADS), arrays(HEADS.chunk), Tile(tile), length)


@SLOW
def test_rows_of_heads_at_a_run_from_mid_page():
    compare(HEADS, np.arange(7, 44), arrays(HEADS.chunk), None, 35)


@pytest.mark.slow
def test_tiles_of_one_head_at_scattered_slots():
    compare(ONE_HEAD, scattered(ONE_HEAD), arrays(ONE_HEAD.chunk), Tile(32), 38)


@pytest.mark.parametrize(("start", "dtype"), [(13, jnp.float32), pytest.param(152, jnp.bfloat16, marks=SLOW)])
def test_tiles_of_one_head_at_a_run_from_mid_tile(start: int, dtype):
    given = arrays(ONE_HEAD.chunk, dtype=dtype)
    compare(ONE_HEAD, np.arange(start, start + ONE_HEAD.chunk.tokens), given, Tile(32), 37, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8"])
def test_eight_bit_canonicals_into_a_wide_pool(dtype: str):
    compare(LATENT, np.arange(9, 28), narrow_arrays(LATENT.chunk, dtype)[0], None, None, jnp.bfloat16)


@pytest.mark.slow
def test_dispatch_takes_the_kernel_and_slots_out_of_range_are_written_nowhere():
    slots = np.arange(60, 60 + HEADS.chunk.tokens, dtype=np.int32)
    run = lambda pool, slots, **given: splice(pool, slots, **given)
    given = arrays(HEADS.chunk) | {"u": None, "v": None}
    wanted = jax.jit(run)(pool_of(HEADS), slots, **given)
    with targeting("tpu", INTERPRET):
        found = jax.jit(lambda *given, **more: run(*given, **more))(pool_of(HEADS), slots, **given)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "change", "words"),
    [
        (SMALL[0], {}, "width of 16; expected a multiple of 128"),
        (SpliceShape(ONE_HEAD.chunk, 10, 7), {}, "10 pages of 7 slots"),
        (SpliceShape(HEADS.chunk._replace(heads=5), 5, 16), {}, "5 heads; expected 1, 2, 4 or a multiple of 8"),
        (HEADS, {"u": jnp.zeros((2, 37, 256)), "v": jnp.zeros((2, 256, 256)), "dtype": jnp.float16}, "dtypes"),
    ],
)
def test_says_what_it_cannot_take(unchecked, shape: SpliceShape, change: dict, words: str):
    change = dict(change)
    dtype = change.pop("dtype", jnp.float32)
    given = arrays(shape.chunk, dtype=dtype) | change
    slots = np.arange(shape.chunk.tokens, dtype=np.int32)
    with targeting("tpu"), pytest.raises(KernelUnavailableError, match=words):
        splice(pool_of(shape, dtype), slots, **given, implementation="tpu")
    with targeting("tpu"):
        assert splice(pool_of(shape, dtype), slots, **given).shape == shape.pool


def test_a_tile_fits_its_budget_and_takes_short_chunks_whole():
    assert prepare.tile_of(100, 4, 128, 64, 2).tokens == 100
    long = prepare.tile_of(1 << 20, 32, 128, 256, 2).tokens
    assert long % 32 == 0
    assert long < prepare.tile_of(1 << 20, 4, 128, 256, 2).tokens
    assert jnp.dtype(jnp.bfloat16).itemsize * long * 32 * 128 < prepare.VMEM_BUDGET
