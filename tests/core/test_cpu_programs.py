"""What the operators compile to on a CPU, how often, and what a call does on the host."""
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import ops
from kvpatch_jax.cache import same_storage
from kvpatch_jax.pool import Pools, write_piece
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, kv_of, local_of

LAYERS, TOKENS, HEADS, WIDTH, RANK = 3, 64, 2, 32, 4
LAYOUT = kvp.KVLayout.gqa(LAYERS, HEADS, WIDTH, kvp.Rope(1e6, WIDTH))


def drawn():
    kv = kv_of(LAYOUT, TOKENS, dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    normal = lambda *shape: placed(rng.standard_normal(shape), jnp.bfloat16)
    factors = {name: (normal(LAYERS, TOKENS, RANK), normal(LAYERS, RANK, HEADS * WIDTH)) for name in kv}
    return kv, factors, jnp.arange(TOKENS, dtype=jnp.float32), jnp.int32(7)


def compiled(program: str) -> str:
    kv, factors, local, start = drawn()
    if program == "place":
        place = jax.jit(lambda kv, local, start: kvp.to_engine(LAYOUT, kv, local, start))
        return place.lower(kv, local, start).compile().as_text()
    if program == "relocate":
        move = jax.jit(lambda kv, old, new: kvp.relocate(LAYOUT, kv, old, new))
        return move.lower(kv, local, local + 5).compile().as_text()
    if program == "apply":
        return ops.jitted_apply.lower(LAYOUT, kv, factors, local, start).compile().as_text()
    pools, slots = Pools(kvp.pool.make_pool(LAYOUT, 4, 32), {}), jnp.arange(TOKENS, dtype=jnp.int32)
    lowered = write_piece.lower(LAYOUT, pools, slots, local, start, jnp.int32(TOKENS), kv, factors)
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


def test_layer_by_layer_is_bit_equal_to_all_at_once():
    kv, factors, local, start = drawn()
    found = ops.jitted_apply(LAYOUT, kv, factors, local, start)
    for layer in range(LAYERS):
        one = kvp.KVLayout.gqa(1, HEADS, WIDTH, kvp.Rope(1e6, WIDTH))
        rows = jax.tree.map(lambda value, layer=layer: value[layer : layer + 1], (kv, factors))
        own = ops.jitted_apply(one, *rows, local, start)
        for name in LAYOUT.names:
            np.testing.assert_array_equal(found[name][layer], own[name][0])


@pytest.mark.nightly
def test_apply_can_be_differentiated_and_mapped():
    kv, factors, local, start = drawn()
    kv, factors = jax.tree.map(lambda value: value.astype(jnp.float32), (kv, factors))

    def total(factors, local):
        placed = ops.apply(LAYOUT, kv, factors, local, start)
        return sum((value**2).sum() for value in placed.values())

    gradient, along = jax.jit(jax.grad(total, argnums=(0, 1)))(factors, local)
    assert np.isfinite(along).all()
    # A rotation keeps lengths, so the gradient is that of |kv + u v|², rotated or not.
    for name, (u, v) in factors.items():
        whole = np.asarray(kv[name], np.float64).reshape(LAYERS, TOKENS, -1) + np.asarray(u, np.float64) @ np.asarray(
            v, np.float64
        )
        np.testing.assert_allclose(gradient[name][0], 2 * whole @ np.swapaxes(v, -1, -2), rtol=2e-4, atol=2e-3)
    starts = placed([0, 7, 90])
    mapped = jax.vmap(lambda start: ops.apply(LAYOUT, kv, factors, local, start))(starts)
    for index, one in enumerate(starts):
        alone = ops.apply(LAYOUT, kv, factors, local, one)
        for name in LAYOUT.names:
            np.testing.assert_allclose(mapped[name][index], alone[name], atol=2e-5)


def test_relocating_compiles_one_program():
    layout = LAYOUTS["blocked"]
    kv, local = kv_of(layout, 20), local_of(layout, 20)
    engine = kvp.to_engine(layout, kv, local, 3)
    jax.block_until_ready(engine)
    with compilations() as compiled:
        for old, new in ((3, 900), (900, 4), (np.int32(4), np.int64(70_000))):
            kvp.relocate(layout, engine, old, new)
    assert len(compiled) <= 1


def test_layouts_of_equal_storage_differ_in_angles_only():
    base = kvp.Rope(1e4, 16, sections=(4, 2, 2), order="interleaved")
    layout = kvp.KVLayout.gqa(2, 2, 16, base)
    with_rope = lambda **fields: kvp.KVLayout.gqa(2, 2, 16, dataclasses.replace(base, **fields))
    assert same_storage(layout, with_rope(angles="float32"))
    for fields in ({"theta": 2e4}, {"cached": "pairs"}, {"order": "blocked"}, {"sections": (3, 3, 2)}, {"width": 16}):
        assert not same_storage(layout, with_rope(**fields))
    scaled = with_rope(scaling=kvp.core.rope.Scaling("yarn", factor=4, original=64))
    assert not same_storage(layout, scaled)
    assert not same_storage(layout, kvp.KVLayout.gqa(3, 2, 16, base))
    assert not same_storage(layout, kvp.KVLayout.mha(2, 2, 16, base))
