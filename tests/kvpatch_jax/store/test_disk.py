"""The disk tier: verified reads, quarantine, typed errors of a failing file system, sweeping, streams."""

import errno
import functools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, file_of, name_of, patch_of, same, same_chunk

from kvpatch_jax.errors import (
    InputError,
    StoreClosedError,
    StoreFullError,
    StoreIOError,
    StoreReadOnlyError,
)
from kvpatch_jax.store import Budget, ChunkStore, PatchKey
from kvpatch_jax.store.io.files import identity

NO_MEMORY = Budget(host=0)


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=NO_MEMORY) as store:
        yield store


def leftovers(store: ChunkStore) -> list[str]:
    return os.listdir(f"{store.disk.root}/tmp")


def test_put_objects_are_read_back_equal(store: ChunkStore):
    chunk = chunk_of(encoder=np.ones((4, 6), np.float32))
    assert store.get("B", BACKBONE) is None
    store.put(chunk)
    assert store.contains("B", BACKBONE)
    assert same_chunk(store.get("B", BACKBONE), chunk)
    found = store.get("B", BACKBONE, encoder=True)
    assert found is not None
    assert same(found.encoder, chunk.encoder)
    assert store.get("B", "other model") is None
    assert store.get("B", BACKBONE, encoding="int8") is None
    store.put(chunk, encoding="int8")
    assert store.get("B", BACKBONE, encoding="int8") is not None
    assert store.delete("B", BACKBONE)
    assert not store.delete("B", BACKBONE)
    assert store.get("B", BACKBONE) is None
    assert store.get_encoder("B", BACKBONE) is None
    assert leftovers(store) == []


def test_another_store_object_and_other_tenants(store: ChunkStore):
    chunk, patch = chunk_of(), patch_of(chunk_of())
    store.put(chunk)
    store.put_patches([patch, patch_of(chunk, rank=1), patch_of(chunk, ("other",))])
    with ChunkStore(store.disk.root) as again, ChunkStore(store.disk.root, tenant="two") as other:
        assert same_chunk(again.get("B", BACKBONE), chunk)
        found = again.get_patches(PatchKey("B", BACKBONE, ("A",)))
        assert [each.ranks["k"] for each in found] == [2, 1]
        assert found[0].metadata == patch.metadata
        assert other.get("B", BACKBONE) is None
        assert other.get_patches(patch.metadata) == []
        assert not other.delete("B", BACKBONE)
        assert not other.contains("B", BACKBONE)
    assert os.stat(f"{store.disk.root}/STORE.json").st_mode & 0o077 == 0


def test_padding_is_verified_too(store: ChunkStore):
    """No leaf's checksum covers the bytes between leaves: they must be zero."""
    chunk = chunk_of(tokens=5)
    store.put(chunk)
    raw = file_of(store, chunk).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    start = 8 + int.from_bytes(raw[:8], "little")
    pads = [entry["data_offsets"] for name, entry in header.items() if name.startswith("pad.")]
    assert pads
    for first, last in pads:
        for at in (first, last - 1):
            store.put(chunk)
            file_of(store, chunk).write_bytes(raw[: start + at] + b"\1" + raw[start + at + 1 :])
            assert store.get("B", BACKBONE) is None
    assert store.counters["quarantined"] == 2 * len(pads)


def test_an_object_under_another_name_is_no_hit(store: ChunkStore):
    one, two = chunk_of("B1", 1), chunk_of("B2", 2)
    store.put(one)
    store.put(two)
    file_of(store, two).write_bytes(file_of(store, one).read_bytes())
    assert store.get("B2", BACKBONE) is None
    assert same_chunk(store.get("B1", BACKBONE), one)
    assert store.counters["quarantined"] == 1


def test_a_good_object_is_not_quarantined_for_the_bad_one_before_it(store: ChunkStore):
    chunk = chunk_of()
    store.put(chunk)
    bad = identity(os.stat(file_of(store, chunk)))
    hold = file_of(store, chunk).open("rb")  # so that the inode is not given out again
    store.put(chunk)
    store.disk.quarantine(name_of(store, chunk), bad, "it was bad")
    hold.close()
    assert same_chunk(store.get("B", BACKBONE), chunk)


# ----------------------------------------------------------------------------------------------- a failing system


def failing(call: Callable, code: int, after: int = 0) -> Callable:
    """`call`, failing from its call number `after` on."""
    count = iter(range(10**9))

    def fail(*arguments, **more):
        if next(count) >= after:
            raise OSError(code, os.strerror(code))
        return call(*arguments, **more)

    return fail


CASES = [
    ("posix_fallocate", errno.ENOSPC, StoreFullError),
    ("pwritev", errno.EIO, StoreIOError),
    ("fsync", errno.EIO, StoreIOError),
    ("rename", errno.EROFS, StoreReadOnlyError),
    ("open", errno.EROFS, StoreReadOnlyError),
]


@pytest.mark.parametrize(("call", "code", "kind"), CASES)
@pytest.mark.parametrize("how", ["put", "async", "group"])
def test_failures_are_typed_and_lose_nothing(store: ChunkStore, monkeypatch, call, code, kind, how):
    old, new = chunk_of("old", 1), chunk_of("new", 2)
    store.put(old)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(getattr(os, call), code))
        if how == "put":
            with pytest.raises(kind, match="expected"):
                store.put(new)
        elif how == "async":
            ack = store.put_async(new)
            assert isinstance(ack.exception(timeout=300), kind)
            with pytest.raises(kind):
                store.flush()
            store.flush()
        elif call != "fsync":  # a group syncs its data by another call
            with pytest.raises(kind):
                store.put_patches([patch_of(new), patch_of(new, rank=1)])
    assert same_chunk(store.get("old", BACKBONE), old)
    assert store.get("new", BACKBONE) is None
    assert store.get_patches(patch_of(new).metadata) == []
    assert leftovers(store) == []
    store.put(new)
    assert same_chunk(store.get("new", BACKBONE), new)


