"""A store keeps within its bytes, evicts the least recently used, and no tenant reads or displaces another's."""

import concurrent.futures
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import ChunkStore, DynamicLibrary, StaticLibrary
from tests.store.store_cases import (
    KEY,
    MODEL,
    SECRET,
    chunk_of,
    expires_of,
    name_of,
    object_of,
    patch_for,
    same_chunk,
    value_of,
)

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


@pytest.mark.parametrize("word", ["root_budget", "share"])
def test_a_budget_is_used_to_its_last_byte_and_never_exceeded(folder: Path, size: int, clock, word: str):
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


def test_what_was_used_last_stays_and_patches_leave_within_a_minute(folder: Path, size: int, clock):
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
        clock.now += 58
        assert len(store.get_patches(patch.metadata)) == 1
        clock.now += 1
        for number in range(3, 8):
            put(store, number)
        assert store.patch_count("page", MODEL) == 1
        put(store, 8)  # 1 and 2 are the oldest
        assert (numbers_of(store), store.patch_count("page", MODEL)) == ([0, 3, 4, 5, 6, 7, 8], 1)
        put(store, 9)
        put(store, 10)  # the patch was used less than a minute after 0, and is cheaper to form again
        assert store.patch_count("page", MODEL) == 0
        assert 0 in numbers_of(store)


def test_what_has_expired_leaves_first(folder: Path, size: int, clock):
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


def test_objects_expire_at_their_moment(folder: Path, clock):
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
        # One that is replaced takes no more room.
        many = pool.submit(lambda: [objects.put_async(name_of(1), lambda: object_of(2), 9) for _ in range(30)])
        assert concurrent.futures.wait([many], 5).done
        last = pool.submit(store.put_async, chunk_of("last"))
        assert not concurrent.futures.wait([last], 0.1).done
        gate.set()
        assert [last.result().result(), first.result(), second.result()] == [True] * 3
        assert [objects.get(name_of(number), value_of) for number in (1, 2)] == [2, None]


def written_in(folder: Path) -> bytes:
    """Everything on the disk: contents of files, and their names."""
    return b"".join(path.read_bytes() + str(path).encode() for path in folder.rglob("*") if path.is_file())


def test_tenants_of_a_root_read_and_delete_what_is_theirs(folder: Path):
    with ChunkStore(folder, tenant="a") as one, ChunkStore(folder, tenant="b") as two:
        one.put(chunk_of("page", 1))
        two.put(chunk_of("page", 2))
        one.put_encoder("only a's", MODEL, OUTPUT)
        for store, seed in ((one, 1), (two, 2)) * 2:  # from the disk, and from memory
            assert same_chunk(store.get("page", MODEL), chunk_of("page", seed))
        assert two.get_encoder("only a's", MODEL) is None
        assert not two.delete("only a's", MODEL)
        assert one.get("page", "another") is None  # a backbone reads its chunks alone
        assert not one.delete("page", "another")
        assert (one.usage().count, two.usage().count) == (2, 1)
        two.delete_tenant()
        assert (one.usage().count, two.usage().count) == (2, 0)
        assert two.get("page", MODEL) is None
        assert same_chunk(one.get("page", MODEL), chunk_of("page", 1))


def test_encrypted_objects_open_with_their_key_alone(folder: Path):
    root = folder / "root"
    with (
        ChunkStore(root, key=KEY) as store,
        ChunkStore(root) as plain,
        ChunkStore(root, key=b"x" * 32) as wrong,
        ChunkStore(root, tenant="other", key=KEY) as other,
    ):
        put(store, 1)
        assert is_there(store, 1)
        for reader, _ in itertools.product((plain, wrong), range(2)):  # the second time memory has it
            with pytest.raises(StoreError, match="key"):
                is_there(reader, 1)
            with pytest.raises(StoreError, match="key"):
                reader.verify(delete=True)
            with pytest.raises(StoreError, match="one that is there, encrypted with another key"):
                put(reader, 1)
        put(store, 1)
        assert is_there(store, 1)
        assert not is_there(other, 1)
        put(plain, 2)
        with pytest.raises(StoreError, match="not encrypted"):
            is_there(store, 2)
        put(store, 2)
        assert is_there(store, 2)
        assert OUTPUT[500:504].tobytes() not in written_in(root)
    with ChunkStore(root, key=KEY) as store:
        assert is_there(store, 1)


