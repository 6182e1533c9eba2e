"""Chunks in engines' own pages, and keys turned in place: as in a pool of ours, and no other slot touched."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operator_cases import LAYOUTS, chunk_of, conditioned_of

import kvpatch_jax as kvp
from kvpatch_jax.core import EngineKV
from kvpatch_jax.errors import DtypeError, InputError, KernelSlotError, LayoutError, PoolError, ShapeError
from tests.compilations import compilations

PAGES, PAGE_SIZE = 6, 8
TOTAL = PAGES * PAGE_SIZE
RAGGED = (kvp.engines.to_ragged_paged_attention, kvp.pool.RAGGED.splice, kvp.pool.RAGGED.rotate)
LATENT = (kvp.engines.to_latent_rows, kvp.pool.LATENT.splice, kvp.pool.LATENT.rotate)
CASES = (
    ("gqa", RAGGED, {"packing": 2}),
    ("mla", LATENT, {"packing": 2}),
    pytest.param("mha", RAGGED, {}, marks=pytest.mark.slow),
    pytest.param("interleaved", RAGGED, {"packing": 4}, marks=pytest.mark.slow),
)
cases = pytest.mark.parametrize(("name", "functions", "options"), CASES)


def pool_of(layout, dtype=jnp.float32, seed=5):
    rng = np.random.default_rng(seed)
    made = kvp.pool.make_pool(layout, PAGES, PAGE_SIZE, dtype)
    return {name: jnp.asarray(rng.standard_normal(value.shape), dtype) for name, value in made.items()}


def bits(value):
    array = np.asarray(value)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def by_slot(pages, layout):
    """Whatever form, all numbers of a slot: [L, slots, …]."""
    return bits(pages).reshape(layout.layers, TOTAL, -1)


def slots_of(tokens, seed=0):
    return np.random.default_rng(seed).permutation(TOTAL)[:tokens].astype(np.int32)


@cases
@pytest.mark.parametrize("dtype", [jnp.float32])
def test_a_spliced_chunk_is_that_of_our_pool(name, functions, options, dtype):
    convert, splice, _ = functions
    chunk = chunk_of(name, length=19, dtype=dtype)
    layout = chunk.layout
    slots = slots_of(chunk.tokens)
    slots[chunk.length :] = -1
    for rank in (4,) if dtype == jnp.float32 else (0, 4):
        patch = kvp.form_patch(chunk, conditioned_of(chunk), rank, ("A",)) if rank else None
        pages = convert(layout, pool_of(layout, dtype), **options)
        before = by_slot(pages, layout).copy()
        expected = convert(
            layout, kvp.pool.splice(pool_of(layout, dtype), slots, kvp.Placed(chunk, patch, 7, ("A",))), **options
        )
        found = splice(pages, slots, kvp.Placed(chunk, patch, 7, ("A",)))
        assert pages.is_deleted()
        assert found.shape == expected.shape
        bar = 1e-6 if dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=bar, atol=bar)
        others = np.setdiff1d(np.arange(TOTAL), slots)
        assert (by_slot(found, layout)[:, others] == before[:, others]).all()


@cases
def test_keys_turn_where_they_lie(name, functions, options):
    """Two chunks by offsets of their own in one launch, as `relocate` turns them; in our pool alike."""
    convert, _, rotate = functions
    layout = LAYOUTS[name]
    slots = slots_of(21)
    axes = () if layout.rope.axes is None else (3,)
    offset = np.where(np.arange(21) < 9, 5, -1000).reshape(21, *(1 for _ in axes)) * np.ones((21, *axes), np.int64)
    pages = convert(layout, pool_of(layout), **options)
    rows = kvp.pool.read_slots(pool_of(layout), slots, layout)
    turned = kvp.relocate(layout, rows, np.zeros((21, *axes), np.int32), offset)
    ours = kvp.pool.rotate_slots(layout, pool_of(layout), slots, offset)
    found = rotate(layout, pages, slots, offset)
    assert pages.is_deleted()
    for channel, value in kvp.pool.read_slots(ours, slots, layout).items():
        np.testing.assert_allclose(value, turned[channel], rtol=1e-6, atol=1e-6)
    expected = convert(layout, ours, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    others = np.setdiff1d(np.arange(TOTAL), slots)
    before = by_slot(convert(layout, pool_of(layout), **options), layout)
    assert (by_slot(found, layout)[:, others] == before[:, others]).all()
    still = next(channel.name for channel in layout.channels if not channel.rotates)
    assert (bits(ours[still]) == bits(pool_of(layout)[still])).all()


def test_rotating_compiles_once_for_a_bucket():
    layout = LAYOUTS["gqa"]
    pages = kvp.engines.to_ragged_paged_attention(layout, pool_of(layout))
    counts = []
    for tokens, offset in ((17, 3), (30, -9), (32, np.arange(32))):
        with compilations() as compiled:
            pages = kvp.pool.RAGGED.rotate(layout, pages, slots_of(tokens, tokens), offset)
        counts.append(len(compiled))
    assert counts[1:] == [0, 0]


@pytest.mark.slow
def test_a_source_is_turned_with_one_rounding():
    """However often keys moved, what they are turned from is the phase-free chunk: bit-equal to a fresh splice."""
    for name in ("yarn", "mla"):
        chunk = chunk_of(name, dtype=jnp.bfloat16)
        layout, slots = chunk.layout, slots_of(24)
        pool = kvp.pool.splice(pool_of(layout, jnp.bfloat16), slots, kvp.Placed(chunk))
        for start in (3, 40, 900):
            pool = kvp.pool.rotate_slots(layout, pool, slots, np.asarray(chunk.local) + start, chunk.kv)
        fresh = kvp.pool.splice(pool_of(layout, jnp.bfloat16), slots, kvp.Placed(chunk, None, 900))
        for channel, value in fresh.items():
            assert (bits(pool[channel]) == bits(value)).all()


@cases
def test_keys_of_a_narrow_cache_come_back_bit_by_bit(name, functions, options):
    """Turned back in float32 and placed again, an engine's bfloat16 keys are its own; kept in bfloat16 they are not."""
    convert, splice, _ = functions
    chunk = chunk_of(name, dtype=jnp.bfloat16)
    layout, slots = chunk.layout, slots_of(chunk.tokens)
    (rotating,) = (channel.name for channel in layout.channels if channel.rotates)
    cached = kvp.to_engine(layout, chunk.kv, chunk.local, 70)
    pool = {own: jnp.zeros_like(value) for own, value in pool_of(layout, jnp.bfloat16).items()}
    expected = convert(layout, kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 70)), **options)
    others = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        kept = EngineKV({**cached, rotating: cached[rotating].astype(dtype)})
        free = kvp.to_phase_free(layout, kept, chunk.local, 70)
        zeros = jnp.zeros(expected.shape, jnp.bfloat16)
        again = splice(zeros, slots, kvp.Placed(dataclasses.replace(chunk, kv=free), None, 70))
        others[dtype] = (bits(again) != bits(expected)).sum()
    assert others[jnp.float32] == 0
    assert others[jnp.bfloat16] > 20


