"""Canonicals formed behind a pinned lead: what they hold, and that none is taken for one formed alone."""
# pyright: reportArgumentType=false

from pathlib import Path

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.cache import patch_digest
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError, StoreError
from kvpatch_jax.models import load
from kvpatch_jax.store import ChunkStore, PatchKey, Request, fetch
from tests.shared.operator_cases import chunk_of, conditioned_of

LEAD, OTHER, UNIT = [[5, 6, 7, 8]], [[5, 6, 7, 9]], [[11, 12, 13]]
DIGEST = "a lead"


@pytest.fixture(scope="module")
def backbone():
    return load(Path(__file__).parents[2] / "evals" / "trained" / "documents" / "qwen2_5_vl", dtype="float32")


@pytest.fixture
def store(tmp_path):
    with ChunkStore(tmp_path / "root", memory=0) as own:
        yield own


def near(found, wanted) -> bool:
    return all(np.allclose(found[name], wanted[name], atol=2e-5) for name in wanted)


# ---------------------------------------------------------------------------------------------------------- forming


def test_a_canonical_behind_a_lead_is_what_one_prompt_of_both_holds(backbone):
    whole = backbone.prefill(backbone.embed(**backbone.prepare([LEAD[0] + UNIT[0]]))).kv
    chunk = kvp.make_chunk(backbone, UNIT, lead=LEAD)
    assert near(chunk.kv, {name: value[:, 0, len(LEAD[0]) :] for name, value in whole.items()})
    alone = kvp.make_chunk(backbone, UNIT)
    assert not near(chunk.kv, alone.kv)
    assert (np.asarray(chunk.local) == np.asarray(alone.local)).all()  # from its own start
    assert (chunk.span, chunk.length, alone.lead) == (alone.span, alone.length, None)


@pytest.mark.nightly
def test_conditioned_kv_includes_the_lead(backbone):
    tokens = [backbone.embed(**backbone.prepare([ids])) for ids in (LEAD[0], [21, 22], UNIT[0])]
    behind = backbone.prefill(backbone.embed(**backbone.prepare([LEAD[0] + [21, 22] + UNIT[0]]))).kv
    for lead in (LEAD, tokens[0]):
        found = kvp.conditioned(backbone, [[[21, 22]], UNIT], lead=lead)
        assert len(found) == 2
        assert near(found[1], {name: value[:, 0, 6:] for name, value in behind.items()})
    rows = [Tokens(*(None if part is None else np.repeat(part, 2, axis=0) for part in own)) for own in tokens[1:]]
    found = kvp.conditioned(backbone, rows, lead=tokens[0])[1]
    for row in range(2):
        assert near({name: value[:, row] for name, value in found.items()}, {n: v[:, 0, 6:] for n, v in behind.items()})


@pytest.mark.nightly
def test_the_lead_is_part_of_a_chunks_identity(backbone):
    alone, behind, other = (kvp.make_chunk(backbone, UNIT, lead=lead) for lead in (None, LEAD, OTHER))
    assert len({chunk.id for chunk in (alone, behind, other)}) == 3
    assert len({chunk.content for chunk in (alone, behind, other)}) == 3
    assert len({chunk.lead for chunk in (alone, behind, other)}) == 3
    tokens = backbone.embed(**backbone.prepare(LEAD))
    again = kvp.make_chunk(backbone, UNIT, lead=tokens)
    assert (again.id, again.lead) == (behind.id, behind.lead)
    assert behind.pad(9).lead == behind.lead
    with pytest.raises(ShapeError, match="lead: got 2 rows; expected one"):
        kvp.make_chunk(backbone, UNIT, lead=Tokens(*(np.repeat(part, 2, axis=0) for part in tokens[:2])))
    with pytest.raises(InputError, match="lead: got no items; expected"):
        kvp.make_chunk(backbone, UNIT, lead=[])
    with pytest.raises(InputError, match="lead ''; expected"):
        chunk_of("gqa", lead="")


