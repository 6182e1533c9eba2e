"""Run as a program on eight host devices: packed canonicals read into shardings, put from them, and exported."""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from array_cases import load_arrays, save_arrays
from packed_cases import same_packed
from store_cases import BACKBONE, chunk_of, same

import kvpatch_jax as kvp
from kvpatch_jax.store import Budget, ChunkStore

LAYOUT = kvp.KVLayout.gqa(2, 4, 16, kvp.Rope(1e4, 16))
SPECS = {
    "tokens": ((8,), (None, "a"), (None, "a")),
    "layers and heads": ((2, 4), ("a", None, "b"), ("a", None)),
    "tokens of few": ((4, 2), (None, ("a", "b")), (None, ("a", "b"))),
    "replicated": ((8,), (), ()),
}
"""Mesh, partition of kv, and of codes."""


def main(folder: Path) -> None:
    whole = chunk_of(layout=LAYOUT, tokens=64)
    chunk, placed = kvp.encode_chunk(whole, "k4v4"), 0
    with ChunkStore(folder / "store", budget=Budget()) as store:
        store.put(chunk)
        for word, (shape, spec, codes) in SPECS.items():
            axes = ("a", "b")[: len(shape)]
            mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
            sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
            found = store.get("B", BACKBONE, encoding="k4v4", placement={"k": sharding, "v": sharding})
            assert same_packed(found, chunk), word
            assert found is not None
            plane = found.kv["v"].planes[0]  # pyright: ignore
            assert plane.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, jax.P(*codes)), 3), word
            # Two groups of tokens are not divided over eight devices.
            assert len(found.kv["k"].scale.sharding.device_set) == 8, word  # pyright: ignore
            assert same(np.asarray(found.kv["k"]), np.asarray(chunk.kv["k"])), word

            # What is sharded is put, encoded and exported as what is not.
            with ChunkStore(folder / word) as other:
                other.put(found)
                assert same_packed(other.get("B", BACKBONE, encoding="k4v4"), chunk), word
                kv = {name: jax.device_put(value, sharding) for name, value in whole.kv.items()}
                other.put(dataclasses.replace(whole, kv=kv), encoding="k6v6")
                assert same_packed(other.get("B", BACKBONE, encoding="k6v6"), kvp.encode_chunk(whole, "k6v6")), word
            save_arrays(folder / f"{word} arrays", [found])
            (loaded,) = load_arrays(folder / f"{word} arrays", {"k": sharding, "v": sharding}).chunks
            assert same_packed(loaded, chunk), word
            assert loaded.kv["v"].planes[0].sharding == plane.sharding, word  # pyright: ignore
            placed += 1
    print(json.dumps({"devices": len(jax.devices()), "placed": placed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
