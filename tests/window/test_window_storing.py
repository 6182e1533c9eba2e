"""Prefills become stored patches and canonicals without a needless forward, and serve only where they belong."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import json
import threading
import time
from typing import Any

import numpy as np
import pytest
from window_cases import Loop, distance, patched, same, text

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.window import PatchFormer, PatchNote, Service, StoredPrefills, traffic
from tests.shared.memory_store import MemoryStore
from tests.shared.window_oracle import BUCKETS, Watched, backbone_of, tokens_of


class PausableStore(MemoryStore):
    """A store that can be made to wait, or to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.broken = threading.Event(), False
        self.open.set()

    def get(self, id: str, backbone: str, **options: Any) -> kvp.Chunk | None:
        assert self.open.wait(60)
        if self.broken:
            raise OSError("the disk is gone")
        return super().get(id, backbone, **options)


class Traffic:
    """A loop whose prefills a former watches."""

    def __init__(self, rank: Any = 8, store: Any = None, **options: Any):
        self.store = PausableStore() if store is None else store
        self.watched = Watched(backbone_of("gqa"))
        self.loop = Loop(store=self.store)
        self.former = PatchFormer(self.watched.backbone, self.store, rank, **options)
        self.former.watch(self.loop.executor)

    def patch(self, id: str) -> kvp.Patch:
        (patch,) = [patch for patch in self.store.patches if patch.metadata.chunk.id == id]
        return patch

    def counts(self) -> tuple[int, ...]:
        """Patches, canonicals and forwards, once everything is stored."""
        self.former.flush()
        assert not self.former.errors
        assert self.watched.forwards == self.former.done.forwards
        return self.former.done.patches, self.former.done.canonicals, self.former.done.forwards


def test_a_prefill_becomes_a_patch_without_a_forward_where_the_canonical_is_stored():
    case = Traffic()
    loop = case.loop
    case.store.put(loop.canonical("c2"))
    loop.append("c0", "c1", "c2")
    # c0 at the front is its own canonical; c1 has none stored.
    assert case.counts() == (2, 2, 1)
    assert {id for id, _, _ in case.store.chunks} == {"c0", "c1", "c2"}
    assert case.patch("c2").metadata.antecedent.identities == loop.window.antecedent("c2").identities

    # Its rank is the whole deficit's, so a recall by it is the prefill again; with a store nothing else is needed.
    rows = loop.rows()
    loop.run(loop.window.evict("c2"))
    loop.executor.forget("c2")
    step = loop.run(loop.window.recall("c2", patched(PatchNote.of(case.patch("c2")))))
    assert [action.kind for action in step] == ["fetch", "fetch", "patch"]
    assert distance(loop.rows(), rows) <= 1e-4
    # The very same prefill again, and in another loop, forms nothing.
    loop.run(loop.window.evict("c2"))
    loop.entry("c2")
    loop.run(loop.window.recall("c2"))
    assert case.counts() == (2, 2, 1)
    other = Traffic(store=case.store)
    other.loop.append("c0", "c1", "c2")
    assert other.counts() == (0, 0, 0)
    assert other.former.done.skipped == 2

    case.former.close()
    other.former.close()


def test_what_left_meanwhile_is_formed_and_a_closed_former_takes_nothing():
    case = Traffic()
    loop = case.loop
    loop.append("c0", "c1")
    case.former.flush()
    case.store.open.clear()
    loop.append("c2")
    kv, behind = loop.executor.read(loop.window, "c2"), loop.window.antecedent("c2")
    loop.run(loop.window.evict("c2"))
    loop.append("c5")  # over its slots
    rows = loop.rows()
    case.store.open.set()
    case.former.close()
    assert not case.former.errors
    chunk = case.store.get("c2", "")
    placed = kvp.Placed(chunk, case.patch("c2"), 0, behind)
    expected = kvp.to_engine(loop.backbone.layout, kv, np.asarray(chunk.local)[: chunk.length], 0)
    formed = {name: np.asarray(value)[:, : chunk.length] for name, value in placed.apply().items()}
    assert distance(formed, expected) <= 1e-4
    assert same(loop.rows(), rows)
    done = case.former.done
    loop.append("c3")
    assert case.former.done == done


@pytest.mark.parametrize("limit", ["PENDING", "PENDING_BYTES"])
def test_errors_are_kept_and_what_waits_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch):
    case = Traffic()
    bound = 1 if limit == "PENDING" else BUCKETS.least * case.loop.executor.costs.kv_bytes
    monkeypatch.setattr(traffic, limit, bound)
    case.former = PatchFormer(case.watched.backbone, case.store, 8)
    case.loop.executor.observers[:] = [case.former]
    case.store.broken = True
    case.loop.append("c0")
    case.former.flush()
    assert [type(error) for error in case.former.errors] == [OSError]
    case.store.broken = False
    case.store.open.clear()
    case.loop.append("c1", "c2", "c3", "c4")
    case.store.open.set()
    case.former.flush()
    done = case.former.done
    assert done.dropped >= 1
    assert (done.failed, done.dropped + done.patches) == (1, 4)
    # What was stored makes room again.
    case.loop.append("c5")
    case.former.close()
    assert case.former.done.patches == done.patches + 1


def test_texts_and_chunks_that_are_stored_as_others_are_not_formed():
    case = Traffic()
    loop = case.loop
    loop.executor.provide("t", tokens=tokens_of(loop.backbone, 3, 8))
    loop.run(loop.window.append(text("t", 8)))
    case.store.put(dataclasses.replace(loop.canonical("c2"), id="c1"))
    loop.append("c1")
    case.former.close()
    assert case.former.done.skipped == 1
    assert "'c1' from the store with content 'content of c2'" in str(case.former.errors[0])
    with pytest.raises(InputError, match="the former's"):
        PatchFormer(backbone_of("kimi"), case.store, 4).watch(loop.executor)


