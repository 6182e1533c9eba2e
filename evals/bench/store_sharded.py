"""Program on eight host devices: times reading a canonical into arrays sharded by heads, by the store and by Orbax.

Prints the seconds of both, in turns, as JSON. A process of its own, because the number of devices is fixed when jax
starts.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from pathlib import Path

import jax
import numpy as np

from evals.bench.store_workload import StoreSizes, chunk_of, restore_by_orbax, save_by_orbax
from evals.bench.timing import interleave, stopwatch
from kvpatch_jax.store import Budget, ChunkStore

DEVICES = 8


def main(folder: Path, sizes: StoreSizes, repeats: int, seed: int) -> None:
    """Puts a chunk, compares every shard that both sides read with it, and times both."""
    chunk = chunk_of(sizes, seed)
    mesh = jax.make_mesh((DEVICES,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "heads"))
    save_by_orbax(folder / "orbax", dict(chunk.kv))

    with ChunkStore(folder / "store", budget=Budget(host=0)) as store:
        store.put(chunk)

        def ours() -> dict[str, jax.Array]:
            stored = store.get(chunk.id, chunk.backbone, placement=sharding)
            assert stored is not None
            return jax.block_until_ready(dict(stored.kv))  # pyright: ignore[reportReturnType]

        def theirs() -> dict[str, jax.Array]:
            return restore_by_orbax(folder / "orbax", dict(chunk.kv), sharding)

        for read in (ours, theirs):
            for name, value in read().items():
                assert value.sharding.is_equivalent_to(sharding, 4), value.sharding
                assert np.asarray(value).tobytes() == np.asarray(chunk.kv[name]).tobytes(), name

        samples = interleave({"ours": lambda: stopwatch(ours), "theirs": lambda: stopwatch(theirs)}, repeats)

    print(json.dumps(samples))


if __name__ == "__main__":
    main(Path(sys.argv[1]), StoreSizes(**json.loads(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
