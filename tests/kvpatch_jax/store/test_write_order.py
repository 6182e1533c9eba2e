"""One order of the writes of a name: what was acknowledged is never behind what was written or read before it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, name_of, patch_of, same, same_chunk
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


def test_a_put_is_after_a_fetch_that_computed(gated: GatedStore, tmp_path: Path):
    (fetched,) = fetch(gated, [Request("c", BACKBONE)], lambda misses: [OLD])
    gated.put(NEW)
    gated.gate.go.set()
    assert fetched.ack is not None
    assert fetched.ack.exception(PATIENCE) is None
    assert same_chunk(gated.get("c", BACKBONE), NEW)
    assert same_chunk(on_disk(tmp_path), NEW)


def test_a_shorter_ttl_is_not_lost_to_a_queued_put(tmp_path: Path):
    now = [100.0]
    with GatedStore(tmp_path, budget=Budget(host=0), clock=lambda: now[0]) as store:
        store.put_async(chunk_of("busy"))
        assert store.gate.reached.wait(PATIENCE)
        store.put_async(OLD)
        store.put(OLD, ttl=5)
        store.gate.go.set()
        store.flush()
        assert store.get("c", BACKBONE) is not None
        now[0] = 105.0
        assert store.get("c", BACKBONE) is None


def test_puts_of_encoder_outputs_and_patches_follow_earlier_queued_puts(gated: GatedStore):
    first, second = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    old, new = patch_of(OLD, seed=1), patch_of(OLD, seed=2)
    gated.put_async(chunk_of("c", 1, encoder=first))
    gated.put_patch_async(old)
    gated.put_encoder("c", BACKBONE, second)
    gated.put_patches([new])
    for _ in range(2):
        found = gated.get_encoder("c", BACKBONE)
        assert found is not None
        assert same(found, second)
        (patch,) = gated.get_patches(new.metadata)
        assert same(patch.factors["k"][0], new.factors["k"][0])  # pyright: ignore
        gated.gate.go.set()
        gated.flush()


def test_a_put_of_another_store_object_follows_earlier_queued_puts(gated: GatedStore, tmp_path: Path):
    """The order is one for a root and a process, however its path is written."""
    ack = gated.put_async(OLD)
    (tmp_path / "link").symlink_to(tmp_path)
    with ChunkStore(tmp_path / "link") as other:
        other.put_async(NEW).result(PATIENCE)
        assert same_chunk(gated.get("c", BACKBONE), NEW)
        gated.gate.go.set()
        assert ack.exception(PATIENCE) is None
        for store in (gated, other):
            assert same_chunk(store.get("c", BACKBONE), NEW)
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


def test_a_queued_put_is_after_the_put_that_came_before_it(gated: GatedStore, tmp_path: Path):
    gated.put(OLD)
    gated.put_async(NEW)
    assert same_chunk(gated.get("c", BACKBONE), NEW)
    gated.gate.go.set()
    gated.flush()
    assert same_chunk(on_disk(tmp_path), NEW)


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


def test_the_queue_is_read_before_devices_and_layers(gated: GatedStore, tmp_path: Path):
    device = jax.devices()[0]
    with GatedStore(tmp_path, budget=Budget(device=1 << 20)) as store:
        store.put(OLD)
        assert same_chunk(store.get("c", BACKBONE, placement=device), OLD)
        store.put_async(NEW)
        assert same_chunk(store.get("c", BACKBONE, placement=device), NEW)
        stream = store.stream("c", BACKBONE)
        assert stream is not None
        assert same_chunk(stream.chunk(lambda *_: None), NEW)
        store.gate.go.set()
        store.flush()
        assert same_chunk(store.get("c", BACKBONE, placement=device), NEW)


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


def test_of_several_queued_puts_the_remote_store_has_the_last(tmp_path: Path):
    remote = GatedRemote()
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        gates = [WriteGate(), WriteGate()]
        remote.put_gates = list(gates)
        one.put_async(chunk_of("busy"))
        assert gates[0].reached.wait(PATIENCE)
        one.put_async(OLD)
        one.put_async(NEW)  # in one group with the first
        gates[0].go.set()
        assert gates[1].reached.wait(PATIENCE)  # whichever comes first, so that another would overtake it
        soon(lambda: bool(remote.paths(name_of(one, NEW).path)))
        gates[1].go.set()
        one.flush()
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


@pytest.mark.parametrize("change", ["delete", "delete_tenant", "put"])
def test_a_remote_read_undoes_no_write_of_another_process(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch):
    """As two processes would: the order of one is not known to the other, and the root decides."""
    remote = GatedRemote()
    with machine(tmp_path / "one", remote) as one, machine(tmp_path / "two", remote) as two:
        monkeypatch.setattr("kvpatch_jax.store.store.shared", lambda kind, root: kind(), raising=False)
        with machine(tmp_path / "two", remote) as beside:
            one.put(OLD)
            remote.read_gate = gate = WriteGate()
            make, then = CHANGES[change]
            with in_a_thread(lambda: two.get("c", BACKBONE)):
                assert gate.reached.wait(PATIENCE)
                remote.read_gate = None
                make(beside)
                gate.go.set()
            for store in (two, beside):
                now = store.get("c", BACKBONE)
                assert now is None if then is None else same_chunk(now, then)


def test_an_expired_object_is_replaced_from_the_remote_store(tmp_path: Path):
    now, remote = [100.0], GatedRemote()
    with machine(tmp_path / "one", remote) as one:
        two = ChunkStore(
            tmp_path / "two", budget=Budget(host=0), secret=b"shared by the machines", clock=lambda: now[0]
        )
        with two:
            two.put(OLD, ttl=5)
        now[0] = 200.0
        one.put(NEW)
        with machine(tmp_path / "two", remote) as two:
            assert same_chunk(two.get("c", BACKBONE), NEW)
            assert two.counters["remote_hits"] == 1
            assert same_chunk(two.get("c", BACKBONE), NEW)
            assert two.counters["remote_hits"] == 1


def test_copies_from_beyond_keep_to_the_budget(tmp_path: Path):
    remote = GatedRemote()
    with machine(tmp_path / "one", remote) as one:
        chunks = [chunk_of(f"B{number}", number) for number in range(12)]
        one.put_many(chunks)
        size = max(entry.size for entry in one.disk.scan())
        two = ChunkStore(
            tmp_path / "two",
            budget=Budget(host=0, disk=4 * size),
            secret=b"shared by the machines",
            remote=remote,
            write_behind=False,
        )
        with two:
            for chunk in chunks:
                assert same_chunk(two.get(chunk.id, BACKBONE), chunk)
                assert sum(entry.size for entry in two.disk.scan()) <= 4 * size
            assert two.contains("B11", BACKBONE)


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
