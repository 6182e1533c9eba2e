"""Fetching returns every chunk in order: loaded where it is stored, computed once where it is not or fails to load."""
# pyright: reportAssignmentType=false

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import StoreError
from kvpatch_jax.store import ChunkStore, Fetched, Request, fetch
from tests.store.store_cases import MODEL, chunk_of, expires_of, file_of, flip, same, same_chunk

IDS = [f"c{number}" for number in range(6)]
REQUESTS = [Request(id, MODEL) for id in IDS]


def chunk(id: str) -> Any:
    return chunk_of(id, int(id[1:]))


class Computing:
    """Computes what is asked for, and remembers."""

    def __init__(self, wrong: str | None = None):
        self.calls: list[list[str]] = []
        self.wrong = wrong

    def __call__(self, misses: Sequence[Any]) -> list[Any]:
        self.calls.append([miss.request.id for miss in misses])
        if self.wrong in self.calls[-1]:
            raise ZeroDivisionError("no such image")
        return [chunk(id) for id in self.calls[-1]]


@pytest.fixture
def store(folder: Path) -> Iterator[ChunkStore]:
    with ChunkStore(folder / "store", memory=0) as store:
        yield store


def sources(results: list[Fetched], ids: list[str]) -> list[str]:
    """The origins of chunks, which are those of these ids."""
    for result, id in zip(results, ids, strict=True):
        assert same_chunk(result.chunk, chunk(id))
    return [result.source for result in results]


def test_hits_are_loaded_and_misses_computed_in_order(store: ChunkStore):
    store.put_many([chunk(id) for id in IDS[::2]])
    compute = Computing()
    asked = [*REQUESTS, REQUESTS[1], REQUESTS[0]]
    results = fetch(store, asked, compute)
    expected = ["store", "computed"] * 3 + ["computed", "store"]
    assert sources(results, [request.id for request in asked]) == expected
    assert compute.calls == [["c1"], ["c3"], ["c5"]]
    for result in results:
        assert (result.ack is not None) == (result.source == "computed")
        assert result.ack is None or result.ack.result(60)
    assert sources(fetch(store, REQUESTS, compute), IDS) == ["store"] * 6
    assert len(compute.calls) == 3
    fetch(store, [Request(id, MODEL) for id in ("c7", "c8", "c9")], compute, batch=2)
    fetch(store, [Request(id, MODEL) for id in ("c17", "c18", "c19")], compute, batch=None)
    assert compute.calls[3:] == [["c7", "c8"], ["c9"], ["c17", "c18", "c19"]]


def test_loading_and_computing_overlap(store: ChunkStore, monkeypatch: pytest.MonkeyPatch):
    """Computing does not begin until loading has, and loading does not end until computing has begun."""
    store.put(chunk("c0"))
    loading, computing = threading.Event(), threading.Event()
    get = store.get

    def slow_get(*args: Any, **more: Any) -> Any:
        loading.set()
        assert computing.wait(60)
        return get(*args, **more)

    def compute(misses: Sequence[Any]) -> list[Any]:
        assert loading.wait(60)
        computing.set()
        return [chunk(miss.request.id) for miss in misses]

    monkeypatch.setattr(store, "get", slow_get)
    assert sources(fetch(store, REQUESTS[:2], compute), IDS[:2]) == ["store", "computed"]


def test_chunks_that_fail_to_load_are_computed_and_replaced(store: ChunkStore, monkeypatch: pytest.MonkeyPatch):
    store.put_many([chunk(id) for id in IDS[:5]])
    flip(file_of(store.objects, store.names.canonical(MODEL, "c1")))
    file_of(store.objects, store.names.canonical(MODEL, "c2")).unlink()
    free, get = threading.Event(), store.get

    def failing(id: str, *args: Any, **more: Any) -> Any:
        if id == "c3":
            raise StoreError("store: read: EIO")
        return get(id, *args, **more)

    monkeypatch.setattr(store, "get", failing)
    compute = Computing()
    assert sources(fetch(store, REQUESTS[:4], compute), IDS[:4]) == ["store"] + ["computed"] * 3
    assert sorted(compute.calls) == [["c1"], ["c2"], ["c3"]]
    assert store.statistics().counts["fetch_errors"] >= 1
    store.flush()
    monkeypatch.setattr(store, "get", get)
    assert sources(fetch(store, REQUESTS[:4], compute), IDS[:4]) == ["store"] * 4

    def hanging(id: str, *args: Any, **more: Any) -> Any:
        assert id not in IDS[:2] or free.wait(60)
        return get(id, *args, **more)

    monkeypatch.setattr(store, "get", hanging)
    compute = Computing()
    results = fetch(store, REQUESTS[:3], compute, timeout=0.2)  # would wait for a minute without
    free.set()
    assert sources(results, IDS[:3]) == ["computed"] * 3  # the third waited behind the two that hang
    assert compute.calls == [["c0"], ["c1"], ["c2"]]


