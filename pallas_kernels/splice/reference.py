"""The XLA path of splice: what every kernel is held against."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..rotate_patch import reference


def write(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    value: Float[Array, "*leading T K H"],
    length: Int[Array, ""] | None = None,
) -> Float[Array, "*leading P O K H"]:
    """The pool with `value` at `slots`; tokens from `length` on, and slots out of range, are written nowhere."""
    *leading, pages, offsets, heads, width = pool.shape
    total = pages * offsets
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    keep = (slots >= 0) & (slots < total)
    if length is not None:
        keep &= tokens < length
    # What is dropped gets distinct places beyond the end, so that the promise of uniqueness holds for all of them.
    places = jnp.where(keep, slots.astype(jnp.int32), total + tokens)
    flat = pool.reshape(*leading, total, heads, width)
    flat = flat.at[..., places, :, :].set(value, mode="drop", unique_indices=True)
    return flat.reshape(pool.shape)


def splice(
    pool,
    slots,
    x,
    cos,
    sin,
    u,
    v,
    dense,
    length,
    x_scale=None,
    u_scale=None,
    v_scale=None,
    *,
    per_head: bool,
    layout: str,
) -> Float[Array, "..."]:
    """The pool with R · (x + u v + dense) at `slots`, zeros where it is padded. Shapes as in `api.splice`."""
    scales, plan = (x_scale, u_scale, v_scale), {"per_head": per_head, "layout": layout, "out_dtype": pool.dtype}
    value = reference.rotate_patch(x, cos, sin, u, v, dense, None, *scales, **plan)
    return write(pool, slots, reference.spread(value, 0, pool.shape[-1]), length)
