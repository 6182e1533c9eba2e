"""rotate_patch: every implementation against float64, and what it refuses. Kernels are interpreted on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    INTERPRET,
    INTERPRETED,
    LARGEST,
    arrays,
    assert_rounded_once,
    expected,
    narrow_arrays,
    narrowed,
)

from pallas_kernels import KernelError, KernelUnavailableError, rotate_patch, targeting
from pallas_kernels._operands import Operands
from pallas_kernels.rotate_patch import tpu
from pallas_kernels.rotate_patch.shapes import ALIGNED, ALIGNED_PAIRS, NARROW, SMALL, RotateShape
from pallas_kernels.tpu.prepare import Tile


def run(implementation: str, **arguments) -> jax.Array:
    """rotate_patch by one implementation; kernels interpreted, races and uninitialised memory being errors."""
    if implementation == "xla":
        return rotate_patch(**arguments, implementation="xla")
    with targeting(implementation, INTERPRETED[implementation]):
        return rotate_patch(**arguments, implementation=implementation)


SLOW = pytest.mark.slow
"""For cases of the Hopper kernel that others stand in for by default: interpreting one takes seconds."""
BLOCKED = ("mla", "pairs", "ragged")
"""Shapes that the kernel for TPUs is interpreted in by default (the first in bfloat16); XLA takes all."""
CASES = [
    *(("xla", shape) for shape in SMALL),
    *(
        pytest.param("tpu", shape, marks=SLOW if shape.name == "mla" else ())
        for shape in SMALL
        if shape.name in BLOCKED
    ),
    ("gpu", ALIGNED_PAIRS[0]),
    *(pytest.param("gpu", shape, marks=SLOW) for shape in ALIGNED),
]
# Of the Hopper kernel by default in its own file, over several blocks.
CASES_BFLOAT16 = [
    ("xla", SMALL[0]),
    pytest.param("tpu", SMALL[0], marks=SLOW),
    pytest.param("gpu", ALIGNED[0], marks=SLOW),
]
CASES_NARROW = [
    *(("xla", SMALL[2], dtype) for dtype in LARGEST),
    pytest.param("tpu", SMALL[2], "int8", marks=SLOW),
    pytest.param("gpu", NARROW, "float8_e5m2", marks=SLOW),  # int8 with several layers in its own file
]
CASES_NARROW_PAIRS = [("xla", "float8_e4m3fn"), pytest.param("gpu", "int8", marks=SLOW)]
NAMES = lambda value: value if isinstance(value, str) else value.name


@pytest.mark.parametrize(("implementation", "shape"), CASES, ids=NAMES)
def test_agrees_with_float64(shape: RotateShape, implementation: str):
    given = arrays(shape)
    found = run(implementation, **given, layout=shape.layout)
    np.testing.assert_allclose(found, expected(shape, given), atol=2e-5)


@pytest.mark.parametrize("layout", ["half", "pairs"])
def test_sharding_in_types_passes_through_the_xla_path(layout: str):
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    given = {"cos": jnp.full((5, 4), 0.6), "sin": jnp.full((5, 4), 0.8), "layout": layout, "implementation": "xla"}
    x = jax.random.normal(jax.random.key(0), (2, 5, 4, 16))
    turned = jax.jit(lambda x: rotate_patch(x, **given))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P(None, None, "heads", None))
        found = turned(jax.device_put(x, sharding))
        assert found.sharding.is_equivalent_to(sharding, 4)
    np.testing.assert_array_equal(found, turned(x))


@pytest.mark.parametrize(("implementation", "shape"), CASES_BFLOAT16, ids=NAMES)
def test_bfloat16_within_one_unit_of_the_rows_largest_value(shape: RotateShape, implementation: str):
    given = arrays(shape, dtype=jnp.bfloat16)
    assert_rounded_once(run(implementation, **given, layout=shape.layout), expected(shape, given))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about what XLA makes for CPUs")
@pytest.mark.parametrize("rotary", [128, 64])
@pytest.mark.parametrize("layout", ["half", "pairs"])
def test_xla_for_cpus_makes_one_pass_of_a_rotation(layout: str, rotary: int):
    shape = RotateShape("one_pass", (2,), 64, 4, 128, rotary, 0, layout)
    given = arrays(shape, dtype=jnp.bfloat16)
    compiled = jax.jit(lambda given: rotate_patch(**given, layout=layout, implementation="xla")).lower(given).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < given["x"].nbytes


@pytest.mark.parametrize(("tile", "length"), [(8, 17), (8, 37), pytest.param(16, 0, marks=SLOW)])
def test_tpu_kernel_over_several_blocks_and_lengths(tile: int, length: int):
    shape = RotateShape("blocks", (2,), 37, 2, 16, 8, 3, "pairs")
    given = arrays(shape)
    plan = {"layout": "pairs", "tile": Tile(tile), "interpret": INTERPRET}
    found = tpu.kernel(Operands(**given), jnp.int32(length), **plan)
    exact = expected(shape, given)
    exact[:, length:] = 0.0
    np.testing.assert_allclose(found, exact, atol=2e-5)


@pytest.mark.slow
def test_tpu_kernel_shares_what_has_fewer_leading_dimensions():
    shape = RotateShape("batch", (2, 3), 7, 1, 16, 16, 4, "half")
    given = arrays(shape)
    given |= {"u": given["u"][:1, :1], "v": given["v"][0], "cos": jnp.stack([given["cos"]] * 3)}
    given["sin"] = jnp.stack([given["sin"], -given["sin"], 0 * given["sin"]])
    given["dense"] = jnp.ones((7, 1, 16))
    np.testing.assert_allclose(run("tpu", **given), run("xla", **given), atol=2e-5)


@pytest.mark.slow
def test_tpu_kernel_has_the_references_derivatives():
    given = arrays(SMALL[0])
    loss = lambda implementation, x, u, v: jnp.sum(jnp.sin(run(implementation, **(given | {"x": x, "u": u, "v": v}))))
    found, wanted = (jax.grad(loss, (1, 2, 3))(name, given["x"], given["u"], given["v"]) for name in ("tpu", "xla"))
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.zeros((2, 12, 2, 16), jnp.float16)}, "dtypes"),
        ({"u": jnp.zeros((2, 12, 257)), "v": jnp.zeros((2, 257, 32))}, "rank 257"),
        ({"u": jnp.zeros((2, 2, 12, 4))}, "u with leading dimensions"),
        ({"cos": jnp.ones((1, 8)), "sin": jnp.ones((1, 8))}, "cosines of 1 tokens"),
    ],
)
def test_tpu_kernel_says_what_it_cannot_take(unchecked, change, words):
    with targeting("tpu"), pytest.raises(KernelUnavailableError, match=words):
        rotate_patch(**(arrays(SMALL[0]) | change), implementation="tpu")


@pytest.mark.parametrize(("implementation", "shape", "dtype"), CASES_NARROW, ids=NAMES)
def test_eight_bits_and_scales_agree_with_float64(dtype: str, shape: RotateShape, implementation: str):
    given, wide = narrow_arrays(shape, dtype)
    found = run(implementation, **given, layout=shape.layout, out_dtype=jnp.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected(shape, wide), atol=5e-5)


@pytest.mark.parametrize(("implementation", "dtype"), CASES_NARROW_PAIRS)
def test_eight_bits_in_pairs_are_rounded_once_to_bfloat16(dtype: str, implementation: str):
    shape = ALIGNED_PAIRS[0]
    given, wide = narrow_arrays(shape, dtype)
    found = run(implementation, **given, layout=shape.layout, out_dtype=jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert_rounded_once(found, expected(shape, wide))


def test_eight_bit_factors_of_a_wide_canonical():
    given = arrays(SMALL[0])
    wide = dict(given)
    for name, axis in (("u", -2), ("v", -1)):
        given[name], given[f"{name}_scale"] = narrowed(wide[name], "int8", axis)
        wide[name] = given[name] * given[f"{name}_scale"]
    np.testing.assert_allclose(rotate_patch(**given), expected(SMALL[0], wide), atol=5e-5)


@pytest.mark.parametrize(
    ("implementation", "shape"),
    [("xla", SMALL[1]), pytest.param("tpu", SMALL[1], marks=SLOW), pytest.param("gpu", ALIGNED[0], marks=SLOW)],
)
def test_float8_factors_without_scales_are_taken_as_they_are(shape: RotateShape, implementation: str):
    given = arrays(shape)
    given |= {name: given[name].astype(jnp.float8_e4m3fn) for name in ("u", "v")}
    found = run(implementation, **given, layout=shape.layout)
    np.testing.assert_allclose(found, expected(shape, given), atol=5e-5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x_scale": jnp.ones((1, 2, 16))}, KernelError, "x of dtype float32, x_scale of dtype float32"),
        ({"x": jnp.zeros((2, 12, 2, 16), jnp.int8), "out_dtype": "float32"}, KernelError, "expected x_scale"),
        ({"u": jnp.zeros((2, 12, 4), jnp.int8)}, KernelError, "u of dtype int8 without a scale"),
        ({"v": jnp.zeros((2, 4, 32), jnp.int16)}, KernelError, "v of dtype int16"),
        ({"out_dtype": jnp.int8}, KernelError, "out_dtype int8"),
        (
            {"x": jnp.zeros((2, 12, 2, 16), jnp.int8), "x_scale": jnp.ones((1, 2, 16))},
            KernelError,
            "expected an out_dtype",
        ),
        (
            {"u": jnp.zeros((2, 12, 4), jnp.int8), "u_scale": jnp.ones((2, 4, 1))},
            KernelError,
            r"u_scale \(2, 4, 1\); expected \[..., \(1, 4\)\]",
        ),
    ],
)
def test_refuses_scales_that_do_not_fit(unchecked, change, error, words):
    with pytest.raises(error, match=words):
        rotate_patch(**(arrays(SMALL[0]) | change))


def test_dense_correction_is_factors_multiplied_out():
    given = arrays(SMALL[0])
    dense = (given["u"] @ given["v"]).reshape(given["x"].shape)
    found = rotate_patch(given["x"], given["cos"], given["sin"], dense=dense)
    np.testing.assert_allclose(found, rotate_patch(**given), atol=1e-5)


def test_rounds_once_to_the_dtype_of_x():
    given = arrays(SMALL[0])
    stored = given["x"].astype(jnp.bfloat16)
    wide = rotate_patch(**(given | {"x": stored.astype(jnp.float32)}))
    found = rotate_patch(**(given | {"x": stored}))
    assert found.dtype == jnp.bfloat16
    assert (found == wide.astype(jnp.bfloat16)).all()


def test_refuses_unknown_implementation():
    with pytest.raises(KernelUnavailableError, match="'cuda'"):
        rotate_patch(**arrays(SMALL[0]), implementation="cuda")


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "quarter"},
        {"sin": None},
        {"v": None},
        {"cos": jnp.zeros((5, 8)), "sin": jnp.zeros((5, 8))},
        {"v": jnp.zeros((2, 4, 31))},
        {"dense": jnp.zeros((2, 12, 2, 15))},
    ],
)
def test_refuses_what_does_not_fit(unchecked, change):
    with pytest.raises(KernelError, match="rotate_patch"):
        rotate_patch(**(arrays(SMALL[0]) | change))


@pytest.mark.parametrize("length", [0, 1, 7, 12])
def test_tokens_from_the_length_on_are_zero(length: int):
    given = arrays(SMALL[0])
    found = jax.jit(rotate_patch)(**given, length=jnp.int32(length))
    assert (found[:, length:] == 0).all()
    np.testing.assert_allclose(found[:, :length], rotate_patch(**given)[:, :length], rtol=1e-6, atol=1e-6)
