"""Makes roots that earlier versions of the store wrote.

`store/before_encodings.zip`, with the code of 1b3a6d7e: a root, before chunks and patches in few bits existed.
`store/before_revisions.zip`, with the code of ac517fb6 (format 1 of objects): below `root`, a plain tenant "default"
and an encrypted one, "sealed", each with libraries; below `snapshot` and `export`, those of "default"; below
`sealed_snapshot`, that of "sealed".

To make one again: `git archive <commit> kvpatch_jax | tar x -C <directory>`, and
`PYTHONPATH=<directory> python tests/goldens/make_store.py [revisions]`.
"""

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.store import ChunkStore, DynamicLibrary, StaticLibrary, save_snapshot

ZIP = Path(__file__).parent / "store" / "before_encodings.zip"
REVISIONS = Path(__file__).parent / "store" / "before_revisions.zip"
KEY = b"k" * 32
LAYOUT = kvp.KVLayout.gqa(2, 2, 8, kvp.Rope(1e4, 8))
BACKBONE, TOKENS, LEAD = "golden", 5, "a lead"


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Numbers between −1 and 1, the same everywhere."""
    index = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(1000 * seed)
    words = index * np.uint64(2654435761) % np.uint64(1 << 24)
    return (words.astype(np.float32) / np.float32(1 << 23) - 1).reshape(shape)


def canonical(id: str, seed: int, dtype: str = "float32", **fields) -> kvp.Chunk:
    """A chunk of these numbers."""
    kv = {}
    for place, name in enumerate(("k", "v")):
        kv[name] = numbers(seed + place, 2, TOKENS, 2, 8).astype(jnp.dtype(dtype))
    local = np.arange(TOKENS, dtype=np.float32)
    return kvp.Chunk(kv, local, TOKENS, TOKENS - 1, id, LAYOUT, BACKBONE, **fields)


CHUNK = canonical("B", 1, encoder=numbers(7, 3, 4))
BEHIND = canonical("B", 3, "bfloat16", lead=LEAD)


def conditioned(antecedent: tuple[str, ...], dtype: str, lead: str | None = None) -> kvp.Patch:
    """A patch of these numbers, of rank 2, in a dtype."""
    chunk = CHUNK if lead is None else BEHIND
    factors = {}
    for place, name in enumerate(("k", "v")):
        u, v = numbers(11 + place, 2, TOKENS, 2), numbers(13 + place, 2, 2, 16)
        factors[name] = (jnp.asarray(u), jnp.asarray(v))
    metadata = PatchMetadata(
        "B", "canonical", antecedent, BACKBONE, LAYOUT, (0, 1), content=chunk.content, local=chunk.places, lead=lead
    )
    return kvp.quantise(kvp.Patch(factors, metadata), dtype)


PATCHES = [conditioned(("A",), "bfloat16"), conditioned(("A",), "int8"), conditioned(("C", "A"), "bfloat16", LEAD)]


def put_all(store: Any) -> None:
    """Puts everything of this module."""
    store.put(CHUNK)
    store.put(CHUNK, encoding="int8")
    store.put(BEHIND)
    store.put_patches(PATCHES)


def write_root(root: Path) -> None:
    """Writes the root before encodings."""
    with ChunkStore(root, secret=None) as store:
        put_all(store)


def write_revisions(directory: Path) -> None:
    """Writes what there was before revisions."""
    from kvpatch_jax.store.snapshots.arrays import export_arrays  # pyright: ignore  (of that version)

    for tenant, key in (("default", None), ("sealed", KEY)):
        with ChunkStore(directory / "root", tenant=tenant, key=key) as store:
            put_all(store)
            store.put(kvp.encode_chunk(CHUNK, "k4v4"))
            StaticLibrary(store, quota=1 << 20).put("NAME", "a text", kind="TEXT")
            for content in ("one", "two"):
                DynamicLibrary(store).publish("NAME", content, kind="TEXT")
            if key is None:
                export_arrays(store, directory / "export", compress=True)
    save_snapshot(directory / "root", directory / "snapshot", tenant="default", copy=True)
    save_snapshot(directory / "root", directory / "sealed_snapshot", tenant="sealed", copy=True)


def main(what: str = "encodings") -> None:
    """Writes an archive."""
    path, write = {"encodings": (ZIP, write_root), "revisions": (REVISIONS, write_revisions)}[what]
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory))
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for file in sorted(Path(directory).rglob("*")):
                if file.is_file():
                    entry = zipfile.ZipInfo(str(file.relative_to(directory)))
                    archive.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
