"""Counted arithmetic is the compiler's count, with every trip of a loop and the dearest branch."""

import jax
import jax.numpy as jnp
import pytest

from kvpatch_jax.utils.traced_flops import traced_flops

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ONCE = 2 * 4 * 8 * 8


def test_a_straight_program_counts_what_the_compiler_counts():
    image, kernel = jax.ShapeDtypeStruct((1, 3, 9, 9), jnp.float32), jax.ShapeDtypeStruct((5, 3, 2, 2), jnp.float32)
    convolve = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID")
    for function, arguments in ((jnp.matmul, (X, SQUARE)), (convolve, (image, kernel))):
        cost = jax.jit(function).lower(*arguments).compile().cost_analysis()
        assert cost is not None
        assert traced_flops(function, *arguments) == cost["flops"]


def test_loops_count_every_trip_and_branches_the_dearest():
    looped = lambda x, w: jax.lax.fori_loop(0, 7, lambda _, x: x @ w, x)
    scanned = lambda x, w: jax.lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, w), None), x, length=5)[0]
    branched = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
    ragged = lambda x, w: jax.lax.ragged_dot(x, jnp.stack([w, w, w]), jnp.array([1, 0, 3]))
    counts = [traced_flops(function, X, SQUARE) for function in (looped, scanned, branched, ragged, jax.remat(scanned))]
    assert counts == [7 * ONCE, 5 * ONCE, 2 * ONCE, ONCE, 5 * ONCE]
    unknown = lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ w, x)
    with pytest.raises(ValueError, match="length that depends on values"):
        traced_flops(unknown, X, SQUARE)
    assert traced_flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x - 1, x), X) == 0
