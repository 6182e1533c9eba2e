"""Makes `store/snapshots.zip`: snapshots and arrays as they were before the arrays were part of the Orbax item.

To make it again, with the code of ac517fb6: `git archive ac517fb6 kvpatch_jax pallas_kernels | tar x -C <directory>`,
and `PYTHONPATH=<directory> python tests/goldens/make_snapshots.py`.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

from make_store import BEHIND, CHUNK, PATCHES
from orbax.checkpoint import v1 as ocp

import kvpatch_jax as kvp
from kvpatch_jax.store import ChunkStore, DynamicLibrary, StaticLibrary, StoreItem, save_snapshot

ZIP = Path(__file__).parent / "store" / "snapshots.zip"
SECRET, KEY = b"secret of the goldens", b"k" * 32


def main() -> None:
    """Writes the archive."""
    # Of the version that this is run with, the one before arrays were part of the Orbax item.
    from kvpatch_jax.store.snapshots.arrays import export_arrays, save_arrays  # pyright: ignore

    with tempfile.TemporaryDirectory() as folder:
        with ChunkStore(f"{folder}/root", tenant="one", secret=SECRET) as store:
            store.put(CHUNK)
            store.put(CHUNK, encoding="int8")
            store.put(kvp.encode_chunk(BEHIND, "k4v4"))
            store.put_patches(PATCHES)
            StaticLibrary(store, quota=1 << 20).put("A", "text")
            DynamicLibrary(store).publish("R", [1, 2, 3])
            made = Path(folder, "made")
            save_snapshot(f"{folder}/root", made / "snapshot", tenant="one", secret=SECRET)
            ocp.save_checkpointables(str(made / "step"), {"chunk_store": StoreItem(store)})
            export_arrays(store, made / "export", compress=True)
            save_arrays(made / "arrays", [CHUNK, kvp.encode_chunk(BEHIND, "k4v4")], PATCHES, compress=True)
        with ChunkStore(f"{folder}/sealed", tenant="one", secret=SECRET, key=KEY) as store:
            store.put(CHUNK)
        save_snapshot(f"{folder}/sealed", made / "sealed", secret=SECRET)
        with zipfile.ZipFile(ZIP, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(made.rglob("*")):
                name = str(path.relative_to(made)) + ("/" if path.is_dir() else "")
                raw = b"" if path.is_dir() else path.read_bytes()
                archive.writestr(zipfile.ZipInfo(name), raw, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    sys.exit(main())
