"""Run as a program on eight host devices: chunks sharded over all of them are saved, and loaded onto 1, 2 and 4."""
# pyright: reportAttributeAccessIssue=false

import os
import sys
from typing import Any

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from test_snapshots import chunk_of, patch_of, same, same_chunk

import kvpatch_jax as kvp
from kvpatch_jax.cache import trusted
from kvpatch_jax.core import PhaseFreeKV
from kvpatch_jax.store.orbax_item import StoreItem


def sharding(count: int, *spec: str | None) -> jax.sharding.NamedSharding:
    mesh = jax.make_mesh((count,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))


def main(path: str) -> None:
    whole, other = chunk_of(tokens=16, encoder=np.ones((2, 3), np.float32)), chunk_of("C", 1)
    packed = kvp.encode_chunk(chunk_of("P", 2), "k4v4")
    kv = {name: jax.device_put(value, sharding(8, None, "a")) for name, value in whole.kv.items()}
    contents = [trusted(whole, kv=PhaseFreeKV(kv)), other, packed, patch_of(other)]
    ocp.save_checkpointables(path, {"chunks": StoreItem(contents=contents)})

    for count, spec in ((1, ()), (2, (None, None, "a")), (4, (None, "a"))):
        target = sharding(count, *spec)
        item = StoreItem(placement={"k": target, "v": target})
        ocp.load_checkpointables(path, {"chunks": item})
        loaded: Any = item.contents
        first, second, third, patch = loaded
        assert same_chunk(first, whole)
        assert same_chunk(second, other)
        assert same_chunk(third, packed)
        assert same(first.encoder, whole.encoder)
        assert patch.metadata.chunk.id == "C"
        assert all(value.sharding == target for value in first.kv.values())

    item = StoreItem(placement=jax.devices()[5])
    ocp.load_checkpointables(path, {"chunks": item})
    assert all(chunk.kv["k"].devices() == {jax.devices()[5]} for chunk in item.contents[:2])
    print("resharded", len(jax.devices()))


if __name__ == "__main__":
    main(sys.argv[1])