def test_data_is_synced_before_the_name_and_the_name_before_the_answer(store: ChunkStore, monkeypatch):
    store.put(chunk_of())
    calls: list[str] = []
    kind = lambda fd: "directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "data"
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(kind(fd)) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda *names, **more: calls.append("rename") or rename(*names, **more))
    store.put(chunk_of())
    assert calls == ["data", "rename", "directory"]


def test_a_passing_read_error_is_a_miss_that_passes(store: ChunkStore, monkeypatch):
    store.put(chunk_of())
    for call, count in (("open", 0), ("pread", 0), ("preadv", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing(getattr(os, call), errno.EIO, count))
            assert store.get("B", BACKBONE) is None
    assert store.counters["read_errors"] == 3
    assert store.counters["quarantined"] == 0
    assert same_chunk(store.get("B", BACKBONE), chunk_of())


def test_short_reads_and_writes_are_carried_on(store: ChunkStore, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv
    short = lambda parts: [memoryview(parts[0])[:1000]]
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, short(parts), at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, short(parts), at))
    store.put(chunk_of())
    assert same_chunk(store.get("B", BACKBONE), chunk_of())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_serves_and_refuses(store: ChunkStore):
    store.put(chunk_of())
    folders = [folder for folder, _, _ in os.walk(store.disk.root)]
    for folder in folders:
        os.chmod(folder, 0o500)
    try:
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        with pytest.raises(StoreReadOnlyError):
            store.put(chunk_of("C"))
    finally:
        for folder in folders:
            os.chmod(folder, 0o700)


# ------------------------------------------------------------------------------------------------ grouped puts


# ------------------------------------------------------------------------------------------- asynchronous puts


def test_acks_come_when_durable_and_groups_form(store: ChunkStore, monkeypatch):
    sizes: list[int] = []
    put_group = store.disk.put_group
    monkeypatch.setattr(
        store.disk, "put_group", lambda items, *more: sizes.append(len(items)) or put_group(items, *more)
    )
    chunk = chunk_of()
    patches = [patch_of(chunk, (f"A{number}",)) for number in range(40)]
    acks = [store.put_patch_async(patch) for patch in patches]
    for patch, ack in zip(patches, acks, strict=True):
        ack.result(timeout=60)
        assert len(store.get_patches(patch.metadata)) == 1
    assert sum(sizes) == 40
    assert len(sizes) < 30
    assert max(sizes) <= 64


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch):
    store = ChunkStore(tmp_path, queue=2 * chunk_of().nbytes)
    gate, put_group = threading.Event(), store.disk.put_group
    monkeypatch.setattr(store.disk, "put_group", lambda items, *more: gate.wait(300) and put_group(items, *more))
    acks = [store.put_async(chunk_of(f"B{number}")) for number in range(2)]
    third = threading.Thread(target=lambda: acks.append(store.put_async(chunk_of("B2"))))
    third.start()
    third.join(0.3)
    assert third.is_alive()
    assert len(acks) == 2
    gate.set()
    third.join(30)
    store.close()
    assert all(ack.done() and ack.exception() is None for ack in acks)
    assert len(acks) == 3
    with pytest.raises(StoreClosedError):
        store.put_async(chunk_of())
    with pytest.raises(StoreClosedError):
        store.get("B", BACKBONE)


# ------------------------------------------------------------------------------------- placement, streams, sweep


def test_streams_give_every_layer_in_order(store: ChunkStore):
    for encoding in (None, "int8"):
        store.put(chunk_of(), encoding=encoding)
        whole, stream = store.get("B", BACKBONE, encoding=encoding), store.stream("B", BACKBONE, encoding=encoding)
        assert whole is not None
        assert stream is not None
        assert (stream.span, stream.length, stream.layout) == (9, 8, whole.layout)
        assert same(stream.local, np.asarray(whole.local))
        layers = list(stream)
        assert [layer for layer, _ in layers] == [0, 1, 2]
        assert all(same(values[name], whole.kv[name][layer]) for layer, values in layers for name in values)
    assert store.stream("absent", BACKBONE) is None


def test_placement_puts_channels_where_they_are_asked(store: ChunkStore):
    store.put(chunk_of())
    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "tensor"))
    for placement in (device, heads, {"k": heads, "v": device}):
        found = store.get("B", BACKBONE, placement=placement)
        assert found is not None
        assert same_chunk(found, chunk_of())
        value = found.kv["k"]
        assert isinstance(value, jax.Array)
        assert value.sharding == heads or placement is device
    with pytest.raises(InputError, match="expected one for 'v'"):
        store.get("B", BACKBONE, placement={"k": device})
    stream = store.stream("B", BACKBONE, placement=device)
    assert stream is not None
    assert all(isinstance(values["v"], jax.Array) for _, values in stream)


def test_sweep_removes_files_of_dead_writers_only(store: ChunkStore):
    dead = Path(store.disk.root, "tmp", "dead")
    dead.write_bytes(b"half an object")
    name = name_of(store, chunk_of())
    from kvpatch_jax.store.format.codec import chunk_blob
    from kvpatch_jax.store.format.objects import write_blob

    write = functools.partial(write_blob, blob=chunk_blob(chunk_of()), name=name.file)
    with store.disk.writer.temporaries() as aside, store.disk.writer.written(name, aside, write) as (living, _, _):
        assert store.disk.sweep() == 1
        assert dead.with_name(living.name).exists()
        assert not dead.exists()
    assert leftovers(store) == []
