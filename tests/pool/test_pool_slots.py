"""What is spliced, moved or rotated in a pool equals what is made directly, and changes no slot of another owner."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportFunctionMemberAccess=false, reportGeneralTypeIssues=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_cases import PAGE_SIZE, PAGES, TOTAL, bits, pool_of, same, slots_of

import kvpatch_jax as kvp
from kvpatch_jax import pool
from kvpatch_jax.core import EngineKV
from kvpatch_jax.errors import (
    InputError,
    KernelError,
    LayoutError,
    PatchMismatchError,
    PoolError,
    ShapeError,
    StalePatchError,
)
from tests.shared.arrays import placed
from tests.shared.compilations import compilations
from tests.shared.operator_cases import LAYOUTS, chunk_of
from tests.store.store_cases import patch_for

nightly = pytest.mark.nightly
FORMATS = (
    ("gqa", pool.RAGGED, 2),
    ("mla", pool.LATENT, 2),
    pytest.param("mha", pool.RAGGED, None, marks=nightly),
    pytest.param("interleaved", pool.RAGGED, 4, marks=nightly),
)
formats = pytest.mark.parametrize(("name", "format", "packing"), FORMATS)


@pytest.mark.parametrize(
    ("name", "padded"),
    [("gqa", False), ("mla", True), *(pytest.param(name, False, marks=nightly) for name in ("yarn", "interleaved"))],
)
def test_splice_is_apply_patch_with_pages_for_a_destination(name: str, padded: bool):
    chunk = chunk_of(name, length=19)
    layout, slots = chunk.layout, slots_of(chunk.tokens)
    slots[chunk.length :] = -1
    named = slots[: chunk.length]
    others = np.setdiff1d(np.arange(TOTAL), named)
    before, compiled = pool.read_slots(pool_of(layout, padded=padded), others), []
    joint, a_layer = patch_for(chunk=chunk), kvp.keep_layers(patch_for(chunk=chunk), (1,))
    unpadded = () if padded else ((None, 11), (a_layer, 11))
    for patch, start in (*unpadded, (joint, 11), (joint, 900)):
        there, vectors = kvp.Placed(chunk, patch, start, ("A",)), pool_of(layout, padded=padded)
        with compilations() as programs:
            written = pool.splice(vectors, slots, there)
        compiled.append(len(programs))
        assert all(value.is_deleted() for value in vectors.values())
        expected = there.apply()
        for channel, value in jax.device_get(pool.read_slots(written, named)).items():
            width = layout.channel(channel).width
            np.testing.assert_allclose(value[..., :width], np.asarray(expected[channel])[:, :19], rtol=1e-6, atol=1e-6)
            assert value.shape[-1] == (128 if padded else width)
            assert not bits(value[..., width:]).any()
        assert same(pool.read_slots(written, others), before)
    assert compiled[-1] == 0  # another start compiles nothing


def test_moved_vectors_keep_their_bits():
    """Slots may be read and written in one move, and one vector may go to several."""
    layout = LAYOUTS["gqa"]
    old, new = np.array([3, 9, 9, 20, 21]), np.array([9, 40, 3, 21, 5])
    before = pool.read_slots(pool_of(layout), old)
    vectors = pool.move_slots(pool_of(layout), old, new)
    for name, value in pool.read_slots(vectors, new).items():
        assert (bits(value) == bits(before[name])).all()


@formats
def test_keys_rotate_where_they_lie(name, format, packing):
    """Two chunks by offsets of their own in one launch, as `relocate` rotates them; in an engine's pages alike."""
    layout, slots = LAYOUTS[name], slots_of(19)
    axes = () if layout.rope.axes is None else (3,)
    offset = np.where(np.arange(19) < 9, 5, -1000).reshape(19, *(1 for _ in axes)) * np.ones((19, *axes), np.int64)
    rows = pool.read_slots(pool_of(layout), slots, layout)
    relocated = kvp.relocate(layout, rows, np.zeros((19, *axes), np.int32), offset)
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
    pages, counts = pool.RAGGED.to_pages(layout, pool_of(layout), 2), []
    for tokens, offset in ((17, 3), (30, -9), (32, np.arange(32))):
        with compilations() as compiled:
            pages = pool.RAGGED.rotate(layout, pages, slots_of(tokens, tokens), offset)
        counts.append(len(compiled))
    assert counts[1:] == [0, 0]


