"""Run as a program on eight host devices: a canonical read into shardings, whole and layer by layer."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from store_cases import BACKBONE, LAYOUT, chunk_of, same, same_chunk

from kvpatch_jax.store import Budget, ChunkStore

SPECS = {
    "tokens": ((None, "a"), 8),
    "heads": ((None, None, "a"), 2),
    "width": ((None, None, None, "a"), 4),
    "replicated": ((), 8),
}


def main(root: str) -> None:
    chunk = chunk_of(layout=LAYOUT, tokens=16)
    with ChunkStore(root, budget=Budget(host=1 << 20)) as store:
        store.put(chunk)
        for name, (spec, count) in SPECS.items():
            mesh = jax.make_mesh(
                (count,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count]
            )
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
            found = store.get("B", BACKBONE, placement={"k": sharding, "v": sharding})
            assert found is not None
            assert same_chunk(found, chunk), name
            value = found.kv["k"]
            assert isinstance(value, jax.Array)
            assert value.sharding == sharding, name
            whole = np.asarray(chunk.kv["k"])
            assert all(same(shard.data, whole[shard.index]) for shard in value.addressable_shards), name
            layers = store.stream("B", BACKBONE, placement=jax.sharding.NamedSharding(mesh, jax.P(*spec[1:])))
            assert layers is not None
            assert all(same(values["k"], whole[layer]) for layer, values in layers), name
        assert store.counters["disk_hits"] == 1 + len(SPECS)
    print("sharded", len(jax.devices()))


if __name__ == "__main__":
    main(sys.argv[1])
