"""A request gets the chunk and patches stored for exactly it; what is missing or fails to load is computed once."""
# pyright: reportAssignmentType=false

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.cache import Antecedent, Member, identity, patch_digest
from kvpatch_jax.errors import InputError, StoreError
from kvpatch_jax.patching import fit_basis, form_in_basis
from kvpatch_jax.store import ChunkStore, Fetched, PatchKey, Request, fetch
from tests.store.store_cases import LAYOUT, MODEL, chunk_of, expires_of, file_of, flip, patch_for, same, same_chunk

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


# -------------------------------------------------------------------------------------------------------------- patches

BLIND = identity("A", "bare")
BEHIND = [
    Antecedent((Member("A"),)),
    Antecedent((Member("A", "version one"),)),
    Antecedent((Member("A", "version two"),)),
    Antecedent((Member("A", "version one", BLIND),)),
]
"""Antecedents of one id."""


def seeds(store: ChunkStore, antecedent: Any, **fields: Any) -> list[int]:
    """Which patches are returned for the chunk "page", by their first number."""
    patches = store.get_patches(PatchKey("page", MODEL, antecedent, **fields))
    return sorted(int(patch.factors["k"][0][0, 0, 0]) for patch in patches)  # pyright: ignore


@pytest.fixture
def filled(store: ChunkStore) -> ChunkStore:
    """A store of a patch behind each of `BEHIND`, with its place as its seed."""
    store.put_patches([patch_for(antecedent, seed) for seed, antecedent in enumerate(BEHIND)])
    return store


def test_no_patch_serves_another_antecedent(filled: ChunkStore):
    assert seeds(filled, BEHIND[1]) == [0, 1]  # plain ids say nothing of contents
    assert seeds(filled, BEHIND[2]) == [0, 2]
    assert seeds(filled, BEHIND[3]) == [3]
    assert seeds(filled, [Member("A", "version three")]) == [0]
    assert seeds(filled, [Member("A", None, BLIND)]) == [3]
    assert seeds(filled, [Member("A", "version two", BLIND)]) == []
    for antecedent in ((), ("B",), ("A", "B"), ("A", "A")):
        assert seeds(filled, antecedent) == []
    assert filled.get_patches(PatchKey("other", MODEL, ("A",))) == []
    assert filled.get_patches(PatchKey("page", "large", ("A",))) == []
    assert filled.patch_count("page", MODEL) == 4
    assert (filled.patch_count("other", MODEL), filled.patch_count("page", "large")) == (0, 0)


def test_plain_ids_mean_the_stored_contents(filled: ChunkStore):
    assert seeds(filled, ["A"]) == [0]  # two contents, and nothing says which
    filled.put(chunk_of("A", content="version two"))
    assert seeds(filled, ["A"]) == [0, 2]
    filled.put(chunk_of("A", content="version one", tokens=40), encoding="k4v4")
    assert seeds(filled, ["A"]) == [0]  # two again, in two encodings
    filled.put(chunk_of("A", content="version three"))
    filled.put(chunk_of("A", content="version three", tokens=40), encoding="k4v4")
    assert seeds(filled, ["A"]) == [0]
    assert seeds(filled, [chunk_of("A", content="version one")]) == [0, 1]


def test_the_base_counts_too(store: ChunkStore):
    for seed, base in enumerate(BEHIND):
        store.put_patches([patch_for(("B",), seed, base="conditioned", base_antecedent=base)])
    assert seeds(store, ("B",)) == []
    for seed, expected in ((1, [0, 1]), (2, [0, 2]), (3, [3])):
        assert seeds(store, ("B",), base="conditioned", base_antecedent=BEHIND[seed]) == expected


def test_an_orbit_patch_serves_every_order(store: ChunkStore):
    members = [Member("A", "one"), Member("B", "two"), Member("B", "three")]
    store.put_patches([patch_for(sorted(members), 5, orbit=True), patch_for(members, 6)])
    assert seeds(store, members[::-1], orbit=True) == seeds(store, members, orbit=True) == [5]
    assert seeds(store, members) == [6]
    assert seeds(store, members[::-1]) == []
    assert seeds(store, ("A", "B", "B"), orbit=True) == []  # which of the contents of "B" is meant?
    fields: dict[str, Any] = {"orbit": True, "base": "conditioned"}
    store.put_patches([patch_for(("A",), 7, base_antecedent=members[1:], **fields)])
    assert seeds(store, ("A",), base_antecedent=members[1:], **fields) == [7]
    assert seeds(store, ("A",), base_antecedent=members[:0:-1], **fields) == []  # the base's order counts