def test_computed_chunks_are_stored_as_requested(store: ChunkStore):
    """In their encoding, with the expiry of the request; an encoder output that is left is used."""
    output, outputs = np.arange(24, dtype=np.float32).reshape(4, 6), []
    store.put_encoder("c0", MODEL, output)

    def compute(misses: Sequence[Any]) -> list[Any]:
        outputs.extend((miss.item, miss.encoder()) for miss in misses)
        return [chunk(miss.request.id) for miss in misses]

    request = Request("c0", MODEL, encoding="k4v4", item=lambda: "an item", expires=4e9)
    (computed,), _ = fetch(store, [request], compute), store.flush()
    (loaded,) = fetch(store, [request], compute)
    assert (computed.source, loaded.source) == ("computed", "store")
    assert loaded.chunk.encoding == request.encoding
    assert same_chunk(loaded.chunk, computed.chunk)
    assert not store.contains("c0", MODEL)
    assert [round(expires / 1e3) for expires in expires_of(store) if expires is not None] == [4_000_000]
    fetch(store, [Request("c1", MODEL, item="another", expires=1.0)], compute)  # has expired: returned, and not stored
    store.flush()
    assert not store.contains("c1", MODEL)
    assert [item for item, _ in outputs] == ["an item", "another"]
    assert same(outputs[0][1], output)
    assert outputs[1][1] is None


def test_errors_of_computing_are_typed_and_leave_nothing(store: ChunkStore):
    store.put_many([chunk(id) for id in IDS[3:]])
    with pytest.raises(StoreError, match=r"got ZeroDivisionError .* from computing 1 chunks") as caught:
        fetch(store, REQUESTS, Computing(wrong="c1"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "c1" not in str(caught.value) + repr(REQUESTS)
    store.flush()
    assert store.contains("c0", MODEL)  # what was computed before is not lost
    assert not store.contains("c2", MODEL)
    assert sources(fetch(store, REQUESTS, Computing()), IDS) == ["store", "computed", "computed"] + ["store"] * 3
    wrong: list[list[Any]] = [[], [chunk("c9")], [chunk("c8"), chunk("c8")], [chunk_of("c8", lead="another")]]
    for chunks in wrong:
        with pytest.raises(StoreError, match="of them as requested"):
            fetch(store, [Request("c8", MODEL)], lambda _, chunks=chunks: chunks)
    with pytest.raises(StoreError, match="computing 1 chunks") as caught:
        fetch(store, [Request("c8", MODEL)], lambda misses: [fetch(store, [misses[0].request], Computing())[0].chunk])
    assert "no fetch there" in str(caught.value.__cause__)


# ---------------------------------------------------------------------------------------------------- several threads


def with_leader(store: ChunkStore, lead: Callable, follow: Callable[[], list[Fetched]]) -> tuple[Any, list[Fetched]]:
    """Has another thread compute "c0" with `lead` while this one follows. Returns its future, and the results here."""
    started, free = threading.Event(), threading.Event()

    def compute(misses: Sequence[Any]) -> Any:
        started.set()
        assert free.wait(60)
        return lead(misses)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        leader = pool.submit(fetch, store, REQUESTS[:1], compute)
        assert started.wait(60)
        threading.Timer(0.2, free.set).start()  # by now the other chunk is known to be computed elsewhere
        return leader, follow()


def test_one_thread_computes_for_all(store: ChunkStore):
    first, second = Computing(), Computing()
    leader, follower = with_leader(store, first, lambda: fetch(store, REQUESTS[:2], second))
    assert sources(leader.result(), IDS[:1]) == ["computed"]
    assert sources(follower, IDS[:2]) == ["joined", "computed"]
    assert (first.calls, second.calls) == ([["c0"]], [["c1"]])


def test_a_follower_takes_over_when_its_leader_fails(store: ChunkStore):
    leader, follower = with_leader(store, Computing("c0"), lambda: fetch(store, REQUESTS[:1], Computing()))
    assert isinstance(leader.exception(), StoreError)
    assert sources(follower, IDS[:1]) == ["computed"]
