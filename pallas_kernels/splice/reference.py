"""The XLA path of splice: what every kernel is held against."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._operands import Operands, spread
from ..rotate_patch import reference


def write(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    value: Float[Array, "*leading T K H"],
    length: Int[Array, ""] | None = None,
) -> Float[Array, "*leading P O K H"]:
    """Writes `value` to `slots` of the pool; tokens from `length` on, and slots out of range, are written nowhere."""
    pages, offsets = pool.shape[-4:-2]
    total = pages * offsets
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    keep = (slots >= 0) & (slots < total)
    if length is not None:
        keep &= tokens < length
    # What is dropped gets distinct places beyond the end, so that the promise of uniqueness holds for all of them.
    places = jnp.where(keep, slots.astype(jnp.int32), total + tokens)
    # By layer, page and offset: over a pool that is reshaped to slots and back, XLA on a CPU copies all of it, and with
    # whole axes of layers XLA on a TPU, where a device has one head (v5e: 0.6 GB of a pool's 0.6 GB).
    leading = jnp.meshgrid(*map(jnp.arange, pool.shape[:-4]), indexing="ij", sparse=True)
    at = (*(axis[..., None] for axis in leading), places // offsets, places % offsets)
    return pool.at[at].set(value, mode="drop", unique_indices=True)


def splice(
    pool: Float[Array, "*leading P O K _"],
    slots: Int[Array, " T"],
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
) -> Float[Array, "*leading P O K _"]:
    """Writes R · (x + u v + dense) to `slots` of the pool, zeros where it is padded. See `api.splice`."""
    value = reference.rotate_patch(operands, None, layout=layout, out_dtype=pool.dtype)
    return write(pool, slots, spread(value, 0, pool.shape[-1]), length)
