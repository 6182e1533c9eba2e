"""Chunks, and their float64 answers."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import Codes
from pallas_kernels.shapes import ChunkShape
from tests.shared.arrays import placed

GQA = ChunkShape("gqa", 2, 12, 2, 16, 16, 4)
SHAPES = (
    GQA,
    ChunkShape("pairs", 2, 7, 2, 16, 16, 3, "pairs"),
    ChunkShape("partial", 2, 9, 2, 16, 8, 2, "pairs"),
    ChunkShape("partial_half", 1, 13, 3, 20, 12, 1),
    ChunkShape("rope_key", 3, 10, 1, 64, 64, 8),
    ChunkShape("values", 2, 11, 2, 16, 0, 5),
    ChunkShape("bare", 2, 8, 1, 16, 16, 0, "pairs"),
)


def arrays(shape: ChunkShape, dtype=jnp.float32, seed: int = 0) -> dict:
    """x, cos, sin, u, v of a shape; without u and v at rank 0, without cos and sin where nothing rotates."""
    rng = np.random.default_rng(seed)
    draw = lambda *sizes: placed(rng.standard_normal(sizes), dtype)
    angle = rng.standard_normal((shape.tokens, shape.rotary // 2))
    given = {"x": draw(*shape.x)}
    if shape.rotary:
        given |= {"cos": placed(np.cos(angle), jnp.float32), "sin": placed(np.sin(angle), jnp.float32)}
    if shape.rank:
        given["u"] = draw(shape.layers, shape.tokens, shape.rank)
        given["v"] = draw(shape.layers, shape.rank, shape.heads * shape.width)
    return given


def expected(shape: ChunkShape, given: dict) -> np.ndarray:
    """R · (x + u v) in float64."""
    exact = {name: np.asarray(value, np.float64) for name, value in given.items()}
    x = exact["x"]
    if shape.rank:
        x = x + (exact["u"] @ exact["v"]).reshape(x.shape)
    half = shape.rotary // 2
    result = x.copy()
    for i in range(half):
        a, b = (i, i + half) if shape.layout == "half" else (2 * i, 2 * i + 1)
        c, s = exact["cos"][:, None, i], exact["sin"][:, None, i]
        result[..., a] = x[..., a] * c - x[..., b] * s
        result[..., b] = x[..., b] * c + x[..., a] * s
    return result


def decoded(x) -> np.ndarray:
    """What x stands for, in float64: of codes least + scale · code, rounded to bfloat16."""
    if not isinstance(x, Codes):
        return np.asarray(x, np.float64)
    codes = np.asarray(x.codes)
    axis, along = (-1, 2 * codes.shape[-1]) if x.by_token else (-2, codes.shape[-2])
    scale, least = (
        np.take(np.asarray(leaf, np.float64), np.arange(along) // x.group, axis) for leaf in (x.scale, x.least)
    )
    value = least + scale * np.concatenate([codes % 16, codes // 16], -1)
    return value.astype(np.float32).astype(jnp.bfloat16).astype(np.float64).reshape(x.shape)


def assert_rounded_once(result, exact: np.ndarray) -> None:
    """bfloat16 results lie within one unit in the last place of their row's largest value."""
    largest = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    assert (np.abs(np.asarray(result, np.float64) - exact) <= 2.0 ** (np.floor(np.log2(largest)) - 7)).all()
