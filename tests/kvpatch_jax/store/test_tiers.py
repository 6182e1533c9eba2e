"""Tiers: budgets, order of eviction, pins, expiry, clocks, deletion seen through memory."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from store_cases import BACKBONE, ManualClock, chunk_of, file_of, patch_of, same_chunk

from kvpatch_jax.errors import InputError, StoreFullError
from kvpatch_jax.store import Budget, ChunkStore
from kvpatch_jax.store.cli.main import main

ONE = 4096 + 64 + 6 * 9 * 2 * 16 * 4  # bytes of chunk_of's file: header, positions, three layers of k and v


# ------------------------------------------------------------------------------------------------------- the store


def test_hits_come_from_the_nearest_tier(tmp_path: Path):
    device = jax.devices()[0]
    with ChunkStore(tmp_path, budget=Budget(host=1 << 20)) as store:
        store.put(chunk_of())
        for _ in range(2):
            assert same_chunk(store.get("B", BACKBONE), chunk_of())
            assert same_chunk(store.get("B", BACKBONE, placement=device), chunk_of())
        counts = store.counters
        assert [counts[f"{tier}_hits"] for tier in ("disk", "host")] == [1, 3]
        found = store.get("B", BACKBONE)
        assert found is not None
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(found.kv["k"])[0] = 0


def test_memory_serves_nothing_that_the_disk_no_longer_has(tmp_path: Path):
    device = jax.devices()[0]
    budget = Budget(host=1 << 20)
    with ChunkStore(tmp_path, budget=budget) as one, ChunkStore(tmp_path, budget=budget) as two:
        one.put(chunk_of())
        assert one.get("B", BACKBONE, placement=device) is not None
        assert two.delete("B", BACKBONE)
        assert one.get("B", BACKBONE) is None
        assert one.get("B", BACKBONE, placement=device) is None


def test_the_disk_keeps_its_budget(tmp_path: Path):
    clock = ManualClock()
    with ChunkStore(tmp_path, budget=Budget(host=0, disk=10 * ONE), clock=clock) as store:
        chunks = [chunk_of(f"B{number}", number) for number in range(30)]
        for number, chunk in enumerate(chunks):
            store.put(chunk)
            os.utime(file_of(store, chunk), (number + 1, number + 1))
            assert sum(entry.size for entry in store.disk.scan()) <= 10 * ONE
            assert same_chunk(store.get(chunk.id, BACKBONE), chunk)
        there = [store.contains(chunk.id, BACKBONE) for chunk in chunks]
        assert 7 <= sum(there) <= 10
        assert there[-1]
        assert not there[0]
        assert store.counters["disk_evicted_budget"] == 30 - sum(there)


def test_order_of_eviction_on_the_disk(tmp_path: Path):
    """Expired, then derived, then a canonical that its encoder output makes again, then the least recently used."""
    clock = ManualClock()
    with ChunkStore(tmp_path, budget=Budget(host=0), clock=clock) as store:
        plain, coded = chunk_of("plain", 1), chunk_of("coded", 2, encoder=np.ones((2, 2), np.float32))
        store.put(plain)
        store.put(coded)
        store.put(plain, encoding="int8")
        store.put_patches([patch_of(plain), patch_of(coded)])
        store.put(chunk_of("brief", 3), ttl=5)
        clock.now += 6
        states = [_shown(store)]
        while any(states[-1]):
            total = sum(entry.size for entry in store.disk.scan())
            assert main(["gc", f"--root={tmp_path}", f"--budget={int(total * 0.99)}"]) == 0
            states.append(_shown(store))
        gone = [sum(state) for state in states]
        assert gone == sorted(gone, reverse=True)
        first_lost = [next(i for i, state in enumerate(states) if not state[which]) for which in range(7)]
        brief, int8, plain_patch, coded_patch, coded_kv, plain_kv, coder = first_lost
        assert brief == 0 or brief < min(int8, plain_patch, coded_patch)
        assert max(int8, plain_patch, coded_patch) < coded_kv < min(plain_kv, coder)


def _shown(store: ChunkStore) -> tuple[bool, ...]:
    there = {(entry.chunk, entry.part.partition(".")[0] if entry.part[0] == "p" else entry.part): True
             for entry in store.disk.scan()}  # fmt: skip
    key = lambda id: (lambda name: f"{name.folder}/{name.chunk}")(store.names.canonical(BACKBONE, id))
    wanted = [("brief", "kv"), ("plain", "kv.int8"), ("plain", "p"), ("coded", "p"), ("coded", "kv"), ("plain", "kv")]
    return tuple((key(id), part) in there for id, part in [*wanted, ("coded", "enc")])


def test_patches_go_with_their_canonical(tmp_path: Path):
    with ChunkStore(tmp_path, budget=Budget(host=0)) as store:
        chunk = chunk_of()
        store.put(chunk, ttl=5)
        store.put_patches([patch_of(chunk), patch_of(chunk, ("other",))])
        store.put_patches([patch_of(chunk_of("C"))])
        store.disk.clock = ManualClock(2e10)
        assert store.collect() == 3
        assert store.get_patches(patch_of(chunk).metadata) == []
        assert len(store.get_patches(patch_of(chunk_of("C")).metadata)) == 1


def test_pinned_chunks_stay_and_a_full_store_raises(tmp_path: Path):
    with ChunkStore(tmp_path, budget=Budget(disk=3 * ONE)) as store:
        first, second = chunk_of("first", 1), chunk_of("second", 2)
        store.put(first)
        store.put(second)
        with store.pin("first", BACKBONE), store.pin("second", BACKBONE):
            with store.pin("first", BACKBONE):
                pass
            with pytest.raises(StoreFullError, match="may go; expected room"):
                store.put(chunk_of("third", 3, tokens=30))
            assert store.contains("first", BACKBONE)
            assert store.contains("second", BACKBONE)
        store.put(chunk_of("third", 3, tokens=30))
        assert store.contains("third", BACKBONE)
        assert not store.contains("first", BACKBONE)
        with pytest.raises(StoreFullError):
            store.put(chunk_of("huge", tokens=300))
        assert store.contains("third", BACKBONE)


def test_expiry_and_a_clock_that_jumps_back(tmp_path: Path):
    clock = ManualClock()
    with ChunkStore(tmp_path, ttl=100, clock=clock, budget=Budget(host=1 << 20, disk=6 * ONE)) as store:
        store.put(chunk_of())
        clock.now += 99
        assert store.get("B", BACKBONE) is not None
        clock.now -= 1e6  # back by days: nothing is lost, and nothing raises
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        for number in range(3):
            store.put(chunk_of(f"C{number}", number))
        assert store.collect() == 0
        assert all(store.get(f"C{number}", BACKBONE) is not None for number in range(3))
        clock.now += 2e6
        assert store.get("B", BACKBONE) is None
        assert store.get("C0", BACKBONE) is None
        assert store.collect() == 4
        with pytest.raises(InputError, match="ttl"):
            store.put(chunk_of(), ttl=0)


def _memory(value: object) -> int:
    """Bytes of the memory that arrays keep, each block once, however little of it they show."""
    spans: list[tuple[int, int]] = []
    for array in map(np.asarray, jax.tree.leaves(value)):
        while isinstance(array.base, np.ndarray):
            array = array.base
        spans.append((array.ctypes.data, array.ctypes.data + array.nbytes))
    total, end = 0, 0
    for start, stop in sorted(spans):
        total, end = total + max(0, stop - max(start, end)), max(end, stop)
    return total


@pytest.mark.parametrize(
    ("encoding", "key"),
    [(None, None), ("bfloat16", b"one key of the store, 32 bytes at least"), ("int8", None)],
    ids=["plain", "encrypted", "int8"],
)
def test_memory_counts_the_bytes_that_it_holds(tmp_path: Path, encoding, key):
    """Reduced encodings are held in the dtype that they had: by the bytes of their files, four times the budget."""
    chunks = [chunk_of(f"B{number}", number, tokens=400) for number in range(12)]
    budget = 4 * chunks[0].nbytes + (1 << 14)
    with ChunkStore(tmp_path, budget=Budget(host=budget), key=key) as store:
        for chunk in chunks:
            store.put(chunk, encoding=encoding)
        for chunk in chunks:
            assert store.get(chunk.id, BACKBONE, encoding=encoding) is not None
        counted, held = store.statistics().held["host"], []
        for chunk in reversed(chunks):  # the newest are held
            hits = store.counters["host_hits"]
            found = store.get(chunk.id, BACKBONE, encoding=encoding)
            if store.counters["host_hits"] == hits:
                break
            held.append(found)
        assert 3 <= len(held) <= 4
        memory = sum(_memory((dict(chunk.kv), chunk.local)) for chunk in held)
        assert memory <= counted <= budget


def test_memory_counts_patches_and_encoder_outputs(tmp_path: Path):
    chunk = chunk_of(tokens=200, encoder=np.ones((100, 8), np.float32))
    with ChunkStore(tmp_path, budget=Budget(host=1 << 20)) as store:
        store.put(chunk)
        store.put_patches([patch_of(chunk), patch_of(chunk, ("other",))])
        [patch] = store.get_patches(patch_of(chunk).metadata)
        patches = store.statistics().held["host"]
        assert _memory(patch.factors) <= patches <= _memory(patch.factors) + 16_384
        whole = store.get("B", BACKBONE, encoder=True)
        assert whole is not None
        more = store.statistics().held["host"] - patches
        memory = _memory((dict(whole.kv), whole.local)) + _memory(whole.encoder)
        assert memory <= more <= memory + 2 * 16_384
