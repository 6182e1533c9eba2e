"""Run as a program, twice at once: what two processes of one job save and load together, over a mesh of both.

    store_hosts.py INDEX COUNT PORT FOLDER STEP ...

With COUNT 1 it is a job of one process, on four devices.
"""

import dataclasses
import os
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // int(sys.argv[2])}"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from array_cases import export_arrays, import_arrays, load_arrays, save_arrays
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp
from store_cases import BACKBONE, chunk_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, StoreCorruptError, StoreFullError, StoreIOError, StoreSnapshotError
from kvpatch_jax.store import Budget, ChunkStore, StaticLibrary, StoreItem, make_durable
from kvpatch_jax.store.snapshots import arrays
from kvpatch_jax.store.snapshots.multihost import ProcessGroup

INDEX, COUNT, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
if COUNT > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{PORT}", COUNT, INDEX)

LAYOUT = kvp.KVLayout.gqa(2, 4, 16, kvp.Rope(1e4, 16))
DTYPES = (jnp.bfloat16, np.float32, np.float16, jnp.float8_e4m3fn)
CHUNKS = [chunk_of(str(np.dtype(dtype)), 7, layout=LAYOUT, tokens=16, dtype=dtype) for dtype in DTYPES]
SPECS = {
    "tokens": ((4,), (None, "a")),
    "heads and tokens": ((2, 2), (None, "b", "a")),
    "width": ((1, 4), (None, None, None, "b")),
    "replicated": ((4,), ()),
}
MODEL = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3)}


def sharding_of(name: str) -> jax.sharding.NamedSharding:
    shape, spec = SPECS[name]
    axes = ("a", "b")[: len(shape)]
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def opened(root: str, **more) -> ChunkStore:
    return ChunkStore(FOLDER / root, tenant="one", budget=Budget(host=0), **more)


def together(word: str) -> None:
    multihost_utils.sync_global_devices(word)


