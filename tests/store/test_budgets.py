"""A store keeps within its bytes of disk and memory, evicts the least recently used, and forgets what has expired.

Sizes are multiples of one object's file, so that each boundary is met exactly.
"""

import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import ChunkStore, DynamicLibrary, StaticLibrary
from tests.store.store_cases import MODEL, chunk_of, expires_of, name_of, object_of, patch_for, value_of

OUTPUT = np.arange(1000, dtype=np.float32)


def put(store: ChunkStore, number: int, **options: Any) -> None:
    store.put_encoder(f"{number:03d}", MODEL, OUTPUT + number, **options)


def is_there(store: ChunkStore, number: int) -> bool:
    """Whether an output is stored; its numbers are those that were put."""
    output = store.get_encoder(f"{number:03d}", MODEL)
    assert output is None or output.tolist() == (OUTPUT + number).tolist()
    return output is not None


def numbers_of(store: ChunkStore, stop: int = 200) -> list[int]:
    """The numbers of the stored outputs, which are not used thereby."""
    names = set(store.objects.with_prefix(""))
    return [number for number in range(stop) if store.names.encoder(MODEL, f"{number:03d}") in names]


@pytest.fixture(scope="module")
def size(module_folder: Path) -> int:
    """Bytes of an output's file."""
    with ChunkStore(module_folder / "one") as store:
        put(store, 0)
        return store.usage().bytes


class Clock:
    def __init__(self) -> None:
        self.now = time.time() // 60 * 60 + 5.0  # early in a minute, the unit of age


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock


@pytest.mark.parametrize("word", ["root_budget", "share"])
def test_a_budget_is_used_to_its_last_byte_and_never_exceeded(folder: Path, size: int, clock: Clock, word: str):
    limits: Any = {word: 10 * size}
    with ChunkStore(folder / "root", memory=0, **limits) as store:
        for number in range(10):
            put(store, number)
            clock.now += 61
        assert store.usage() == (10 * size, 10)  # exactly full
        put(store, 3)  # replacing needs room for both for a moment
        assert 8 <= store.usage().count <= 10
        for number in range(10, 40):
            clock.now += 61
            put(store, number)
            numbers = numbers_of(store)
            assert numbers[-1] == number
            assert 8 <= len(numbers) == store.usage().count <= 10  # a few more than needed leave, not many
            assert store.usage().bytes == len(numbers) * size
        assert numbers_of(store) == list(range(40 - len(numbers), 40))  # the oldest have left
        assert store.statistics().counts["evicted"] == 41 - len(numbers) - 1
        store.put_encoder("small", MODEL, OUTPUT[:1])
        usage = store.usage()
        with pytest.raises(StoreError, match="at most the"):
            store.put_encoder("large", MODEL, np.tile(OUTPUT, 13))
        assert store.usage() == usage  # nothing has left for it
    with ChunkStore(folder / "root", memory=0) as store:  # the budget is the root's, not the object's
        put(store, 100)
        assert store.usage().bytes <= 10 * size
    with ChunkStore(folder / "root", memory=0, **{word: 20 * size}) as store:  # pyright: ignore[reportArgumentType]
        for number in range(100, 120):
            put(store, number)
        assert store.usage().count > 17


def test_an_object_as_large_as_the_budget_has_room(folder: Path, size: int):
    with ChunkStore(folder / "root", root_budget=size) as store:
        for number in range(3):
            put(store, number)
            assert numbers_of(store) == [number]
    with ChunkStore(folder / "root", root_budget=size - 1) as store, pytest.raises(StoreError, match="root budget"):
        put(store, 4)


def test_what_was_used_last_stays_and_patches_of_its_minute_leave_first(folder: Path, size: int, clock: Clock):
    patch = patch_for(chunk=chunk_of("page"), rank=8)
    with ChunkStore(folder / "root", memory=0) as store:
        store.put_patches([patch])
        nbytes = store.usage().bytes
    with ChunkStore(folder / "root", root_budget=nbytes + 8 * size, memory=1 << 20) as store:
        clock.now += 120
        put(store, 0)
        put(store, 1)
        put(store, 2)
        clock.now += 120
        for _ in range(2):  # from the disk, and from memory
            assert is_there(store, 0)
        clock.now += 1
        assert len(store.get_patches(patch.metadata)) == 1
        clock.now += 1
        for number in range(3, 8):
            put(store, number)
        assert store.patch_count("page", MODEL) == 1
        put(store, 8)  # 1 and 2 are the oldest
        assert (numbers_of(store), store.patch_count("page", MODEL)) == ([0, 3, 4, 5, 6, 7, 8], 1)
        put(store, 9)
        put(store, 10)  # the patch is as old as 0, to the minute, and is cheaper to form again
        assert store.patch_count("page", MODEL) == 0
        assert 0 in numbers_of(store)


def test_what_has_expired_leaves_first(folder: Path, size: int, clock: Clock):
    with ChunkStore(folder / "root", root_budget=5 * size, memory=0) as store:
        put(store, 0)
        clock.now += 120
        for number in (1, 2):
            put(store, number, ttl=100)
        put(store, 3)
        put(store, 4)
        clock.now += 100
        put(store, 5)
        assert numbers_of(store) == [0, 3, 4, 5]
        assert store.statistics().counts["evicted"] == 0


