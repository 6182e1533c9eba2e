"""What surrounds a store: forks, other processes' deletions, permissions, folders that somebody removed, odd texts."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from array_cases import export_arrays, load_arrays, save_arrays
from failing_system import read_only
from orbax.checkpoint import v1 as ocp
from store_cases import BACKBONE, chunk_of, file_of, patch_of, same_chunk
from store_processes import processes, wait_until

from kvpatch_jax.errors import InputError, StoreKeyError
from kvpatch_jax.store import (
    Budget,
    ChunkStore,
    DynamicLibrary,
    PatchKey,
    StaticLibrary,
    StoreItem,
    chunk_id,
    encoder_id,
    load_snapshot,
    save_snapshot,
)
from kvpatch_jax.store.cli.main import main
from kvpatch_jax.store.format import encryption
from kvpatch_jax.store.tenants import delete_tenant

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


# ------------------------------------------------------------------------------------------------------------- forks


def test_a_forked_process_puts_asynchronously_too(tmp_path: Path):
    """Threads do not follow into it: what was queued is its parent's to write, and it begins with an empty queue."""
    process = processes().start("fork_queue", tmp_path / "store")
    wait_until(lambda: len(process.spoken.split("\n")) > 2 or bool(process.error), 120)
    assert process.error == ""
    said = dict(line.split(" ", 1) for line in process.spoken.split("\n") if line)
    assert said == {"child": "True True StoreClosedError", "parent": "True True"}


# --------------------------------------------------------------------------------------------------------- deletions


def test_a_tenant_deleted_by_another_process_keeps_its_key_check(tmp_path: Path):
    """Another process's deletion takes KEY away; whoever puts next brings it back before its object can be seen."""
    with ChunkStore(tmp_path, key=KEY) as mine, ChunkStore(tmp_path, key=KEY) as another:
        mine.put(chunk_of())
        another.delete_tenant()
        mine.put(chunk_of())
        assert (tmp_path / mine.names.space / "KEY").exists()
        another.delete_tenant()
        StaticLibrary(mine, quota=1 << 20).put("A", "text")
        assert (tmp_path / mine.names.space / "KEY").exists()
    with pytest.raises(StoreKeyError, match="another key"):
        ChunkStore(tmp_path, key=OTHER_KEY)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_a_put_fails_if_another_key_was_used_in_the_meantime(tmp_path: Path, key: bytes | None):
    with ChunkStore(tmp_path, key=key) as mine:
        mine.put(chunk_of())
        with ChunkStore(tmp_path, key=key) as another:
            another.delete_tenant()
        with ChunkStore(tmp_path, key=OTHER_KEY) as third:
            third.put(chunk_of("theirs"))
            with pytest.raises(StoreKeyError, match="expected the one of this tenant's objects"):
                mine.put(chunk_of())
            assert same_chunk(third.get("theirs", BACKBONE), chunk_of("theirs"))


def test_a_deletion_between_the_check_and_the_put_leaves_a_key_check(tmp_path: Path, monkeypatch):
    """The one moment at which only the lock helps; another process deletes, which does not know our order."""
    with ChunkStore(tmp_path, key=KEY) as mine:
        mine.put(chunk_of())
        make_room = mine.tenant_disk.make_room
        deletions = [functools.partial(delete_tenant, mine.disk, mine.names)]
        monkeypatch.setattr(
            mine.tenant_disk, "make_room", lambda size: [deletions.pop()() for _ in deletions[:]] and make_room(size)
        )
        mine.put(chunk_of())
        assert (tmp_path / mine.names.space / "KEY").exists()
        assert same_chunk(mine.get("B", BACKBONE), chunk_of())


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


