"""The XLA path of rotate_patch: what every kernel is held against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


def widened(value: Num[Array, "..."], scale: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """The float32 numbers that stored ones and their scale stand for."""
    value = value.astype(jnp.float32)
    return value if scale is None else value * scale


def flat(leaf: Array, inner: int) -> Array:
    """A leaf with its leading dimensions merged into one."""
    return leaf.reshape(-1, *leaf.shape[leaf.ndim - inner :])


def product(u: Float[Array, "..."], v: Float[Array, "..."], heads: int) -> Float[Array, "..."]:
    """u v in float32, as [..., T, K, H], from joint factors ([..., T, M], [..., M, K·H])."""
    delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return delta.reshape(*delta.shape[:-1], heads, delta.shape[-1] // heads)


def product_per_head(u: Float[Array, "... K T M"], v: Float[Array, "... K M H"]) -> Float[Array, "... T K H"]:
    """u v of per-head factors, float32."""
    delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return jnp.swapaxes(delta, -3, -2)


def rotate(
    x: Float[Array, "..."], cos: Float[Array, "..."], sin: Float[Array, "..."], layout: str
) -> Float[Array, "..."]:
    """Rotates the first 2·cos.shape[-1] channels of float32 x [..., T, K, H]; the rest passes through.

    cos and sin [..., T, R/2] broadcast over x's leading dimensions. `half`: channel i pairs with i + R/2; `pairs`: 2i
    with 2i + 1.
    """
    rotary = 2 * cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    head, tail = x[..., :rotary], x[..., rotary:]
    if layout == "half":
        first, second = head[..., : rotary // 2], head[..., rotary // 2 :]
    else:
        first, second = head[..., 0::2], head[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if layout == "half":
        head = jnp.concatenate(turned, axis=-1)
    else:
        head = jnp.stack(turned, axis=-1).reshape(*turned[0].shape[:-1], rotary)
    if not tail.shape[-1]:
        return head
    return jnp.concatenate([head, jnp.broadcast_to(tail, (*head.shape[:-1], tail.shape[-1]))], axis=-1)


def rotate_patch(
    x: Num[Array, "..."],
    cos: Float[Array, "..."] | None,
    sin: Float[Array, "..."] | None,
    u: Num[Array, "..."] | None,
    v: Num[Array, "..."] | None,
    dense: Float[Array, "..."] | None,
    length: Int[Array, ""] | None,
    x_scale: Float[Array, "..."] | None = None,
    u_scale: Float[Array, "..."] | None = None,
    v_scale: Float[Array, "..."] | None = None,
    *,
    per_head: bool,
    layout: str,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "..."]:
    """R · (x + u v + dense) in `out_dtype`; tokens from `length` on are zero. Shapes as in `api.rotate_patch`."""
    value = widened(x, x_scale)
    if u is not None and v is not None:
        u, v = _factor(u, u_scale), _factor(v, v_scale)
        value = value + (product_per_head(u, v) if per_head else product(u, v, x.shape[-2]))
    if dense is not None:
        value = value + dense.astype(jnp.float32)
    if cos is not None and sin is not None:
        value = rotate(value, cos, sin, layout)
    if length is not None:
        value = jnp.where((jnp.arange(x.shape[-3]) < length)[:, None, None], value, 0.0)
    return value.astype(x.dtype if out_dtype is None else out_dtype)


def _factor(value: Num[Array, "..."], scale: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """A factor as the product takes it: eight-bit and scaled ones widened, others as they are stored."""
    return value if scale is None and value.dtype.itemsize > 1 else widened(value, scale)