def test_patches_are_formed_on_encoded_canonicals_and_the_front_is_kept_as_it_is():
    case = Traffic(rank="20 %", encoding="k8v8")
    case.loop.append("c0", "c1", "c2")
    assert case.counts() == (2, 3, 2)
    done, store, layout = case.former.done, case.store, case.loop.backbone.layout
    assert (done.encoded, done.canonical_bytes) == (2, sum(chunk.nbytes for chunk in store.chunks.values()))
    assert (store.encodings_of("c0"), store.encodings_of("c1")) == ({None}, {"k8v8g32"})
    assert {patch.metadata.chunk.encoding for patch in store.patches} == {"k8v8g32"}
    # A canonical that is stored as it was prefilled is encoded without a forward.
    plain = MemoryStore()
    plain.put(case.loop.canonical("c2"))
    other = Traffic(rank=4, store=plain, encoding="k8v8")
    other.loop.append("c0", "c1", "c2")
    assert other.counts() == (2, 3, 1)
    other.former.close()
    assert case.patch("c2").nbytes < 0.6 * layout.bytes_per_token() * case.loop.window.piece("c2").entry.tokens
    case.former.close()


def stored_by(store: Any, *ids: str, name: str = "gqa", means: bool = False, nbytes: float = 1e6) -> Any:
    """A loop of chunks that were prefilled behind one another, whose prefills are stored."""
    loop = Loop(name)
    with PatchFormer(loop.backbone, store, 0, prefill_bytes=int(nbytes)) as former:
        if means:
            former.form_means()
        former.watch(loop.executor)
        loop.append(*ids)
    assert not former.errors
    return loop, former


def read(loop: Loop, id: str) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in loop.executor.read(loop.window, id).items()}


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
    first, former = stored_by(store, "c0", "c1", "c2", name=name)
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
    assert same(read(near, "c2"), read(first, "c2"))
    assert near.window.standing("c2").ways == (("near", 0),)
    other = Loop(name, store=store)
    other.append("c0", "c3")
    assert find(other, prefills, "c2") == {}
    # One that is encoded would be none; another rounding of what a forward reads is another KV.
    assert StoredPrefills(store, first.backbone.fingerprint, "bfloat16").alike("c2", near.window.likeness("c2")) == {}
    key = "c2", prefills.lead(made), None
    store.chunks[key] = kvp.encode_chunk(store.chunks[key], "k8v8")
    assert prefills.get("c2", made) is None


def test_a_mean_is_over_the_histories_that_share_the_nearest_chunk():
    store = MemoryStore()
    kv = [read(stored_by(store, "c0", third, "c1", "c5", means=True)[0], "c5") for third in ("c2", "c3", "c4")]
    place = Loop(store=store)
    place.append("c0", "c6", "c1")
    stored = find(place, prefills_of(place, store), "c5")
    assert stored.keys() == {"near", "mean"}
    place.append("c5", service=Service("restored", stored=stored["mean"], likeness="mean"))
    assert distance(read(place, "c5"), {name: np.mean([rows[name] for rows in kv], axis=0) for name in kv[0]}) <= 1e-6
    assert distance(read(place, "c5"), kv[0]) > 1e-3
    # Of two prefills, padded to four times their rows, there is room for the first alone.
    nbytes = 6 * sum(rows.nbytes for rows in kv[0].values())
    assert stored_by(MemoryStore(), "c0", "c1", "c2", nbytes=nbytes)[1].done.prefills == 1
    # One history has no mean.
    assert "mean" not in find(place, prefills_of(place, store), "c1")


def test_listings_keep_the_latest_records_and_a_damaged_one_lists_nothing():
    store, now = MemoryStore(), time.time_ns()
    first, _ = stored_by(store, "c0", "c1", "c2")
    prefills, near = prefills_of(first, store), Loop()
    near.append("c0", "c3", "c1")
    made, keys = first.window.piece("c2").made, {"near": near.window.likeness()["near"]}
    chunk = store.get("c2", "", lead=prefills.lead(made))

    def write(listing: bytes) -> None:
        store.encoders[prefills.name("c2")] = np.frombuffer(listing, np.uint8)

    for listing in (b"", b"\xff", b"{}", b"[[]]", b"[" * 100_000, json.dumps([["0" * 32, keys, "now", 1]]).encode()):
        write(listing)
        assert not prefills.is_listed("c2")
        assert find(near, prefills, "c2") == {}
    # The next prefill is listed again; what is here serves by its identity all the same.
    assert prefills.contains("c2", made)
    prefills.put(chunk, made, keys)
    assert find(near, prefills, "c2").keys() == {"near"}

    old = [[f"{index:032x}", keys, now - int(8 * 24 * 3600e9), 1] for index in range(5)]
    ahead = [[f"{index:032x}", keys, now + int(2 * 24 * 3600e9), 1] for index in range(5, 9)]
    recent = [[f"{index:032x}", keys, now - 10**9 + index, 1] for index in range(10, 74)]
    write(json.dumps([*old, *ahead, *recent][-64:]).encode())
    for index in range(10, 74):
        store.put(dataclasses.replace(chunk, lead=prefills.lead(f"{index:032x}")))
    assert prefills.alike("c2", keys) == {"near": f"{10:032x}"}
    prefills.put(dataclasses.replace(chunk, lead=prefills.lead("e" * 32)), "e" * 32, keys)
    # 64 are listed, so the first of them made way.
    assert prefills.alike("c2", keys) == {"near": f"{11:032x}"}
    write(json.dumps([*old, *ahead]).encode())
    assert not prefills_of(first, store).is_listed("c2")
