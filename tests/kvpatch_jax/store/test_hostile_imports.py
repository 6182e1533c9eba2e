"""Snapshots and exports that somebody made to mislead: typed errors, no memory beyond theirs, and nothing comes."""

import contextlib
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_cases import export_arrays
from orbax.checkpoint import v1 as ocp
from store_cases import BACKBONE, chunk_of, patch_of, same_chunk
from test_damage import VALUES, forged, places_of, replaced
from test_hostile_roots import directory, fifo, link, listening, sparse, within

from kvpatch_jax.errors import KVPatchError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, DynamicLibrary, StaticLibrary, load_snapshot, save_snapshot
from kvpatch_jax.store.format.header import crc32
from kvpatch_jax.store.snapshots.arrays import load_contents, text_digest
from kvpatch_jax.store.snapshots.manifest import read_list, write_list
from kvpatch_jax.store.snapshots.restore import load_objects

CHUNK = chunk_of(encoder=np.ones(5, np.float32))


def filled(root: Path, key: bytes | None = None) -> ChunkStore:
    store = ChunkStore(root, tenant="one", key=key)
    store.put(CHUNK)
    store.put(CHUNK, encoding="int8")
    store.put_patches([patch_of(CHUNK)])
    StaticLibrary(store, quota=1 << 20).put("A", "text", vector=np.ones(3, np.float32))
    DynamicLibrary(store).publish("R", [1, 2, 3])
    return store


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshots")
    filled(folder / "root").close()
    save_snapshot(folder / "root", folder / "snapshot", copy=True)
    return folder / "snapshot"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    with filled(folder / "root") as store:
        export_arrays(store, folder / "export")
    return folder / "export" / "chunk_store"


def load_arrays(directory: Path) -> None:
    load_contents(str(directory))


def nothing_came(root: Path) -> bool:
    return not list(root.rglob("*.safetensors"))


# --------------------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("make", [fifo, link, directory, listening, sparse], ids=lambda make: make.__name__)
@pytest.mark.parametrize("place", ["MANIFEST", "STORE.json", "entry"])
def test_irregular_files_in_a_snapshot_are_refused(tmp_path: Path, snapshot: Path, make, place: str):
    mine = tmp_path / "snapshot"
    shutil.copytree(snapshot, mine)
    path = mine / place
    if place == "canonical":
        path = next(mine.rglob("*.kv.safetensors"))
    elif place == "entry":
        path = next(mine.rglob("*.entry.safetensors"))
    make(path)
    if place == "STORE.json":  # alone it would be mended from its copy
        make(mine / "STORE.copy.json")
    with within(60), pytest.raises(KVPatchError, match="expected"):
        load_snapshot(mine, tmp_path / "other", tenant="one")
    assert nothing_came(tmp_path / "other")


def test_lists_made_to_mislead_are_refused(tmp_path: Path, snapshot: Path):
    mine = tmp_path / "snapshot"
    shutil.copytree(snapshot, mine)
    good = read_list(str(mine / "MANIFEST"))
    rng = random.Random(2)
    few = {**good, "objects": good["objects"][:2]}
    for trial in range(150):
        tree = replaced(few, rng.choice(places_of(few)), rng.choice(VALUES))
        (mine / "MANIFEST").unlink()
        try:
            write_list(str(mine / "MANIFEST"), tree)
        except ValueError:  # no JSON
            write_list(str(mine / "MANIFEST"), None)
        try:
            load_snapshot(mine, tmp_path / f"other{trial}", tenant="one")
        except KVPatchError:
            assert nothing_came(tmp_path / f"other{trial}"), tree
        shutil.rmtree(tmp_path / f"other{trial}", ignore_errors=True)


