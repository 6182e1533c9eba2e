"""Makes `store/before_encodings.zip`: a root that the store wrote before chunks and patches in few bits existed.

To make it again, with the code of 1b3a6d7e: `git archive 1b3a6d7e kvpatch_jax | tar x -C <directory>`, and
`PYTHONPATH=<directory> python tests/goldens/make_store.py`.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata
from kvpatch_jax.store import ChunkStore

ZIP = Path(__file__).parent / "store" / "before_encodings.zip"
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


def main() -> None:
    """Writes the archive."""
    with tempfile.TemporaryDirectory() as root:
        with ChunkStore(root, secret=None) as store:
            store.put(CHUNK)
            store.put(CHUNK, encoding="int8")
            store.put(BEHIND)
            store.put_patches(PATCHES)
        ZIP.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(ZIP, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for path in sorted(Path(root).rglob("*")):
                if path.is_file():
                    archive.writestr(
                        zipfile.ZipInfo(str(path.relative_to(root))), path.read_bytes(), zipfile.ZIP_DEFLATED
                    )


if __name__ == "__main__":
    sys.exit(main())
