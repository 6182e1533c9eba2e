"""What a former stores of a loop's prefills: patches and canonicals, no forward twice, nothing in the caller's way."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from window_cases import Loop, Watched, backbone_of, distance, patched, same, text

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, WorseThanBlindError
from kvpatch_jax.window import PatchFormer, PatchNote, Service, traffic
from tests.shared.memory_store import MemoryStore
from tests.shared.window_oracle import tokens_of


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

    def __init__(self, rank: int | None = 8, store: Any = None, **options: Any):
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
    assert other.former.done.skipped == 3 - 1
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
    case.former.keep_encoder("content", np.arange(3.0))
    case.store.open.set()
    with case.former:
        pass
    assert not case.former.errors
    chunk = case.store.get("c2", "")
    placed = kvp.Placed(chunk, case.patch("c2"), 0, behind)
    expected = kvp.to_engine(loop.backbone.layout, kv, np.asarray(chunk.local)[: chunk.length], 0)
    formed = {name: np.asarray(value)[:, : chunk.length] for name, value in placed.apply().items()}
    assert distance(formed, expected) <= 1e-4
    assert same(loop.rows(), rows)
    done = case.former.done
    loop.append("c3")
    case.former.close()
    case.former.keep_encoder("another", np.zeros(3))
    assert (case.former.done, done.encoders) == (done, 1)
    assert case.store.get_encoder("content", "").tolist() == [0, 1, 2]


@pytest.mark.parametrize("limit", ["PENDING", "PENDING_BYTES"])
def test_errors_are_kept_and_what_waits_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch):
    case = Traffic()
    bound = 1 if limit == "PENDING" else 2 * 8 * case.loop.executor.costs.kv_bytes
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


def test_patches_are_formed_of_chunks_that_come_again_once_there_is_a_rank():
    case = Traffic(rank=None, prefill_bytes=1 << 20)
    loop = case.loop
    loop.append("c0", "c1")
    assert case.counts() == (0, 1, 0)
    case.former.form_patches(4)
    case.former.form_patches(8)
    loop.append("c2")
    assert case.counts() == (0, 1, 0)
    loop.run(loop.window.evict("c1"))
    loop.run(loop.window.serve({"c2": Service("prefill")}))
    loop.run(loop.window.recall("c1"))
    # c2 came before; c1 before there was a rank, but its prefill is listed.
    assert case.counts() == (2, 3, 2)
    assert all(rank == 4 for rank in case.patch("c1").ranks.values())
    case.former.close()


def test_patches_are_formed_on_encoded_canonicals_and_the_front_is_kept_as_it_is():
    case = Traffic(rank=4, encoding="k8v8")
    case.loop.append("c0", "c1", "c2")
    assert case.counts() == (2, 3, 2)
    done, store = case.former.done, case.store
    assert (done.encoded, done.canonical_bytes) == (2, sum(chunk.nbytes for chunk in store.chunks.values()))
    assert (store.encodings_of("c0"), store.encodings_of("c1")) == ({None}, {"k8v8g32"})
    assert {patch.metadata.chunk.encoding for patch in store.patches} == {"k8v8g32"}
    # A canonical that is stored as it was prefilled is encoded without a forward.
    plain = MemoryStore()
    for id in ("c1", "c2"):
        plain.put(case.loop.canonical(id))
    other = Traffic(rank=4, store=plain, encoding="k8v8")
    other.loop.append("c0", "c1", "c2")
    assert other.counts() == (2, 3, 0)
    case.former.close()
    other.former.close()


def test_a_size_in_bytes_is_formed_once_and_a_patch_that_would_not_help_is_counted(monkeypatch: pytest.MonkeyPatch):
    case = Traffic(rank="20 %")  # pyright: ignore[reportArgumentType]
    case.loop.append("c0", "c1", "c2")
    assert case.counts() == (2, 3, 2)
    patch = case.patch("c2")
    whole = patch.metadata.chunk.layout.bytes_per_token() * case.loop.window.piece("c2").entry.tokens
    assert patch.nbytes < 0.6 * whole
    assert patch.predicted is not None
    assert patch.predicted < 1
    again = Traffic(rank="20 %", store=case.store)  # pyright: ignore[reportArgumentType]
    again.loop.append("c0", "c1", "c2")
    assert again.counts() == (0, 0, 0)

    def refuse(*_: Any, **__: Any) -> kvp.Patch:
        raise WorseThanBlindError("no use")

    monkeypatch.setattr(traffic, "form_patch", refuse)
    other = Traffic()
    other.loop.append("c0", "c1", "c2")
    assert other.counts() == (0, 3, 2)
    assert (other.former.done.refused, other.former.done.failed) == (2, 0)
    for former in (case.former, again.former, other.former):
        former.close()
