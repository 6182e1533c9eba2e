"""Arrays and float64 answers that the kernels' tests share."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.rotate_patch.shapes import Shape


def arrays(shape: Shape, per_head: bool = False, dtype=jnp.float32, seed: int = 0) -> dict:
    """x, cos, sin, u, v of a case; without u and v at rank 0, without cos and sin where nothing rotates."""
    rng = np.random.default_rng(seed)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal(sizes), dtype)
    angle = rng.standard_normal((shape.tokens, shape.rotary // 2))
    middle = (shape.heads,) if per_head else ()
    columns = shape.width if per_head else shape.heads * shape.width
    given = {"x": draw(*shape.leading, shape.tokens, shape.heads, shape.width)}
    if shape.rotary:
        given |= {"cos": jnp.asarray(np.cos(angle), jnp.float32), "sin": jnp.asarray(np.sin(angle), jnp.float32)}
    if shape.rank:
        given |= {
            "u": draw(*shape.leading, *middle, shape.tokens, shape.rank),
            "v": draw(*shape.leading, *middle, shape.rank, columns),
        }
    return given


def expected(shape: Shape, given: dict, per_head: bool = False) -> np.ndarray:
    """R · (x + u v) in float64."""
    exact = {name: np.asarray(value, np.float64) for name, value in given.items()}
    x = exact["x"]
    if shape.rank:
        delta = exact["u"] @ exact["v"]
        x = x + (np.swapaxes(delta, -3, -2) if per_head else delta.reshape(x.shape))
    half = shape.rotary // 2
    result = x.copy()
    for i in range(half):
        a, b = (i, i + half) if shape.layout == "half" else (2 * i, 2 * i + 1)
        c, s = exact["cos"][:, None, i], exact["sin"][:, None, i]
        result[..., a] = x[..., a] * c - x[..., b] * s
        result[..., b] = x[..., b] * c + x[..., a] * s
    return result
