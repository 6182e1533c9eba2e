"""rotate_patch on the XLA path, the oracle of the kernels: against float64, its laws, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import GQA, SHAPES, arrays, expected
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import Codes, KernelError, KernelUnavailableError, rotate_patch
from pallas_kernels.shapes import ChunkShape
from tests.shared.arrays import placed
from tests.shared.examples import examples


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_agrees_with_float64(shape: ChunkShape):
    given = arrays(shape)
    np.testing.assert_allclose(rotate_patch(**given, layout=shape.layout), expected(shape, given), atol=2e-5)


@given(
    tokens=st.integers(1, 21),
    heads=st.integers(1, 3),
    rank=st.integers(0, 11),
    layout=st.sampled_from(["half", "pairs"]),
    share=st.floats(0, 1),
)
@examples(6)
def test_any_tokens_rank_and_length_agree_with_float64_and_layers_with_their_batch(tokens, heads, rank, layout, share):
    shape = ChunkShape("drawn", 2, tokens, heads, 12, 8, rank, layout)
    chunk, length = arrays(shape), round(share * tokens)
    found = rotate_patch(**chunk, layout=layout, length=jnp.int32(length))
    exact = expected(shape, chunk)
    exact[:, length:] = 0
    np.testing.assert_allclose(found, exact, atol=5e-5)
    alone = chunk | {name: chunk[name][1] for name in ("x", "u", "v") if name in chunk}
    np.testing.assert_allclose(rotate_patch(**alone, layout=layout, length=length), found[1], rtol=1e-6, atol=1e-6)


def tables(angles) -> tuple[jax.Array, jax.Array]:
    angles = np.asarray(angles, np.float64)
    return placed(np.cos(angles), jnp.float32), placed(np.sin(angles), jnp.float32)


ANGLES = st.floats(-100, 100, width=32)


@given(a=ANGLES, b=ANGLES, seed=st.integers(0, 2**16), layout=st.sampled_from(["half", "pairs"]))
@examples(8)
def test_turning_twice_is_turning_by_the_sum_and_by_nothing_is_nothing(a, b, seed, layout):
    rng = np.random.default_rng(seed)
    x = placed(rng.standard_normal((2, 9, 2, 16)), jnp.float32)
    frequencies = rng.uniform(0.1, 1.0, (9, 6))
    turn = lambda value, angle: rotate_patch(value, *tables(angle * frequencies), layout=layout)
    np.testing.assert_allclose(turn(turn(x, a), b), turn(x, a + b), atol=3e-6)
    np.testing.assert_array_equal(turn(x, 0.0), x)


@given(a=ANGLES, seed=st.integers(0, 2**16))
@examples(6)
def test_frames_invert_within_one_rounding_each_way(a: float, seed: int):
    x = placed(np.random.default_rng(seed).standard_normal((1, 7, 1, 16)), jnp.bfloat16)
    cos, sin = tables(np.full((7, 8), a))
    back = rotate_patch(rotate_patch(x, cos, sin), cos, -sin)
    pair = lambda value: np.asarray(value, np.float64).reshape(1, 7, 1, 2, 8)
    norm = np.linalg.norm(pair(x), axis=-2, keepdims=True)
    # One rounding to bfloat16 there and one back, of numbers no larger than the pair's norm.
    assert (np.abs(pair(back) - pair(x)) <= 2 * 2.0**-8 * norm + 1e-30).all()


@pytest.mark.parametrize("layout", ["half", "pairs"])
def test_sharding_in_types_passes_through(layout: str):
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    given = {"cos": jnp.full((5, 4), 0.6), "sin": jnp.full((5, 4), 0.8), "layout": layout}
    x = jax.random.normal(jax.random.key(0), (2, 5, 4, 16))
    turned = jax.jit(lambda x: rotate_patch(x, **given))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, jax.P(None, None, "heads", None))
        found = turned(jax.device_put(x, sharding))
        assert found.sharding.is_equivalent_to(sharding, 4)
    np.testing.assert_array_equal(found, turned(x))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about what XLA makes for CPUs")
@pytest.mark.parametrize("rotary", [128, 64])
@pytest.mark.parametrize("layout", ["half", "pairs"])
def test_xla_for_cpus_makes_one_pass_of_a_rotation(layout: str, rotary: int):
    given = arrays(ChunkShape("one_pass", 2, 64, 4, 128, rotary, 0, layout), dtype=jnp.bfloat16)
    compiled = jax.jit(lambda given: rotate_patch(**given, layout=layout)).lower(given).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < given["x"].nbytes


def test_dense_correction_is_factors_multiplied_out():
    given = arrays(GQA)
    dense = (given["u"] @ given["v"]).reshape(given["x"].shape)
    found = rotate_patch(given["x"], given["cos"], given["sin"], dense=dense)
    np.testing.assert_allclose(found, rotate_patch(**given), atol=1e-5)


def test_rounds_once_to_the_dtype_of_x():
    given = arrays(GQA)
    stored = given["x"].astype(jnp.bfloat16)
    wide = rotate_patch(**(given | {"x": stored.astype(jnp.float32)}))
    found = rotate_patch(**(given | {"x": stored}))
    assert found.dtype == jnp.bfloat16
    assert (found == wide.astype(jnp.bfloat16)).all()


@pytest.mark.parametrize("by_token", [False, True])
def test_codes_of_four_bits_are_their_numbers_rounded_to_bfloat16(by_token: bool):
    shape, rng = ChunkShape("codes", 2, 11, 2, 16, 16, 3), np.random.default_rng(0)
    codes, given = rng.integers(0, 16, (2, 11, 32)), arrays(shape)
    del given["x"]
    groups = (2, 11, 3) if by_token else (2, 3, 32)
    scale, least = (placed(rng.uniform(0.1, 1.0, groups), jnp.bfloat16) for _ in range(2))
    packed = placed(codes[..., :16] + 16 * codes[..., 16:], jnp.uint8)
    every = 12 if by_token else 4
    steps, lows = (np.repeat(np.asarray(part, np.float32), every, -1 if by_token else -2) for part in (scale, least))
    steps, lows = steps[:, :11, :32], lows[:, :11, :32]
    for low, numbers in ((least, codes * steps + lows), (None, (codes - 8) * steps)):
        x = placed(numbers.astype(np.float32).reshape(2, 11, 2, 16), jnp.bfloat16)
        found = rotate_patch(Codes(packed, scale, low, 2, every, by_token), **given)
        np.testing.assert_array_equal(found, rotate_patch(x, **given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "quarter"}, "'quarter'"),
        ({"sin": None}, "one of a pair alone"),
        ({"v": None}, "one of a pair alone"),
        ({"cos": jnp.zeros((5, 8)), "sin": jnp.zeros((5, 8))}, r"cos \(5, 8\)"),
        ({"v": jnp.zeros((2, 4, 31))}, r"v \(2, 4, 31\)"),
        ({"dense": jnp.zeros((2, 12, 2, 15))}, r"dense \(2, 12, 2, 15\)"),
        ({"x": jnp.zeros((2, 12, 2, 16), jnp.int8)}, "x of dtype int8"),
        ({"out_dtype": jnp.int8}, "out_dtype int8"),
    ],
)
def test_refuses_what_does_not_fit(unchecked, change, words):
    with pytest.raises(KernelError, match=f"rotate_patch: got .*{words}"):
        rotate_patch(**(arrays(GQA) | change))


def test_refuses_unknown_implementation():
    with pytest.raises(KernelUnavailableError, match="'cuda'"):
        rotate_patch(**arrays(GQA), implementation="cuda")