@pytest.mark.parametrize("name", ["mla", pytest.param("yarn", marks=nightly)])
def test_keys_that_rotate_from_a_source_have_one_rounding(name):
    """However often they move, to the same slots or to others: bit-equal to what is written there at once."""
    chunk = chunk_of(name, dtype=jnp.bfloat16, length=19)
    layout, slots, elsewhere, length = chunk.layout, slots_of(24), slots_of(24, 1), np.int32(19)
    patch = patch_for(chunk=chunk)

    def written(start, slots):
        empty = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE))
        return pool.write_piece(
            layout, empty, slots, chunk.local, np.int32(start), length, dict(chunk.kv), dict(patch.operands)
        )

    starts = lambda start: np.full(24, start, np.int32)
    pools = written(0, slots)
    for start in (3, 40, 900):
        before = pools
        pools = pool.rotate_pieces(layout, pools, slots, slots, chunk.local, starts(start), length, whole=False)
        assert all(value.is_deleted() for value in jax.tree.leaves(before))
    assert same(pools.engine, written(900, slots).engine)
    pools = pool.rotate_pieces(layout, pools, slots, elsewhere, chunk.local, starts(7), length, whole=True)
    rows, fresh = (pool.read_rows(these, elsewhere[:19]) for these in (pools, written(7, elsewhere)))
    assert same(rows.engine, fresh.engine)
    assert same(rows.source, fresh.source)

    # Without a `Pools`: the source is an argument.
    ours = pool.splice(pool.make_pool(layout, PAGES, PAGE_SIZE), slots, kvp.Placed(chunk))
    source = {channel: placed(np.asarray(value)[:, :19]) for channel, value in chunk.kv.items()}
    for start in (3, 900):
        ours = pool.rotate_slots(layout, ours, slots[:19], np.asarray(chunk.local[:19]) + start, source)
    assert same(ours, pool.splice(pool.make_pool(layout, PAGES, PAGE_SIZE), slots, kvp.Placed(chunk, None, 900)))


@pytest.mark.parametrize(("name", "format", "packing"), [FORMATS[0], pytest.param(*FORMATS[1], marks=nightly)])
def test_keys_of_a_narrow_cache_come_back_bit_by_bit(name, format, packing):
    """Keys rotated back in float32 are the cache's own when they are placed again; rotated in bfloat16 they are not."""
    chunk = chunk_of(name, dtype=jnp.bfloat16)
    layout, slots = chunk.layout, slots_of(chunk.tokens)
    (rotating,) = (channel.name for channel in layout.channels if channel.rotates)
    cached = kvp.to_engine(layout, chunk.kv, chunk.local, 70)
    spliced = pool.splice(pool.make_pool(layout, PAGES, PAGE_SIZE), slots, kvp.Placed(chunk, None, 70))
    expected, wrong = format.to_pages(layout, spliced, packing), {}
    for dtype in (jnp.float32, jnp.bfloat16):
        keys = placed(cached[rotating], dtype)
        kv = kvp.to_phase_free(layout, EngineKV({**cached, rotating: keys}), chunk.local, 70)
        again = kvp.Placed(dataclasses.replace(chunk, kv=kv), None, 70)
        pages = format.splice([placed(np.zeros(page.shape), page.dtype) for page in expected], slots, again)
        wrong[dtype] = (bits(np.stack(pages)) != bits(np.stack(expected))).sum()
    assert wrong[jnp.float32] == 0
    assert wrong[jnp.bfloat16] > 20


