"""What is read from memory counts as used on the disk."""

import os
import time
from pathlib import Path

import jax
import pytest
from store_cases import BACKBONE, chunk_of, file_of, same_chunk

from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.disk.recent_use import EVERY, RecentUse

HOT = chunk_of("hot", 1)


@pytest.fixture
def size(tmp_path: Path) -> int:
    """Bytes of one object's file."""
    with ChunkStore(tmp_path / "one") as store:
        store.put(HOT)
        return file_of(store, HOT).stat().st_size


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("evictor", ["itself", "another tenant"])
def test_objects_read_from_memory_stay_on_the_disk(tmp_path: Path, size: int, tier: str, evictor: str):
    placement = jax.devices()[0] if tier == "device" else None
    budget = Budget(host=1 << 20, device=1 << 20, disk=6 * size)
    with (
        ChunkStore(tmp_path / "store", budget=budget) as store,
        ChunkStore(tmp_path / "store", tenant="other", budget=budget) as other,
    ):
        store.put(HOT)
        assert store.get("hot", BACKBONE, placement=placement) is not None
        for number in range(30):
            (store if evictor == "itself" else other).put(chunk_of(f"cold{number}", number))
            assert same_chunk(store.get("hot", BACKBONE, placement=placement), HOT)
        assert store.counters[f"{tier}_hits"] == 30
        assert store.counters["disk_hits"] == 1
        assert store.counters["disk_evicted_budget"] + other.counters["disk_evicted_budget"] >= 25


def test_access_times_are_updated_for_other_processes_at_intervals(tmp_path: Path):
    with ChunkStore(tmp_path) as store:
        store.put(HOT)
        file = file_of(store, HOT)
        assert store.get("hot", BACKBONE) is not None
        before = file.stat()
        for _ in range(3):
            assert store.get("hot", BACKBONE) is not None
        assert file.stat().st_atime_ns == before.st_atime_ns  # it was written when the disk was read, just now
        began = time.time()
        os.utime(file, ns=(int((began - EVERY - 1) * 1e9), before.st_mtime_ns))
        for _ in range(3):
            assert same_chunk(store.get("hot", BACKBONE), HOT)
        assert file.stat().st_atime >= began - 1
        assert file.stat().st_mtime_ns == before.st_mtime_ns
        assert store.counters["host_hits"] == 6
        assert store.counters["disk_hits"] == 1


def test_a_use_is_to_be_written_down_once_in_a_while():
    uses = RecentUse()
    assert uses.last("a", 5.0) == 5.0
    assert not uses.note("a", 100.0, 100.0 - EVERY + 1)
    assert uses.note("a", 101.0, 101.0 - EVERY)
    assert not uses.note("a", 102.0, 0.0)  # on a medium that may only be read the file does not show it
    assert uses.note("a", 101.0 + EVERY, 0.0)
    assert uses.last("a", 5.0) == 101.0 + EVERY
    assert uses.last("a", 500.0) == 500.0


def test_uses_do_not_pile_up():
    uses = RecentUse()
    for number in range(1 << 20):
        uses.note(str(number), 100.0 + number, 0.0)
        if uses.last("0", 0.0) == 0.0:
            break
    else:
        pytest.fail("the oldest of a million is still there")
    assert uses.last(str(number), 0.0) == 100.0 + number
