"""Every slot of a pool has the owners that took it: none is given twice, lost, or written while it is shared."""
# pyright: reportArgumentType=false

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_cases import PAGE_SIZE, PAGES, pool_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import KernelError, PoolError
from tests.shared.operator_cases import LAYOUTS, chunk_of


@given(data=st.data())
def test_owners_of_slots_are_counted_through_any_operations(data):
    """After any allocations, shares and releases, counts are those of the owners, and no slot has two of them."""
    books = kvp.pool.SlotAllocator(PAGES, PAGE_SIZE)
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
                pages = kvp.pool.pages_of(slots, PAGE_SIZE)
                strangers = [other[0] for other in entries if other[0] is not slots]
                assert not any(np.isin(other // PAGE_SIZE, pages).any() for other in strangers)
        assert (books.counts == counts).all()


def test_slots_that_are_not_owned_are_refused(unchecked):
    books = kvp.pool.SlotAllocator(2, 4)
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
    with pytest.raises(PoolError, match="pages 0"):
        kvp.pool.SlotAllocator(0, 4)
    with pytest.raises(PoolError, match="page_size 0"):
        kvp.pool.make_pool(LAYOUTS["gqa"], 1, 0)
    assert (books.counts[slots] == 1).all()
    assert books.counts.sum() == 3


def test_page_tables_refuse_what_they_cannot_express():
    slots = np.array([12, 13, 14, 15, 0, 1])
    assert kvp.pool.pages_of(slots, 4).tolist() == [3, 0]
    assert kvp.pool.slot_mask(slots, np.array([3, 0]), 4).tolist() == [True] * 6 + [False] * 2
    with pytest.raises(PoolError, match="token 0 at slot 1"):
        kvp.pool.pages_of(np.array([1, 2]), 4)
    with pytest.raises(PoolError, match="token 5 at slot 2"):
        kvp.pool.pages_of(np.array([12, 13, 14, 15, 0, 2]), 4)


def test_shared_slots_are_not_overwritten():
    chunk = chunk_of("gqa")
    layout, books = chunk.layout, kvp.pool.SlotAllocator(PAGES, PAGE_SIZE)
    pool, slots = pool_of(layout), books.allocate(24)
    put = lambda: kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 4), allocator=books)
    books.share(slots[5:6])  # a fork reads it too
    with pytest.raises(PoolError, match=f"slot {slots[5]} with 2 owners; expected 1"):
        put()
    books.release(slots[5:6])
    books.release(slots[23:])
    with pytest.raises(PoolError, match=f"slot {slots[23]} with 0 owners; expected 1"):
        put()
    with pytest.raises(PoolError, match=r"6 pages of 8.*expected 5 pages of 8"):
        kvp.pool.splice(pool, slots, kvp.Placed(chunk, None, 4), allocator=kvp.pool.SlotAllocator(5, 8))
    assert not any(value.is_deleted() for value in pool.values())
    short = chunk_of("gqa", length=23)
    after = kvp.pool.splice(pool, slots, kvp.Placed(short, None, 4), allocator=books)  # the padding's slot is nobody's
    assert set(after) == set(pool)


def test_pages_are_added_behind_the_present_ones():
    books = kvp.pool.SlotAllocator(2, 4)
    slots = books.allocate(5, aligned=True)
    copy, more = books.copy(), books.enlarged(3)
    books.release(slots)
    assert (copy.owners(slots) == 1).all()
    assert (more.owners(slots) == 1).all()
    assert (copy.free, more.free, books.free) == (0, 4, 8)
    with pytest.raises(PoolError, match="1 pages in place of 2"):
        books.enlarged(1)
