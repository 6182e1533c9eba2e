"""The store in Orbax checkpoints, and its objects as Orbax arrays: bit for bit, verified, over a mesh too."""

import json
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from array_cases import export_arrays, import_arrays, save_arrays
from orbax.checkpoint import v1 as ocp
from store_cases import BACKBONE, MLA, PYTHON, child_environment, chunk_of, file_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.errors import StoreFullError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, PatchKey, StoreItem, make_durable
from kvpatch_jax.store.snapshots import arrays as orbax_arrays

SERVED = PatchKey("B", BACKBONE, ("A",))
MODEL = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3)}


def opened(root: Path, tenant: str = "one", **more) -> ChunkStore:
    return ChunkStore(root, tenant=tenant, budget=Budget(host=0, **more))


def fill(store: ChunkStore) -> None:
    """Every dtype and kind of object."""
    chunk = chunk_of(encoder=np.ones((4, 6), np.float32), hidden={1: np.full((9, 8), 0.5, np.float32)})
    store.put(chunk)
    for encoding in ("int8", "float8_e4m3fn", "float8_e5m2", "float16"):
        store.put(chunk, encoding=encoding)
    store.put(chunk_of("bf16", 3, layout=MLA, dtype=jnp.bfloat16))
    store.put_patches([patch_of(chunk)])
    store.put_encoder("none", BACKBONE, np.zeros((0, 6), np.float32))


def bytes_below(store: ChunkStore) -> dict[str, bytes]:
    return {entry.path: Path(store.disk.root, entry.path).read_bytes() for entry in store.disk.scan()}


def test_a_store_is_saved_and_loaded_beside_a_model(tmp_path: Path):
    with opened(tmp_path / "store") as store, opened(tmp_path / "other") as other:
        fill(store)
        ocp.save_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": StoreItem(store), "model": MODEL})
        make_durable(tmp_path / "checkpoint")
        item = StoreItem(other)
        found = ocp.load_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": item, "model": MODEL})
        assert same(found["model"]["weights"], MODEL["weights"])
        assert found["chunk_store"] is item
        assert same_chunk(other.get("B", BACKBONE), chunk_of())
        assert len(other.get_patches(SERVED)) == 1
        assert len(bytes_below(other)) == len(bytes_below(store))
        only_model = ocp.load_checkpointables(str(tmp_path / "checkpoint"), {"model": MODEL})
        assert same(only_model["model"]["weights"], MODEL["weights"])


def test_orbax_checkpointer_keeps_steps_of_a_store(tmp_path: Path):
    with opened(tmp_path / "store") as store, ocp.training.Checkpointer(str(tmp_path / "steps")) as checkpointer:
        store.put(chunk_of())
        checkpointer.save_checkpointables(0, {"chunk_store": StoreItem(store), "model": MODEL})
        store.put_async(chunk_of("later", 4))
        response = checkpointer.save_checkpointables_async(1, {"chunk_store": StoreItem(store, copy=True)})
        response.result()
        store.delete("B", BACKBONE)
        store.delete("later", BACKBONE)
        checkpointer.load_checkpointables(0, {"chunk_store": StoreItem(store)})
        assert same_chunk(store.get("B", BACKBONE), chunk_of())
        assert store.get("later", BACKBONE) is None
        checkpointer.load_checkpointables(1, {"chunk_store": StoreItem(store, copy=True)})
        assert same_chunk(store.get("later", BACKBONE), chunk_of("later", 4))


def test_a_damaged_checkpoint_loads_nothing(tmp_path: Path):
    with opened(tmp_path / "store") as store, opened(tmp_path / "other") as other:
        fill(store)
        item = StoreItem(store, copy=True)
        ocp.save_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": item})
        file = tmp_path / "checkpoint" / "chunk_store" / file_of(store, chunk_of()).relative_to(tmp_path / "store")
        raw = bytearray(file.read_bytes())
        raw[-100] ^= 4
        file.write_bytes(raw)
        with pytest.raises(StoreSnapshotError) as caught:
            ocp.load_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": StoreItem(other)})
        assert len(caught.value.bad) == 1
        assert bytes_below(other) == {}
        ocp.load_checkpointables(str(tmp_path / "checkpoint"), {"chunk_store": StoreItem(other, skip_damaged=True)})
        assert len(bytes_below(other)) == len(bytes_below(store)) - 1


