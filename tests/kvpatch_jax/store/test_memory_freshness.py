"""Memory serves what the disk has now: what was put again, by whomever, is not served as it was."""

import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from store_cases import BACKBONE, ManualClock, chunk_of, patch_of, same, same_chunk

from kvpatch_jax.store import Budget, ChunkStore, save_snapshot
from kvpatch_jax.store.disk.disk import Disk

MEMORY = Budget(host=1 << 20)


def factors(store: ChunkStore, patch) -> np.ndarray:
    (found,) = store.get_patches(patch.metadata)
    return np.asarray(found.factors["k"][0])


@pytest.mark.parametrize("key", [None, b"one key of the store, 32 bytes at least"])
@pytest.mark.parametrize("whose", ["own", "another"])
def test_a_patch_that_was_formed_again_is_served(tmp_path: Path, key: bytes | None, whose: str):
    first, second = patch_of(chunk_of(), seed=1), patch_of(chunk_of(), seed=2)
    with ChunkStore(tmp_path, budget=MEMORY, key=key) as store, ChunkStore(tmp_path, budget=MEMORY, key=key) as other:
        assert store.names.patch(first) == store.names.patch(second)
        store.put_patches([first])
        assert same(factors(store, first), first.factors["k"][0])
        (store if whose == "own" else other).put_patches([second])
        assert same(factors(store, first), second.factors["k"][0])
        store.put_patch_async(first).result()
        assert same(factors(store, first), first.factors["k"][0])


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("whose", ["own", "another"])
def test_a_shortened_life_is_kept_to(tmp_path: Path, placed: bool, whose: str):
    clock, device = ManualClock(), jax.devices()[0] if placed else None
    opened = lambda: ChunkStore(tmp_path, budget=MEMORY, clock=clock)
    with opened() as store, opened() as other:
        store.put(chunk_of(), ttl=1000)
        assert store.get("B", BACKBONE, placement=device) is not None
        (store if whose == "own" else other).put(chunk_of(), ttl=10)
        clock.now += 20
        assert store.get("B", BACKBONE, placement=device) is None


def test_other_content_under_the_same_id_is_served(tmp_path: Path):
    old, new = chunk_of(seed=1), chunk_of(seed=2)
    with ChunkStore(tmp_path, budget=MEMORY) as store:
        store.put(old)
        assert same_chunk(store.get("B", BACKBONE), old)
        store.put_async(new).result()
        assert same_chunk(store.get("B", BACKBONE), new)
        placed = store.get("B", BACKBONE, placement=jax.devices()[0])
        assert placed is not None
        assert same(placed.kv["k"], new.kv["k"])


def test_a_read_that_a_put_overtakes_leaves_nothing_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The old bytes were read, then the new ones put, then the old ones kept in memory."""
    old, new = chunk_of(seed=1), chunk_of(seed=2)
    with ChunkStore(tmp_path, budget=MEMORY) as store:
        store.put(old)
        read, go = threading.Event(), threading.Event()
        get = Disk.get

        def slow(disk: Disk, name):
            found = get(disk, name)
            read.set()
            assert go.wait(300)
            return found

        monkeypatch.setattr(Disk, "get", slow)
        reader = threading.Thread(target=lambda: store.get("B", BACKBONE))
        reader.start()
        assert read.wait(300)
        store.put(new)
        go.set()
        reader.join()
        monkeypatch.undo()
        assert same_chunk(store.get("B", BACKBONE), new)


def test_reading_and_linking_by_others_keep_the_memory_copy(tmp_path: Path):
    """Both change what the system notes of a file; what it holds is the same, and memory goes on serving it."""
    with ChunkStore(tmp_path / "store", budget=MEMORY) as store, ChunkStore(tmp_path / "store") as other:
        store.put(chunk_of())
        assert store.get("B", BACKBONE) is not None
        assert other.get("B", BACKBONE) is not None
        assert store.get("B", BACKBONE) is not None
        save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant="default")
        assert store.get("B", BACKBONE) is not None
        assert (store.counters["disk_hits"], store.counters["host_hits"]) == (1, 2)