def test_refuses_before_it_writes(unchecked):
    chunk = chunk_of("gqa")
    layout, slots = chunk.layout, slots_of(24)
    pages = kvp.engines.to_ragged_paged_attention(layout, pool_of(layout))
    splice = lambda pages=pages, slots=slots, chunk=chunk: kvp.pool.RAGGED.splice(
        pages, slots, kvp.Placed(chunk, None, 4)
    )
    rotate = lambda pages=pages, slots=slots, offset=1: kvp.pool.RAGGED.rotate(layout, pages, slots, offset)
    turn = lambda slots=slots, offset=1, source=None: kvp.pool.rotate_slots(
        layout, pool_of(layout), slots, offset, source
    )
    gone = jnp.array(pages)
    gone.delete()
    latent = kvp.engines.to_latent_rows(LAYOUTS["mla"], pool_of(LAYOUTS["mla"]), packing=2)
    for call, error, words in (
        (lambda: splice(slots=slots + 30), KernelSlotError, "expected 0 to 47"),
        (lambda: splice(slots=np.zeros(24, np.int32)), KernelSlotError, "twice"),
        (lambda: splice(slots=slots[1:]), ShapeError, "one per token"),
        (lambda: splice(pages.astype(jnp.bfloat16)), DtypeError, "bfloat16"),
        (lambda: splice(pages[..., :3, :]), ShapeError, "4 heads of 16"),
        (lambda: splice(pages[1:]), ShapeError, "2 layers"),
        (lambda: splice(pages.astype(jnp.int8)), DtypeError, "int8"),
        (lambda: splice(gone), PoolError, "donated"),
        (lambda: splice(chunk=chunk_of("mla")), LayoutError, "'ckv'"),
        (
            lambda: kvp.pool.LATENT.splice(latent[..., 1:], slots, kvp.Placed(chunk_of("mla"), None, 4)),
            ShapeError,
            "128",
        ),
        (lambda: rotate(slots=slots + 30), KernelSlotError, "expected 0 to 47"),
        (lambda: rotate(offset=1.5), InputError, "integers"),
        (lambda: rotate(offset=np.zeros(23, np.int32)), InputError, r"\(23,\)"),
        (lambda: rotate(offset=2**31), InputError, "2147483648"),
        (lambda: rotate(list(pages[:2])), ShapeError, "2 layers"),
        (lambda: turn(slots=slots + 30), KernelSlotError, "expected 0 to 47"),
        (lambda: turn(offset=0.5), InputError, "integers"),
        (lambda: turn(source={"k": chunk.kv["k"][:, 1:]}), ShapeError, "source"),
        (lambda: turn(source={"v": chunk.kv["v"]}), ShapeError, "None"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not pages.is_deleted()
