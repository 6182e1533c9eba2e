"""One operator serves MLA, GQA and MHA: R(start + local)·(kv + u v) in float32, rounded once; rank 0 is a rotation."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import ops
from kvpatch_jax.pool import Pools, write_piece
from tests.shared.arrays import placed
from tests.shared.operator_cases import (
    LAYOUTS,
    assert_one_rounding,
    chunk_of,
    conditioned_of,
    kv_of,
    local_of,
    placed_in_float64,
)

LAYERS, TOKENS, HEADS, WIDTH, RANK = 3, 64, 2, 32, 4
WIDE = kvp.KVLayout.gqa(LAYERS, HEADS, WIDTH, kvp.Rope(1e6, WIDTH))
LAYOUT = LAYOUTS["gqa"]
PLAN = ops.FormPlan(ranks=(("k", 4), ("v", 4)), method="exact")


def factors_of(layout: kvp.KVLayout, tokens: int, layers: int, dtype=jnp.float32, rank: int = RANK) -> dict:
    rng = np.random.default_rng(1)
    normal = lambda *shape: placed(rng.standard_normal(shape), dtype)
    return {c.name: (normal(layers, tokens, rank), normal(layers, rank, c.features)) for c in layout.channels}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_operator_is_its_definition_in_every_layout(name: str, dtype):
    """Of factors of one layer alone, in float64 by complex numbers."""
    layout = LAYOUTS[name]
    kv, local, start = kv_of(layout, 12, dtype=dtype), local_of(layout, 12), np.int32(70)
    start = start if layout.rope.axes is None else np.array([70, 3, 999_000], np.int32)
    factors = factors_of(layout, 12, 1)
    found = ops.jitted_apply(layout, kv, factors, local, start, layers=(1,))
    patched = {key: np.array(value).astype(np.float64) for key, value in kv.items()}
    for key, (u, v) in factors.items():
        patched[key][1] += (np.asarray(u[0], np.float64) @ np.asarray(v[0], np.float64)).reshape(patched[key][1].shape)
    for key, value in placed_in_float64(layout, patched, local, start).items():
        assert_one_rounding(found[key], value, dtype)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_patch_is_one_rotation_bit_for_bit(name: str):
    for dtype in (jnp.float32, jnp.bfloat16):
        chunk = chunk_of(name, dtype=dtype)
        empty = kvp.form_patch(chunk, conditioned_of(chunk), {}, ["A"])
        turned = kvp.to_engine(chunk.layout, chunk.kv, chunk.local, 20)
        for patch in (None, empty):
            found = kvp.apply_patch(chunk, patch, 20, ["A"])
            assert all((found[c] == turned[c]).all() and found[c].dtype == dtype for c in chunk.layout.names)


def test_layer_by_layer_is_bit_equal_to_all_at_once():
    kv, factors, local, start = drawn()
    found = ops.jitted_apply(WIDE, kv, factors, local, start)
    single = kvp.KVLayout.gqa(1, HEADS, WIDTH, kvp.Rope(1e6, WIDTH))
    for layer in range(LAYERS):
        rows = jax.tree.map(lambda value, layer=layer: value[layer : layer + 1], (kv, factors))
        alone = ops.jitted_apply(single, *rows, local, start)
        for name in WIDE.names:
            np.testing.assert_array_equal(found[name][layer], alone[name][0])


# ---------------------------------------------------------------------------------------------- compiled programs


def drawn(dtype=jnp.bfloat16):
    kv = kv_of(WIDE, TOKENS, dtype=dtype)
    local = np.arange(TOKENS, dtype=np.float32)
    return kv, factors_of(WIDE, TOKENS, LAYERS, dtype), local, np.int32(7)


@functools.cache
def compiled(program: str) -> str:
    kv, factors, local, start = drawn()
    if program == "place":
        place = jax.jit(lambda kv, local, start: kvp.to_engine(WIDE, kv, local, start))
        return place.lower(kv, local, start).compile().as_text()
    if program == "relocate":
        move = jax.jit(lambda kv, old, new: kvp.relocate(WIDE, kv, old, new))
        return move.lower(kv, local, local + 5).compile().as_text()
    if program == "apply":
        return ops.jitted_apply.lower(WIDE, kv, factors, local, start).compile().as_text()
    pools, slots = Pools(kvp.pool.make_pool(WIDE, 4, 32), {}), np.arange(TOKENS, dtype=np.int32)
    lowered = write_piece.lower(WIDE, pools, slots, local, start, np.int32(TOKENS), kv, factors)
    return lowered.compile().as_text()


@pytest.mark.parametrize("program", ["place", "relocate", "apply", "splice"])
def test_cosines_are_computed_once_per_token_and_frequency(program: str):
    """What is fused into a loop is computed as often as the loop's result has elements."""
    computations = compiled(program).split("\n}\n")
    fused = [text for text in computations if re.search(r"\b(?:cosine|sine)\(", text) and "ENTRY" not in text]
    assert fused
    for text in fused:
        shapes = re.findall(r"= \w+\[([\d,]*)\]", text)
        assert max(math.prod(map(int, shape.split(","))) for shape in shapes if shape) <= TOKENS * WIDTH // 2