@pytest.mark.slow
def test_export_and_import_are_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same file, byte for byte, where the names are the same; every dtype and kind, in several parts."""
    with opened(tmp_path / "store") as store:
        fill(store)
        before = bytes_below(store)
        monkeypatch.setattr(orbax_arrays, "PART_BYTES", 5_000)
        made = export_arrays(store, tmp_path / "export")
        assert made.objects == len(before) == 9
        assert len(list((tmp_path / "export" / "chunk_store").glob("part-*"))) > 2
        again = import_arrays(tmp_path / "export", store)
        assert (again.objects, again.skipped) == (0, 9)
        for chunk in ("B", "bf16", "none"):
            store.delete(chunk, BACKBONE)
        assert bytes_below(store) == {}
        assert import_arrays(tmp_path / "export", store).objects == 9
        assert bytes_below(store).keys() == before.keys()  # with later revisions, because they were deleted before
        for chunk in ("B", "bf16", "none"):
            assert store.delete(chunk, BACKBONE)
    with ChunkStore(tmp_path / "fresh", tenant="one", secret=store.names.secret, budget=Budget(host=0)) as fresh:
        assert import_arrays(tmp_path / "export", fresh).objects == 9
        assert bytes_below(fresh) == before
    with opened(tmp_path / "other", "two") as other:
        import_arrays(tmp_path / "export", other)
        assert same_chunk(other.get("bf16", BACKBONE), chunk_of("bf16", 3, layout=MLA, dtype=jnp.bfloat16))
        assert len(other.get_patches(SERVED)) == 1


def flip(folder: Path, needle: bytes) -> bool:
    """Flips a bit where these bytes are in a file below a folder. Whether they were found."""
    for path in folder.rglob("*"):
        raw = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        if needle in raw:
            raw[raw.index(needle)] ^= 1
            path.write_bytes(raw)
            return True
    return False


def opening(chunk: kvp.Chunk) -> bytes:
    return np.asarray(chunk.kv["k"]).tobytes()[:64]


@pytest.mark.parametrize("needle", [opening(chunk_of("B0")), b'"kind":"kv"'], ids=["payload", "list"])
def test_bit_flips_in_exported_arrays_are_detected(tmp_path: Path, needle: bytes):
    """Orbax loads a flipped payload as it is."""
    save_arrays(tmp_path / "export", [chunk_of(f"B{number}", number) for number in range(8)])
    assert flip(tmp_path / "export", needle)
    with opened(tmp_path / "store") as store:
        with pytest.raises(StoreSnapshotError):
            import_arrays(tmp_path / "export", store)
        assert bytes_below(store) == {}


def test_a_failed_import_removes_the_objects_that_it_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chunks = [chunk_of(f"B{number}", number) for number in range(3)]
    with opened(tmp_path / "store") as store:
        for chunk in chunks:
            store.put(chunk)
        monkeypatch.setattr(orbax_arrays, "PART_BYTES", 1)
        export_arrays(store, tmp_path / "export")
        size = sum(len(raw) for raw in bytes_below(store).values())
    with opened(tmp_path / "small", disk=size - 1) as small:
        with pytest.raises(StoreFullError):
            import_arrays(tmp_path / "export", small)
        assert bytes_below(small) == {}
    assert sum(flip(tmp_path / "export" / "chunk_store" / "part-00002", opening(chunk)) for chunk in chunks) == 1
    with opened(tmp_path / "other") as other:
        with pytest.raises(StoreSnapshotError):
            import_arrays(tmp_path / "export", other)
        assert bytes_below(other) == {}


@pytest.mark.slow
def test_arrays_travel_between_meshes_of_eight_devices(tmp_path: Path):
    program = [PYTHON, str(Path(__file__).parent / "store_arrays.py"), str(tmp_path)]
    done = subprocess.run(program, env=child_environment(), capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["resharded", "8"], done.stderr[-3000:]


def test_the_store_is_imported_without_orbax():
    program = (
        "import sys, json, kvpatch_jax.store; print(json.dumps([m for m in sys.modules if m.startswith('orbax')]))"
    )
    done = subprocess.run([PYTHON, "-c", program], env=child_environment(), capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == [], done.stderr[-2000:]