def test_a_patch_of_one_lead_is_refused_by_another():
    alone, behind = (chunk_of("gqa", content="same", lead=lead) for lead in (None, DIGEST))
    patches = [kvp.form_patch(chunk, conditioned_of(chunk), 4, ["A"]) for chunk in (alone, behind)]
    assert len({patch_digest(patch) for patch in patches}) == 2
    for chunk, patch in ((alone, patches[1]), (behind, patches[0])):
        with pytest.raises(PatchMismatchError, match=r"lead .*expected"):
            kvp.apply_patch(chunk, patch, 3, ["A"], allow_stale=True)
        acc = kvp.accumulate(None, conditioned_of(chunk), chunk, ["A"])
        with pytest.raises(PatchMismatchError, match="lead"):
            kvp.accumulate(acc, conditioned_of(chunk), alone if chunk is behind else behind, ["A"])


# ---------------------------------------------------------------------------------------------------------- keeping


def both(**more) -> tuple[kvp.Chunk, kvp.Chunk]:
    """One id, alone and behind a lead; other numbers."""
    return chunk_of("gqa", id="page", **more), chunk_of("gqa", seed=1, id="page", lead=DIGEST, **more)


def same(found: kvp.Chunk | None, chunk: kvp.Chunk) -> bool:
    if found is None:
        return False
    right = all(np.asarray(found.kv[name]).tobytes() == np.asarray(chunk.kv[name]).tobytes() for name in chunk.kv)
    return right and (found.lead, found.content) == (chunk.lead, chunk.content)


def test_canonicals_of_different_leads_are_never_confused(store):
    alone, behind = both()
    store.put(alone)
    assert store.get("page", "tiny", lead=DIGEST) is None
    assert not store.contains("page", "tiny", lead=DIGEST)
    store.put(behind)
    store.put(behind, encoding="k8v8")
    for chunk in (alone, behind):
        assert same(store.get("page", "tiny", lead=chunk.lead), chunk)
    reduced = store.get("page", "tiny", lead=DIGEST, encoding="k8v8")
    assert reduced is not None
    assert reduced.lead == DIGEST
    assert store.get("page", "tiny", encoding="k8v8") is None
    assert store.get("page", "tiny", lead="another") is None
    assert store.usage().count == 3
    assert store.delete("page", "tiny")
    assert store.usage().count == 0


def test_patches_of_different_leads_are_kept_apart(store):
    chunks = both()
    patches = [kvp.form_patch(chunk, conditioned_of(chunk), 4, ["A"]) for chunk in chunks]
    store.put_patches(patches)
    for chunk, patch in zip(chunks, patches, strict=True):
        store.put(chunk)
        (found,) = store.get_patches(PatchKey("page", "tiny", ["A"], lead=chunk.lead))
        assert patch_digest(found) == patch_digest(patch)
        kvp.apply_patch(chunk, found, 0, ["A"])
    store.put_patches([kvp.form_patch(chunks[1], conditioned_of(chunks[1]), 2, [chunk_of("gqa", id="A", content="c")])])
    store.put(chunk_of("gqa", id="A", content="other"))  # alone: not what stood in front, behind the lead
    assert len(store.get_patches(PatchKey("page", "tiny", ["A"], lead=DIGEST))) == 2
    store.put(chunk_of("gqa", id="A", content="other", lead=DIGEST))
    assert len(store.get_patches(PatchKey("page", "tiny", ["A"], lead=DIGEST))) == 1


def test_fetching_asks_for_one_lead(store):
    alone, behind = both()
    asked = Request("page", "tiny", lead=DIGEST)
    store.put(alone)
    with pytest.raises(StoreError, match="0 of them as requested"):
        fetch(store, [asked], lambda misses: [alone for _ in misses])
    (found,) = fetch(store, [asked], lambda misses: [behind for _ in misses])
    assert found.source == "computed"
    store.flush()
    found = fetch(store, [asked, Request("page", "tiny")], lambda _: pytest.fail("both are there"))
    assert [each.chunk.lead for each in found] == [DIGEST, None]


def test_a_lead_survives_snapshots(store, tmp_path):
    alone, behind = both()
    store.put_many([alone, behind])
    store.save(tmp_path / "snapshot")
    with ChunkStore(tmp_path / "other") as other:
        other.restore(tmp_path / "snapshot")
        assert same(other.get("page", "tiny", lead=DIGEST), behind)
        assert same(other.get("page", "tiny"), alone)
        assert other.verify() == []
