"""Small layouts, chunks and conditioned KVs that the operator tests share, and the operator itself in float64."""
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


def deficit_of(chunk: kvp.Chunk, conditioned: dict) -> dict[str, np.ndarray]:
    """What a patch has to add to the numbers that a canonical decodes to: float64 [L, T, F], without padding."""
    result = {}
    for name, value in kvp.cache.decode_chunk(chunk).kv.items():
        delta = np.asarray(conditioned[name], np.float64) - np.asarray(value, np.float64)
        result[name] = delta[:, : chunk.length].reshape(len(delta), chunk.length, -1)
    return result


def correction_of(patch: kvp.Patch, length: int | None = None) -> dict[str, np.ndarray]:
    """What a patch adds to phase-free KV of the first tokens: u v of every layer, or numbers, float64 [L, T, F]."""
    result = {}
    for name, factors in patch.factors.items():
        factors = factors.by_layer() if isinstance(factors, kvp.core.RaggedFactors) else factors
        if isinstance(factors, tuple):
            u, v = (np.asarray(leaf, np.float64) for leaf in factors)
            result[name] = (u @ v)[:, :length]
        else:
            value = np.asarray(factors, np.float64)
            result[name] = value.reshape(*value.shape[:2], -1)[:, :length]
    return result


def turned(rope: kvp.Rope, value: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys [..., T, K, H] times e^(i·angle), pair by pair, in float64; positions [T] or [T, A]."""
    half, sections = rope.dim // 2, rope.sections
    frequency = rope.theta ** (-np.arange(0, rope.dim, 2) / rope.dim)
    frequency = frequency if rope.scaling is None else rope.inverse_frequencies
    positions = np.asarray(positions, np.float64)
    if sections is None:
        angle = positions[:, None] * frequency
    else:
        cycle = [n % len(sections) if n // len(sections) < sections[n % len(sections)] else 0 for n in range(half)]
        axis = np.repeat(np.arange(len(sections)), sections) if rope.order == "blocked" else cycle
        angle = positions[:, axis] * frequency
    pairs = np.arange(rope.dim).reshape(half, 2) if rope.cached == "pairs" else np.arange(rope.dim).reshape(2, half).T
    result = np.array(value, np.float64)
    z = (result[..., pairs[:, 0]] + 1j * result[..., pairs[:, 1]]) * np.exp(1j * angle)[:, None]
    result[..., pairs[:, 0]], result[..., pairs[:, 1]] = z.real, z.imag
    return result


def placed_in_float64(layout: kvp.KVLayout, kv: dict, local: np.ndarray, start: int | np.ndarray) -> dict:
    """KV {channel: [L, T, K, H]} in the engine frame, attention scaling included."""
    result = {}
    for channel in layout.channels:
        value, rope = np.asarray(kv[channel.name]).astype(np.float64), layout.rope_of(channel.name)
        if channel.rotates:
            value = turned(rope, value, np.asarray(local, np.float64) + start)
            value[..., : rope.dim] *= rope.attention_scaling
        result[channel.name] = value
    return result


def assert_one_rounding(found, expected: np.ndarray, dtype=jnp.bfloat16, slack: float = 4e-6) -> None:
    """Asserts that numbers are those expected, rounded once to a dtype, within float32's error of their row."""
    top = np.abs(expected).max(-1, keepdims=True)
    bound = slack * top + (0 if dtype == jnp.float32 else 2.0**-8) * np.abs(expected)
    error = np.abs(np.asarray(found).astype(np.float64) - expected)
    assert found.dtype == dtype
    assert (error <= bound).all(), (error / np.maximum(bound, 1e-30)).max()
