"""Fetching: order, sources, failing loads and failing computing, one computation per chunk, nothing left behind."""
# pyright: reportAssignmentType=false

import concurrent.futures
import os
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, StoreError
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.fetch import Request, fetch

LAYOUT = kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16))
MODEL = "tiny"
IDS = [f"c{number}" for number in range(6)]
REQUESTS = [Request(id, MODEL) for id in IDS]


def chunk_of(id: str, **more) -> kvp.Chunk:
    rng = np.random.default_rng(int(id[1:]))
    kv = {name: rng.standard_normal((3, 8, 2, 16)).astype(np.float32) for name in LAYOUT.names}
    return kvp.Chunk(kv, np.arange(8, dtype=np.float32), 8, 8, id, LAYOUT, MODEL, **more)


class Computing:
    """Computes what is asked for, and remembers."""

    def __init__(self, wrong: str | None = None):
        self.calls: list[list[str]] = []
        self.wrong = wrong

    def __call__(self, misses):
        self.calls.append([miss.request.id for miss in misses])
        if self.wrong in self.calls[-1]:
            raise ZeroDivisionError("no such image")
        return [chunk_of(id) for id in self.calls[-1]]


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store", memory=0) as store:
        yield store


def check(results, ids) -> None:
    assert [result.chunk.id for result in results] == ids
    for result, id in zip(results, ids, strict=True):
        assert all(np.array_equal(result.chunk.kv[name], value) for name, value in chunk_of(id).kv.items())


def file_of(store: ChunkStore, id: str) -> Path:
    (file,) = store.objects.index.row("SELECT file FROM objects WHERE name = ?", store.names.canonical(MODEL, id)) or ()
    return Path(store.objects.root, "data", file)


def test_hits_are_loaded_and_misses_computed_in_order(store):
    for id in IDS[::2]:
        store.put(chunk_of(id))
    compute = Computing()
    asked = [*REQUESTS, REQUESTS[1], REQUESTS[0]]
    results = fetch(store, asked, compute)
    check(results, [request.id for request in asked])
    assert [result.source for result in results] == ["store", "computed"] * 3 + ["computed", "store"]
    assert compute.calls == [["c1"], ["c3"], ["c5"]]
    for result in results:
        assert (result.ack is not None) == (result.source == "computed")
        assert result.ack is None or result.ack.result(60)
    again = fetch(store, REQUESTS, compute)
    check(again, IDS)
    assert {result.source for result in again} == {"store"}
    assert len(compute.calls) == 3
    assert fetch(store, [], compute) == []
    fetch(store, [Request(id, MODEL) for id in ("c7", "c8", "c9")], compute, batch=2)
    assert compute.calls[3:] == [["c7", "c8"], ["c9"]]
    with pytest.raises(InputError, match="batch"):
        fetch(store, [], compute, batch=0)
    store.close()
    with pytest.raises(StoreError, match="after close"):
        fetch(store, REQUESTS, compute)


def test_loading_and_computing_overlap(store, monkeypatch):
    """Computing does not begin until loading has, and loading does not end until computing has begun."""
    store.put(chunk_of("c0"))
    loading, computing = threading.Event(), threading.Event()
    get = store.get

    def slow_get(*args, **more):
        loading.set()
        assert computing.wait(60)
        return get(*args, **more)

    def compute(misses):
        assert loading.wait(60)
        computing.set()
        return [chunk_of(miss.request.id) for miss in misses]

    monkeypatch.setattr(store, "get", slow_get)
    check(fetch(store, REQUESTS[:2], compute), IDS[:2])


def test_chunks_that_fail_to_load_are_computed_and_replaced(store, monkeypatch):
    for id in IDS[:4]:
        store.put(chunk_of(id))
    data = bytearray(file_of(store, "c1").read_bytes())
    data[-70] ^= 1
    file_of(store, "c1").write_bytes(bytes(data))
    os.unlink(file_of(store, "c2"))
    get = store.get

    def failing(id, *args, **more):
        if id == "c3":
            raise StoreError("store: read: EIO")
        return get(id, *args, **more)

    monkeypatch.setattr(store, "get", failing)
    compute = Computing()
    results = fetch(store, REQUESTS[:4], compute)
    check(results, IDS[:4])
    assert results[0].source == "store"
    assert sorted(compute.calls) == [["c1"], ["c2"], ["c3"]]
    assert store.objects.counters["fetch_errors"] > 0
    store.flush()
    monkeypatch.undo()
    assert {result.source for result in fetch(store, REQUESTS[:4], compute)} == {"store"}