@pytest.mark.parametrize("most", [1, 100, 639])
def test_leaves_beyond_the_ciphers_limit_are_encrypted_in_pieces(tmp_path: Path, monkeypatch, most: int):
    """As 2 GiB and more would be; a file that was written in one piece or in other ones is read all the same."""
    chunk = chunk_of(tokens=5, encoder=np.ones((3, 7), np.float32))
    with ChunkStore(tmp_path, key=KEY, budget=Budget(host=0)) as store:
        store.put(chunk_of("whole"))
        with monkeypatch.context() as patched:
            patched.setattr(encryption, "MOST", most)
            store.put(chunk)
            store.put_patches([patch_of(chunk)])
            assert same_chunk(store.get("whole", BACKBONE), chunk_of("whole"))
        assert same_chunk(store.get("B", BACKBONE), chunk)
        layers = store.stream("B", BACKBONE)
        assert layers is not None
        assert all(np.array_equal(values["k"], chunk.kv["k"][layer]) for layer, values in layers)
        assert len(store.get_patches(patch_of(chunk).metadata)) == 1
        assert store.counters["quarantined"] == 0
        assert b"sealed.2.1=" in file_of(store, chunk).read_bytes()
    with pytest.raises(StoreKeyError):
        ChunkStore(tmp_path, key=OTHER_KEY)


def test_piece_sizes_are_within_the_ciphers_limit():
    assert 0 < encryption.MOST <= 2**31 - 1 - 16


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


@pytest.mark.parametrize("folder", ["tmp", "quarantine", "obj", "lib"])
def test_a_removed_folder_is_created_again(tmp_path: Path, folder: str):
    with ChunkStore(tmp_path, budget=Budget(host=0)) as store:
        store.put(chunk_of())
        StaticLibrary(store, quota=1 << 20).put("A", "text")
        shutil.rmtree(tmp_path / folder)
        store.put(chunk_of())
        store.put_patches([patch_of(chunk_of()), patch_of(chunk_of(), rank=1)])
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        shutil.rmtree(tmp_path / "tmp")
        StaticLibrary(store, quota=1 << 20).put("B", "text")
        path = file_of(store, chunk_of())
        path.write_bytes(path.read_bytes()[:-1])
        assert store.get("B", BACKBONE) is None
        assert len(list((tmp_path / "quarantine").glob("*.kv.safetensors"))) == 1
        shutil.rmtree(tmp_path / "tmp")
        store.collect()


# ---------------------------------------------------------------------------------------------------------- odd texts

LONE = "\ud800"


def test_texts_that_no_file_can_hold_are_refused_by_name(tmp_path: Path):
    with ChunkStore(tmp_path) as store:
        files = StaticLibrary(store, quota=1 << 20)
        for call in (
            lambda: chunk_id("model", LONE),
            lambda: chunk_id(LONE, "text"),
            lambda: encoder_id("model", {LONE: np.ones(3)}),
            lambda: encoder_id(LONE, {"pixels": np.ones(3)}),
            lambda: store.get(LONE, BACKBONE),
            lambda: store.get("B", LONE),
            lambda: store.put(chunk_of(LONE)),
            lambda: store.put_async(chunk_of(LONE)),
            lambda: store.delete(LONE, BACKBONE),
            lambda: store.contains(LONE, BACKBONE),
            lambda: store.stream(LONE, BACKBONE),
            lambda: store.get_patches(PatchKey(LONE, BACKBONE, ("A",))),
            lambda: store.put_patches([patch_of(chunk_of(LONE))]),
            lambda: files.put("A", LONE),
            lambda: files.put(LONE, "text"),
            lambda: ChunkStore(tmp_path, tenant=LONE),
            lambda: ChunkStore(tmp_path, tenant=LONE, key=KEY),
        ):
            with pytest.raises(InputError, match="expected"):
                call()
        assert not list(tmp_path.rglob("*.safetensors"))
        store.flush()


def test_the_command_line_refuses_them_too(tmp_path: Path, capsys):
    ChunkStore(tmp_path).close()
    assert main(["ls", f"--root={tmp_path}", f"--tenant={LONE}"]) == 2
    assert "expected" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- read-only


def test_verify_reports_damaged_objects_that_could_not_be_moved(tmp_path: Path, capsys):
    with ChunkStore(tmp_path) as store:
        store.put(chunk_of())
        path = file_of(store, chunk_of())
    path.write_bytes(path.read_bytes()[:-1])
    with read_only():
        assert main(["verify", f"--root={tmp_path}"]) == 1
        said = capsys.readouterr().out
        assert "in quarantine: " not in said
        assert f"bad, left where it is: {path.relative_to(tmp_path)}" in said
        assert main(["verify", f"--root={tmp_path}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["bad"], found["left"]) == ([], [str(path.relative_to(tmp_path))])
    assert path.exists()


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