def refused(kind: type[Exception], call, *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert all(word in str(caught.value) for word in words), caught.value


# -------------------------------------------------------------------------------------------------------- arrays


def export() -> None:
    """A store's canonicals, read into a mesh of both processes, and saved from there."""
    with opened("store") as store:
        if INDEX == 0:
            for chunk in CHUNKS:
                store.put(chunk)
        together("put")
        placed = []
        for chunk in CHUNKS:
            found = store.get(chunk.id, BACKBONE, placement=sharding_of("heads and tokens"))
            assert found is not None
            value = found.kv["k"]
            assert isinstance(value, jax.Array)
            assert not value.is_fully_addressable
            placed.append(found)
        refused(InputError, lambda: store.put(placed[0]), "StoreItem")
        refused(InputError, lambda: export_arrays(store, FOLDER / "no"), "2 processes")
        together("refused")
        save_arrays(FOLDER / "arrays", placed, [patch_of(CHUNKS[0])])
        refused(InputError, lambda: import_arrays(FOLDER / "arrays", store), "2 processes")


def load() -> None:
    """The same bits in any mesh, in one process or two."""
    for name in SPECS:
        placement = sharding_of(name)
        loaded = load_arrays(FOLDER / "arrays", placement)
        assert [chunk.id for chunk in loaded.chunks] == [chunk.id for chunk in CHUNKS]
        for found, whole in zip(loaded.chunks, CHUNKS, strict=True):
            for channel, value in found.kv.items():
                assert isinstance(value, jax.Array)
                assert value.sharding == placement, name
                expected = np.asarray(whole.kv[channel])
                assert value.shape == expected.shape
                assert len(value.addressable_shards) == 4 // COUNT
                assert all(same(part.data, expected[part.index]) for part in value.addressable_shards), name
        assert [patch.metadata for patch in loaded.patches] == [patch_of(CHUNKS[0]).metadata]
    assert all(same_chunk(*pair) for pair in zip(load_arrays(FOLDER / "arrays").chunks, CHUNKS, strict=True))


def imported() -> None:
    """Into a store, in a job of one process."""
    with opened("imported") as store:
        assert import_arrays(FOLDER / "arrays", store).objects == len(CHUNKS) + 1
        assert all(same_chunk(store.get(chunk.id, BACKBONE), chunk) for chunk in CHUNKS)


def damaged() -> None:
    """A flipped bit is found by both, whoever reads it."""
    needle = np.asarray(CHUNKS[1].kv["v"])[1, -1, -1].tobytes()
    if INDEX == 0:
        shutil.copytree(FOLDER / "arrays", FOLDER / "damaged")
        (path,) = [path for path in (FOLDER / "damaged").rglob("*") if path.is_file() and needle in path.read_bytes()]
        raw = bytearray(path.read_bytes())
        raw[raw.index(needle)] ^= 1
        path.write_bytes(raw)
    together("damaged")
    for name in SPECS:
        refused(StoreSnapshotError, lambda: load_arrays(FOLDER / "damaged", sharding_of(name)), "other bits")  # noqa: B023


def disagreeing() -> None:
    """What one process alone cannot read is loaded by none."""
    real = arrays.check_entry

    def fail(entry) -> None:
        real(entry)
        if INDEX == 1 and entry.about["kind"] == "patch":
            raise StoreCorruptError("export: here only")

    arrays.check_entry = fail
    kind, word = (StoreSnapshotError, "here only") if INDEX == 1 else (StoreIOError, "failure in process 1")
    refused(kind, lambda: load_arrays(FOLDER / "arrays", sharding_of("tokens")), word)
    arrays.check_entry = real


# ---------------------------------------------------------------------------------------------------------- item


def item() -> None:
    """One root: the first process saves and loads it; queued puts of both are in it."""
    mine = chunk_of(f"of {INDEX}", INDEX)
    with opened("shared") as store:
        together("opened")
        store.put_async(mine)
        if INDEX == 0:
            StaticLibrary(store, quota=1 << 20).put("A", "text")
        together("put")
        ocp.save_checkpointables(str(FOLDER / "item"), {"chunk_store": StoreItem(store), "model": MODEL})
        make_durable(FOLDER / "item")
        together("saved")
        assert not list((FOLDER / "item" / "chunk_store").glob("flushed-*"))
        if INDEX == 0:
            for index in range(COUNT):
                assert store.delete(f"of {index}", BACKBONE)
        together("deleted")
        found = ocp.load_checkpointables(str(FOLDER / "item"), {"chunk_store": StoreItem(store), "model": MODEL})
        assert same(found["model"]["weights"], MODEL["weights"])
        for index in range(COUNT):  # also what the other process put, and the other one loaded
            assert same_chunk(store.get(f"of {index}", BACKBONE), chunk_of(f"of {index}", index))


def late() -> None:
    """One process comes late from every meeting; what it then looks for is still there."""
    real = ProcessGroup.wait

    def wait(self: ProcessGroup) -> None:
        real(self)
        time.sleep(0.3)

    for who in range(COUNT):
        ProcessGroup.wait = wait if who == INDEX else real
        with opened("shared") as store:
            item = StoreItem(store)
            ocp.save_checkpointables(str(FOLDER / f"late-{who}"), {"chunk_store": item})
            ocp.load_checkpointables(str(FOLDER / f"late-{who}"), {"chunk_store": item})
    ProcessGroup.wait = real


def failing() -> None:
    """Where one process fails all raise, and the checkpoint is not there."""
    for broken in range(COUNT):
        path = FOLDER / f"failed-{broken}"
        with opened("shared") as store:
            if broken == INDEX:

                def fail() -> None:
                    raise StoreFullError("this process has no room")

                store.flush = fail
            items = {"chunk_store": StoreItem(store), "model": MODEL}
            kind = StoreFullError if broken == INDEX else StoreSnapshotError
            refused(kind, lambda: ocp.save_checkpointables(str(path), items))  # noqa: B023
            together(path.name)
            assert not path.exists()
    with opened("shared") as store:  # and the next one is
        ocp.save_checkpointables(str(FOLDER / "after"), {"chunk_store": StoreItem(store), "model": MODEL})
        assert (FOLDER / "after").exists()
        if INDEX == 0:
            (FOLDER / "after" / "chunk_store" / "MANIFEST").unlink()
        together("unlinked")
        kind = StoreSnapshotError if INDEX == 0 else StoreIOError
        refused(kind, lambda: ocp.load_checkpointables(str(FOLDER / "after"), {"chunk_store": StoreItem(store)}))


def in_the_background() -> None:
    """While the program goes on, over the devices too."""
    with opened("shared") as store, ocp.training.Checkpointer(str(FOLDER / "steps")) as checkpointer:
        for step in range(2):
            response = checkpointer.save_checkpointables_async(step, {"chunk_store": StoreItem(store), "model": MODEL})
            for number in range(20):
                together(f"{step} {number}")
            response.result()
        together("saved")
        assert sorted(path.name for path in (FOLDER / "steps").iterdir()) == ["0", "1"]
        checkpointer.load_checkpointables(1, {"chunk_store": StoreItem(store)})


def alone() -> None:
    """Saved by a job of one process."""
    placement = sharding_of("tokens")
    placed = [
        dataclasses.replace(chunk, kv={name: jax.device_put(value, placement) for name, value in chunk.kv.items()})
        for chunk in CHUNKS
    ]
    save_arrays(FOLDER / "arrays", placed, [patch_of(CHUNKS[0])])
    with opened("first") as store:
        store.put(CHUNKS[0])
        ocp.save_checkpointables(str(FOLDER / "item"), {"chunk_store": StoreItem(store)})


def of_one() -> None:
    """What one process saved, in a job of two over one root; two roots are refused."""
    with opened("shared-item") as store:
        together("item")
        ocp.load_checkpointables(str(FOLDER / "item"), {"chunk_store": StoreItem(store)})
        assert same_chunk(store.get(CHUNKS[0].id, BACKBONE), CHUNKS[0])
    with opened(f"own-{INDEX}") as store:
        item = {"chunk_store": StoreItem(store)}
        refused(InputError, lambda: ocp.save_checkpointables(str(FOLDER / "no"), item), "another root")
        together("refused")


def one_process() -> None:
    """What two processes saved, in a job of one."""
    with opened("later") as store:
        ocp.load_checkpointables(str(FOLDER / "item"), {"chunk_store": StoreItem(store)})
        assert StaticLibrary(store, quota=1 << 20).get("TEXT", "A") is not None


def main() -> None:
    """Ends at once where something fails: a process that leaves a job in order waits for the others."""
    warnings.simplefilter("error")
    try:
        for step in sys.argv[5:]:
            globals()[step]()
            print(step, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