# --------------------------------------------------------------------------------------------------- chunks in few bits


LENGTH, SLOTS = 19, slots_of(24, 3)


def in_a_pool(placed: kvp.Placed, dtype) -> dict:
    return pool.splice(pool.make_pool(placed.chunk.layout, PAGES, PAGE_SIZE, dtype), SLOTS, placed)


def in_pages(placed: kvp.Placed, dtype) -> list:
    """In an engine's pages; tokens before the fifth are not written."""
    layout = placed.chunk.layout
    format = pool.LATENT if layout.kind == "mla" else pool.RAGGED
    pages = format.to_pages(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, dtype), 2)
    return format.splice(pages, SLOTS, placed, 5)


def with_a_source(placed: kvp.Placed, dtype) -> pool.Pools:
    """In a pool of bfloat16, which may have fewer bits than the chunk, and in its phase-free source."""
    layout = placed.chunk.layout
    pools = pool.with_source(layout, pool.make_pool(layout, PAGES, PAGE_SIZE, jnp.bfloat16, padded=True))
    where = (SLOTS, placed.chunk.local, placed.start, np.int32(LENGTH))
    return pool.write_piece(layout, pools, *where, dict(placed.kv), placed.factors, layers=placed.layers)


@pytest.mark.parametrize("place", [pytest.param(in_a_pool, marks=nightly), in_pages, with_a_source])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gqa", jnp.bfloat16),
        pytest.param("mla", jnp.float32, marks=pytest.mark.nightly),
        pytest.param("interleaved", jnp.float32, marks=pytest.mark.nightly),
    ],
)
def test_what_is_written_has_the_twins_bits(kind, dtype, place):
    chunk = kvp.encode_chunk(chunk_of(kind, dtype=dtype, length=LENGTH), "k4v6g8")
    coded, decoded = (
        place(kvp.Placed(twin, patch_for(chunk=chunk), 1000, ("A",)), dtype)
        for twin in (chunk, kvp.cache.decode_chunk(chunk))
    )
    for value, expected in zip(jax.tree.leaves(coded), jax.tree.leaves(decoded), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(bits(value), bits(expected))
        assert bits(value).any()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slots": np.zeros(24, np.int32)}, KernelError, "named twice"),
        ({"slots": np.arange(24, dtype=np.int32) + 25}, KernelError, "slot 48"),
        ({"slots": np.arange(23, dtype=np.int32)}, ShapeError, r"\(23,\)"),
        ({"antecedent": ("C",)}, StalePatchError, "'C'"),
        ({"chunk": chunk_of("gqa", seed=3)}, PatchMismatchError, "'B3'"),
        ({"chunk": chunk_of("gqa", dtype=jnp.bfloat16), "patch": None}, ShapeError, "bfloat16"),
        ({"chunk": chunk_of("mha"), "patch": None}, ShapeError, r"expected \[2, P, O, 4, 16\]"),
        ({"pool": {"k": jnp.zeros((3, 6, 8, 2, 16))}}, LayoutError, "pool"),
        ({"pool": {name: jnp.zeros((3, 6, 8, 2, 16), jnp.int8) for name in "kv"}}, ShapeError, "int8"),
        ({"pool": {"k": jnp.zeros((3, 6, 8, 2, 16)), "v": jnp.zeros((3, 5, 8, 2, 16))}}, ShapeError, "pages"),
        ({"pool": {"k": [[0.0]], "v": [[0.0]]}}, ShapeError, "list"),
        ({"slots": np.linspace(0, 1, 24)}, KernelError, "float64"),
    ],
)
def test_refuses_before_it_writes(unchecked, change, error, words):
    chunk = chunk_of("gqa")
    patch = patch_for(chunk=chunk)
    settings = {"chunk": chunk, "patch": patch, "start": 4, "antecedent": ("A",)} | change
    vectors, slots = settings.pop("pool", pool_of(chunk.layout)), settings.pop("slots", slots_of(24))
    with pytest.raises(error, match=words):
        pool.splice(vectors, slots, kvp.Placed(**settings))
    arrays = [leaf for leaf in jax.tree.leaves(vectors) if isinstance(leaf, jax.Array)]
    assert not any(value.is_deleted() for value in arrays)