def test_computed_chunks_are_stored_and_returned_in_their_encodings(store):
    request, compute = Request("c0", MODEL, encoding="k4v4"), Computing()
    (computed,) = fetch(store, [request], compute)
    store.flush()
    (loaded,) = fetch(store, [request], compute)
    assert (computed.source, loaded.source) == ("computed", "store")
    assert computed.chunk.encoding == loaded.chunk.encoding == request.encoding
    leaves = [jax.tree.leaves(dict(result.chunk.kv)) for result in (computed, loaded)]
    assert all(np.array_equal(first, second) for first, second in zip(*leaves, strict=True))
    assert not store.contains("c0", MODEL)
    with pytest.raises(StoreError, match="0 of them as requested"):
        fetch(store, REQUESTS[:1], lambda misses: [computed.chunk])


def test_a_load_that_hangs_is_computed_at_the_deadline(store, monkeypatch):
    for id in IDS[:3]:
        store.put(chunk_of(id))
    free, get = threading.Event(), store.get

    def hanging(id, *args, **more):
        if id in ("c0", "c1"):
            assert free.wait(60)
        return get(id, *args, **more)

    monkeypatch.setattr(store, "get", hanging)
    compute = Computing()
    results = fetch(store, REQUESTS[:3], compute, timeout=0.2)  # would wait for a minute without
    free.set()
    check(results, IDS[:3])
    assert compute.calls == [["c0"], ["c1"], ["c2"]]  # the third waited behind the two that hang


def test_errors_of_computing_are_typed_and_leave_nothing(store):
    for id in IDS[3:]:
        store.put(chunk_of(id))
    with pytest.raises(StoreError, match=r"got ZeroDivisionError .* from computing 1 chunks") as caught:
        fetch(store, REQUESTS, Computing(wrong="c1"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "c1" not in str(caught.value) + repr(REQUESTS)
    store.flush()
    assert store.contains("c0", MODEL)  # what was computed before is not lost
    assert not store.contains("c2", MODEL)
    check(fetch(store, REQUESTS, Computing()), IDS)
    with pytest.raises(StoreError, match="computing 1 chunks") as caught:
        fetch(store, [Request("c8", MODEL)], lambda misses: [fetch(store, [misses[0].request], Computing())[0].chunk])
    assert "no fetch there" in str(caught.value.__cause__)


def test_a_miss_has_the_encoder_output_that_is_left(store):
    output = np.arange(24, dtype=np.float32).reshape(4, 6)
    store.put_encoder("c0", MODEL, output)
    outputs = []

    def compute(misses):
        outputs.extend(miss.encoder() for miss in misses)
        return [chunk_of(miss.request.id) for miss in misses]

    check(fetch(store, REQUESTS[:2], compute), IDS[:2])
    assert np.array_equal(outputs[0], output)
    assert outputs[1] is None


def test_one_thread_computes_for_all(store):
    started, free = threading.Event(), threading.Event()
    first, second = Computing(), Computing()

    def lead(misses):
        started.set()
        assert free.wait(60)
        return first(misses)

    def join(misses):
        threading.Timer(0.2, free.set).start()  # by now the other chunk was found to be computed elsewhere
        return second(misses)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        leader = pool.submit(fetch, store, REQUESTS[:1], lead)
        assert started.wait(60)
        follower = fetch(store, REQUESTS[:2], join)
    check(leader.result(), IDS[:1])
    check(follower, IDS[:2])
    assert [result.source for result in follower] == ["joined", "computed"]
    assert (first.calls, second.calls) == ([["c0"]], [["c1"]])


def test_a_follower_takes_over_when_its_leader_fails(store):
    started, free = threading.Event(), threading.Event()

    def fail(misses):
        started.set()
        assert free.wait(60)
        raise ZeroDivisionError

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        leader = pool.submit(fetch, store, REQUESTS[:1], fail)
        assert started.wait(60)
        threading.Timer(0.2, free.set).start()
        (follower,) = fetch(store, REQUESTS[:1], Computing())
    assert isinstance(leader.exception(), StoreError)
    assert (follower.chunk.id, follower.source) == ("c0", "computed")


def test_what_another_thread_has_computed_meanwhile_is_loaded(store):
    compute = Computing()

    def slow(misses):
        fetch(store, REQUESTS[1:2], compute)  # as another thread, while the first of two misses is computed
        return [chunk_of("c0")]

    assert [result.source for result in fetch(store, REQUESTS[:2], slow)] == ["computed", "store"]
    assert compute.calls == [["c1"]]
