"""An object of another version of the format is a miss and stays as it is; other files of one are a typed error."""

import json
from pathlib import Path

import numpy as np
import pytest
from store_cases import BACKBONE, chunk_of, file_of, patch_of, rewritten, same_chunk

from kvpatch_jax.errors import StoreSnapshotError, StoreVersionError
from kvpatch_jax.store import Budget, ChunkStore, KeyValueStore, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.snapshots.manifest import read_list, write_list

CHUNK = chunk_of()
PATCH = patch_of(CHUNK)


def of_another_version(raw: bytes) -> bytes:
    return rewritten(raw, lambda tree, body: tree["__metadata__"].update(version="99"))


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "root", budget=Budget(host=0)) as store:
        store.put(CHUNK)
        store.put_encoder("B", BACKBONE, np.ones((3, 7), np.float32))
        store.put_patches([PATCH])
        yield store


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.safetensors")}


def test_objects_are_misses_that_stay_and_that_a_put_replaces(store: ChunkStore):
    root = Path(store.disk.root)
    for path in root.rglob("*.safetensors"):
        path.write_bytes(of_another_version(path.read_bytes()))
    before = files_of(root)
    assert store.get("B", BACKBONE) is None
    assert store.get_encoder("B", BACKBONE) is None
    assert not store.get_patches(PATCH.metadata)
    assert store.stream("B", BACKBONE) is None
    store.collect()
    assert files_of(root) == before
    assert store.counters["other_format"] >= 4
    assert store.counters["quarantined"] == 0

    store.put(CHUNK)
    assert same_chunk(store.get("B", BACKBONE), CHUNK)


def test_a_library_entry_is_a_miss_that_stays(store: ChunkStore):
    library = StaticLibrary(store, quota=1 << 20)
    library.put("PAGE", "a text")
    (path,) = Path(store.disk.root).glob("lib/*/static/*/*.safetensors")
    path.write_bytes(raw := of_another_version(path.read_bytes()))
    assert library.get("TEXT", "PAGE") is None
    assert library.entries() == []
    assert path.read_bytes() == raw


def test_operators_see_them_and_nothing_moves_them(store: ChunkStore, capsys: pytest.CaptureFixture[str]):
    path = file_of(store, CHUNK)
    path.write_bytes(raw := of_another_version(path.read_bytes()))
    assert main(["verify", f"--root={store.disk.root}", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["unreadable"] == [str(path.relative_to(store.disk.root))]
    assert path.read_bytes() == raw


def test_a_snapshot_leaves_them_out(store: ChunkStore, tmp_path: Path):
    path = file_of(store, CHUNK)
    path.write_bytes(of_another_version(path.read_bytes()))
    saved = save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
    assert (saved.objects, saved.skipped, saved.damaged) == (2, 1, 0)
    assert load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="default").objects == 2


@pytest.mark.parametrize("copy", [False, True])
def test_a_snapshot_with_one_is_refused(store: ChunkStore, tmp_path: Path, copy: bool):
    save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default", copy=True)
    path = tmp_path / "snapshot" / file_of(store, CHUNK).relative_to(store.disk.root)
    path.write_bytes(of_another_version(path.read_bytes()))
    with pytest.raises(StoreSnapshotError, match="1 of 3 objects"):
        load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="default", copy=copy)


def test_a_manifest_of_another_version_is_a_typed_error(store: ChunkStore, tmp_path: Path):
    save_snapshot(store.disk.root, tmp_path / "snapshot", tenant="default")
    path = tmp_path / "snapshot" / "MANIFEST"
    tree = read_list(str(path))
    path.unlink()
    write_list(str(path), tree | {"version": 99})
    with pytest.raises(StoreSnapshotError, match="expected version 1"):
        load_snapshot(tmp_path / "snapshot", tmp_path / "other", tenant="default")


def test_remote_objects_are_misses_that_stay(tmp_path: Path):
    remote = KeyValueStore({"driver": "file", "path": f"{tmp_path}/remote/"})
    with ChunkStore(tmp_path / "root", remote=remote, secret=b"s" * 32) as store:
        store.put(CHUNK)
        store.flush()
        name = file_of(store, CHUNK).relative_to(store.disk.root)
    path = tmp_path / "remote" / name
    path.write_bytes(raw := of_another_version(path.read_bytes()))
    with ChunkStore(tmp_path / "other", remote=remote, secret=b"s" * 32) as store:
        assert store.get("B", BACKBONE) is None
        assert store.counters["other_format"] == 1
        with pytest.raises(StoreVersionError):
            remote.open(store.names.canonical(BACKBONE, "B"))
    assert path.read_bytes() == raw
