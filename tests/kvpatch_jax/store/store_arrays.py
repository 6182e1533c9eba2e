"""Run as a program on eight host devices: chunks saved from one mesh and loaded into others, and into a store."""

import dataclasses
import os
import sys
import warnings
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from array_cases import export_arrays, import_arrays, load_arrays, save_arrays
from store_cases import BACKBONE, chunk_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.store import ChunkStore

LAYOUT = kvp.KVLayout.gqa(2, 4, 16, kvp.Rope(1e4, 16))
SPECS = {
    "tokens over all": ((8,), (None, "a")),
    "heads and tokens": ((4, 2), (None, "b", "a")),
    "width": ((2, 4), (None, None, None, "b")),
    "replicated": ((8,), ()),
}
DTYPES = (jnp.bfloat16, np.float32, np.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)


def sharding_of(shape: tuple[int, ...], spec: tuple) -> jax.sharding.NamedSharding:
    axes = ("a", "b")[: len(shape)]
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    chunks = [chunk_of(str(np.dtype(dtype)), 7, layout=LAYOUT, tokens=16, dtype=dtype) for dtype in DTYPES]
    saved = sharding_of(*SPECS["heads and tokens"])
    sharded = [
        dataclasses.replace(chunk, kv={name: jax.device_put(value, saved) for name, value in chunk.kv.items()})
        for chunk in chunks
    ]
    save_arrays(folder / "arrays", sharded, [patch_of(chunks[0])])
    with ChunkStore(folder / "store") as store:
        for chunk in sharded:
            store.put(chunk)
        store.put(sharded[0], encoding="int8")
        export_arrays(store, folder / "export")
        reduced = store.get("bfloat16", BACKBONE, encoding="int8")
        assert reduced is not None
    for source in ("arrays", "export"):
        for word, place in SPECS.items():
            placement = sharding_of(*place)
            loaded = load_arrays(folder / source, {"k": placement, "v": placement})
            assert len(loaded.chunks) == len(chunks)
            for found in loaded.chunks:
                whole = next(chunk for chunk in chunks if chunk.id == found.id)
                assert same_chunk(found, whole), (word, found.id)
                for name, value in found.kv.items():
                    assert isinstance(value, jax.Array)
                    assert value.sharding == placement, word
                    parts = value.addressable_shards
                    assert all(same(part.data, np.asarray(whole.kv[name])[part.index]) for part in parts), word
            for encoding, found in loaded.reduced:
                assert encoding == "int8"
                assert same_chunk(found, reduced), word
    with ChunkStore(folder / "other", tenant="other") as other:
        assert import_arrays(folder / "arrays", other).objects == len(chunks) + 1
        assert all(same_chunk(other.get(chunk.id, BACKBONE), chunk) for chunk in chunks)
    print("resharded", len(jax.devices()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
