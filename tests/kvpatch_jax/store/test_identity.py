"""Which file it is: an inode is given out again, so that a path and an inode do not tell a file from its successor."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import (
    BACKBONE,
    ManualClock,
    chunk_of,
    file_of,
    name_of,
    patch_of,
    same_chunk,
)

from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, save_snapshot
from kvpatch_jax.store.disk.eviction import make_room
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


CHILD = """
import sys
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary
with ChunkStore(sys.argv[1], budget=Budget(host=0), clock=lambda: 1e9) as store:
    for text in ("first", "stays"):
        StaticLibrary(store, quota=1 << 20).put("DOC", text)
"""


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
