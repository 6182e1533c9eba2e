"""Laws that every implementation of rotate_patch and splice keeps. TPU kernels are interpreted, with few examples."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import INTERPRET, arrays, expected

from pallas_kernels import rotate_patch, splice, targeting
from pallas_kernels.rotate_patch.shapes import RotateShape
from pallas_kernels.splice.shapes import LANES
from tests.arrays import placed

EXAMPLES = {"xla": 6, "tpu": 2}
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "tpu"])
ANGLES = st.floats(-100, 100, width=32)


def rotated(implementation: str, *given, **more) -> jax.Array:
    """rotate_patch by one implementation, the TPU kernel interpreted."""
    with targeting("cpu" if implementation == "xla" else "tpu", INTERPRET):
        return rotate_patch(*given, **more, implementation=implementation)


def tables(angles) -> tuple[jax.Array, jax.Array]:
    angles = np.asarray(angles, np.float64)
    return placed(np.cos(angles), jnp.float32), placed(np.sin(angles), jnp.float32)


def repeated(implementation: str, **strategies) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """A test over drawn examples: few where a kernel is interpreted."""
    count = EXAMPLES[implementation]
    quiet = [HealthCheck.too_slow]
    return lambda check: settings(max_examples=count, deadline=None, suppress_health_check=quiet)(
        given(**strategies)(check)
    )


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [("xla", "half"), ("xla", "pairs"), pytest.param("tpu", "pairs", marks=pytest.mark.slow)],
)
def test_turning_twice_is_turning_by_the_sum_and_by_nothing_is_nothing(implementation: str, layout: str):
    @repeated(implementation, a=ANGLES, b=ANGLES, seed=st.integers(0, 2**16))
    def check(a: float, b: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x = placed(rng.standard_normal((2, 9, 2, 16)), jnp.float32)
        frequencies = rng.uniform(0.1, 1.0, (9, 6))
        turn = lambda value, angle: rotated(implementation, value, *tables(angle * frequencies), layout=layout)
        np.testing.assert_allclose(turn(turn(x, a), b), turn(x, a + b), atol=3e-6)
        np.testing.assert_array_equal(turn(x, 0.0), x)

    check()


@IMPLEMENTATIONS
def test_frames_invert_within_one_rounding_each_way(implementation: str):
    @repeated(implementation, a=ANGLES, seed=st.integers(0, 2**16))
    def check(a: float, seed: int) -> None:
        x = placed(np.random.default_rng(seed).standard_normal((1, 7, 1, 16)), jnp.bfloat16)
        cos, sin = tables(np.full((7, 8), a))
        back = rotated(implementation, rotated(implementation, x, cos, sin), cos, -sin)
        pair = lambda value: np.asarray(value, np.float64).reshape(1, 7, 1, 2, 8)
        norm = np.linalg.norm(pair(x), axis=-2, keepdims=True)
        # One rounding to bfloat16 there and one back, of numbers no larger than the pair's norm.
        assert (np.abs(pair(back) - pair(x)) <= 2 * 2.0**-8 * norm + 1e-30).all()

    check()


SHAPES = {
    "xla": st.builds(
        lambda tokens, heads, rank, layout: RotateShape("drawn", (2,), tokens, heads, 12, 8, rank, layout),
        st.integers(1, 21),
        st.integers(1, 3),
        st.integers(0, 11),
        st.sampled_from(["half", "pairs"]),
    ),
    "tpu": st.sampled_from(
        [RotateShape("odd", (2,), 13, 1, 12, 8, 11, "pairs"), RotateShape("odd", (2,), 5, 3, 12, 8, 3, "half")]
    ),
}


@pytest.mark.parametrize("implementation", ["xla", pytest.param("tpu", marks=pytest.mark.slow)])
def test_any_tokens_rank_and_length_agree_with_float64_and_items_with_their_batch(implementation: str):
    @repeated(implementation, shape=SHAPES[implementation], share=st.floats(0, 1))
    def check(shape: RotateShape, share: float) -> None:
        chunk, length = arrays(shape), round(share * shape.tokens)
        plan = {"layout": shape.layout, "length": jnp.int32(length)}
        found = rotated(implementation, **chunk, **plan)
        exact = expected(shape, chunk)
        exact[:, length:] = 0
        np.testing.assert_allclose(found, exact, atol=5e-5)
        item = chunk | {name: chunk[name][1] for name in ("x", "u", "v") if name in chunk}
        np.testing.assert_allclose(rotated(implementation, **item, **plan), found[1], rtol=1e-6, atol=1e-6)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("shape", LANES[:2], ids=lambda shape: shape.name)
def test_the_kernel_for_tpus_writes_the_same_in_any_order_of_slots(shape):
    @repeated("tpu", seed=st.integers(0, 2**16), share=st.floats(0.2, 1))
    def check(seed: int, share: float) -> None:
        chunk, tokens = arrays(shape.chunk), shape.chunk.tokens
        rng = np.random.default_rng(seed)
        order, start = rng.permutation(tokens), rng.integers(shape.pages * shape.page_size - tokens)
        length = jnp.int32(round(share * tokens))
        slots = np.arange(start, start + tokens, dtype=np.int32)
        # Only tokens that count may change places with each other.
        order = np.concatenate([order[order < length], np.arange(int(length), tokens)])
        moved = {name: chunk[name][order] for name in ("cos", "sin")}
        moved |= {name: chunk[name][:, order] for name in ("x", "u")} | {"v": chunk["v"]}
        with targeting("tpu", INTERPRET):
            run = lambda slots, given: splice(
                jnp.zeros(shape.pool), slots, **given, layout=shape.chunk.layout, length=length, implementation="tpu"
            )
            straight, shuffled = run(slots, chunk), run(slots[order], moved)
        np.testing.assert_allclose(shuffled, straight, atol=1e-6)

    check()
