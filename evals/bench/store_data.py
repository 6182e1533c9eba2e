"""What the store's benchmark keeps: a canonical of 28 layers, patches of about a megabyte, small objects."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp

BACKBONE = "benchmark"


@dataclasses.dataclass(frozen=True)
class StoreSizes:
    """Of all that is timed. `WHOLE`: 58.7 MB of bf16 in 56 leaves, patches of 1.03 MB, 10 000 small objects, growth to
    50 000, a library of 4 000 entries."""

    layers: int = 28
    tokens: int = 1024
    heads: int = 8
    width: int = 64
    rank: int = 6
    group: int = 64
    objects: int = 10_000
    growth: tuple[int, ...] = (1_000, 10_000, 50_000)
    entries: int = 4_000


WHOLE = StoreSizes()
QUICK = StoreSizes(layers=4, tokens=64, heads=8, width=16, rank=2, group=4, objects=40, growth=(20, 40), entries=20)


def chunk_of(sizes: StoreSizes, seed: int, id: str = "large") -> kvp.Chunk:
    """Draws a canonical of bf16 host arrays."""
    layout = kvp.KVLayout.gqa(sizes.layers, sizes.heads, sizes.width, kvp.Rope(1e4, sizes.width))
    rng = np.random.default_rng(seed)
    shape = (sizes.layers, sizes.tokens, sizes.heads, sizes.width)
    kv = {name: rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for name in layout.names}
    return kvp.Chunk(kv, np.arange(sizes.tokens, dtype=np.float32), sizes.tokens, sizes.tokens, id, layout, BACKBONE)


def leaves_of(chunk: kvp.Chunk) -> dict[str, np.ndarray]:
    """Splits a chunk into every layer's channels as arrays of their own, as the store keeps them."""
    layers = range(chunk.layout.layers)
    return {f"layer.{layer}.{name}": np.asarray(chunk.kv[name][layer]) for layer in layers for name in chunk.kv}


def patches_of(chunk: kvp.Chunk, sizes: StoreSizes, seed: int) -> list[kvp.Patch]:
    """Draws as many patches as one commit takes, each behind another antecedent."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    factors = {
        name: (draw(sizes.layers, sizes.tokens, sizes.rank), draw(sizes.layers, sizes.rank, sizes.heads * sizes.width))
        for name in chunk.layout.names
    }
    layers = tuple(range(sizes.layers))
    metadata = kvp.PatchMetadata(chunk.id, "canonical", ("0",), chunk.backbone, chunk.layout, layers)
    each = [dataclasses.replace(metadata, antecedent=(str(number),)) for number in range(sizes.group)]
    return [kvp.Patch(factors, one) for one in each]
