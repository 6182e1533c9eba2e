"""Prefills that a former stores are found by their identity, by what their history shares, and from other machines."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import json
import time
from typing import Any

import numpy as np
import pytest
from window_cases import Loop, distance, same

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.window import PatchFormer, Service, StoredPrefills, stored_prefill
from tests.shared.memory_store import MemoryStore


class SharedStore(MemoryStore):
    """A store with a remote one behind it."""

    def __init__(self, remote: MemoryStore):
        super().__init__()
        self.remote, self.reads = remote, 0

    def get(self, id: str, backbone: str, **options: Any) -> kvp.Chunk | None:
        return super().get(id, backbone, **options) or self.remote.get(id, backbone, **options)

    def may_have(self, id: str, backbone: str, **options: Any) -> bool:
        # Until it is read, a remote store may have anything.
        return True

    def get_encoder(self, id: str, backbone: str, *, tier: str | None = None) -> np.ndarray | None:
        self.reads += tier == "remote"
        return self.remote.encoders.get(id) if tier == "remote" else super().get_encoder(id, backbone)


def traffic(
    store: Any, *ids: str, name: str = "gqa", prefill_bytes: int = 1 << 20, means: bool = False
) -> tuple[Loop, PatchFormer]:
    """A loop of chunks that were prefilled behind one another, whose prefills are stored."""
    loop = Loop(name)
    with PatchFormer(loop.backbone, store, 0, prefill_bytes=prefill_bytes) as former:
        if means:
            former.form_means()
        former.watch(loop.executor)
        loop.append(*ids)
    assert not former.errors
    return loop, former


def prefills_of(loop: Loop, store: Any) -> StoredPrefills:
    return StoredPrefills(store, loop.backbone.fingerprint, np.float32)


def find(loop: Loop, prefills: StoredPrefills, id: str) -> dict[str, str]:
    """What is stored of a chunk that would be appended."""
    entry = loop.entry(id)
    made = loop.window.prefilled(entry)
    exact = {"restored": made} if prefills.may_have(id, made) else {}
    return exact | {like: other for like, other in prefills.alike(id, loop.window.likeness()).items() if other != made}


@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_a_prefill_serves_behind_the_same_history_bit_for_bit_and_behind_a_like_one(name: str):
    store = MemoryStore()
    first, former = traffic(store, "c0", "c1", "c2", name=name)
    assert (former.done.prefills, former.done.patches) == (2, 0)
    made = first.window.piece("c2").made

    again, prefills = Loop(name, store=store), prefills_of(first, store)
    again.append("c0", "c1")
    assert find(again, prefills, "c2") == {"restored": made}
    step = again.append("c2", service=Service("restored"))
    assert [action.kind for action in step if action.kind != "compose"] == ["fetch", "copy"]
    assert same(again.rows(), first.rows())

    # The nearest chunk and the lead are those of the history; what is between is not.
    near = Loop(name, store=store)
    near.append("c0", "c3", "c1")
    assert find(near, prefills, "c2") == {"near": made}
    near.append("c2", service=Service("restored", stored=made, likeness="near"))
    kv = first.executor.read(first.window, "c2")
    assert distance({name: np.asarray(value) for name, value in near.executor.read(near.window, "c2").items()}, kv) == 0
    assert near.window.standing("c2").ways == (("near", 0),)
    other = Loop(name, store=store)
    other.append("c0", "c3")
    assert find(other, prefills, "c2") == {}
    with pytest.raises(InputError, match="which no store has"):
        other.append("c2", service=Service("restored"))
    # One that is encoded would be none; another rounding of what a forward reads is another KV.
    assert StoredPrefills(store, first.backbone.fingerprint, "bfloat16").alike("c2", near.window.likeness("c2")) == {}
    key = "c2", prefills.lead(made), None
    store.chunks[key] = kvp.encode_chunk(store.chunks[key], "k8v8")
    assert prefills.get("c2", made) is None


def test_a_mean_is_over_the_histories_that_share_the_nearest_chunk():
    store, kv = MemoryStore(), []
    for third in ("c2", "c3", "c4"):
        loop, _ = traffic(store, "c0", third, "c1", "c5", means=True)
        kv.append({name: np.asarray(value) for name, value in loop.executor.read(loop.window, "c5").items()})
    place = Loop(store=store)
    place.append("c0", "c6", "c1")
    stored = find(place, prefills_of(place, store), "c5")
    assert stored.keys() == {"near", "mean"}
    place.append("c5", service=Service("restored", stored=stored["mean"], likeness="mean"))
    mean = {name: np.mean([one[name] for one in kv], axis=0) for name in kv[0]}
    read = {name: np.asarray(value) for name, value in place.executor.read(place.window, "c5").items()}
    assert distance(read, mean) <= 1e-6
    assert distance(read, kv[0]) > 1e-3
    # One history has no mean.
    assert "mean" not in find(place, prefills_of(place, store), "c1")


def test_other_machines_are_asked_once_in_a_while(monkeypatch: pytest.MonkeyPatch):
    remote = MemoryStore()
    first, _ = traffic(remote, "c0", "c1", "c2")
    store, made = SharedStore(remote), first.window.piece("c2").made
    prefills = prefills_of(first, store)
    loop = Loop(store=store)
    loop.append("c0", "c1")
    for _ in range(3):
        assert find(loop, prefills, "c2") == {"restored": made}
    assert store.reads == 1
    loop.append("c2", service=Service("restored"))
    assert same(loop.rows(), first.rows())

    # A listing may name what is gone: it is missed once, and not promised again at once.
    remote.chunks.clear()
    assert prefills.get("c2", made) is None
    assert find(loop, prefills, "c2") == {}
    later = time.monotonic() + stored_prefill.FRESH_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert prefills.may_have("c2", made)
    assert store.reads == 2


@pytest.mark.parametrize(
    "listing",
    [
        *(b"", b"\xff", b"{}", b"[3]", b"[[]]", b"null", b"[" * 100_000, b'[["made", {}, 1, 1]]'),
        json.dumps([["0" * 32, {"near": "1" * 32}, "now", 1]]).encode(),
        json.dumps([["0" * 32, ["near"], 1, 1]]).encode(),
        json.dumps([["0" * 32, {"near": 3}, 1, 1]]).encode(),
        json.dumps([["0" * 32, {"near": "1" * 32}, 10**40, 1]]).encode(),
    ],
)
def test_a_damaged_listing_is_one_without_prefills(listing: bytes):
    store = MemoryStore()
    first, _ = traffic(store, "c0", "c1", "c2")
    prefills = prefills_of(first, store)
    store.encoders[prefills.name("c2")] = np.frombuffer(listing, np.uint8)
    assert not prefills.is_listed("c2")
    near = Loop()
    near.append("c0", "c3", "c1")
    assert find(near, prefills, "c2") == {}
    # The next prefill is listed again; what is here serves by its identity all the same.
    assert prefills.contains("c2", first.window.piece("c2").made)
    chunk = store.get("c2", "", lead=prefills.lead(first.window.piece("c2").made))
    prefills.put(chunk, first.window.piece("c2").made, near.window.likeness())
    assert find(near, prefills, "c2").keys() == {"near"}


def test_listings_keep_the_latest_records_and_forget_old_ones():
    store, now = MemoryStore(), time.time_ns()
    loop = Loop()
    prefills, chunk = prefills_of(loop, store), loop.canonical("c2")
    keys = {"near": "1" * 32}
    old = [[f"{index:032x}", keys, now - int(8 * 24 * 3600e9), 1] for index in range(5)]
    ahead = [[f"{index:032x}", keys, now + int(2 * 24 * 3600e9), 1] for index in range(5, 9)]
    recent = [[f"{index:032x}", keys, now - 10**9 + index, 1] for index in range(10, 74)]
    listing = json.dumps([*old, *ahead, *recent][-64:]).encode()
    store.encoders[prefills.name("c2")] = np.frombuffer(listing, np.uint8)
    for index in range(10, 74):
        made = f"{index:032x}"
        store.put(dataclasses.replace(chunk, lead=prefills.lead(made)))
    assert prefills.alike("c2", keys) == {"near": f"{10:032x}"}
    prefills.put(dataclasses.replace(chunk, lead=prefills.lead("e" * 32)), "e" * 32, keys)
    # 64 are listed, so the first of them made way.
    assert prefills.alike("c2", keys) == {"near": f"{11:032x}"}
    store.encoders[prefills.name("c2")] = np.frombuffer(json.dumps([*old, *ahead]).encode(), np.uint8)
    assert not prefills_of(loop, store).is_listed("c2")
