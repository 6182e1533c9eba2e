"""Keys that move: rotated in place by offsets of their own, or from a phase-free source with one rounding."""
# pyright: reportArgumentType=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_cases import PAGE_SIZE, PAGES, TOTAL, bits, pool_of, same, slots_of

import kvpatch_jax as kvp
from kvpatch_jax import pool
from kvpatch_jax.core import EngineKV
from kvpatch_jax.errors import InputError, KernelError, ShapeError
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of, conditioned_of

CASES = (
    ("gqa", pool.RAGGED, 2),
    ("mla", pool.LATENT, 2),
    pytest.param("mha", pool.RAGGED, None, marks=pytest.mark.nightly),
    pytest.param("interleaved", pool.RAGGED, 4, marks=pytest.mark.nightly),
)
cases = pytest.mark.parametrize(("name", "format", "packing"), CASES)


@cases
def test_keys_rotate_where_they_lie(name, format, packing):
    """Two chunks by offsets of their own in one launch, as `relocate` rotates them; in an engine's pages alike."""
    layout, slots = LAYOUTS[name], slots_of(21)
    axes = () if layout.rope.axes is None else (3,)
    offset = np.where(np.arange(21) < 9, 5, -1000).reshape(21, *(1 for _ in axes)) * np.ones((21, *axes), np.int64)
    rows = pool.read_slots(pool_of(layout), slots, layout)
    relocated = kvp.relocate(layout, rows, np.zeros((21, *axes), np.int32), offset)
    ours = pool.rotate_slots(layout, pool_of(layout), slots, offset)
    for channel, value in pool.read_slots(ours, slots, layout).items():
        np.testing.assert_allclose(value, relocated[channel], rtol=1e-6, atol=1e-6)

    pages = format.rotate(layout, format.to_pages(layout, pool_of(layout), packing), slots, offset)
    np.testing.assert_allclose(pages, format.to_pages(layout, ours, packing), rtol=1e-6, atol=1e-6)
    others = np.setdiff1d(np.arange(TOTAL), slots)
    for left in (ours, format.from_pages(layout, pages)):
        assert same(pool.read_slots(left, others), pool.read_slots(pool_of(layout), others))
        still = next(channel.name for channel in layout.channels if not channel.rotates)
        assert (bits(left[still]) == bits(pool_of(layout)[still])).all()


def test_rotating_compiles_once_for_a_bucket():
    layout = LAYOUTS["gqa"]
    pages, counts = pool.RAGGED.to_pages(layout, pool_of(layout)), []
    for tokens, offset in ((17, 3), (30, -9), (32, np.arange(32))):
        with compilations() as compiled:
            pages = pool.RAGGED.rotate(layout, pages, slots_of(tokens, tokens), offset)
        counts.append(len(compiled))
    assert counts[1:] == [0, 0]


@pytest.mark.parametrize("name", ["mla", pytest.param("yarn", marks=pytest.mark.nightly)])
def test_keys_that_rotate_from_a_source_have_one_rounding(name):
    """However often they move, to the same slots or to others: bit-equal to what is written there at once."""
    chunk = chunk_of(name, dtype=jnp.bfloat16, length=19)
    layout, slots, elsewhere, length = chunk.layout, slots_of(24), slots_of(24, 1), np.int32(19)
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ("A",))

    def written(start, slots):
        empty = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE))
        return pool.write_piece(
            layout, empty, slots, chunk.local, np.int32(start), length, dict(chunk.kv), dict(patch.operands)
        )

    starts = lambda start: np.full(24, start, np.int32)
    pools = written(0, slots)
    for start in (3, 40, 900):
        given = pools
        pools = pool.rotate_pieces(layout, pools, slots, slots, chunk.local, starts(start), length, whole=False)
        assert all(value.is_deleted() for value in jax.tree.leaves(given))
    assert same(pools.engine, written(900, slots).engine)
    pools = pool.rotate_pieces(layout, pools, slots, elsewhere, chunk.local, starts(7), length, whole=True)
    rows, fresh = (pool.read_rows(these, elsewhere[:19]) for these in (pools, written(7, elsewhere)))
    assert same(rows.engine, fresh.engine)
    assert same(rows.source, fresh.source)

    # Without a `Pools`: the source is an argument.
    ours = pool.splice(pool.make_pool(layout, PAGES, PAGE_SIZE), slots, kvp.Placed(chunk))
    source = {channel: value[:, :19] for channel, value in chunk.kv.items()}
    for start in (3, 900):
        ours = pool.rotate_slots(layout, ours, slots[:19], np.asarray(chunk.local[:19]) + start, source)
    assert same(ours, pool.splice(pool.make_pool(layout, PAGES, PAGE_SIZE), slots, kvp.Placed(chunk, None, 900)))


@cases
def test_keys_of_a_narrow_cache_come_back_bit_by_bit(name, format, packing):
    """Keys rotated back in float32 are the cache's own when they are placed again; rotated in bfloat16 they are not."""
    chunk = chunk_of(name, dtype=jnp.bfloat16)
    layout, slots = chunk.layout, slots_of(chunk.tokens)
    (rotating,) = (channel.name for channel in layout.channels if channel.rotates)
    cached = kvp.to_engine(layout, chunk.kv, chunk.local, 70)
    spliced = pool.splice(pool.make_pool(layout, PAGES, PAGE_SIZE), slots, kvp.Placed(chunk, None, 70))
    expected, wrong = format.to_pages(layout, spliced, packing), {}
    for dtype in (jnp.float32, jnp.bfloat16):
        kv = kvp.to_phase_free(layout, EngineKV({**cached, rotating: cached[rotating].astype(dtype)}), chunk.local, 70)
        again = kvp.Placed(dataclasses.replace(chunk, kv=kv), None, 70)
        pages = format.splice([jnp.zeros_like(page) for page in expected], slots, again)
        wrong[dtype] = (bits(np.stack(pages)) != bits(np.stack(expected))).sum()
    assert wrong[jnp.float32] == 0
    assert wrong[jnp.bfloat16] > 20


def test_refuses_before_it_rotates(unchecked):
    layout, slots, keys = LAYOUTS["gqa"], slots_of(24), chunk_of("gqa").kv["k"]
    vectors, pages = pool_of(layout), pool.RAGGED.to_pages(layout, pool_of(layout))
    rotate = lambda slots, offset, *source: pool.rotate_slots(layout, vectors, slots, offset, *source)
    for call, error, words in (
        (lambda: rotate(slots + 30, 1), KernelError, "expected 0 to 47"),
        (lambda: rotate(slots, 0.5), InputError, "integers"),
        (lambda: rotate(slots, 1, {"k": keys[:, 1:]}), ShapeError, "source"),
        (lambda: rotate(slots, 1, {"v": keys}), ShapeError, "None"),
        (lambda: pool.RAGGED.rotate(layout, pages, slots + 30, 1), KernelError, "expected 0 to 47"),
        (lambda: pool.RAGGED.rotate(layout, pages, slots, np.zeros(23, np.int32)), InputError, r"\(23,\)"),
        (lambda: pool.RAGGED.rotate(layout, pages, slots, 2**31), InputError, "2147483648"),
        (lambda: pool.RAGGED.rotate(layout, pages[:2], slots, 1), ShapeError, "2 layers"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not any(value.is_deleted() for value in (*vectors.values(), *pages))