def test_names_depend_on_the_secret_and_the_tenant(folder: Path):
    roots: list[tuple[str, str, Any]] = [("a", "one", SECRET), ("b", "one", SECRET)]
    roots += [("a", "two", SECRET), ("a", "one", None), ("c", "one", None)]
    names = []
    for root, tenant, secret in roots:
        with ChunkStore(folder / root, tenant=tenant, secret=secret) as store:
            store.put(chunk_of("a private id"))
            names.append(store.objects.with_prefix("")[0])
    assert names[0] == names[1]
    assert len(set(names)) == 4
    written = written_in(folder / "a")
    assert SECRET not in written
    assert b"one/" not in written


def test_an_encrypted_store_reveals_neither_contents_nor_names(folder: Path):
    with ChunkStore(folder, tenant="museum", key=KEY) as store:
        library, dynamic = StaticLibrary(store, quota="1 MB"), DynamicLibrary(store)
        library.put("LOUVRE2025", "a secret text", chunk=chunk_of("a private id"))
        dynamic.publish("HOTEL01", "another secret", vector=np.array([1.0, 2.0]))
        assert [str(entry.reference) for entry in library.entries()] == ["TEXT#LOUVRE2025"]
        assert [reference for reference, _ in dynamic.vectors()] == ["TEXT#HOTEL01"]
    written = written_in(folder)
    words = (b"LOUVRE2025", b"HOTEL01", b"secret text", b"another secret", b"private id", b"museum", KEY)
    assert not [word for word in words if word in written]
    with ChunkStore(folder, tenant="museum", key=b"x" * 32) as store, pytest.raises(StoreError, match="another key"):
        StaticLibrary(store, quota="1 MB").get("TEXT", "LOUVRE2025")


def test_a_tenants_snapshot_has_nothing_of_others(folder: Path):
    with ChunkStore(folder / "root", tenant="one") as store, ChunkStore(folder / "root", tenant="two") as two:
        store.put(chunk_of("page"))
        two.put_many([chunk_of("theirs"), chunk_of("more")])
        two.delete("theirs", MODEL)
        store.save(folder / "snapshot")
        assert not (folder / "snapshot" / "secret").exists()
        content = written_in(folder / "snapshot")
        for name in (two.objects.tenant, two.names.chunk(MODEL, "theirs"), two.names.chunk(MODEL, "more")):
            assert name.encode() not in content


def test_tenants_take_from_whoever_holds_more_than_is_theirs(folder: Path, size: int):
    """A tenant alone fills the root; beside others it keeps an equal part, or its share, whoever writes more."""
    root = folder / "root"
    budget: Any = {"root_budget": 20 * size, "memory": 0}
    one, two = (ChunkStore(root, tenant=tenant, **budget) for tenant in ("one", "two"))
    for number in range(30):
        put(one, number)
    assert one.usage().count >= 19
    for number in range(30):
        put(two, number)
        # What takes a tenant below its part is one object at most.
        assert one.usage().count >= 9
        assert one.usage().bytes + two.usage().bytes <= 20 * size
    assert two.usage().count >= 9
    assert is_there(one, 29)
    assert not is_there(one, 0)

    # In turn, each evicts what is its own; a share moves the parts.
    for number in range(100, 110):
        put(one, number)
        put(two, number)
        assert min(one.usage().count, two.usage().count) >= 8
    three = ChunkStore(root, tenant="three", share=14 * size, memory=0)
    for number in range(30):
        put(three, number)
    assert 12 <= three.usage().count <= 14
    for number in range(200, 220):
        put(one, number)
        put(two, number)
    assert three.usage().count >= 12
    assert min(one.usage().count, two.usage().count) >= 1
    assert one.usage().bytes + two.usage().bytes + three.usage().bytes <= 20 * size
    usages = [store.usage() for store in (one, two, three)]
    with pytest.raises(StoreError, match="other tenants' shares stay"):
        one.put_encoder("large", MODEL, np.tile(OUTPUT, 9))
    assert [store.usage() for store in (one, two, three)] == usages
    for store in (one, two, three):
        store.close()
