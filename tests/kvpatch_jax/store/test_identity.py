"""Which file it is: an inode is given out again, so that a path and an inode do not tell a file from its successor."""

import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import (
    BACKBONE,
    PYTHON,
    ManualClock,
    child_environment,
    chunk_of,
    file_of,
    name_of,
    patch_of,
    same_chunk,
)

from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.disk.eviction import collect, make_room
from kvpatch_jax.store.disk.object_writer import LinkSource

NO_MEMORY = Budget(host=0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock):
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY, clock=clock) as store:
        yield store


def replaced_with_its_inode(path: Path, put: Callable[[], object]) -> None:
    """Replaces an object by a put, the new file having the inode of the old one, as the system may well give it out."""
    aside = path.with_suffix(".aside")
    os.link(path, aside)
    inode = path.stat().st_ino
    put()
    assert path.stat().st_ino != inode
    aside.write_bytes(path.read_bytes())
    os.utime(aside, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(aside, path)
    assert path.stat().st_ino == inode


def between_look_and_removal(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Has something happen just before anything is taken away for the first time: before the lock for that is held."""
    flock, left = fcntl.flock, [change]

    def locking(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and "/obj/" in os.readlink(f"/proc/self/fd/{fd}") and left:
            left.pop()()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", locking)


def entry_file(library: StaticLibrary, name: str) -> Path:
    return Path(library.store.disk.root, library.store.names.entry("static", "TEXT", name).path)


def test_a_library_sees_that_an_entry_was_replaced(tmp_path: Path, store: ChunkStore, clock: ManualClock):
    mine = StaticLibrary(store, quota=1 << 20)
    mine.put("DOC", "brief", ttl=10)
    assert mine.used > 0  # looked at
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY, clock=clock) as other:
        theirs = StaticLibrary(other, quota=1 << 20)
        replaced_with_its_inode(entry_file(mine, "DOC"), lambda: theirs.put("DOC", "stays"))
    clock.now += 20
    mine.put("ANOTHER", "of anything")
    kept = mine.get("TEXT", "DOC")
    assert kept is not None
    assert kept.content == "stays"
    assert mine.collect() == 0


def test_a_library_counts_its_current_entries(tmp_path: Path, store: ChunkStore):
    mine = StaticLibrary(store, quota=1 << 20)
    mine.put("DOC", "x" * 100)
    before = mine.used
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY) as other:
        theirs = StaticLibrary(other, quota=1 << 20)
        replaced_with_its_inode(entry_file(mine, "DOC"), lambda: theirs.put("DOC", "x" * 100_000))
    assert mine.used > before + 90_000


CHILD = """
import sys
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
with ChunkStore(sys.argv[1], budget=Budget(host=0), clock=lambda: 1e9) as store:
    for text in ("first", "stays"):
        StaticLibrary(store, quota=1 << 20).put("DOC", text)
"""


@pytest.mark.slow
def test_another_process_replaces_an_entry_twice(tmp_path: Path, store: ChunkStore, clock: ManualClock):
    for _ in range(3):
        mine = StaticLibrary(store, quota=1 << 20)
        mine.put("DOC", "brief", ttl=10)
        assert mine.used > 0
        child = [PYTHON, "-c", CHILD, str(tmp_path / "store")]
        subprocess.run(child, env=child_environment(), check=True, timeout=120)
        clock.now += 20
        mine.put("ANOTHER", "of anything")
        kept = mine.get("TEXT", "DOC")
        assert kept is not None
        assert kept.content == "stays"


def test_collect_keeps_objects_that_were_put_again(
    store: ChunkStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    chunk = chunk_of()
    store.put(chunk, ttl=10)
    store.put_patches([patch_of(chunk)])
    clock.now += 20
    path = file_of(store, chunk)
    between_look_and_removal(monkeypatch, lambda: replaced_with_its_inode(path, lambda: store.put(chunk, ttl=1000)))
    assert store.collect() == 0
    assert same_chunk(store.get("B", BACKBONE), chunk)
    assert len(store.get_patches(patch_of(chunk).metadata)) == 1


def test_collect_keeps_a_canonical_whose_patches_were_used(
    store: ChunkStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    """A patch that was put again meanwhile is not the one that goes along; the next look takes it as what it is."""
    chunk = chunk_of()
    store.put(chunk, ttl=10)
    store.put_patches([patch_of(chunk)])
    clock.now += 20
    path = Path(store.disk.root, store.names.patch(patch_of(chunk)).path)
    new = patch_of(chunk, seed=7)

    def again() -> None:
        replaced_with_its_inode(path, lambda: store.put_patches([new]))
        store.put(chunk)

    between_look_and_removal(monkeypatch, again)
    assert store.collect() == 0
    assert len(store.get_patches(new.metadata)) == 1


def test_eviction_keeps_objects_that_were_put_again(store: ChunkStore, monkeypatch: pytest.MonkeyPatch):
    old, new = chunk_of("old", 1), chunk_of("new", 2)
    store.put(old)
    store.put(new)
    path = file_of(store, old)
    size = path.stat().st_size
    between_look_and_removal(monkeypatch, lambda: replaced_with_its_inode(path, lambda: store.put(old)))
    left = make_room(store.disk, int(1.5 * size), 0, lambda chunk: False)
    there = [store.contains(chunk.id, BACKBONE) for chunk in (old, new)]
    assert sum(there) == 1  # room was made all the same
    assert left == sum(entry.size for entry in store.disk.scan())


def test_a_failed_restore_removes_only_the_objects_that_it_added(tmp_path: Path, store: ChunkStore):
    chunk = chunk_of()
    store.put(chunk)
    save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default", copy=True)
    (path,) = [file for file in (tmp_path / "snapshot" / "obj").rglob("*.safetensors")]
    with ChunkStore(tmp_path / "into", budget=NO_MEMORY, secret=store.names.secret) as into:
        name = name_of(into, chunk)

        def groups():
            yield [(name, LinkSource(str(path.parent), path.name))]
            kept = chunk_of(seed=4)
            replaced_with_its_inode(file_of(into, chunk), lambda: into.put(kept))
            raise RuntimeError("the next group cannot be read")

        with pytest.raises(RuntimeError, match="next group"):
            into.tenant_disk.add(groups(), 0)
        assert same_chunk(into.get("B", BACKBONE), chunk_of(seed=4))


@pytest.mark.parametrize("copy", [False, True])
def test_a_failed_restore_removes_objects_read_or_linked_meanwhile(tmp_path: Path, store: ChunkStore, copy: bool):
    chunk = chunk_of()
    store.put(chunk)
    save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
    (path,) = [file for file in (tmp_path / "snapshot" / "obj").rglob("*.safetensors")]
    with ChunkStore(tmp_path / "into", budget=NO_MEMORY, secret=store.names.secret) as into:

        def groups():
            yield [(name_of(into, chunk), LinkSource(str(path.parent), path.name))]
            assert into.get("B", BACKBONE) is not None
            save_snapshot(into.disk.root, tmp_path / "again", tenant="default", secret=store.names.secret)
            raise RuntimeError("the next group cannot be read")

        with pytest.raises(RuntimeError, match="next group"):
            into.tenant_disk.add(groups(), 0, copy=copy)
        assert not into.contains("B", BACKBONE)


@pytest.mark.parametrize("what", ["snapshot", "read"])
def test_a_snapshot_in_between_breaks_neither_expiry_nor_eviction(
    tmp_path: Path, store: ChunkStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, what: str
):
    """A link changes what the system notes of a file, and so does a read; it is the same file."""
    chunk, library = chunk_of(), StaticLibrary(store, quota=1 << 20)
    store.put(chunk, ttl=10)
    store.put_patches([patch_of(chunk)])
    library.put("DOC", "brief", ttl=10)
    assert library.used > 0

    def meanwhile() -> None:
        if what == "snapshot":
            save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
        else:
            assert len(store.get_patches(patch_of(chunk).metadata)) == 1

    clock.now += 20
    between_look_and_removal(monkeypatch, meanwhile)
    assert collect(store.disk, store.names.space) == 2
    assert library.collect() == 1
    assert store.disk.scan() == []


def test_a_snapshot_in_between_does_not_keep_room_from_being_made(
    tmp_path: Path, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
):
    for number in range(8):
        store.put(chunk_of(f"B{number}", number))
    size = file_of(store, chunk_of("B0")).stat().st_size
    between_look_and_removal(
        monkeypatch, lambda: save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
    )
    left = make_room(store.disk, 4 * size, 0, lambda chunk: False)
    assert left <= 4 * size
    assert sum(entry.size for entry in store.disk.scan()) == left


def test_a_damaged_object_is_quarantined_though_it_was_linked(tmp_path: Path, store: ChunkStore):
    store.put(chunk_of())
    path = file_of(store, chunk_of())
    raw = bytearray(path.read_bytes())
    raw[40] ^= 1
    path.write_bytes(raw)
    summary = save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
    assert (summary.objects, summary.damaged) == (0, 1)
    assert not path.exists()
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="default").objects == 0


def test_an_intact_object_under_a_wrong_name_is_quarantined_by_the_file_that_was_read(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
):
    """Whoever puts a good one between the read and the verdict keeps it."""
    from kvpatch_jax.errors import StoreCorruptError
    from kvpatch_jax.store import store as module

    chunk = chunk_of()
    store.put(chunk)
    path = file_of(store, chunk)

    def build(body: object, arrays: object):
        replaced_with_its_inode(path, lambda: store.put(chunk))
        raise StoreCorruptError("object: not what its name says; expected it to be")

    monkeypatch.setattr(module, "canonical_of", lambda part: build)
    assert store.get("B", BACKBONE) is None
    monkeypatch.undo()
    assert same_chunk(store.get("B", BACKBONE), chunk)
