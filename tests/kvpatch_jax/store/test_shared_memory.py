"""Files that are mapped in place of being copied, and the idle buffers of a process."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, file_of, same_chunk

from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.disk import mapping as mapping_module
from kvpatch_jax.store.format.buffers import Buffers


@pytest.fixture
def mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkStore]:
    """A store that maps files of any size."""
    monkeypatch.setattr(mapping_module, "MAPPED_BYTES", 0)
    with ChunkStore(tmp_path, budget=Budget(host=1 << 20)) as store:
        store.disk.mapped = True
        yield store


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_a_mapped_chunk_has_the_same_numbers_and_no_copy(mapping: ChunkStore):
    chunk = chunk_of(tokens=13, hidden={1: np.ones((13, 5), np.float32)})
    mapping.put(chunk)
    found = mapping.get(chunk.id, BACKBONE)
    assert found is not None
    assert (mapping.counters["mapped"], mapping.disk.buffers.idle_bytes) == (1, 0)
    assert str(file_of(mapping, chunk)) in mapped_files()
    assert same_chunk(found, chunk)
    assert found.hidden is not None
    assert np.array_equal(found.hidden[1], np.ones((13, 5), np.float32))
    for name, value in found.kv.items():
        value = np.asarray(value)
        assert not value.flags.writeable
        assert np.array_equal(np.asarray(jax.device_put(value)), np.asarray(chunk.kv[name]))
        assert np.array_equal(np.asarray(jax.jit(lambda x: 2 * x)(value)), 2 * np.asarray(chunk.kv[name]))
    assert mapping.get(chunk.id, BACKBONE) is found  # kept in the host tier
    assert mapping.statistics().held["host"] == file_of(mapping, chunk).stat().st_size


def test_a_mapped_chunk_outlives_its_file_and_its_store(mapping: ChunkStore):
    chunk = chunk_of()
    mapping.put(chunk)
    found = mapping.get(chunk.id, BACKBONE)
    mapping.put(chunk_of(seed=5))
    assert mapping.delete(chunk.id, BACKBONE)
    mapping.close()
    assert same_chunk(found, chunk)
    del found
    gc.collect()
    assert str(mapping.disk.root) not in mapped_files()


@pytest.mark.parametrize("at", [5000, -1], ids=["first leaf", "last leaf"])
def test_a_damaged_file_is_found_when_it_is_mapped(mapping: ChunkStore, at: int):
    mapping.put(chunk_of())
    path = file_of(mapping, chunk_of())
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert mapping.get("B", BACKBONE) is None
    assert (mapping.counters["quarantined"], mapping.counters["mapped"]) == (1, 0)
    assert not path.exists()


@pytest.mark.parametrize("more", [{"key": b"k" * 32}, {"wipe": True}, {}], ids=["encrypted", "wiped", "small"])
def test_what_may_not_stay_in_memory_or_is_small_is_copied(tmp_path: Path, more: dict[str, Any], monkeypatch):
    if more:
        monkeypatch.setattr(mapping_module, "MAPPED_BYTES", 0)
    with ChunkStore(tmp_path, **more) as store:
        store.disk.mapped = True
        store.put(chunk_of())
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        assert store.counters["mapped"] == 0


# ---------------------------------------------------------------------------------------------------- idle buffers


def used(pool: Buffers, count: int, size: int) -> None:
    """Leases buffers at the same time, and returns them."""
    leases = [pool.lease(size) for _ in range(count)]
    leases.clear()
