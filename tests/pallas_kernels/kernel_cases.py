"""Arrays and float64 answers that the kernels' tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.rotate_patch.shapes import RotateShape
from tests.arrays import placed

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
"""How TPU kernels are interpreted: races and uninitialised memory are errors."""
INTERPRETED = {"gpu": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"), "tpu": INTERPRET}
"""The same by platform."""


def arrays(shape: RotateShape, dtype=jnp.float32, seed: int = 0) -> dict:
    """x, cos, sin, u, v of a case; without u and v at rank 0, without cos and sin where nothing rotates."""
    rng = np.random.default_rng(seed)
    draw = lambda *sizes: placed(rng.standard_normal(sizes), dtype)
    angle = rng.standard_normal((shape.tokens, shape.rotary // 2))
    given = {"x": draw(*shape.leading, shape.tokens, shape.heads, shape.width)}
    if shape.rotary:
        given |= {"cos": placed(np.cos(angle), jnp.float32), "sin": placed(np.sin(angle), jnp.float32)}
    if shape.rank:
        given |= {
            "u": draw(*shape.leading, shape.tokens, shape.rank),
            "v": draw(*shape.leading, shape.rank, shape.heads * shape.width),
        }
    return given


def expected(shape: RotateShape, given: dict) -> np.ndarray:
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


def assert_rounded_once(found, exact: np.ndarray) -> None:
    """bfloat16 results lie within one unit in the last place of their row's largest value."""
    largest = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= 2.0 ** (np.floor(np.log2(largest)) - 7)).all()


def narrowed(value, dtype: str, axis: int) -> tuple[jax.Array, jax.Array]:
    """A value in eight bits, and the float32 scales over `axis` that multiply it."""
    scale = jnp.abs(value).max(axis, keepdims=True) / LARGEST[dtype]
    scaled = value / scale
    return (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype), scale.astype(jnp.float32)


def narrow_arrays(shape: RotateShape, dtype: str) -> tuple[dict, dict]:
    """`arrays` with x, u and v in eight bits and their scales; and the same numbers wide, without scales."""
    wide = arrays(shape)
    given = dict(wide)
    for name, axis in (("x", -3), ("u", -2), ("v", -1)):
        if name in wide:
            given[name], given[f"{name}_scale"] = narrowed(wide[name], dtype, axis)
            stood_for = np.asarray(given[name], np.float64) * np.asarray(given[f"{name}_scale"], np.float64)
            wide[name] = stood_for
    return given, wide
