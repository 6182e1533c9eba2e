"""What surrounds a store: forks, other processes' deletions, permissions, folders that somebody removed, odd texts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from array_cases import export_arrays, load_arrays, save_arrays
from orbax.checkpoint import v1 as ocp
from store_cases import BACKBONE, chunk_of, file_of, patch_of, same_chunk

from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    DynamicLibrary,
    StaticLibrary,
    StoreItem,
    load_snapshot,
    save_snapshot,
)
from kvpatch_jax.store.format import encryption

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


# ------------------------------------------------------------------------------------------------------------- forks


# --------------------------------------------------------------------------------------------------------- deletions


# ------------------------------------------------------------------------------------------------------- permissions


@pytest.fixture(params=[0o000, 0o022], ids=["umask 000", "umask 022"])
def generous(request) -> Iterator[None]:
    before = os.umask(request.param)
    try:
        yield
    finally:
        os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """What others than the owner may read, write or enter."""
    every = [folder, *folder.rglob("*")]
    return [str(path.relative_to(folder)) for path in every if path.lstat().st_mode & 0o077]


@pytest.mark.usefixtures("generous")
def test_everything_that_is_made_is_its_owners_alone(tmp_path: Path):
    root = tmp_path / "root"
    with ChunkStore(root, budget=Budget(host=0)) as store:
        store.put(chunk_of())
        store.put(chunk_of("damaged"))
        store.put_patches([patch_of(chunk_of())])
        StaticLibrary(store, quota=1 << 20).put("A", "text")
        DynamicLibrary(store).publish("R", "first")
        path = file_of(store, chunk_of("damaged"))
        path.write_bytes(path.read_bytes()[:-1])
        assert store.get("damaged", BACKBONE) is None
        assert any((root / "quarantine").glob("*.reason"))
        export_arrays(store, tmp_path / "export")
        ocp.save_checkpointables(str(tmp_path / "step"), {"chunk_store": StoreItem(store)})
        save_arrays(tmp_path / "arrays", [chunk_of()], [patch_of(chunk_of())])
        store.delete_tenant()
        store.put(chunk_of())
    for copy in (False, True):
        save_snapshot(root, tmp_path / f"snapshot{copy}", tenant="default", copy=copy)
        load_snapshot(tmp_path / f"snapshot{copy}", tmp_path / f"into{copy}", tenant="default", copy=copy)
    for each in (
        "root",
        "export/chunk_store",
        "arrays/chunk_store",
        "snapshotFalse",
        "snapshotTrue",
        "intoFalse",
        "intoTrue",
    ):
        assert open_to_others(tmp_path / each) == [], each
    assert open_to_others(tmp_path / "step" / "chunk_store") == []
    (found,) = load_arrays(tmp_path / "arrays").chunks
    assert same_chunk(found, chunk_of())


# ---------------------------------------------------------------------------------------------------- large leaves


@pytest.mark.parametrize("change", ["swapped", "dropped", "moved"])
def test_pieces_of_a_leaf_cannot_be_exchanged(tmp_path: Path, monkeypatch, change: str):
    from kvpatch_jax.store.format.buffers import Buffers
    from kvpatch_jax.store.format.objects import Blob, blob_bytes, read_header, read_leaves

    monkeypatch.setattr(encryption, "MOST", 64)
    chunk = chunk_of(tokens=5)
    with ChunkStore(tmp_path, key=KEY, budget=Budget(host=0)) as store:
        store.put(chunk)
        path = file_of(store, chunk)
        with path.open("rb") as file:
            header = read_header(file.fileno())
            arrays = read_leaves(file.fileno(), header, list(header.leaves), Buffers())
        if change == "swapped":
            arrays["sealed.2.0"], arrays["sealed.2.1"] = arrays["sealed.2.1"], arrays["sealed.2.0"]
        elif change == "dropped":
            del arrays[max(name for name in arrays if name.startswith("sealed.2."))]
        else:
            arrays["sealed.2.0"], arrays["sealed.3.0"] = arrays["sealed.3.0"], arrays["sealed.2.0"]
        path.write_bytes(blob_bytes(Blob("kv", header.body, arrays), path.name))
        assert store.get("B", BACKBONE) is None
        assert store.counters["quarantined"] == 1


# ----------------------------------------------------------------------------------------- folders that were removed


# ---------------------------------------------------------------------------------------------------------- odd texts

# --------------------------------------------------------------------------------------------------------- read-only


def test_a_system_without_fcntl_raises_a_typed_error():
    """A plain, typed error at import, and not the ImportError of some module far below."""
    program = """
import sys
sys.modules["fcntl"] = None
try:
    import kvpatch_jax.store
except ValueError as error:
    print(type(error).__name__, error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.startswith("StorePlatformError store: got a system without `fcntl`; expected a POSIX system"), told
