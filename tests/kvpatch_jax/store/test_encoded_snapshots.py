"""Chunks and patches in few bits in snapshots, exports and checkpoints: codes and scales, bit for bit."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from array_cases import import_arrays, load_arrays, save_arrays
from packed_cases import few_bit_patch, ragged_patch, same_leaves, same_packed
from store_cases import BACKBONE, chunk_of, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.core import PackedArray
from kvpatch_jax.errors import InputError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, load_snapshot, save_snapshot
from kvpatch_jax.store.snapshots import orbax_item
from kvpatch_jax.store.snapshots.array_entries import ArrayEntry, chunk_of_entry, entry_of_chunk

CHUNK = chunk_of(tokens=40, hidden={1: np.ones((40, 5), np.float32)})
PACKED = kvp.encode_chunk(CHUNK, "k4v4")
BEHIND = kvp.encode_chunk(dataclasses.replace(CHUNK, lead="a lead"), "k6v3g16")
PATCHES = [few_bit_patch(PACKED), few_bit_patch(CHUNK, "int3"), ragged_patch(PACKED), ragged_patch(BEHIND, "int4")]


def filled(root: Path, **more: Any) -> ChunkStore:
    store = ChunkStore(root, budget=Budget(host=0), **more)
    store.put_many([CHUNK, PACKED, BEHIND])
    store.put_patches(PATCHES)
    return store


def check(store: ChunkStore) -> None:
    assert same_chunk(store.get("B", BACKBONE), CHUNK)
    assert same_packed(store.get("B", BACKBONE, encoding="k4v4"), PACKED)
    assert same_packed(store.get("B", BACKBONE, encoding="k6v3g16", lead="a lead"), BEHIND)
    for patch in PATCHES:
        found = store.get_patches(patch.metadata)
        assert any(one.metadata == patch.metadata and same_leaves(one.factors, patch.factors) for one in found)
    assert store.counters["quarantined"] == 0


@pytest.mark.parametrize("key", [None, b"k" * 32], ids=["plain", "sealed"])
@pytest.mark.parametrize("renamed", [False, True], ids=["same secret", "another secret"])
def test_a_snapshot_brings_them_back(tmp_path: Path, key, renamed):
    with filled(tmp_path / "one", key=key, secret=b"a secret of the first") as store:
        save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default", secret=b"a secret of the first")
    secret = b"a secret of another" if renamed else b"a secret of the first"
    load_snapshot(tmp_path / "snapshot", tmp_path / "two", tenant="default", secret=secret, key=key)
    with ChunkStore(tmp_path / "two", key=key, secret=secret, budget=Budget(host=0)) as store:
        check(store)


@pytest.mark.slow
def test_arrays_are_saved_as_planes_and_come_back_packed(tmp_path: Path):
    on_device = dataclasses.replace(PACKED, kv=jax.device_put(dict(PACKED.kv), jax.devices()[0]))
    save_arrays(tmp_path / "arrays", [on_device, BEHIND], PATCHES)
    for placement in (None, jax.devices()[0]):
        loaded = load_arrays(tmp_path / "arrays", placement)
        assert loaded.reduced == ()
        found = {chunk.encoding: chunk for chunk in loaded.chunks}
        assert same_packed(found["k4v4g32"], PACKED)
        assert same_packed(found["k6v3g16"], BEHIND)
        for value in found["k4v4g32"].kv.values():
            assert isinstance(value, PackedArray)
            assert isinstance(value.planes[0], np.ndarray if placement is None else jax.Array)
    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        assert import_arrays(tmp_path / "arrays", store).objects == 2 + len(PATCHES)
        store.put(CHUNK)
        check(store)
    with pytest.raises(InputError, match="decoded"):
        save_arrays(tmp_path / "decoded", [kvp.decode_chunk(PACKED)])
    assert not (tmp_path / "decoded").exists()


FORGED: dict[str, Any] = {
    "another encoding": lambda about, arrays: (about | {"body": about["body"] | {"encoding": "k2v2g32"}}, arrays),
    "another part": lambda about, arrays: (about | {"part": "kv.k8v8g32"}, arrays),
    "an unreduced part": lambda about, arrays: (about | {"part": "kv"}, arrays),
    "another group": lambda about, arrays: (about | {"body": about["body"] | {"groups": {"k": 20, "v": 32}}}, arrays),
    "a later encoding": lambda about, arrays: (about | {"body": about["body"] | {"encoding": "nf4"}}, arrays),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_export_is_refused_and_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case):
    entry = entry_of_chunk(PACKED)
    about, arrays = FORGED[case](dict(entry.about), dict(entry.arrays))
    with pytest.raises(kvp.errors.StoreError):
        chunk_of_entry(ArrayEntry(about, arrays))
    monkeypatch.setattr(orbax_item, "entries_of", lambda contents: [ArrayEntry(about, arrays)])
    save_arrays(tmp_path / "export")
    with pytest.raises(StoreSnapshotError):
        load_arrays(tmp_path / "export")
    with ChunkStore(tmp_path / "store", budget=Budget(host=0)) as store:
        if "group" not in case:
            with pytest.raises(StoreSnapshotError):
                import_arrays(tmp_path / "export", store)
            assert not list((tmp_path / "store").rglob("*.safetensors"))
        assert store.get("B", BACKBONE, encoding="k4v4") is None