def test_refuses_before_it_moves_rotates_or_reads(unchecked):
    layout, slots, keys = LAYOUTS["gqa"], slots_of(24), chunk_of("gqa").kv["k"]
    vectors, pages = pool_of(layout), pool.RAGGED.to_pages(layout, pool_of(layout), 2)
    rotate = lambda slots, offset, *source: pool.rotate_slots(layout, vectors, slots, offset, *source)
    move = lambda *slots: pool.move_slots(vectors, *map(np.array, slots))
    for call, error, words in (
        (lambda: rotate(slots + 30, 1), KernelError, "expected 0 to 47"),
        (lambda: rotate(slots, 0.5), InputError, "integers"),
        (lambda: rotate(slots, 1, {"k": keys[:, 1:]}), ShapeError, "source"),
        (lambda: rotate(slots, 1, {"v": keys}), ShapeError, "None"),
        (lambda: pool.RAGGED.rotate(layout, pages, slots + 30, 1), KernelError, "expected 0 to 47"),
        (lambda: pool.RAGGED.rotate(layout, pages, slots, np.zeros(23, np.int32)), InputError, r"\(23,\)"),
        (lambda: pool.RAGGED.rotate(layout, pages, slots, 2**31), InputError, "2147483648"),
        (lambda: pool.RAGGED.rotate(layout, pages[:2], slots, 1), ShapeError, "2 layers"),
        (lambda: move([1, 2], [3, 3]), KernelError, "named twice"),
        (lambda: move([1, 48], [3, 4]), KernelError, "slot 48"),
        (lambda: move([1, 2], [3]), ShapeError, "2 slots to 1"),
        (lambda: pool.read_slots(vectors, np.array([-1])), KernelError, "expected 0 to"),
        (lambda: pool.read_slots(vectors, np.array([0.5])), KernelError, "expected int32"),
        (lambda: pool.read_slots(vectors, np.array([[0, 1]])), ShapeError, r"slots of shape \(1, 2\); expected \[T\]"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert not any(value.is_deleted() for value in (*vectors.values(), *pages))
    after = move([1], [2])
    for call in (
        lambda: move([1], [2]),
        lambda: rotate(slots, 1),
        lambda: pool.splice(vectors, slots, kvp.Placed(chunk_of("gqa"), None, 4)),
        lambda: pool.read_slots(vectors, slots, layout),
        lambda: pool.RAGGED.to_pages(layout, vectors),
    ):
        with pytest.raises(PoolError, match=r"donated.*expected the pool that"):
            call()
    pool.read_slots(after, slots)


# ------------------------------------------------------------------------------------------------------ owners of slots


@given(data=st.data())
def test_owners_of_slots_are_counted_through_any_operations(data):
    """After any allocations, shares and releases, counts are those of the owners, and no slot has two of them."""
    books = pool.SlotAllocator(PAGES, PAGE_SIZE)
    entries: list[list] = []  # [slots, owners, aligned]
    for _ in range(data.draw(st.integers(1, 12))):
        word = data.draw(st.sampled_from(("allocate", "share", "release")))
        if word == "allocate":
            tokens, aligned = data.draw(st.integers(1, 20)), data.draw(st.booleans())
            room = books.free_pages * PAGE_SIZE if aligned else books.free
            if tokens > room:
                with pytest.raises(PoolError, match="free"):
                    books.allocate(tokens, aligned=aligned)
                continue
            entries.append([books.allocate(tokens, aligned=aligned), 1, aligned])
        elif entries:
            entry = entries[data.draw(st.integers(0, len(entries) - 1))]
            (books.share if word == "share" else books.release)(entry[0])
            entry[1] += 1 if word == "share" else -1
        entries = [entry for entry in entries if entry[1]]
        counts = np.zeros(PAGES * PAGE_SIZE, int)
        for slots, owners, aligned in entries:
            assert (counts[slots] == 0).all()
            counts[slots] = owners
            if aligned:
                pages = pool.pages_of(slots, PAGE_SIZE)
                strangers = [other[0] for other in entries if other[0] is not slots]
                assert not any(np.isin(other // PAGE_SIZE, pages).any() for other in strangers)
        assert (books.counts == counts).all()


def test_slots_that_are_not_owned_are_refused(unchecked):
    books = pool.SlotAllocator(2, 4)
    slots = books.allocate(3)
    for none in ([], np.array([]), slots[:0]):
        books.release(none)
        books.share(none)
    for bad, error, words in (
        (np.array([5]), PoolError, "slot 5 without an owner"),
        (np.array([0, 0]), KernelError, "distinct"),
        (np.array([8]), KernelError, "0 to 7"),
        (np.array([0.0]), KernelError, "float64"),
    ):
        with pytest.raises(error, match=words):
            books.release(bad)
    with pytest.raises(PoolError, match="0 tokens"):
        books.allocate(0)
    with pytest.raises(PoolError, match="2 whole pages; expected at most the 1 of 2"):
        books.allocate(5, aligned=True)
    with pytest.raises(PoolError, match="page_size 0"):
        pool.make_pool(LAYOUTS["gqa"], 1, 0)
    assert (books.counts[slots] == 1).all()
    assert books.counts.sum() == 3


def test_page_tables_refuse_what_they_cannot_express():
    slots = np.array([12, 13, 14, 15, 0, 1])
    assert pool.pages_of(slots, 4).tolist() == [3, 0]
    assert pool.slot_mask(slots, np.array([3, 0]), 4).tolist() == [True] * 6 + [False] * 2
    with pytest.raises(PoolError, match="token 0 at slot 1"):
        pool.pages_of(np.array([1, 2]), 4)
    with pytest.raises(PoolError, match="token 5 at slot 2"):
        pool.pages_of(np.array([12, 13, 14, 15, 0, 2]), 4)


def test_shared_slots_are_not_overwritten():
    chunk = chunk_of("gqa")
    layout, books = chunk.layout, pool.SlotAllocator(PAGES, PAGE_SIZE)
    vectors, slots = pool_of(layout), books.allocate(24)
    put = lambda: pool.splice(vectors, slots, kvp.Placed(chunk, None, 4), allocator=books)
    books.share(slots[5:6])  # a fork reads it too
    with pytest.raises(PoolError, match=f"slot {slots[5]} with 2 owners; expected 1"):
        put()
    books.release(slots[5:6])
    books.release(slots[23:])
    with pytest.raises(PoolError, match=f"slot {slots[23]} with 0 owners; expected 1"):
        put()
    with pytest.raises(PoolError, match=r"6 pages of 8.*expected 5 pages of 8"):
        pool.splice(vectors, slots, kvp.Placed(chunk, None, 4), allocator=pool.SlotAllocator(5, 8))
    assert not any(value.is_deleted() for value in vectors.values())
    short = chunk_of("gqa", length=23)
    after = pool.splice(vectors, slots, kvp.Placed(short, None, 4), allocator=books)  # the padding's slot is nobody's
    assert set(after) == set(vectors)


def test_pages_are_added_behind_the_present_ones():
    books = pool.SlotAllocator(2, 4)
    slots = books.allocate(5, aligned=True)
    copy, more = books.copy(), books.enlarged(3)
    books.release(slots)
    assert (copy.owners(slots) == 1).all()
    assert (more.owners(slots) == 1).all()
    assert (copy.free, more.free, books.free) == (0, 4, 8)
    with pytest.raises(PoolError, match="1 pages in place of 2"):
        books.enlarged(1)
