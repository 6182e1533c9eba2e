"""Run as a program on eight host devices: a canonical read into heads-sharded arrays, by the store and by Orbax.

Prints the seconds of both, in turns, as JSON.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from pathlib import Path

import jax
import numpy as np

from evals.bench import orbax_side, store_data
from evals.bench.timing import stopwatch, take_turns
from kvpatch_jax.store import Budget, ChunkStore

DEVICES = 8


def main(folder: Path, sizes: store_data.StoreSizes, repeats: int, seed: int) -> None:
    """Puts a chunk, reads it into shards both ways, and compares every shard once."""
    chunk = store_data.chunk_of(sizes, seed)
    mesh = jax.make_mesh((DEVICES,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "heads"))
    orbax_side.save(folder / "orbax", dict(chunk.kv))
    with ChunkStore(folder / "store", budget=Budget(host=0)) as store:
        store.put(chunk)

        def ours() -> dict[str, jax.Array]:
            found = store.get(chunk.id, chunk.backbone, placement=sharding)
            assert found is not None
            return jax.block_until_ready(dict(found.kv))  # pyright: ignore[reportReturnType]

        theirs = lambda: orbax_side.restore(folder / "orbax", dict(chunk.kv), sharding)
        for read in (ours, theirs):
            for name, value in read().items():
                assert value.sharding.is_equivalent_to(sharding, 4), value.sharding
                assert np.asarray(value).tobytes() == np.asarray(chunk.kv[name]).tobytes(), name
        print(json.dumps(take_turns({"ours": lambda: stopwatch(ours), "theirs": lambda: stopwatch(theirs)}, repeats)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), store_data.StoreSizes(**json.loads(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
