"""The budget of a root that tenants share: nobody loses objects to another's smaller budget."""

from pathlib import Path

import pytest
from store_cases import BACKBONE, chunk_of

from kvpatch_jax.errors import StoreFullError
from kvpatch_jax.store import Budget, ChunkStore, load_snapshot, save_snapshot

SIZE = 4096 + 64 + chunk_of().nbytes


def opened(root: Path, tenant: str, disk: int | None) -> ChunkStore:
    return ChunkStore(root, tenant=tenant, budget=Budget(host=0, disk=disk))


def fill(store: ChunkStore, count: int) -> None:
    for number in range(count):
        store.put(chunk_of(f"B{number}", number))


def held(store: ChunkStore) -> int:
    return sum(store.contains(f"B{number}", BACKBONE) for number in range(20))


@pytest.mark.parametrize("first", [None, 50 * SIZE], ids=["no budget", "a larger budget"])
def test_a_tenant_with_a_small_budget_evicts_its_own_alone(tmp_path: Path, first: int | None):
    with opened(tmp_path, "one", first) as one, opened(tmp_path, "two", 50_000) as two:
        fill(one, 6)
        fill(two, 10)
        assert held(one) == 6
        assert held(two) == 50_000 // SIZE - (50_000 // SIZE == 10)
        assert two.contains("B9", BACKBONE)
        with pytest.raises(StoreFullError):
            two.put(chunk_of("huge", tokens=200))
        assert held(one) == 6


def test_tenants_of_one_budget_share_it(tmp_path: Path):
    with opened(tmp_path, "one", 6 * SIZE) as one, opened(tmp_path, "two", 6 * SIZE) as two:
        fill(one, 4)
        fill(two, 6)
        assert sum(entry.size for entry in one.disk.scan()) <= 6 * SIZE
        assert held(one) < 4
        assert two.contains("B5", BACKBONE)


def test_the_largest_budget_is_the_roots(tmp_path: Path):
    with opened(tmp_path, "one", 8 * SIZE) as one, opened(tmp_path, "two", 4 * SIZE) as two:
        fill(one, 6)
        fill(two, 8)
        assert held(two) <= 4
        assert 6 - held(one) <= 4
        fill(one, 20)
        assert sum(entry.size for entry in one.disk.scan()) <= 8 * SIZE


def test_a_tenants_latest_budget_counts(tmp_path: Path):
    """A lower budget is lower from the next put on; opening and reading changes nothing."""
    with opened(tmp_path, "one", 20 * SIZE) as one:
        fill(one, 10)
    with opened(tmp_path, "two", 4 * SIZE) as two:
        fill(two, 6)
        opened(tmp_path, "one", SIZE).close()
        two.put(chunk_of("more"))
        with opened(tmp_path, "one", None) as one:
            assert held(one) == 10
    with opened(tmp_path, "one", 4 * SIZE) as one, opened(tmp_path, "two", 4 * SIZE) as two:
        one.put(chunk_of("more"))
        two.put(chunk_of("again"))
        assert sum(entry.size for entry in one.disk.scan()) <= 4 * SIZE


def test_a_damaged_budget_note_evicts_no_object(tmp_path: Path):
    with opened(tmp_path, "one", 8 * SIZE) as one:
        fill(one, 6)
        (note,) = tmp_path.rglob("BUDGET")
        note.write_text("7 or so")
        with opened(tmp_path, "two", 2 * SIZE) as two:
            fill(two, 6)
        assert held(one) == 6


def test_a_tenant_that_is_deleted_has_no_say(tmp_path: Path):
    with opened(tmp_path, "one", 20 * SIZE) as one, opened(tmp_path, "two", 4 * SIZE) as two:
        fill(one, 6)
        one.delete_tenant()
        assert not list(tmp_path.rglob("BUDGET"))
        fill(two, 8)
        assert sum(entry.size for entry in two.disk.scan()) <= 4 * SIZE


def test_a_restore_of_the_whole_root_keeps_to_the_operators_budget(tmp_path: Path):
    with opened(tmp_path / "root", "one", None) as one, opened(tmp_path / "root", "two", None) as two:
        fill(one, 3)
        fill(two, 3)
    save_snapshot(tmp_path / "root", tmp_path / "snapshot")
    with pytest.raises(StoreFullError):
        load_snapshot(tmp_path / "snapshot", tmp_path / "into", budget=Budget(disk=3 * SIZE))
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "again", budget=Budget(disk=7 * SIZE)).objects == 6
