"""The Hopper kernel of rotate_patch beyond the shared suite: cuts, lengths, dense, float32 factors, refusals."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import INTERPRETED, arrays, assert_rounded_once, expected, narrow_arrays

from pallas_kernels import KernelUnavailableError, rotate_patch, targeting
from pallas_kernels._operands import Operands
from pallas_kernels.hopper import factors, launch
from pallas_kernels.rotate_patch import gpu
from pallas_kernels.rotate_patch.shapes import ALIGNED, NARROW, PRODUCTION, RotateShape


def run(**arguments) -> jax.Array:
    with targeting("gpu", INTERPRETED["gpu"]):
        return rotate_patch(**arguments, implementation="gpu")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [launch.LaunchPlan(2, 2, 1), launch.LaunchPlan(1, 3, 3)])
def test_blocks_stages_and_lengths(plan: launch.LaunchPlan):
    shape = RotateShape("lengths", (3,), 131, 2, 32, 32, 16, "half")
    given = arrays(shape, dtype=jnp.bfloat16)
    plans: dict[str, Any] = {"layout": "half", "out_dtype": "bfloat16", "plan": plan, "interpret": INTERPRETED["gpu"]}
    call = jax.jit(functools.partial(gpu.kernel, **plans))
    for length in (0, 65, 131):
        exact = expected(shape, given)
        exact[:, length:] = 0.0
        found = call(Operands(**given), jnp.int32(length))
        assert (np.asarray(found[:, length:], np.float32) == 0).all()
        assert_rounded_once(found, exact)


@pytest.mark.slow
def test_padding_that_is_not_finite_comes_back_as_zeros():
    shape = ALIGNED[0]
    given = arrays(shape)
    given["x"] = given["x"].at[:, 6:].set(jnp.nan)
    found = run(**given, length=jnp.int32(6))
    assert (found[:, 6:] == 0).all()
    assert jnp.isfinite(found).all()


@pytest.mark.slow
def test_shared_factors_and_a_dense_correction():
    shape = RotateShape("batch", (2, 2), 7, 1, 32, 32, 4, "half")
    given = arrays(shape)
    given |= {
        "u": given["u"][:1, :1],
        "v": given["v"][0],
        "dense": jnp.ones((2, 7, 1, 32)) * jnp.arange(7.0)[:, None, None],
    }
    np.testing.assert_allclose(run(**given), rotate_patch(**given), atol=2e-5)


@pytest.mark.slow
def test_the_result_has_the_dtype_that_is_asked_for():
    shape = ALIGNED[3]
    given = arrays(shape)
    given |= {"x": given["x"].astype(jnp.bfloat16), "dense": jnp.ones(given["x"].shape)}
    found = run(**given, out_dtype=jnp.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(shape, {n: given[n] for n in ("x", "u", "v")}) + 1, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "layout"), [("float8_e4m3fn", "pairs"), ("int8", "half"), ("float8_e5m2", "half")])
def test_every_number_of_eight_bits_is_widened_exactly(dtype: str, layout: str):
    """Subnormal numbers too; as one channel and as half a word. What is not a number stays none."""
    x = jnp.asarray(np.arange(256, dtype=np.uint8).reshape(2, 2, 64).view(jnp.dtype(dtype)))
    given = {"x": x, "cos": jnp.ones((2, 32)), "sin": jnp.zeros((2, 32)), "out_dtype": jnp.bfloat16}
    given |= {"x_scale": jnp.full((1, 2, 64), 2.0)} if dtype == "int8" else {}
    found, wanted = run(**given, layout=layout), rotate_patch(**given, layout=layout, implementation="xla")
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted.astype(jnp.float32))


@pytest.mark.slow
def test_lengths_and_several_layers_of_eight_bits_with_buffers_of_their_own():
    shape = NARROW._replace(leading=(3,), tokens=70)
    given, wide = narrow_arrays(shape, "int8")
    plans: dict[str, Any] = {
        "layout": "half",
        "out_dtype": "bfloat16",
        "plan": launch.LaunchPlan(2, 2, 1),
        "interpret": INTERPRETED["gpu"],
    }
    call = jax.jit(functools.partial(gpu.kernel, **plans))
    for length in (0, 66):
        exact = expected(shape, wide)
        exact[:, length:] = 0.0
        assert_rounded_once(call(Operands(**given), jnp.int32(length)), exact)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["u", "v"])
def test_scales_of_factors_lie_on_the_side_that_is_float32(side: str):
    shape = ALIGNED[3]
    given, wide = narrow_arrays(shape, "int8")
    plain = arrays(shape)
    mixed = plain | {side: given[side], f"{side}_scale": given[f"{side}_scale"]}
    rank = factors.padded_rank(17, mixed["u"].dtype, mixed["v"].dtype, 3, True)
    assert rank == 64
    exact = expected(shape, plain | {side: wide[side]})
    np.testing.assert_allclose(run(**mixed), exact, atol=5e-5)
    assert factors.padded_rank(17, jnp.int8, jnp.int8, 3, True) == 64
    assert factors.padded_rank(17, jnp.float8_e5m2, jnp.float8_e5m2, 3) == 32


@pytest.mark.slow
def test_rank_zero_is_bit_equal_to_one_rotation():
    shape = ALIGNED[1]
    given = arrays(shape, dtype=jnp.bfloat16)
    assert (run(**given) == rotate_patch(**given, implementation="xla")).all()


@pytest.mark.parametrize("pieces", [2, 3])
def test_pieces_multiply_out(pieces: int):
    u, v = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(9, 5), (5, 32)]))
    for left, right in ((u, v), (u.astype(jnp.bfloat16), v), (u, v.astype(jnp.bfloat16))):
        thin, wide = jax.jit(functools.partial(factors.bfloat16_factors, pieces=pieces))(left, right)
        assert thin.dtype == wide.dtype == jnp.bfloat16
        assert thin.shape[-1] == factors.padded_rank(5, left.dtype, right.dtype, pieces)
        exact = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
        assert thin.shape[-2] == 16
        assert (thin[9:] == 0).all()
        error = np.abs(np.asarray(thin[:9], np.float64) @ np.asarray(wide, np.float64) - exact).max()
        assert error < (1e-4 if pieces == 2 else 2e-6)


@pytest.mark.slow
def test_has_the_references_derivatives():
    given = arrays(ALIGNED[3])
    loss = lambda call, x, u, v: jnp.sum(jnp.sin(call(**(given | {"x": x, "u": u, "v": v}))))
    calls = (run, functools.partial(rotate_patch, implementation="xla"))
    found, wanted = (jax.grad(loss, (1, 2, 3))(call, given["x"], given["u"], given["v"]) for call in calls)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.zeros((2, 13, 2, 32), jnp.float8_e4m3fn)}, "dtypes"),
        ({"out_dtype": "float16"}, "dtypes"),
        ({"x": jnp.zeros((2, 13, 2, 32), jnp.float8_e5m2), "out_dtype": "float32"}, "halves in multiples of 32"),
        ({"u": jnp.zeros((2, 13, 257)), "v": jnp.zeros((2, 257, 64))}, "rank 257"),
        ({"u": jnp.zeros((2, 13, 256)), "v": jnp.zeros((2, 256, 64))}, "more shared memory"),
        ({"u": jnp.zeros((3, 13, 4)), "v": jnp.zeros((4, 64))}, "u with leading dimensions"),
        ({"cos": jnp.ones((1, 16)), "sin": jnp.ones((1, 16))}, "cosines of 1 tokens"),
        ({"cos": jnp.ones((2, 13, 16)), "sin": jnp.ones((2, 13, 16))}, "one table for all layers"),
        ({"cos": jnp.ones((13, 8)), "sin": jnp.ones((13, 8))}, "2 heads of 32 channels, 16 rotary"),
        ({"dense": jnp.zeros((13, 2, 32), jnp.float16)}, "dtypes"),
    ],
)
def test_says_what_it_cannot_take(unchecked, change, words):
    with targeting("gpu"), pytest.raises(KernelUnavailableError, match=words):
        rotate_patch(**(arrays(ALIGNED[0]) | change), implementation="gpu")


def test_other_gpus_are_told(monkeypatch):
    class Device:
        compute_capability = "8.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    with pytest.raises(KernelUnavailableError, match=r"a GPU of compute capability 8\.0; expected 9\.0"):
        rotate_patch(**arrays(ALIGNED[0]), implementation="gpu")


@pytest.mark.parametrize("rank", [0, 16, 64, 256])
@pytest.mark.parametrize("shape", PRODUCTION, ids=lambda shape: shape.name)
def test_production_shapes_fit_and_every_item_is_in_one_block(shape: RotateShape, rank: int):
    for layout, source in itertools.product(("half", "pairs"), ("bfloat16", "int8")):
        dtypes = launch.LaunchDtypes(source, "bfloat16", scaled=source == "int8")
        ways = launch.ways_of(launch.RowShape(shape.heads, shape.width, shape.rotary, layout, *dtypes.itemsizes[1::-1]))
        cut = launch.launch_of(ways, shape.tokens, shape.leading[0], rank, dtypes)
        assert cut is not None
        items = cut.items
        assert cut.shared_memory <= launch.SHARED_MEMORY
        tiles, kinds, blocks = cut.grid
        assert tiles * cut.rows >= shape.tokens
        assert blocks * cut.share >= cut.total
        assert (blocks - 1) * cut.share < cut.total
        width = shape.heads * shape.width
        seen = np.zeros(width, int)
        for kind in range(kinds):
            for head in range(items.heads):
                for start in items.columns(kind, head):
                    seen[int(start) : int(start) + items.width] += 1
        assert (seen == 1).all()
