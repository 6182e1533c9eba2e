"""One order of the writes of a name: what was acknowledged is never behind what was written or read before it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import BACKBONE, chunk_of, name_of, patch_of, same_chunk
from store_gates import PATIENCE, GatedRemote, GatedStore, WriteGate, in_a_thread, soon

import kvpatch_jax as kvp
from kvpatch_jax.errors import StoreIOError
from kvpatch_jax.store import Budget, ChunkStore, Request, fetch

OLD, NEW = chunk_of("c", 1), chunk_of("c", 2)


def on_disk(root: Path, id: str = "c") -> kvp.Chunk | None:
    with ChunkStore(root, budget=Budget(host=0)) as store:
        return store.get(id, BACKBONE)


@pytest.fixture(params=[0, 1 << 20], ids=["no memory", "memory"])
def gated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GatedStore]:
    """A store whose writer is held up by another chunk, so that what is put asynchronously is queued."""
    store = GatedStore(tmp_path, budget=Budget(host=request.param))
    store.put_async(chunk_of("busy"))
    assert store.gate.reached.wait(PATIENCE)
    yield store
    store.gate.go.set()
    store.close()


# ------------------------------------------------------------------------------------------------- queued puts


PUTS = {
    "put": lambda store: store.put(NEW),
    "put_many": lambda store: store.put_many([chunk_of("other"), NEW]),
}


@pytest.mark.parametrize("how", PUTS)
def test_a_put_follows_earlier_queued_puts(gated: GatedStore, tmp_path: Path, how: str):
    ack = gated.put_async(OLD)
    PUTS[how](gated)
    assert same_chunk(gated.get("c", BACKBONE), NEW)
    assert same_chunk(on_disk(tmp_path), NEW)
    gated.gate.go.set()
    gated.flush()
    assert ack.exception(PATIENCE) is None
    assert same_chunk(gated.get("c", BACKBONE), NEW)
    assert same_chunk(on_disk(tmp_path), NEW)


def test_a_put_that_failed_leaves_the_queued_one(gated: GatedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gated.put_async(OLD)
    with monkeypatch.context() as patched:

        def broken(items: Any, only: Any) -> int:
            raise StoreIOError("no disk; expected one")

        patched.setattr(gated.tenant_disk, "put", broken)
        with pytest.raises(StoreIOError):
            gated.put(NEW)
    assert same_chunk(gated.get("c", BACKBONE), OLD)
    gated.gate.go.set()
    gated.flush()
    assert same_chunk(on_disk(tmp_path), OLD)


@pytest.mark.parametrize("what", ["delete", "delete by another object", "delete_tenant by another object"])
def test_puts_queued_before_a_deletion_are_never_written(gated: GatedStore, tmp_path: Path, what: str):
    ack = gated.put_async(OLD)
    gated.put_patch_async(patch_of(OLD))
    with ChunkStore(tmp_path) as other:
        if what == "delete_tenant by another object":
            other.delete_tenant()
        else:  # another object does not know what is queued here
            assert (gated if what == "delete" else other).delete("c", BACKBONE) == (what == "delete")
    for _ in range(2):
        assert gated.get("c", BACKBONE) is None
        assert not gated.contains("c", BACKBONE)
        assert gated.get_patches(patch_of(OLD).metadata) == []
        gated.gate.go.set()
        gated.flush()
    assert ack.exception(PATIENCE) is None
    assert on_disk(tmp_path) is None


# -------------------------------------------------------------------------------------------- the remote store


def machine(root: Path, remote: Any) -> ChunkStore:
    return ChunkStore(
        root, budget=Budget(host=1 << 20), secret=b"shared by the machines", remote=remote, write_behind=False
    )


def test_the_remote_store_ends_with_the_last_put(tmp_path: Path):
    """The first put is on its way to the remote store when the second begins."""
    remote = GatedRemote()
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        gate = WriteGate()
        remote.put_gates = [gate]
        one.put_async(OLD)
        assert gate.reached.wait(PATIENCE)
        with in_a_thread(lambda: one.put(NEW)) as done:
            soon(done.done)
            gate.go.set()
        one.flush()
        assert same_chunk(one.get("c", BACKBONE), NEW)
        assert same_chunk(two.get("c", BACKBONE), NEW)


READS: dict[str, Callable[[ChunkStore], Any]] = {
    "get": lambda store: store.get("c", BACKBONE),
    "stream": lambda store: store.stream("c", BACKBONE).chunk(lambda *_: None),  # pyright: ignore
}


def put_and_evict(store: ChunkStore) -> None:
    store.put(NEW)
    assert store.disk.delete(name_of(store, NEW).path)


CHANGES: dict[str, tuple[Callable[[ChunkStore], Any], kvp.Chunk | None]] = {
    "delete": (lambda store: store.delete("c", BACKBONE), None),
    "delete_tenant": (lambda store: store.delete_tenant(), None),
    "put": (lambda store: store.put(NEW), NEW),
    "put_async": (lambda store: store.put_async(NEW).result(PATIENCE), NEW),
    "put, and evicted": (put_and_evict, NEW),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_remote_read_undoes_no_write(tmp_path: Path, read: str, change: str):
    """All of it was read from the remote store when its name changes, and only then the disk would have its copy."""
    remote = GatedRemote()
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(OLD)
        remote.read_gate = gate = WriteGate()
        make, then = CHANGES[change]
        with in_a_thread(lambda: READS[read](two)) as found:
            assert gate.reached.wait(PATIENCE)
            remote.read_gate = None
            make(two)
            gate.go.set()
        assert same_chunk(found.result(), OLD)  # it was there when reading began
        for _ in range(2):
            now = two.get("c", BACKBONE)
            assert now is None if then is None else same_chunk(now, then)
            assert two.contains("c", BACKBONE) == (then is not None)


def test_a_fetch_does_not_join_a_load_from_before_a_deletion(tmp_path: Path):
    remote = GatedRemote()
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        one.put(OLD)
        remote.read_gate = gate = WriteGate()
        request = Request("c", BACKBONE)
        with in_a_thread(lambda: fetch(two, [request], lambda misses: [OLD])) as first:
            assert gate.reached.wait(PATIENCE)
            remote.read_gate = None
            two.delete("c", BACKBONE)
            with in_a_thread(lambda: fetch(two, [request], lambda misses: [NEW], keep=False)) as second:
                second.result(PATIENCE)  # it does not wait for the load of the other
            gate.go.set()
        assert first.result()[0].source == "store"
        assert second.result()[0].source == "computed"
        assert same_chunk(second.result()[0].chunk, NEW)
