"""Snapshots and arrays of the version before the arrays were part of the Orbax item are read as they are."""

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from array_cases import import_arrays
from packed_cases import same_leaves, same_packed
from store_cases import same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, load_snapshot
from kvpatch_jax.store.snapshots.arrays import load_contents
from kvpatch_jax.store.snapshots.restore import load_objects
from tests.goldens import make_store as golden

sys.path.insert(0, str(Path(golden.__file__).parent))
ZIP = Path(golden.__file__).parent / "store" / "snapshots.zip"
SECRET, KEY = b"secret of the goldens", b"k" * 32
PACKED = kvp.encode_chunk(golden.BEHIND, "k4v4")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ZIP) as archive:
        archive.extractall(tmp_path / "made")
    return tmp_path / "made"


def opened(root: Path, **more) -> ChunkStore:
    return ChunkStore(root, tenant="two", budget=Budget(host=0), **more)


def check(store: ChunkStore, everything: bool) -> None:
    found = store.get("B", golden.BACKBONE, encoder=True)
    assert found is not None
    assert same_chunk(found, golden.CHUNK)
    assert found.encoder is not None
    assert np.array_equal(np.asarray(found.encoder), np.asarray(golden.CHUNK.encoder))
    assert same_packed(store.get("B", golden.BACKBONE, encoding="k4v4", lead=golden.LEAD), PACKED)
    for patch in golden.PATCHES:
        stored = store.get_patches(patch.metadata)
        assert sum(same_leaves(one.factors, patch.factors) for one in stored) == 1
    assert store.counters["quarantined"] == store.counters["newer"] == 0
    if everything:
        assert store.get("B", golden.BACKBONE, encoding="int8") is not None
        assert [str(entry.reference) for entry in StaticLibrary(store, quota=1).entries()] == ["TEXT#A"]
        assert [str(entry.reference) for entry in DynamicLibrary(store).entries()] == ["TOKENS#R@1"]


@pytest.mark.parametrize("word", ["snapshot", "step", "step/chunk_store", "export", "arrays"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_an_older_snapshot_and_older_arrays_are_restored(tmp_path: Path, made: Path, word: str, key: bytes | None):
    with opened(tmp_path / "root", key=key) as store:
        found = load_snapshot(made / word, tmp_path / "root", tenant="two", key=key)
        assert (found.objects, found.skipped, found.newer) == (6 if word == "arrays" else 9, 0, 0)
        check(store, word != "arrays")
        again = load_snapshot(made / word, tmp_path / "root", tenant="two", key=key)
        assert (again.objects, again.skipped) == (0, found.objects)


def test_an_older_checkpoint_is_loaded_by_orbax(tmp_path: Path, made: Path):
    with opened(tmp_path / "root") as store:
        assert import_arrays(made / "step", store).objects == 9
        check(store, True)


def test_older_objects_have_no_revision(tmp_path: Path, made: Path):
    with opened(tmp_path / "root") as store:
        load_objects(store.tenant_disk, str(made / "arrays"))
        found = store.disk.get(store.names.canonical(golden.BACKBONE, "B"))
        assert found is not None
        assert found.header.revision == 0


@pytest.mark.parametrize("word", ["export", "arrays"])
def test_older_arrays_are_loaded_without_a_store(made: Path, word: str):
    found = load_contents(str(made / word))
    chunks = {chunk.encoding: chunk for chunk in found.chunks}
    assert same_chunk(chunks[None], golden.CHUNK)
    assert same_packed(chunks["k4v4g32"], PACKED)
    assert [word for word, _ in found.reduced] == ([] if word == "arrays" else ["int8"])
    assert len(found.patches) == len(golden.PATCHES)


def test_an_older_encrypted_snapshot_of_a_whole_store_is_restored(tmp_path: Path, made: Path):
    load_snapshot(made / "sealed", tmp_path / "root", secret=SECRET)
    with ChunkStore(tmp_path / "root", tenant="one", secret=SECRET, key=KEY) as store:
        assert same_chunk(store.get("B", golden.BACKBONE), golden.CHUNK)