def test_lead_and_encoding_are_part_of_what_is_served(store: ChunkStore):
    served: list[dict[str, Any]] = [{}, {"lead": "one"}, {"encoding": "k4v4g32"}]
    store.put_patches([patch_for(seed=seed, **fields) for seed, fields in enumerate(served)])
    for seed, fields in enumerate(served):
        assert seeds(store, ("A",), **fields) == [seed]
    assert seeds(store, ("A",), encoding="k4v4") == [2]
    for fields in ({"lead": "two"}, {"encoding": "k4v4g64"}):
        assert seeds(store, ("A",), **fields) == []


def test_patches_of_an_older_version_are_not_served(store: ChunkStore):
    first, second = chunk_of("page", content="one"), chunk_of("page", content="two")
    for seed, content in ((1, "one"), (2, "two")):
        store.put_patches([patch_for(seed=seed, rank=seed, content=content)])
    store.put_patches([patch_for(seed=3, rank=3)])
    assert seeds(store, ("A",)) == [1, 2, 3]  # nobody says which content is meant: whoever applies one checks
    store.put(first)
    assert seeds(store, ("A",)) == [1, 3]
    ack = store.put_async(second)
    assert seeds(store, ("A",)) == [2, 3]
    ack.result()
    assert seeds(store, ("A",)) == [2, 3]
    assert seeds(store, ("A",), content="one") == [1, 3]
    ranks = [patch.ranks["k"] for patch in store.get_patches(PatchKey("page", MODEL, ("A",)))]
    assert ranks == [3, 2]  # the largest first
    store.put(chunk_of("page", content="one", lead="a lead"))
    assert seeds(store, ("A",)) == [2, 3]
    store.delete("page", MODEL)
    assert seeds(store, ("A",)) == []


def test_a_damaged_patch_or_canonical_says_nothing(filled: ChunkStore):
    filled.put(chunk_of("A", content="version two"))
    for name in (filled.names.canonical(MODEL, "A"), filled.names.patch(patch_for(seed=0))):
        flip(file_of(filled.objects, name))
    with ChunkStore(filled.objects.root, memory=0) as store:
        filled.objects.memory.clear()
        assert seeds(store, ["A"]) == []
        assert seeds(store, BEHIND[1]) == [1]


def test_patches_share_a_basis_that_lives_as_long_as_they(store: ChunkStore):
    chunk = chunk_of("page")
    conditioned = {name: value + np.float32(0.1) * value**2 for name, value in chunk.kv.items()}
    basis = fit_basis([(chunk, conditioned)], 3)
    patch = form_in_basis(chunk, conditioned, basis, ("A",), 2)

    def ends() -> set[Any]:
        query = "SELECT expires FROM objects WHERE kind = 'encoder'"
        return {end for (end,) in store.objects.index.rows(query)}

    with pytest.raises(InputError, match="put_basis"):
        store.put_patches([patch])
    store.put_basis(basis, ttl=100.0)
    store.put_patches([patch], ttl=50.0)
    (first,) = ends()
    store.put_patches([patch, kvp.quantise(patch, "int8")], ttl=1000.0)
    (second,) = ends()
    assert second >= first + 900
    store.put_basis(basis, ttl=10.0)
    assert ends() == {second}  # never a shorter life
    store.put_patch_async(patch).result()
    assert ends() == {None}
    store.put_basis(basis, ttl=10.0)
    assert ends() == {None}

    largest, smaller = store.get_patches(patch.metadata)
    assert patch_digest(largest) == patch_digest(patch)
    assert largest.metadata == smaller.metadata == patch.metadata
    assert getattr(store.get_basis(basis.digest, LAYOUT, MODEL), "digest", None) == basis.digest
    assert store.get_basis(basis.digest, LAYOUT, "large") is None
    store.delete(f"basis {basis.digest} k", MODEL)
    assert store.get_patches(patch.metadata) == []
