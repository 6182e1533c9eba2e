"""TPU kernels that take a block by pairs of heads: against float64 and the XLA path, interpreted on a CPU.

Two interpreters look at it. The one that looks for races and uninitialised memory sees references in no other shape, so
there rows are read by their index. The other sees words with a stride, as they are compiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import INTERPRET, arrays, assert_rounded_once, expected, narrow_arrays

from pallas_kernels import rotate_patch, splice, targeting
from pallas_kernels._operands import Operands
from pallas_kernels.rotate_patch import tpu
from pallas_kernels.rotate_patch.shapes import RotateShape
from pallas_kernels.splice import tpu as splice_tpu
from pallas_kernels.splice.shapes import SpliceShape
from pallas_kernels.tpu import block
from pallas_kernels.tpu.prepare import Tile
from tests.arrays import placed

SLOW = pytest.mark.slow
"""For cases that others stand in for by default: layouts, ranks and heads are looked at together, then once each."""
CASES = [
    (4, "pairs", 128, 17, True),
    pytest.param(8, "half", 64, 3, True, marks=SLOW),
    pytest.param(1, "pairs", 64, 3, True, marks=SLOW),
    pytest.param(4, "half", 0, 5, True, marks=SLOW),
    pytest.param(8, "half", 128, 3, INTERPRET, marks=SLOW),
]


def turned(shape: RotateShape, given: dict, dtype, interpret: Any, length: int, tile: int = 32) -> tuple:
    """The kernel's rows below the length and what float64 says of them, once the rest was found to be zero."""
    plan: dict[str, Any] = {"layout": shape.layout, "tile": Tile(tile), "interpret": interpret}
    found = np.asarray(tpu.kernel(Operands(**given), jnp.int32(length), **plan, out_dtype=dtype).astype(jnp.float32))
    assert not found[:, length:].any()
    return found[:, :length], length


@pytest.mark.parametrize(("heads", "layout", "rotary", "rank", "interpret"), CASES)
def test_rotation_and_patch_agree_with_float64(heads: int, layout: str, rotary: int, rank: int, interpret):
    shape = RotateShape("pairs", (2,), 37, heads, 128, rotary, rank, layout)
    for dtype in (jnp.float32, jnp.bfloat16):
        given = arrays(shape, dtype=dtype, seed=heads)
        found, length = turned(shape, given, dtype, interpret, 35)
        exact = expected(shape, given)[:, :length]
        if dtype == jnp.float32:
            np.testing.assert_allclose(found, exact, atol=5e-5)
        else:
            assert_rounded_once(found, exact)


@pytest.mark.parametrize(
    "stored",
    ["bfloat16", *(pytest.param(each, marks=SLOW) for each in ("float32", "int8", "float8_e5m2"))],
)
def test_any_dtype_into_any_other(stored: str):
    shape = RotateShape("pairs", (1,), 21, 4, 128, 128, 5, "half")
    if stored in ("bfloat16", "float32"):
        given = wide = arrays(shape, dtype=jnp.dtype(stored))
    else:
        given, wide = narrow_arrays(shape, stored)
    exact = expected(shape, wide)
    found, length = turned(shape, given, jnp.float32, True, 19)
    np.testing.assert_allclose(found, exact[:, :length], atol=5e-5)
    assert_rounded_once(turned(shape, given, jnp.bfloat16, True, 19)[0], exact[:, :length])


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 8])
def test_both_interpreters_give_the_same_bits(heads: int):
    shape = RotateShape("pairs", (1,), 40, heads, 128, 128, 3, "half")
    given = arrays(shape, dtype=jnp.bfloat16)
    given["x"] = given["x"].at[0, 3].set(jnp.nan).at[0, 5].set(jnp.inf)
    raced, strided = (turned(shape, given, jnp.bfloat16, each, 33)[0] for each in (INTERPRET, True))
    assert np.isnan(raced[0, 3]).all()
    np.testing.assert_array_equal(raced, strided)


@pytest.mark.parametrize(
    ("heads", "dtype", "rank", "layout", "length"),
    [
        (2, "bfloat16", 3, "pairs", 50),
        pytest.param(4, "float32", 5, "half", 41, marks=SLOW),
        pytest.param(4, "int8", 3, "half", 60, marks=SLOW),
    ],
)
def test_slots_not_named_keep_their_bits(heads: int, dtype: str, rank: int, layout: str, length: int):
    chunk = RotateShape("pairs", (2,), 63, heads, 128, 128, rank, layout)
    shape = SpliceShape(chunk, 6, 16)
    wide = jnp.float32 if dtype == "float32" else jnp.bfloat16
    given = narrow_arrays(chunk, dtype)[0] if dtype == "int8" else arrays(chunk, dtype=jnp.dtype(dtype))
    pool = lambda: placed(np.random.default_rng(7).standard_normal(shape.pool), wide)
    # A run of 40 slots from mid-page, the others scattered behind it: copies of 32 tokens at once and of one.
    behind = np.random.default_rng(3).permutation(np.arange(46, 96))[:23]
    slots = placed(np.concatenate([np.arange(5, 45), behind]), jnp.int32)
    plan: dict[str, Any] = {"layout": layout, "tile": Tile(32), "interpret": INTERPRET}
    made = jax.jit(lambda pool: splice_tpu.kernel(pool, slots, Operands(**given), jnp.int32(length), **plan))(pool())
    wanted = splice(pool(), slots, **given, layout=layout, length=jnp.int32(length), implementation="xla")
    found, wanted, before = (np.asarray(each.astype(jnp.float32)) for each in (made, wanted, pool()))
    rows = [each.reshape(2, 96, heads, 128) for each in (found, wanted, before)]
    named = np.asarray(slots)[:length]
    others = np.setdiff1d(np.arange(96), named)
    np.testing.assert_array_equal(rows[0][:, others], rows[2][:, others])
    if wide == jnp.float32:
        np.testing.assert_allclose(rows[0][:, named], rows[1][:, named], atol=5e-5)
    else:
        assert_rounded_once(rows[0][:, named], rows[1][:, named].astype(np.float64))


def test_which_blocks_are_taken_by_pairs():
    leaf = lambda heads, dtype="bfloat16", width=128: jax.ShapeDtypeStruct((32, heads, width), dtype)
    for heads, wanted in ((2, True), (3, False), (4, True), (6, False), (8, True), (24, True)):
        assert block.by_pairs({"x": leaf(heads)}, leaf(heads)) == wanted
    assert not block.by_pairs({"x": leaf(32, "float32")}, leaf(32, "float32"))
    assert not block.by_pairs({"x": leaf(4, "int8")}, leaf(4))
    assert not block.by_pairs({"x": leaf(4, width=64)}, leaf(4, width=64))
    assert block.by_pairs({"x": leaf(4, "float32"), "dense": leaf(4)}, leaf(4))


@pytest.mark.slow
def test_a_mesh_whose_axes_are_in_types_is_no_obstacle():
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    shape = RotateShape("pairs", (2,), 9, 4, 128, 128, 3, "half")
    given = arrays(shape, dtype=jnp.bfloat16)
    run = lambda x: rotate_patch(**(given | {"x": x}), implementation="tpu")
    with targeting("tpu", True):
        wanted = jax.jit(run)(given["x"])
        with jax.set_mesh(mesh):
            for spec in (jax.P(), jax.P(None, None, "heads")):
                placed = jax.device_put(given["x"], jax.NamedSharding(mesh, spec))
                found = jax.jit(run)(placed)
                assert jax.typeof(found).sharding.spec == jax.typeof(placed).sharding.spec
                np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))
