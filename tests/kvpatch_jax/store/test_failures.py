"""Whichever system call fails, at whatever moment: a typed error or a miss, and nothing that was there is lost."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from failing_system import OneFailure, read_only
from store_cases import BACKBONE, ManualClock, chunk_of, file_of, patch_of, same, same_chunk

from kvpatch_jax.errors import StoreCorruptError, StoreError, StoreFullError, StoreIOError, StoreReadOnlyError
from kvpatch_jax.store import Budget, ChunkStore

KINDS = {errno.EIO: StoreIOError, errno.ENOSPC: StoreFullError, errno.EROFS: StoreReadOnlyError}
OLD, NEW, NEWER = chunk_of("old", 1), chunk_of("new", 2), chunk_of("newer", 5)
PATCHES = [patch_of(NEW), patch_of(NEW, rank=1)]


def put(store: ChunkStore) -> bool:
    store.put(NEW)
    return True


def put_again(store: ChunkStore) -> bool:
    store.put(OLD)
    return False


def put_group(store: ChunkStore) -> bool:
    store.put_patches(PATCHES)
    return False


def put_many(store: ChunkStore) -> bool:
    store.put_many([NEW, NEWER])
    return True


def put_within_a_budget(store: ChunkStore) -> bool:
    """The filler has to go: it was not used since."""
    with ChunkStore(store.disk.root, budget=Budget(host=0, disk=40_000)) as small, small.pin("old", BACKBONE):
        small.put(NEW)
    return True


def get(store: ChunkStore) -> bool:
    found = store.get("old", BACKBONE)
    assert found is None or same_chunk(found, OLD)
    return False


def get_patches(store: ChunkStore) -> bool:
    assert len(store.get_patches(patch_of(OLD).metadata)) in (0, 1)
    return False


def stream(store: ChunkStore) -> bool:
    layers = store.stream("old", BACKBONE)
    for layer, values in layers if layers is not None else ():
        assert same(values["k"], OLD.kv["k"][layer])
    return False


def get_damaged(store: ChunkStore) -> bool:
    assert store.get("damaged", BACKBONE) is None
    return False


def delete(store: ChunkStore) -> bool:
    store.delete("filler", BACKBONE)
    assert not store.contains("filler", BACKBONE)
    return False


def collect(store: ChunkStore) -> bool:
    store.collect()
    return False


def reopen(store: ChunkStore) -> bool:
    with ChunkStore(store.disk.root) as again:
        return get(again)


MISSES = (get, get_patches, get_damaged)
"""Reads answer that there is nothing, and never raise."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of puts; no power is lost here
    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        yield store


def prepared(store: ChunkStore) -> None:
    """What was there before: an object to keep, one to let go, one that is damaged, one of a writer that died."""
    root = Path(store.disk.root)
    for path in (root / "quarantine").iterdir():
        path.unlink()
    store.delete("new", BACKBONE)
    store.delete("newer", BACKBONE)
    for chunk in (chunk_of("filler", 3), chunk_of("damaged", 4)):
        if not store.contains(chunk.id, BACKBONE):
            store.put(chunk)
    if not store.contains("old", BACKBONE):
        store.put(OLD)
        store.put_patches([patch_of(OLD)])
    path = file_of(store, chunk_of("damaged", 4))
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    (root / "tmp" / f"{store.names.space.removeprefix('obj/')}.dead").write_bytes(b"half an object")
    (root / "tmp" / "settings-dead").write_bytes(b"half of them")
    os.utime(file_of(store, chunk_of("filler", 3)), (1, 1))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def fails_well(store: ChunkStore, operation: Callable[[ChunkStore], bool], at: int, code: int) -> bool:
    """One operation, its system call number `at` failing, and all that must hold afterwards. Whether one failed."""
    prepared(store)
    store.disk.index.usage()
    before, acknowledged, raised = descriptors(), False, None
    with OneFailure(store.disk.root, at, code).installed() as failure:
        try:
            acknowledged = operation(store)
        except StoreError as error:
            raised = error
    what = f"{failure.failed} (call {at}) failed: {raised!r}"
    assert raised is None or failure.failed, what
    assert raised is None or isinstance(raised, KINDS[code]), what
    assert raised is None or operation not in MISSES, what
    assert descriptors() <= before, what  # fewer if the index was closed, which is opened when it is needed
    assert same_chunk(store.get("old", BACKBONE), OLD), what
    assert len(store.get_patches(patch_of(OLD).metadata)) == 1, what
    found = store.get("new", BACKBONE)
    assert same_chunk(found, NEW) or (found is None and not acknowledged), what
    if operation is put_group and raised is None:
        assert len(store.get_patches(PATCHES[0].metadata)) == len(PATCHES), what
    if operation is put_many:
        # the chunks of one commit are there together or not at all, once it is acknowledged
        newer = store.get("newer", BACKBONE)
        assert same_chunk(newer, NEWER) or (newer is None and not acknowledged), what
    damaged = Path(store.disk.root, "quarantine").glob("*.safetensors")
    assert all(b"damaged" in path.read_bytes() for path in damaged), what
    store.collect()
    assert os.listdir(f"{store.disk.root}/tmp") == [], what
    assert operation(store) in (True, False), what
    return bool(failure.failed)


