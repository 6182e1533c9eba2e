"""Splicing of packed KV: one layer is decoded, patched, rotated and written before the next."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import rotate_patch

from ..core import KVLayout, PackedArray, ops


def splice_packed(
    layout: KVLayout,
    pool: Mapping[str, Float[Array, "L P O _ _"]],
    slots: Int[Array, " T"],
    kv: Mapping[str, PackedArray],
    arguments: dict[str, dict[str, Any]],
    length: Int[Array, ""],
) -> dict[str, Float[Array, "L P O _ _"]]:
    """Writes packed channels' R · (x + u v) into a pool, so that one layer at most is unpacked at a time.

    Args:
      arguments: of `rotate_patch` by channel, as `ops.operator_arguments` gives them.
      length: tokens that count; later ones are written nowhere.
    """
    pages, size = next(iter(pool.values())).shape[1:3]
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    # What is dropped gets distinct places beyond the end, so that the promise of uniqueness holds for all of them.
    keep = (tokens < length) & (slots >= 0) & (slots < pages * size)
    places = jnp.where(keep, slots.astype(jnp.int32), pages * size + tokens)

    def write(pool: dict[str, Array], layer: Array, rows: dict[str, Array]) -> dict[str, Array]:
        written = dict(pool)
        for name, value in rows.items():
            padding = [(0, 0), (0, 0), (0, pool[name].shape[-1] - value.shape[-1])]
            value = jnp.pad(value.astype(pool[name].dtype), padding)
            at = pool[name].at[layer, places // size, places % size]
            written[name] = at.set(value, mode="drop", unique_indices=True)
        return written

    written = dict(pool)
    for names, kernel in layout.kernels(rotate_patch):
        own = {name: kv[name] for name in names if name in pool}
        if own:
            written = ops.over_layers(own, arguments, kernel, write, written)
    return written
