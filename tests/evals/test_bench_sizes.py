"""Counting arithmetic, and what the sizes suite says of released checkpoints against formulas of our own."""

import math

import jax
import jax.numpy as jnp
import pytest

from evals.bench import sizes
from evals.bench.released_configs import RELEASED
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
    found = [traced_flops(function, X, SQUARE) for function in (looped, scanned, branched, ragged, jax.remat(scanned))]
    assert found == [7 * ONCE, 5 * ONCE, 2 * ONCE, ONCE, 5 * ONCE]
    unknown = lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ w, x)
    with pytest.raises(ValueError, match="length that depends on values"):
        traced_flops(unknown, X, SQUARE)
    assert traced_flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x - 1, x), X) == 0


@pytest.mark.parametrize(
    "name", [pytest.param("Qwen/Qwen2.5-VL-3B-Instruct", marks=pytest.mark.slow), "Qwen/Qwen3-30B-A3B"]
)
def test_a_checkpoint_is_described(name):
    raw = RELEASED[name].config
    row = sizes.describe(raw, None)
    published = RELEASED[name].published
    assert published is not None
    assert row["weights"] == pytest.approx(2e9 * published, rel=0.01)
    heads, head_dim, layers = raw["num_key_value_heads"], 128, raw["num_hidden_layers"]
    assert row["kv_per_token"] == 2 * 2 * heads * head_dim * layers
    # Where devices outnumber KV heads, each has one.
    assert row["mesh"]["devices"] == 8
    assert row["mesh"]["kv_per_token"] * heads == row["kv_per_token"]
    assert row["weights"] / row["mesh"]["devices"] <= row["mesh"]["weights"] <= row["weights"]

    # Matrices of the layers that a token passes, and causal attention of which dense blocks compute up to all.
    width, queries = raw["hidden_size"], raw["num_attention_heads"] * head_dim
    inner = raw["moe_intermediate_size"] * raw["num_experts_per_tok"] if "num_experts" in raw else 0
    inner = inner or raw["intermediate_size"]
    layer = width * (2 * queries + 2 * heads * head_dim) + 3 * width * inner
    for length in sizes.PROMPTS:
        matrices, scores = 2 * length * layers * layer, 4 * length**2 * layers * queries
        counted = row["prefill"][str(length)]["flops"]
        assert matrices + scores / 2 <= counted <= 1.3 * (matrices + scores)
        assert row["H200"]["prefill"][length] >= counted / 989e12
    assert set(row["tower"]) == ({f"{size} Mpx" for size in sizes.MEGAPIXELS} if "VL" in name else set())


def test_images_have_the_pixels_that_their_name_says():
    for megapixels in sizes.MEGAPIXELS:
        height, width = sizes._grid(megapixels * 1e6, 28)
        assert height * width * 28**2 == pytest.approx(megapixels * 1e6, rel=0.1)
        assert math.isclose(height / width, 3 / 4, rel_tol=0.1)
