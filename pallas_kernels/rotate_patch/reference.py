"""The XLA path of rotate_patch: what every kernel is held against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def product(u: Float[Array, "..."], v: Float[Array, "..."], heads: int) -> Float[Array, "..."]:
    """u vᵀ in float32, as [..., T, K, H], from joint ([..., T, M], [..., M, K·H]) or per-head factors.

    Per-head factors are [..., K, T, M] and [..., K, M, H]; a joint v is told from them by its width.
    """
    delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return delta.reshape(*delta.shape[:-1], heads, delta.shape[-1] // heads)


def product_per_head(u: Float[Array, "... K T M"], v: Float[Array, "... K M H"]) -> Float[Array, "... T K H"]:
    """u vᵀ of per-head factors, float32."""
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
    x: Float[Array, "..."],
    cos: Float[Array, "..."] | None,
    sin: Float[Array, "..."] | None,
    u: Float[Array, "..."] | None,
    v: Float[Array, "..."] | None,
    dense: Float[Array, "..."] | None,
    length: Int[Array, ""] | None,
    *,
    per_head: bool,
    layout: str,
) -> Float[Array, "..."]:
    """R · (x + u v + dense) in x's dtype; tokens from `length` on are zero. Shapes as in `api.rotate_patch`."""
    value = x.astype(jnp.float32)
    if u is not None and v is not None:
        value = value + (product_per_head(u, v) if per_head else product(u, v, x.shape[-2]))
    if dense is not None:
        value = value + dense.astype(jnp.float32)
    if cos is not None and sin is not None:
        value = rotate(value, cos, sin, layout)
    if length is not None:
        value = jnp.where((jnp.arange(x.shape[-3]) < length)[:, None, None], value, 0.0)
    return value.astype(x.dtype)