WRITING = [put, put_again, put_group, put_many, put_within_a_budget, delete, collect, reopen]
READING = [get, get_patches, stream, get_damaged]
MANY_CALLS = (put_again, put_group, put_many, put_within_a_budget, collect)


@pytest.mark.parametrize("operation", [*WRITING, *READING], ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_any_one_call_may_fail(store: ChunkStore, operation: Callable[[ChunkStore], bool], every: int):
    """Each call in turn, until an operation runs through without reaching the one that would fail.

    By default, of operations that make many calls, every third.
    """
    each_call_fails(store, operation, errno.EIO, every if operation in MANY_CALLS else 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EROFS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", [put, pytest.param(put_group, marks=pytest.mark.slow)])
def test_any_one_call_may_fail_for_another_reason(
    store: ChunkStore, operation: Callable[[ChunkStore], bool], code: int
):
    """A full disk, and one that turned read-only."""
    each_call_fails(store, operation, code)


def each_call_fails(store: ChunkStore, operation: Callable[[ChunkStore], bool], code: int, every: int = 1) -> None:
    at = 0
    while fails_well(store, operation, at, code):
        at += every
    assert at > 3, "no call was seen to fail"


def test_making_a_store_may_fail_anywhere(tmp_path: Path, monkeypatch):
    """Whichever call fails, the next attempt makes a whole store, and nothing is left of the first."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    at = 0
    while True:
        root = tmp_path / f"above{at}" / "store"
        failure = OneFailure(str(tmp_path), at, errno.EIO)
        with failure.installed(), contextlib.suppress(StoreIOError):  # another error would be none of the store's
            ChunkStore(root).close()
        with ChunkStore(root, budget=Budget(host=0)) as store:
            store.put(OLD)
            store.collect()
            assert same_chunk(store.get("old", BACKBONE), OLD)
        assert sorted(path.name for path in root.iterdir() if not path.name.startswith("index.sqlite")) == [
            "STORE.copy.json",
            "STORE.json",
            "obj",
            "quarantine",
            "tmp",
        ]
        assert list((root / "tmp").iterdir()) == []
        if not failure.failed:
            break
        at += 1
    assert at > 10


def test_the_names_of_a_new_store_are_durable(tmp_path: Path, monkeypatch):
    """A directory's own name lies in the one above it, which must be synced too."""
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    ChunkStore(tmp_path / "above" / "store").close()
    assert {str(tmp_path), str(tmp_path / "above"), str(tmp_path / "above" / "store")} <= set(synced)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_file_system_for_reading_serves_and_refuses(store: ChunkStore, code: int):
    prepared(store)
    with read_only(code):
        for each in (store, ChunkStore(store.disk.root, budget=Budget(host=0))):
            get(each)
            assert same_chunk(each.get("old", BACKBONE), OLD)
            assert len(each.get_patches(patch_of(OLD).metadata)) == 1
            stream(each)
            assert each.get("damaged", BACKBONE) is None
            for refused in (put, put_group, collect, delete, put_within_a_budget):
                with pytest.raises(StoreReadOnlyError, match="expected a directory that may be written"):
                    refused(each)
            assert isinstance(each.put_async(NEW).exception(timeout=60), StoreReadOnlyError)
            with pytest.raises(StoreReadOnlyError):
                each.flush()
        with pytest.raises(StoreReadOnlyError):
            ChunkStore(f"{store.disk.root}/another")
    assert same_chunk(store.get("old", BACKBONE), OLD)
    store.put(NEW)


def test_a_clock_that_jumps_back_loses_nothing(tmp_path: Path):
    """By a year, between any two steps, with memory, expiry, a budget and a queue."""
    clock = ManualClock()
    budget = Budget(host=1 << 20, disk=1 << 20)
    chunks = [chunk_of(f"C{number}", number) for number in range(6)]
    with ChunkStore(tmp_path, ttl=100, clock=clock, budget=budget) as store:
        for chunk in chunks:
            store.put_async(chunk).result(timeout=60)
            clock.now -= 365 * 86400
            assert store.collect() == 0
            assert all(same_chunk(store.get(each.id, BACKBONE), each) for each in chunks if each.id <= chunk.id)
        with ChunkStore(tmp_path, clock=clock, budget=budget) as again:
            assert all(same_chunk(again.get(chunk.id, BACKBONE), chunk) for chunk in chunks)
        clock.now += 2 * 365 * 86400  # to the last put but one, which lives, as do those before it
        assert [chunk.id for chunk in chunks if store.get(chunk.id, BACKBONE) is not None] == [
            chunk.id for chunk in chunks[:-1]
        ]


def test_a_damaged_object_that_cannot_be_moved_is_a_miss_all_the_same(store: ChunkStore):
    prepared(store)
    with read_only():
        assert store.get("damaged", BACKBONE) is None
        layers = store.stream("damaged", BACKBONE)
        assert layers is not None
        with pytest.raises(StoreCorruptError):
            list(layers)
