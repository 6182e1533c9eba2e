"""Patches formed of what a loop's prefills leave behind: no forward twice, nothing in the caller's way."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import threading
from typing import Any

import numpy as np
import pytest
from window_drill import Drill, backbone_of, canonical
from window_oracle import counting_of, rows_of, tokens_of

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.window import Costs, Entry, PagedExecutor, PatchFormer, Window, patch_former


class PausableStore:
    """A store in memory that can be made to wait, or to fail."""

    def __init__(self):
        self.chunks, self.patches = {}, []
        self.open = threading.Event()
        self.open.set()
        self.broken = False

    def get(self, id, backbone):
        assert self.open.wait(60)
        if self.broken:
            raise OSError("the disk is gone")
        return self.chunks.get(id)

    def put(self, chunk):
        self.chunks[chunk.id] = chunk

    def get_patches(self, served):
        return [patch for patch in self.patches if patch.metadata.chunk == served.chunk]

    def put_patches(self, patches):
        self.patches += patches


def loop_of(shelf: PausableStore, rank: int = 8, **options) -> tuple[Drill, PatchFormer, Any]:
    drill, counting = Drill("gqa"), counting_of(backbone_of("gqa"))
    former = PatchFormer(counting, shelf, rank, **options)
    former.watch(drill.paged)
    drill.paged.store = shelf
    return drill, former, counting


def test_a_prefill_gives_its_patch_without_a_forward_if_the_canonical_is_stored():
    shelf = PausableStore()
    drill, former, counting = loop_of(shelf)
    with former:
        for id in ("c0", "c1", "c2"):
            drill.make(id)
        shelf.chunks["c2"] = drill.chunks["c2"]
        for id in ("c0", "c1", "c2"):
            drill.append(id)
        former.flush()
        # c0 stands alone: it is its own canonical; c1 has none stored; c2 has.
        assert counting.forwards == 1
        assert (former.done.patches, former.done.canonicals, former.done.forwards) == (2, 2, 1)
        assert not former.errors
    assert set(shelf.chunks) == {"c0", "c1", "c2"}
    patch = next(patch for patch in shelf.patches if patch.metadata.chunk == "c2")
    assert patch.metadata.behind.digest == drill.window.antecedent("c2").digest
    # Its rank is the whole deficit's, so that a recall by it is the prefill again.
    conditioned = rows_of(drill.paged, drill.window)
    drill.evict("c2")
    drill.paged.forget("c2")
    window, edits = drill.window.recall("c2", "patch", patch)
    counted = drill.paged.run(window, edits)
    drill.windows[""] = window
    for name, value in rows_of(drill.paged, window).items():
        assert np.abs(value - conditioned[name]).max() <= 1e-4 * np.abs(conditioned[name]).max()
    for kind in ("Fetch", "ApplyPatch"):
        said = sum(edit.bytes for edit in edits if type(edit).__name__ == kind)
        assert counted[kind].bytes <= said  # the shelf's patch is padded to a bucket, and says so
    assert counting.forwards == 1


def test_patches_of_evicted_pieces_are_still_formed():
    shelf = PausableStore()
    drill, former, _ = loop_of(shelf)
    for id in ("c0", "c1"):
        drill.append(id)
    former.flush()
    shelf.open.clear()
    drill.append("c2")
    wanted = {name: np.asarray(value)[:, 0] for name, value in drill.model.find("c2").kv.items()}
    antecedent = drill.window.antecedent("c2")
    drill.evict("c2")
    drill.append("c5")  # over its slots
    rows = rows_of(drill.paged, drill.window)
    shelf.open.set()
    former.close()
    assert not former.errors
    patch = next(patch for patch in shelf.patches if patch.metadata.chunk == "c2")
    chunk = shelf.chunks["c2"]
    found = kvp.apply_patch(kvp.Placed(chunk, patch, 0, antecedent))
    expected = kvp.to_engine(drill.backbone.layout, wanted, np.asarray(chunk.local)[: chunk.length], 0)
    for name, value in expected.items():
        given = np.asarray(found[name])[:, : chunk.length]
        assert np.abs(given - value).max() <= 1e-4 * np.abs(np.asarray(value)).max()
    for name, value in rows_of(drill.paged, drill.window).items():
        assert (value == rows[name]).all()
    former.close()
    drill.append("c3")  # a closed one takes nothing
    assert former.done.patches == 3


class LeadStore(PausableStore):
    """A store in memory that keeps canonicals of several leads apart."""

    def get(self, id, backbone, *, lead=None):
        return self.chunks.get((id, lead))

    def put(self, chunk):
        self.chunks[chunk.id, chunk.lead] = chunk

    def get_patches(self, served):
        return [patch for patch in super().get_patches(served) if patch.metadata.lead == served.lead]


@pytest.mark.slow
def test_canonicals_behind_a_lead_are_formed_stored_and_fetched_as_such():
    shelf, counting = LeadStore(), counting_of(backbone_of("gqa"))
    front = tokens_of(counting, 50, 5)
    executor = PagedExecutor(counting, 12, 8, np.float32, store=shelf, lead=front)
    window = Window.empty(Costs.of(counting, np.float32))
    with pytest.raises(ShapeError):
        PagedExecutor(counting, 12, 8, lead=front.take(0, 0))
    with PatchFormer(backbone_of("gqa"), shelf, 8, lead=front) as former:
        with pytest.raises(InputError, match="the former's"):
            former.watch(PagedExecutor(counting, 1, 8))
        former.warm_up([5])
        assert not shelf.chunks
        former.watch(executor)
        for id, tokens in (("system", front), ("c0", tokens_of(counting, 0, 5)), ("c1", tokens_of(counting, 1, 7))):
            executor.provide(id, tokens=tokens)
            window, edits = window.append(Entry.of_tokens(id, tokens, kind="text" if id == "system" else "chunk"))
            executor.run(window, edits)
        former.flush()
        assert not former.errors
        assert (former.done.forwards, former.done.canonicals, former.done.patches) == (2, 2, 2)
    assert set(shelf.chunks) == {("c0", executor.lead), ("c1", executor.lead)}
    # Behind the lead alone a chunk is what it is in the window, and its patch is nothing.
    chunk = shelf.chunks["c0", executor.lead]
    for name, value in executor.read(window, "c0").items():
        assert np.abs(np.asarray(chunk.kv[name])[:, :5] - value).max() <= 1e-5 * np.abs(value).max()

    conditioned = rows_of(executor, window)
    patch = next(patch for patch in shelf.patches if patch.metadata.chunk == "c1")
    window, edits = window.evict("c1")
    executor.run(window, edits)
    executor.forget("c1")
    window, edits = window.recall("c1", "patch", patch)
    executor.run(window, edits)
    for name, value in rows_of(executor, window).items():
        assert np.abs(value - conditioned[name]).max() <= 1e-4 * np.abs(conditioned[name]).max()
    with pytest.raises(PatchMismatchError, match="was prefilled behind lead None"):
        executor.provide("c0", chunk=canonical(counting, "c0", tokens_of(counting, 0, 5)))


def test_errors_are_kept_and_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(patch_former, "PENDING", 1)
    shelf = PausableStore()
    drill, former, _ = loop_of(shelf)
    shelf.broken = True
    drill.append("c0")
    former.flush()
    assert [type(error) for error in former.errors] == [OSError]
    shelf.broken = False
    shelf.open.clear()
    for id in ("c1", "c2", "c3", "c4"):
        drill.append(id)
    shelf.open.set()
    former.close()
    done = former.done
    assert done.dropped >= 2
    assert (done.failed, done.dropped + done.patches) == (1, 4)
    drill.compare()


@pytest.mark.slow
def test_texts_and_mismatched_chunks_are_skipped():
    shelf = PausableStore()
    drill, former, counting = loop_of(shelf)
    text = tokens_of(drill.backbone, 3, 8)
    drill.paged.provide("t", tokens=text)
    window, edits = drill.window.append(Entry.of_tokens("t", text))
    drill.paged.run(window, edits)
    # Another chunk is stored under this id.
    drill.make("c1")
    drill.make("c2")
    shelf.chunks["c1"] = drill.chunks["c2"]
    window, edits = window.append(Entry.of(drill.chunks["c1"]))
    drill.paged.run(window, edits)
    former.close()
    assert former.done.skipped == 1
    assert "c1" in str(former.errors[0])
    assert counting.forwards == 0
    with pytest.raises(InputError, match="the former's"):
        PatchFormer(backbone_of("mla"), shelf, 4).watch(drill.paged)


@pytest.mark.slow
def test_a_store_on_the_disk_recalls_what_traffic_formed(tmp_path):
    with kvp.ChunkStore(tmp_path / "store") as store:
        drill = Drill("gqa")
        drill.paged.store = store
        with PatchFormer(drill.backbone, store, 8) as former:
            former.watch(drill.paged)
            for id in ("c0", "c1", "c2"):
                drill.append(id)
            former.flush()
            assert not former.errors
        conditioned = rows_of(drill.paged, drill.window)
        target = drill.window.target("c2")
        drill.evict("c2")
        drill.paged.forget("c2")
        model, layout = drill.backbone.fingerprint, drill.backbone.layout
        metadata = PatchMetadata("c2", "canonical", target.ids, model, layout, (0, 1, 2), members=target.members)
        (patch,) = store.get_patches(metadata)
        window, edits = drill.window.recall("c2", "patch", patch)
        drill.paged.run(window, edits)
        for name, value in rows_of(drill.paged, window).items():
            assert np.abs(value - conditioned[name]).max() <= 1e-4 * np.abs(conditioned[name]).max()
