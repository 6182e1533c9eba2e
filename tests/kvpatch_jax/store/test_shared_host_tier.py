"""The host tier that stores of several tenants share: one budget, and each tenant's own objects."""

from pathlib import Path

import pytest
from store_cases import BACKBONE, chunk_of, same_chunk

from kvpatch_jax.errors import InputError
from kvpatch_jax.store import ChunkStore, SharedHostTier

ONE = 4096 + 64 + 6 * 9 * 2 * 16 * 4
"""Bytes of a chunk in memory."""


def counts_of(store: ChunkStore, *names: str) -> list[int]:
    counts = store.statistics().counts
    return [counts.get(name, 0) for name in names]


def test_one_budget_bounds_all_tenants_and_the_least_recently_used_goes_first(tmp_path: Path):
    tier, chunks = SharedHostTier(3 * ONE + 100), [chunk_of(str(number), number) for number in range(4)]
    stores = [ChunkStore(tmp_path, tenant=f"tenant {number}", host_tier=tier) for number in range(4)]
    for store, chunk in zip(stores, chunks, strict=True):
        store.put(chunk)
        assert same_chunk(store.get(chunk.id, BACKBONE), chunk)
        assert tier.nbytes <= tier.budget
    held = [store.statistics().held["host"] for store in stores]
    assert held[0] == 0, "its chunk was used least recently, by another tenant's read"
    assert all(held[1:])
    assert tier.nbytes == sum(held)
    assert [counts_of(store, "host_evicted_budget")[0] for store in stores] == [1, 0, 0, 0]
    assert same_chunk(stores[0].get("0", BACKBONE), chunks[0]), "it is on the disk"
    assert counts_of(stores[0], "disk_hits") == [2]
    for store in stores:
        store.close()
    assert tier.nbytes == 0


def test_a_tenant_never_gets_another_ones_copy_and_drops_only_its_own(tmp_path: Path):
    tier = SharedHostTier("1 MiB")
    with (
        ChunkStore(tmp_path, tenant="one", host_tier=tier) as one,
        ChunkStore(tmp_path, tenant="two", host_tier=tier) as two,
    ):
        mine, theirs = chunk_of("same", 1), chunk_of("same", 2)
        one.put(mine)
        two.put(theirs)
        for _ in range(2):
            assert same_chunk(one.get("same", BACKBONE), mine)
            assert same_chunk(two.get("same", BACKBONE), theirs)
        assert counts_of(one, "host_hits", "disk_hits") == [1, 1]
        one.delete("same", BACKBONE)
        assert one.get("same", BACKBONE) is None
        assert one.statistics().held["host"] == 0
        two.delete_tenant()
        assert tier.nbytes == 0
        two.put(theirs)
        assert same_chunk(two.get("same", BACKBONE), theirs)
        one.close()
        assert two.statistics().held["host"] == tier.nbytes > 0, "closing one store drops nothing of another"


def test_pinned_chunks_of_any_tenant_stay(tmp_path: Path):
    tier = SharedHostTier(ONE + 100)
    with (
        ChunkStore(tmp_path, tenant="one", host_tier=tier) as one,
        ChunkStore(tmp_path, tenant="two", host_tier=tier) as two,
    ):
        for store in (one, two):
            store.put(chunk_of())
        with one.pin("B", BACKBONE):
            one.get("B", BACKBONE)
            two.get("B", BACKBONE)
            assert one.statistics().held["host"] == tier.nbytes > 0
        two.get("B", BACKBONE)
        assert two.statistics().held["host"] == tier.nbytes > 0


def test_a_tier_of_another_root_and_other_kinds_are_refused(tmp_path: Path):
    tier = SharedHostTier("1 MiB")
    with ChunkStore(tmp_path / "one", host_tier=tier), pytest.raises(InputError, match=r"host_tier: got root .*two"):
        ChunkStore(tmp_path / "two", host_tier=tier)
    (tmp_path / "alias").symlink_to(tmp_path / "one")
    ChunkStore(tmp_path / "one", tenant="other", host_tier=tier).close()
    with pytest.raises(InputError, match=r"SharedHostTier\.budget: got 'lots'"):
        SharedHostTier("lots")