@pytest.mark.slow
def test_forged_objects_in_a_snapshot_come_whole_or_not_at_all(tmp_path: Path, snapshot: Path):
    """With all checksums made right, those of the list too, so that only what the objects say can give them away."""
    mine = tmp_path / "snapshot"
    shutil.copytree(snapshot, mine)
    listed, rng = read_list(str(mine / "MANIFEST")), random.Random(3)
    originals = {path: (mine / path).read_bytes() for path, _, _ in listed["objects"]}
    for trial in range(60):
        path = rng.choice(sorted(originals))
        raw = forged(originals[path], rng)
        (mine / path).write_bytes(raw)
        start = 8 + int.from_bytes(raw[:8], "little")
        objects = [[path, len(raw), f"{crc32(raw[:start]):08x}"]]
        (mine / "MANIFEST").unlink()
        write_list(str(mine / "MANIFEST"), {"version": 1, "scope": "tenant", "objects": objects})
        other = tmp_path / f"other{trial}"
        for tenant in ("one", "two"):  # whose objects get other names
            tracemalloc.start()
            try:
                load_snapshot(mine, other, tenant=tenant)
            except KVPatchError:
                pass
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < (64 << 20), raw[:start].rstrip()[-2000:]
        (mine / path).write_bytes(originals[path])
        shutil.rmtree(other, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------- exports


def rewritten(export: Path, target: Path, change: Callable[[list[dict[str, Any]]], Any]) -> Path:
    """The export with other descriptions of its objects, their digest made right."""
    part = export / "part-00000"
    found = {word: ocp.load(str(part / word), checkpointable_name=None) for word in ("objects", "arrays")}
    tree = json.loads(found["objects"]["json"].tobytes())
    text = json.dumps({"version": 2, "objects": change(tree["objects"])}).encode()
    about = {"json": np.frombuffer(text, np.uint8), "digest": np.frombuffer(text_digest(text), np.uint8)}
    target.mkdir()
    shutil.copy(export / "EXPORT", target / "EXPORT")
    ocp.save_checkpointables(str(target / "part-00000"), {"objects": about, "arrays": found["arrays"]})
    return target


def attempt(export: Path, root: Path) -> int:
    """Loads it and imports it. How many bytes at most were traced."""
    tracemalloc.start()
    try:
        with within(120):
            for call in (lambda: load_arrays(export), lambda: imported(export, root)):
                with contextlib.suppress(KVPatchError):
                    call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def imported(export: Path, root: Path) -> None:
    with ChunkStore(root, tenant="two", budget=Budget(library=1 << 20), key=b"k" * 32) as store:
        load_objects(store.tenant_disk, str(export))


@pytest.mark.slow
def test_forged_descriptions_in_an_export_are_typed_errors(tmp_path: Path, export: Path):
    rng = random.Random(4)
    for trial in range(12):

        def change(objects: list[dict[str, Any]]) -> Any:
            return replaced(objects, rng.choice(places_of(objects)), rng.choice(VALUES))

        try:
            mine = rewritten(export, tmp_path / f"mine{trial}", change)
        except UnicodeEncodeError:
            continue
        assert attempt(mine, tmp_path / f"root{trial}") < 256 << 20
        shutil.rmtree(mine)
        shutil.rmtree(tmp_path / f"root{trial}", ignore_errors=True)


@pytest.mark.parametrize("kind", ["kv", "entry"])
def test_a_small_export_asks_for_no_more_than_it_holds(tmp_path: Path, export: Path, kind: str):
    """Arrays that the description and the array files themselves say are of 32 GiB."""
    target = tmp_path / "mine"

    def change(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (one,) = [each for each in objects if each["kind"] == kind and each["part"] in ("kv", "entry")][:1]
        name = next(iter(one["arrays"]))
        one["arrays"][name] = ["U8", [32 << 30], 0]
        return [one]

    rewritten(export, target, change)
    with within(120):
        for call in (lambda: load_arrays(target), lambda: imported(target, tmp_path / "root")):
            tracemalloc.start()
            try:
                with pytest.raises(StoreSnapshotError, match="expected"):
                    call()
                assert tracemalloc.get_traced_memory()[1] < 256 << 20
            finally:
                tracemalloc.stop()
    assert nothing_came(tmp_path / "root")


def test_the_originals_come_in(tmp_path: Path, export: Path, snapshot: Path):
    load_snapshot(snapshot, tmp_path / "one", tenant="one")
    imported(export, tmp_path / "two")
    for root, tenant, key in ((tmp_path / "one", "one", None), (tmp_path / "two", "two", b"k" * 32)):
        with ChunkStore(root, tenant=tenant, key=key) as store:
            assert same_chunk(store.get(CHUNK.id, BACKBONE), CHUNK)
    assert os.listdir(tmp_path / "one" / "tmp") == []
