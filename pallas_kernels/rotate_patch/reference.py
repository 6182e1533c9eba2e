"""The XLA path of rotate_patch: what every kernel is held against."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from .._operands import Codes, Operands, spread


def decoded(x: Num[Array, "*leading T K H"] | Codes) -> Float[Array, "*leading T K H"]:
    """Returns cached vectors in float32, codes by least + scale · code, rounded to bfloat16."""
    if not isinstance(x, Codes):
        return x.astype(jnp.float32)
    tokens, half = x.codes.shape[-2:]
    axis, along = (-1, 2 * half) if x.by_token else (-2, tokens)
    numbers = jnp.concatenate([x.codes & 15, x.codes >> 4], -1).astype(jnp.float32)

    def of_numbers(value: Array) -> Array:
        repeated = jnp.repeat(value.astype(jnp.float32), x.group, axis, total_repeat_length=value.shape[axis] * x.group)
        return jax.lax.slice_in_dim(repeated, 0, along, axis=repeated.ndim + axis)

    step = of_numbers(x.scale)
    value = (numbers - 8.0) * step if x.least is None else numbers * step + of_numbers(x.least)
    return jax.lax.reduce_precision(value, 8, 7).reshape(x.shape)


def product(
    u: Float[Array, "*left T M"], v: Float[Array, "*right M columns"], heads: int
) -> Float[Array, "*both T {heads} H"]:
    """Multiplies factors: u v in float32, with its columns taken apart into heads."""
    delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return delta.reshape(*delta.shape[:-1], heads, delta.shape[-1] // heads)


def rotate(
    x: Float[Array, "*axes T K H"],
    cos: Float[Array, "*angles #T half"],
    sin: Float[Array, "*angles #T half"],
    layout: str,
) -> Float[Array, "*rotated T K H"]:
    """Rotates the first 2·cos.shape[-1] channels of float32 x [..., T, K, H]; the rest passes through.

    cos and sin [..., T, R/2] broadcast over x's leading dimensions. `half`: channel i pairs with i + R/2; `pairs`: 2i
    with 2i + 1.
    """
    rotary = 2 * cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if layout == "half":
        first, second = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
    else:
        first, second = x[..., 0:rotary:2], x[..., 1:rotary:2]

    turned = (first * cos - second * sin, second * cos + first * sin)

    if layout == "half":
        low, high = spread(turned[0], 0, x.shape[-1]), spread(turned[1], rotary // 2, x.shape[-1])
        result = jnp.where(_below(rotary // 2, low), low, high)
    else:
        pairs = jnp.stack(turned, axis=-1)
        result = spread(pairs.reshape(*pairs.shape[:-2], rotary), 0, x.shape[-1])

    return result if rotary == x.shape[-1] else jnp.where(_below(rotary, result), result, x)


def _below(limit: int, like: Num[Array, "*axes"]) -> Bool[Array, "*axes"]:
    """Returns whether a channel comes before `limit`; of the shape of `like`, and sharded as it where its type says
    how.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1, out_sharding=jax.typeof(like).sharding)
    return place < limit


# Inlined where the caller is traced; called eagerly it is one program, not one for every operation.
@functools.partial(jax.jit, static_argnames=("layout", "out_dtype"), inline=True)
def rotate_patch(
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "*leading T K H"]:
    """Computes R · (x + u v + dense) in `out_dtype`; tokens from `length` on are zero. See `api.rotate_patch`."""
    out: Any = operands.x.dtype if out_dtype is None else out_dtype
    at_once = functools.partial(_rotate_patch, layout=layout, out_dtype=out)
    if operands.u is None or not _by_layer(operands):
        return at_once(operands, length)

    # XLA writes a product out in float32. On a CPU that is more memory than all else here touches, and the system has
    # to give it anew each call; one layer's stays in the cache. Angles and the length are the same for all layers.
    angles = operands.cos, operands.sin

    def by_layer(operands, angles, length):
        return jax.lax.map(lambda layer: at_once(layer._replace(cos=angles[0], sin=angles[1]), length), operands)

    def whole(operands, angles, length):
        return at_once(operands._replace(cos=angles[0], sin=angles[1]), length)

    layered = operands._replace(cos=None, sin=None)
    return jax.lax.platform_dependent(layered, angles, length, cpu=by_layer, default=whole)


def _by_layer(operands: Operands) -> bool:
    """Returns whether the first axis is one of layers, of all that have layers; and not one that is sharded by its
    type.
    """
    x, cos = operands.x, operands.cos
    if (
        isinstance(x, Codes)
        or x.ndim <= 3
        or jax.typeof(x).sharding.spec[0] is not None
        or (cos is not None and cos.ndim >= x.ndim - 1)
    ):
        return False
    layered = [leaf for leaf in operands._replace(cos=None, sin=None) if leaf is not None]
    return all(leaf.shape[: x.ndim - 3] == x.shape[:-3] for leaf in layered)


def _rotate_patch(operands: Operands, length: Array | None, *, layout: str, out_dtype: jax.typing.DTypeLike) -> Array:
    x = operands.x
    value = decoded(x)
    if operands.u is not None and operands.v is not None:
        value = value + product(_factor(operands.u), _factor(operands.v), x.shape[-2])

    if operands.dense is not None:
        value = value + operands.dense.astype(jnp.float32)
    if operands.cos is not None and operands.sin is not None:
        value = rotate(value, operands.cos, operands.sin, layout)
    if length is not None:
        # Not a product with 0: padding may hold what is not a number.
        value = jnp.where((jnp.arange(x.shape[-3]) < length)[:, None, None], value, 0.0)
    return value.astype(out_dtype)


def _factor(value: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """Returns a factor as the product takes it: one of eight bits widened, others as they are stored."""
    return value if value.dtype.itemsize > 1 else value.astype(jnp.float32)
