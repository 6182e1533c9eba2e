"""What the store's benchmark stores, a canonical of 28 layers, patches of about a megabyte; and the same by Orbax."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from orbax.checkpoint import v1 as ocp

import kvpatch_jax as kvp
from kvpatch_jax.cache import PatchMetadata

BACKBONE = "benchmark"
_WRITER = """
import os, sys
data = os.urandom(1 << 22)
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(16):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    print("wrote", flush=True)
"""


@dataclasses.dataclass(frozen=True)
class StoreSizes:
    """Sizes of all that is timed.

    `WHOLE`: 58.7 MB of bf16 in 56 leaves, patches of 1.03 MB, growth to 10 000 small objects, a chunk of 5 000 patches,
    a library of 4 000 entries.
    """

    layers: int = 28
    tokens: int = 1024
    heads: int = 8
    width: int = 64
    rank: int = 6
    group: int = 64
    growth: tuple[int, ...] = (1_000, 10_000)
    patches: int = 5_000
    entries: int = 4_000


WHOLE = StoreSizes()
QUICK = StoreSizes(layers=4, tokens=64, heads=8, width=16, rank=2, group=4, growth=(20, 40), patches=6, entries=20)


def chunk_of(sizes: StoreSizes, seed: int, id: str = "large") -> kvp.Chunk:
    """Draws a canonical of bf16 host arrays."""
    layout = kvp.KVLayout.gqa(sizes.layers, sizes.heads, sizes.width, kvp.Rope(1e4, sizes.width))
    rng = np.random.default_rng(seed)
    shape = (sizes.layers, sizes.tokens, sizes.heads, sizes.width)
    kv = {name: rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for name in layout.names}
    return kvp.Chunk(kv, np.arange(sizes.tokens, dtype=np.float32), sizes.tokens, sizes.tokens, id, layout, BACKBONE)


def leaves_of(chunk: kvp.Chunk) -> dict[str, np.ndarray]:
    """Splits a chunk into one array per layer and channel, as the store keeps them."""
    leaves = {}
    for layer in range(chunk.layout.layers):
        for name in chunk.kv:
            leaves[f"layer.{layer}.{name}"] = np.asarray(chunk.kv[name][layer])
    return leaves


def patches_of(chunk: kvp.Chunk, sizes: StoreSizes, seed: int) -> list[kvp.Patch]:
    """Draws as many patches as one commit takes, each for another antecedent."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    factors = {}
    for name in chunk.layout.names:
        u, v = draw(sizes.layers, sizes.tokens, sizes.rank), draw(sizes.layers, sizes.rank, sizes.heads * sizes.width)
        factors[name] = (u, v)

    layers = tuple(range(sizes.layers))
    metadata = PatchMetadata(chunk.id, "canonical", ("0",), chunk.backbone, chunk.layout, layers)
    numbers = range(sizes.group)
    return [kvp.Patch(factors, dataclasses.replace(metadata, antecedent=(str(number),))) for number in numbers]


def save_by_orbax(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays uncompressed, which reads faster than Orbax's default."""
    context = ocp.Context()
    context.array_options.saving.use_compression = False
    with context:
        ocp.save(str(path), {name: jnp.asarray(value) for name, value in arrays.items()})


def restore_by_orbax(path: Path, arrays: dict[str, Any], sharding: jax.sharding.Sharding) -> dict[str, jax.Array]:
    """Reads them back, every array into `sharding`, and waits until they are there."""
    wanted = {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding) for name, value in arrays.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax's own
        return jax.block_until_ready(ocp.load(str(path), wanted))


@contextlib.contextmanager
def busy_writer(path: Path) -> Iterator[None]:
    """Runs another process that writes 64 MB after 64 MB to the same disk, each synced, until this is left."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, os.fspath(path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()  # it has begun
            yield
        finally:
            writer.kill()
    path.unlink()