def test_objects_expire_at_their_moment(folder: Path, clock: Clock):
    with ChunkStore(folder / "root", ttl=100, memory="1 MB") as store:
        put(store, 1)
        put(store, 2, ttl=1000)
        store.put(chunk_of("queued"), ttl=100)
        assert expires_of(store).count(clock.now + 100) == 2
        assert is_there(store, 1)
        clock.now += 99.5
        assert is_there(store, 1)
        assert store.get("queued", MODEL) is not None
        clock.now += 0.5
        assert not is_there(store, 1)
        assert store.get("queued", MODEL) is None
        assert not store.contains("queued", MODEL)
        assert numbers_of(store) == [2]
        assert store.usage().count == 3
        assert store.collect() == 2
        assert store.usage().count == 1
        put(store, 1)
        assert is_there(store, 1)


def test_entries_of_libraries_are_neither_evicted_nor_counted(folder: Path, size: int):
    with ChunkStore(folder / "root", root_budget=5 * size) as store:
        library, dynamic = StaticLibrary(store, quota="1 MB"), DynamicLibrary(store)
        library.put("A", b"x" * 20 * size)
        dynamic.publish("B", b"y" * 20 * size)
        for number in range(12):
            put(store, number)
        assert numbers_of(store)[-1] == 11
        assert 3 * size < store.usage().bytes <= 5 * size
        held = dynamic.open("FILE", "B")
        assert held is not None
        assert held.resource.content == b"y" * 20 * size
        with pytest.raises(StoreError, match="at most the root budget"):
            library.put("C", "x", chunk=chunk_of(tokens=200))
        assert [str(entry.reference) for entry in library.entries()] == ["FILE#A"]


def test_what_the_remote_store_does_not_have_yet_stays(folder: Path, size: int):
    obstore = pytest.importorskip("obstore.store")
    folder_of_remote = folder / "remote"
    with ChunkStore(folder / "root", root_budget=4 * size, remote="http://127.0.0.1:9/unreachable") as store:
        assert obstore is not None
        for number in range(4):
            put(store, number)
        with pytest.raises(StoreError, match="what the remote store does not have yet"):
            put(store, 4)
        assert numbers_of(store) == [0, 1, 2, 3]
    with ChunkStore(folder / "root", remote=f"file://{folder_of_remote}") as store:
        store.flush()
        put(store, 4)
        assert numbers_of(store)[-1] == 4
        assert is_there(store, 0)  # from there, if it has left


def test_memory_keeps_what_was_used_last_within_its_bytes(folder: Path, size: int):
    with (
        ChunkStore(folder / "root", tenant="one", memory=3 * size) as store,
        ChunkStore(folder / "root", tenant="two", memory=size) as other,
    ):
        for number in range(5):
            put(store, number)
        put(other, 0)

        def hits(*numbers: int) -> list[str]:
            """The origin of each output, in this order of reads."""
            origins = []
            for number in numbers:
                before = store.statistics().counts
                assert is_there(store, number)
                after = store.statistics().counts
                origins += [
                    kind for kind in ("disk", "memory") if after.get(f"{kind}_hits") != before.get(f"{kind}_hits")
                ]
                assert store.statistics().gauges["memory_bytes"] <= 3 * size
            return origins

        assert hits(0, 1, 2, 0) == ["disk", "disk", "disk", "memory"]
        assert hits(3, 0, 1) == ["disk", "memory", "disk"]  # 1 was the least recently used
        assert hits(3, 0, 1) == ["memory"] * 3  # exactly full
        put(store, 1)
        assert hits(1, 1, 3, 0) == ["disk", "memory", "memory", "memory"]  # the old file's value has left
        assert is_there(other, 0)  # the memory is one for the tenants of a root
        assert hits(3, 0, 1) == ["memory", "memory", "disk"]
        store.put_encoder("large", MODEL, np.tile(OUTPUT, 4))
        assert store.get_encoder("large", MODEL) is not None
        assert hits(1, 0) == ["memory", "memory"]  # what does not fit displaces nothing
        store.delete("000", MODEL)
        assert not is_there(store, 0)
        assert store.statistics().gauges["memory_bytes"] == 2 * size
        store.delete_tenant()
        assert store.statistics().gauges["memory_bytes"] <= size


def test_a_full_queue_waits_and_its_last_put_or_deletion_counts(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvpatch_jax.store.objects.QUEUE_BYTES", 1000)
    gate, encoding = threading.Event(), threading.Event()

    def make() -> Any:
        encoding.set()
        gate.wait(10)
        return object_of(1)

    with ChunkStore(folder / "root") as store, concurrent.futures.ThreadPoolExecutor(1) as pool:
        objects = store.objects
        first = objects.put_async(name_of(1), make, 800)
        encoding.wait()  # it is being written, and those that follow wait
        second, third = (objects.put_async(name_of(number), lambda: object_of(2), 9) for number in (1, 2))
        assert [objects.get(name_of(number), value_of) for number in (1, 2)] == [2, 2]
        assert objects.delete(f"{2:032x}")
        assert not third.result()
        last = pool.submit(store.put_async, chunk_of("last"))
        assert not concurrent.futures.wait([last], 0.1).done
        gate.set()
        assert [last.result().result(), first.result(), second.result()] == [True] * 3
        assert [objects.get(name_of(number), value_of) for number in (1, 2)] == [2, None]
