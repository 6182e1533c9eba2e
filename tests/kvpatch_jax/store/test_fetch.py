"""Fetching: order, sources, failing loads and failing computing, one flight per chunk, nothing left behind."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, file_of, same, same_chunk

from kvpatch_jax.errors import FetchError, StoreIOError
from kvpatch_jax.store import Budget, ChunkStore, Request, fetch
from kvpatch_jax.store.cli.main import main

IDS = [f"c{number}" for number in range(6)]
REQUESTS = [Request(id, BACKBONE) for id in IDS]


def made(id: str):
    return chunk_of(id, int(id[1:]))


class Computing:
    """Computes what is asked for, and remembers."""

    def __init__(self, wrong: str | None = None):
        self.calls: list[list[str]] = []
        self.wrong = wrong

    def __call__(self, misses):
        self.calls.append([miss.request.id for miss in misses])
        if self.wrong in self.calls[-1]:
            raise ZeroDivisionError("no such image")
        return [made(id) for id in self.calls[-1]]

    @property
    def ids(self) -> list[str]:
        return [id for call in self.calls for id in call]


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        yield store


@pytest.fixture(autouse=True)
def nothing_stays():
    """No thread of ours and no file outlives a test."""
    files = lambda: len(os.listdir("/proc/self/fd"))
    before, others = files(), set(threading.enumerate())  # other tests' stores may still have a writer
    new = lambda: [thread.name for thread in threading.enumerate() if thread not in others]
    yield
    deadline = time.monotonic() + 60
    staying = ("kvpatch-crc", "kvpatch-group")  # those sum large objects and write groups, for all to come
    ending = lambda name: "kvpatch-" in name and not name.startswith(staying)
    while any(ending(name) for name in new()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [name for name in new() if ending(name)] == []
    assert files() <= before


def check(got, ids) -> None:
    assert [fetched.chunk.id for fetched in got] == ids
    assert all(same_chunk(fetched.chunk, made(id)) for fetched, id in zip(got, ids, strict=True))


def test_hits_are_loaded_and_misses_computed_in_order(store):
    for id in IDS[::2]:
        store.put(made(id))
    compute = Computing()
    asked = [*REQUESTS, REQUESTS[1], REQUESTS[0]]
    got = fetch(store, asked, compute)
    check(got, [request.id for request in asked])
    assert [fetched.source for fetched in got] == ["store", "computed"] * 3 + ["computed", "store"]
    assert compute.calls == [["c1"], ["c3"], ["c5"]]
    for fetched in got:
        assert (fetched.ack is not None) == (fetched.source == "computed")
        assert fetched.ack is None or fetched.ack.result(60) is None
    again = fetch(store, REQUESTS, compute)
    check(again, IDS)
    assert {fetched.source for fetched in again} == {"store"}
    assert len(compute.calls) == 3
    assert fetch(store, [], compute) == []


def test_loading_and_computing_overlap(store, monkeypatch):
    """Computing does not begin until loading has, and loading does not end until computing has begun."""
    store.put(made("c0"))
    loading, computing = threading.Event(), threading.Event()
    get = store.get

    def slow_get(*args, **more):
        loading.set()
        assert computing.wait(60)
        return get(*args, **more)

    def compute(misses):
        assert loading.wait(60)
        computing.set()
        return [made(miss.request.id) for miss in misses]

    monkeypatch.setattr(store, "get", slow_get)
    check(fetch(store, REQUESTS[:2], compute), IDS[:2])


@pytest.mark.parametrize("layers", [False, True])
def test_chunks_that_fail_to_load_are_computed(store, monkeypatch, layers):
    for id in IDS[:4]:
        store.put(made(id))
    corrupt, gone = file_of(store, made("c1")), file_of(store, made("c2"))
    data = bytearray(corrupt.read_bytes())
    data[-70] ^= 1
    corrupt.write_bytes(bytes(data))
    name = "stream" if layers else "get"
    load = getattr(store, name)

    def failing(id, *args, **more):
        if id == "c2":
            gone.unlink()  # between the look and the load
        if id == "c3":
            raise StoreIOError("store: read: EIO")
        return load(id, *args, **more)

    monkeypatch.setattr(store, name, failing)
    compute, seen = Computing(), []
    on_layer = (lambda request, layer, values: seen.append((request.id, layer))) if layers else None
    got = fetch(store, REQUESTS[:4], compute, on_layer=on_layer)
    check(got, IDS[:4])
    assert got[0].source == "store"
    assert sorted(compute.ids) == IDS[1:4]
    assert store.counters["quarantined"] == 1
    assert store.counters["fetch_errors"] == (2 if layers else 1)  # a stream says that it broke
    if layers:
        for id in IDS[:4]:
            assert [layer for other, layer in seen if other == id][-3:] == [0, 1, 2]
    store.flush()
    assert same_chunk(load("c1", BACKBONE), made("c1")) if not layers else store.contains("c1", BACKBONE)


def test_layers_come_in_order_and_make_the_chunk(store):
    kept = chunk_of("c0", 0, hidden={1: np.ones((9, 4), np.float32)})
    store.put(kept, encoding=None)
    store.put(made("c2"), encoding="int8")
    seen: dict[str, list] = {}
    requests = [REQUESTS[0], REQUESTS[1], Request("c2", BACKBONE, encoding="int8")]

    def on_layer(request, layer, values):
        seen.setdefault(request.id, []).append((layer, values))

    got = fetch(store, requests, Computing(), on_layer=on_layer)
    assert [fetched.source for fetched in got] == ["store", "computed", "store"]
    for fetched in got:
        layers = seen[fetched.chunk.id]
        assert [layer for layer, _ in layers] == [0, 1, 2]
        assert all(same(values[name], fetched.chunk.kv[name][layer]) for layer, values in layers for name in values)
    assert same_chunk(got[0].chunk, kept)
    hidden = got[0].chunk.hidden
    assert hidden is not None
    assert same(hidden[1], np.ones((9, 4), np.float32))
    whole = store.get("c2", BACKBONE, encoding="int8")
    assert same_chunk(got[2].chunk, whole)


def test_a_load_that_hangs_is_computed_at_the_deadline(store, monkeypatch):
    for id in IDS[:3]:
        store.put(made(id))
    free = threading.Event()
    get = store.get

    def hanging(id, *args, **more):
        if id in ("c0", "c1"):
            assert free.wait(60)
        return get(id, *args, **more)

    monkeypatch.setattr(store, "get", hanging)
    compute = Computing()
    began = time.monotonic()
    got = fetch(store, REQUESTS[:3], compute, timeout=0.2, threads=2)
    assert time.monotonic() - began < 50  # it did not wait for them
    free.set()
    check(got, IDS[:3])
    assert compute.ids == IDS[:3]  # the third waited behind the two that hang


def test_errors_of_computing_are_typed_and_leave_nothing(store):
    for id in IDS[3:]:
        store.put(made(id))
    with pytest.raises(FetchError, match="computing 1 of the chunks raised ZeroDivisionError") as caught:
        fetch(store, REQUESTS, Computing(wrong="c1"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "c1" not in str(caught.value) + repr(REQUESTS)
    store.flush()
    assert store.contains("c0", BACKBONE)  # what was computed before is not lost
    assert not store.contains("c2", BACKBONE)
    check(fetch(store, REQUESTS, Computing()), IDS)


def test_a_canonical_dropped_for_its_encoder_output(store):
    """The encoder output outlives the canonical in the budget, and is what the chunk is computed from again."""
    output = np.arange(24, dtype=np.float32).reshape(4, 6)
    store.put(chunk_of("c0", 0, encoder=output))
    size = file_of(store, made("c0")).stat().st_size
    assert main(["gc", f"--root={store.disk.root}", f"--budget={size}"]) == 0
    assert not store.contains("c0", BACKBONE)
    given = []

    def compute(misses):
        given.extend(miss.encoder() for miss in misses)
        return [made(miss.request.id) for miss in misses]

    got = fetch(store, REQUESTS[:2], compute)
    check(got, IDS[:2])
    assert same(given[0], output)
    assert given[1] is None


# ------------------------------------------------------------------------------------------------- single flight


def run_together(*runs) -> list:
    results: list = [None] * len(runs)

    def guarded(number, run):
        try:
            results[number] = run()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=guarded, args=pair) for pair in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_one_thread_computes_for_all(store):
    started, free = threading.Event(), threading.Event()
    first = Computing()

    def lead(misses):
        started.set()
        assert free.wait(60)
        return first(misses)

    def follow():
        assert started.wait(60)
        return fetch(store, [REQUESTS[1], REQUESTS[0]], join, timeout=0.05)

    def join(misses):
        threading.Timer(0.2, free.set).start()  # by now the other chunk was found to be computed elsewhere
        return second(misses)

    second = Computing()
    one, two = run_together(lambda: fetch(store, REQUESTS[:1], lead), follow)
    check(one, IDS[:1])
    check(two, [IDS[1], IDS[0]])
    assert [fetched.source for fetched in two] == ["computed", "joined"]
    assert (first.ids, second.ids) == (["c0"], ["c1"])


def test_a_follower_takes_over_when_its_leader_fails(store):
    started, free = threading.Event(), threading.Event()

    def fail(misses):
        started.set()
        assert free.wait(60)
        raise ZeroDivisionError

    def follow():
        assert started.wait(60)
        threading.Timer(0.1, free.set).start()
        return fetch(store, REQUESTS[:1], Computing())

    one, two = run_together(lambda: fetch(store, REQUESTS[:1], fail), follow)
    assert isinstance(one, FetchError)
    check(two, IDS[:1])
    assert two[0].source == "computed"
