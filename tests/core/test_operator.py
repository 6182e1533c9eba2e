"""One operator, R(start + local)·(kv + u v) in float32 rounded once, serves every layout, each channel by its rope."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportReturnType=false

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax import ops, relocate, to_engine, to_phase_free
from kvpatch_jax.cache import Chunk, Patch, encode_chunk, same_storage
from kvpatch_jax.core import Channel, KVLayout, Rope, Scaling, check_uniform
from kvpatch_jax.errors import LayoutError, ShapeError
from kvpatch_jax.patching import apply_patch, form_patch
from kvpatch_jax.pool import Pools, make_pool, write_piece
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
from tests.store.store_cases import patch_for

START = 31
FULL, LOCAL = Rope(1e4, 8), Rope(30.0, 4, cached="pairs", width=6)
CHANNELS = (
    Channel("k", 1, 8, 8, layers=(1, 4)),
    Channel("v", 1, 8, layers=(1, 4)),
    Channel("k_local", 2, 6, 4, LOCAL, (0, 3)),
    Channel("v_local", 2, 6, layers=(0, 3)),
)
"""Two kinds with unlike heads, widths and ropes; layer 2 keeps nothing (it reads another's)."""
MIXED = KVLayout("gqa", 5, CHANNELS, FULL)
UNIFORM = KVLayout.gqa(5, 2, 8, FULL)
LOCALS = np.arange(6, dtype=np.float32)


def mixed_kv(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {c.name: (MIXED.depth(c.name), 6, c.heads, c.width) for c in CHANNELS}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def expected(kv: dict[str, np.ndarray], start: int) -> dict[str, np.ndarray]:
    return placed_in_float64(MIXED, kv, LOCALS, start)


def expect_close(rows, values, bar=2e-6):
    assert list(rows) == list(values)
    for name, value in values.items():
        assert np.abs(np.asarray(rows[name]) - value).max() <= bar * np.abs(value).max(), name


def test_layouts_have_the_papers_bytes_per_token():
    qwen = KVLayout.gqa(28, 4, 128, Rope(1e6, 128, sections=(16, 24, 24)))
    kimi = KVLayout.mla(27, 512, 64, rope=Rope(8e5, 64))
    assert (qwen.names, qwen.bytes_per_token(jnp.bfloat16)) == (("k", "v"), 57_344)
    assert (kimi.names, kimi.bytes_per_token(jnp.bfloat16)) == (("ckv", "kpe"), 31_104)
    assert [c.rotates for c in (*qwen.channels, *kimi.channels)] == [True, False, False, True]
    assert hash(qwen) == hash(KVLayout.gqa(28, 4, 128, Rope(1e6, 128, sections=(16, 24, 24))))


def test_layouts_of_equal_storage_differ_in_angles_only():
    base = Rope(1e4, 16, sections=(4, 2, 2), order="interleaved")
    layout = KVLayout.gqa(2, 2, 16, base)
    with_rope = lambda **fields: KVLayout.gqa(2, 2, 16, dataclasses.replace(base, **fields))
    assert same_storage(layout, with_rope(angles="float32"))
    for fields in ({"theta": 2e4}, {"cached": "pairs"}, {"order": "blocked"}, {"sections": (3, 3, 2)}):
        assert not same_storage(layout, with_rope(**fields))
    assert not same_storage(layout, with_rope(scaling=Scaling("yarn", factor=4, original=64)))
    assert not same_storage(layout, KVLayout.gqa(3, 2, 16, base))
    assert not same_storage(layout, KVLayout.mha(2, 2, 16, base))


def test_a_layout_says_what_each_channel_keeps():
    assert (MIXED.uniform, UNIFORM.uniform) == (False, True)
    assert MIXED.ropes == (FULL, LOCAL)
    assert UNIFORM.ropes == (FULL,)
    assert [MIXED.layers_of(name) for name in MIXED.names] == [(1, 4), (1, 4), (0, 3), (0, 3)]
    assert tuple(UNIFORM.layers_of("v")) == tuple(range(5))
    assert MIXED.rows_of("k_local", (1, 3, 4)) == (1,)
    assert MIXED.numbers == 2 * (8 + 8) + 2 * (12 + 12)
    assert MIXED.bytes_per_token("float32") == 4 * MIXED.numbers
    floats = MIXED.with_angles("float32")
    assert {rope.angles for rope in floats.ropes} == {"float32"}
    assert floats.with_angles("exact") == MIXED


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("channel", "message"),
    [
        (Channel("k", 1, 8, 8, FULL), "by another rope"),
        (Channel("k", 1, 8, 8, layers=(1, 5)), "expected some of 0 to 4"),
        (Channel("k", 1, 12, 12, Rope(1e4, 12, sections=(2, 2, 2))), "expected the axes of the layout's rope, None"),
        (Channel("k", 1, 8, 8, Rope(1e4, 8, scaling=Scaling("dynamic", 2.0, 16, length=16))), "depend on no length"),
        (Channel("k", 1, 6, 4), "expected the rope's 8 and 8"),
    ],
)
def test_channels_that_do_not_fit_are_refused(channel, message):
    with pytest.raises(LayoutError, match=message):
        KVLayout("gqa", 5, (channel,), FULL)
    for layers in ((), (2, 1), (-1,)):
        with pytest.raises(LayoutError, match="layers"):
            Channel("k", 1, 8, 8, layers=layers)
    with pytest.raises(LayoutError, match="channel 'k' has layers of its own; expected layers of one kind"):
        check_uniform(MIXED, "anything")


def test_every_channel_turns_by_its_own_rope():
    kv, local = mixed_kv(), LOCALS
    engine = to_engine(MIXED, kv, local, START)
    expect_close(engine, expected(kv, START))
    expect_close(to_phase_free(MIXED, engine, local, START), kv)
    expect_close(relocate(MIXED, engine, START, 7), expected(kv, 7))
    with pytest.raises(ShapeError, match=r"expected \[2, ..., T, 1, 8\]"):
        to_engine(MIXED, kv | {"k": np.zeros((5, 6, 1, 8), np.float32)}, local, 0)


def test_a_patch_corrects_the_layers_that_it_covers_better_by_rank():
    """Of layers 0 to 2, where two channels keep one row each; in the others nothing changes."""
    base, target = mixed_kv(), mixed_kv(1)
    chunk = Chunk(base, LOCALS, 6, 6, "page", MIXED, "backbone", content="given")
    whole, left = form_patch(chunk, target, 6, (), layers=(0, 1, 2), method="exact", dense=False), []
    for rank in (2, 6):
        factors = {name: (placed(np.where(np.arange(6) < rank, u, 0)), v) for name, (u, v) in whole.factors.items()}
        rows = apply_patch(chunk, Patch(factors, whole.metadata), START)
        wanted, plain, error = expected(target, START), expected(base, START), 0.0
        for name in rows:
            covered = np.isin(MIXED.layers_of(name), (0, 1, 2))
            error += np.square(np.asarray(rows[name])[covered] - wanted[name][covered]).sum()
            assert np.abs(np.asarray(rows[name])[~covered] - plain[name][~covered]).max(initial=0) <= 2e-6 * 4
        left.append(error)
    assert all(after < before for before, after in itertools.pairwise(left))
    assert left[-1] <= 1e-9 * left[0]


# ------------------------------------------------------------------------------------------------------ one operator


LAYERS, TOKENS, HEADS, WIDTH, RANK = 3, 64, 2, 32, 4
WIDE = KVLayout.gqa(LAYERS, HEADS, WIDTH, Rope(1e6, WIDTH))
GQA = LAYOUTS["gqa"]
PLAN = ops.FormPlan(ranks=(("k", 4), ("v", 4)), method="exact")


def factors_of(layout: KVLayout, tokens: int, layers: int, dtype=jnp.float32, rank: int = RANK) -> dict:
    rng = np.random.default_rng(1)
    normal = lambda *shape: placed(rng.standard_normal(shape), dtype)
    return {c.name: (normal(layers, tokens, rank), normal(layers, rank, c.features)) for c in layout.channels}


FORMS = [("gqa", jnp.bfloat16), *zip(LAYOUTS, itertools.cycle((jnp.float32, jnp.bfloat16)), strict=False)]


@pytest.mark.parametrize(("name", "dtype"), FORMS)
def test_the_operator_is_its_definition_in_every_layout(name: str, dtype):
    """Of factors of one layer alone, in float64 by complex numbers."""
    layout = LAYOUTS[name]
    kv, local, start = kv_of(layout, 24, dtype=dtype), local_of(layout, 24), np.int32(70)
    start = start if layout.rope.axes is None else np.array([70, 3, 999_000], np.int32)
    factors = factors_of(layout, 24, 1)
    found = ops.jitted_apply(layout, kv, factors, local, start, layers=(1,))
    patched = {key: np.array(value).astype(np.float64) for key, value in kv.items()}
    for key, (u, v) in factors.items():
        patched[key][1] += (np.asarray(u[0], np.float64) @ np.asarray(v[0], np.float64)).reshape(patched[key][1].shape)
    for key, value in placed_in_float64(layout, patched, local, start).items():
        assert_one_rounding(found[key], value, dtype)


@pytest.mark.parametrize(("name", "dtype"), FORMS)
def test_no_patch_is_one_rotation_bit_for_bit(name: str, dtype):
    chunk = chunk_of(name, dtype=dtype, content="given")
    turned = to_engine(chunk.layout, chunk.kv, chunk.local, 20)
    for patch in (None, Patch({}, patch_for(chunk=chunk).metadata)):
        found = apply_patch(chunk, patch, 20, ["A"])
        assert all(np.array_equal(found[c], turned[c]) and found[c].dtype == dtype for c in chunk.layout.names)


def test_layer_by_layer_is_bit_equal_to_all_at_once():
    kv, factors, local, start = wide_inputs()
    found = jax.device_get(ops.jitted_apply(WIDE, kv, factors, local, start))
    single = KVLayout.gqa(1, HEADS, WIDTH, Rope(1e6, WIDTH))
    for layer in range(LAYERS):
        rows = jax.tree.map(lambda value, layer=layer: placed(np.asarray(value)[layer : layer + 1]), (kv, factors))
        alone = ops.jitted_apply(single, *rows, local, start)
        for name in WIDE.names:
            np.testing.assert_array_equal(found[name][layer], alone[name][0])


# ------------------------------------------------------------------------------------------------- compiled programs


def wide_inputs(dtype=jnp.bfloat16):
    kv = kv_of(WIDE, TOKENS, dtype=dtype)
    local = np.arange(TOKENS, dtype=np.float32)
    return kv, factors_of(WIDE, TOKENS, LAYERS, dtype), local, np.int32(7)


@functools.cache
def compiled(program: str) -> str:
    kv, factors, local, start = wide_inputs()
    if program == "place":
        place = jax.jit(lambda kv, local, start: to_engine(WIDE, kv, local, start))
        return place.lower(kv, local, start).compile().as_text()
    if program == "relocate":
        move = jax.jit(lambda kv, old, new: relocate(WIDE, kv, old, new))
        return move.lower(kv, local, local + 5).compile().as_text()
    if program == "apply":
        return ops.jitted_apply.lower(WIDE, kv, factors, local, start).compile().as_text()
    pools, slots = Pools(make_pool(WIDE, 4, 32), {}), np.arange(TOKENS, dtype=np.int32)
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
    layout, tokens = KVLayout.gqa(16, 4, 64, Rope(1e4, 64)), 128
    kv = kv_of(layout, tokens, dtype=jnp.bfloat16)
    chunk = Chunk(kv, np.arange(tokens, dtype=np.int32), tokens, tokens, "c", layout, "tiny", content="given")
    packed = encode_chunk(chunk, "k4v4")
    lowered = ops.jitted_apply.lower(layout, dict(packed.kv), {}, chunk.local, np.int32(3))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * tokens * 4 * 64 * 4
    assert memory.argument_size_in_bytes <= 0.36 * chunk.nbytes


# ----------------------------------------------------------------------------------------------------------- batches


def test_a_batch_between_layers_and_tokens_is_each_of_it():
    chunks = [chunk_of("gqa", seed=seed, length=length) for seed, length in enumerate((24, 17))]
    stack = lambda *values: placed(np.stack(values, 1))
    kv = jax.tree.map(stack, *[dict(chunk.kv) for chunk in chunks])
    conditioned = jax.tree.map(stack, *[conditioned_of(chunk, seed=9 + n) for n, chunk in enumerate(chunks)])
    form = jax.jit(ops.form, static_argnames=("plan",))
    apply = jax.jit(functools.partial(ops.apply, GQA))
    local, key = placed(local_of(GQA, 24)), jax.random.key(0)
    start = placed([5, 70], np.int32)
    factors = form(conditioned, kv, placed([24, 17]), key, plan=PLAN)
    assert not np.asarray(factors["k"][0])[:, 1, 17:].any()
    found = jax.device_get(apply(kv, factors, placed(np.stack([local, local])), start))
    row, other = ({name: placed(np.asarray(value)[:, 1]) for name, value in tree.items()} for tree in (kv, conditioned))
    alone = apply(row, form(other, row, np.int32(17), key, plan=PLAN), local, np.int32(70))
    np.testing.assert_allclose(found["k"][:, 1], alone["k"], atol=2e-5)


def test_accumulate_masks_padding():
    kv, other = kv_of(GQA, 6), kv_of(GQA, 6, 1)
    zero = {name: placed(np.zeros(value.shape), np.float32) for name, value in kv.items()}
    total = np.asarray(ops.accumulate(ops.accumulate(zero, other, kv, 4), other, kv, 4)["k"])
    np.testing.assert_allclose(total[:, :4], 2 * (np.asarray(other["k"]) - np.asarray(kv["k"]))[:, :4], rtol=1e-6)
    assert not total[:, 4:].any()
