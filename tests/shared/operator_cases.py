"""Small layouts, chunks and conditioned KVs that the operator tests share."""
# pyright: reportArgumentType=false, reportCallIssue=false

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from tests.shared.arrays import placed

LAYOUTS = {
    "gqa": kvp.KVLayout.gqa(3, 2, 16, kvp.Rope(1e4, 16)),
    "mha": kvp.KVLayout.mha(2, 4, 16, kvp.Rope(1e4, 8, cached="pairs", width=16)),
    "mla": kvp.KVLayout.mla(2, 32, 16, rope=kvp.Rope(1e4, 16)),
    "blocked": kvp.KVLayout.gqa(2, 2, 16, kvp.Rope(1e4, 16, sections=(2, 3, 3))),
    "interleaved": kvp.KVLayout.gqa(2, 2, 16, kvp.Rope(1e4, 16, sections=(4, 2, 2), order="interleaved")),
    "yarn": kvp.KVLayout.gqa(2, 2, 16, kvp.Rope(1e4, 16, scaling=kvp.core.rope.Scaling("yarn", factor=4, original=64))),
}


def kv_of(layout: kvp.KVLayout, tokens: int, seed: int = 0, batch: tuple = (), dtype=jnp.float32) -> dict:
    rng = np.random.default_rng(seed)
    return {
        channel.name: placed(rng.standard_normal((layout.layers, *batch, tokens, channel.heads, channel.width)), dtype)
        for channel in layout.channels
    }


def local_of(layout: kvp.KVLayout, tokens: int) -> np.ndarray:
    base = np.arange(tokens, dtype=np.float32)
    return base if layout.rope.axes is None else np.stack([base * 0, base // 4, base % 4], -1)


def chunk_of(
    name: str, tokens: int = 24, seed: int = 0, dtype=jnp.float32, length: int | None = None, **more
) -> kvp.Chunk:
    layout = LAYOUTS[name]
    given = {"kv": kv_of(layout, tokens, seed, dtype=dtype), "local": local_of(layout, tokens), "span": tokens}
    given |= {"length": length or tokens, "id": f"B{seed}", "layout": layout, "backbone": "tiny"}
    return kvp.Chunk(**(given | more))


def conditioned_of(chunk: kvp.Chunk, rank: int = 4, seed: int = 9, size: float = 0.3) -> dict:
    """The canonical plus a deficit of exactly `rank` in every channel."""
    rng = np.random.default_rng(seed)
    result = {}
    for channel in chunk.layout.channels:
        u = rng.standard_normal((chunk.layout.layers, chunk.tokens, rank))
        v = rng.standard_normal((chunk.layout.layers, rank, channel.features)) * size / np.sqrt(rank)
        value = np.asarray(chunk.kv[channel.name])
        total = value.astype(np.float32) + (u @ v).reshape(value.shape).astype(np.float32)
        result[channel.name] = placed(total, value.dtype)
    return result