@pytest.mark.parametrize("program", ["apply", "splice"])
def test_no_product_is_held_for_more_than_one_layer(program: str):
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled(program))
    sizes = [math.prod(map(int, shape.split(","))) for shape in products]
    assert sizes
    assert max(sizes) == TOKENS * HEADS * WIDTH


def test_no_layer_but_one_of_an_encoded_chunk_is_unpacked_at_a_time():
    layout, tokens = kvp.KVLayout.gqa(16, 4, 64, kvp.Rope(1e4, 64)), 128
    kv = kv_of(layout, tokens, dtype=jnp.bfloat16)
    chunk = kvp.Chunk(kv, np.arange(tokens, dtype=np.int32), tokens, tokens, "c", layout, "tiny")
    packed = kvp.encode_chunk(chunk, "k4v4")
    lowered = ops.jitted_apply.lower(layout, dict(packed.kv), {}, chunk.local, np.int32(3))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * tokens * 4 * 64 * 4
    assert memory.argument_size_in_bytes <= 0.36 * chunk.nbytes


# ------------------------------------------------------------------------------------------------------- batches


def test_a_batch_between_layers_and_tokens_is_each_of_it():
    chunks = [chunk_of("gqa", seed=seed, length=length) for seed, length in enumerate((24, 17))]
    stack = lambda *values: placed(np.stack(values, 1))
    kv = jax.tree.map(stack, *[dict(chunk.kv) for chunk in chunks])
    conditioned = jax.tree.map(stack, *[conditioned_of(chunk, seed=9 + n) for n, chunk in enumerate(chunks)])
    form = jax.jit(ops.form, static_argnames=("plan",))
    apply = jax.jit(functools.partial(ops.apply, LAYOUT))
    local, key = placed(local_of(LAYOUT, 24)), jax.random.key(0)
    start = placed([5, 70], np.int32)
    factors = form(conditioned, kv, placed([24, 17]), key, plan=PLAN)
    assert not np.asarray(factors["k"][0])[:, 1, 17:].any()
    found = apply(kv, factors, placed(np.stack([local, local])), start)
    row, other = ({name: placed(np.asarray(value)[:, 1]) for name, value in tree.items()} for tree in (kv, conditioned))
    alone = apply(row, form(other, row, np.int32(17), key, plan=PLAN), local, np.int32(70))
    np.testing.assert_allclose(found["k"][:, 1], alone["k"], atol=2e-5)


def test_accumulate_masks_padding():
    kv, other = kv_of(LAYOUT, 6), kv_of(LAYOUT, 6, 1)
    zero = {name: jnp.zeros_like(value) for name, value in kv.items()}
    total = ops.accumulate(ops.accumulate(zero, other, kv, 4), other, kv, 4)
    np.testing.assert_allclose(total["k"][:, :4], 2 * (other["k"] - kv["k"])[:, :4], rtol=1e-6)
    assert not total["k"][:, 4:].any()
