"""splice for Hopper GPUs, on Mosaic GPU: rotate_patch's blocks, which send tokens to slots of a paged pool, in place.

Eight tokens whose slots follow each other leave as one copy, others one by one. Copies may start at every token: its
columns in shared memory are whole lines of 128 bytes, and lines are swizzled by their address, as the copy engine does
it ("Swizzle Pattern Pointer Offset Computation" in the CUDA C++ Programming Guide).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .._operands import Operands
from ..rotate_patch.gpu import ROWS, Form, as_words, run_tiles

EIGHT = 8
"""Tokens that leave together."""


def send(refs: tuple[Any, Any, Any], part: Any, layer: Any, start: Any, columns: Any) -> None:
    """Starts the copies of 64 tokens to their slots; −1 is none, and of an eight one by one."""
    slots, eights, pool = refs

    def copy(row, count: int, slot) -> None:
        place = pool.at[layer, pl.ds(slot, count), columns]
        plgpu.copy_smem_to_gmem(part.at[pl.ds(row, count)], place, commit_group=False)

    def eight(number, carry):
        row = number * EIGHT
        first = eights[(start + row) // EIGHT]
        pl.when(first >= 0)(lambda: copy(row, EIGHT, first))

        @pl.when(first < 0)
        def _():
            for token in range(EIGHT):
                slot = slots[start + row + token]
                pl.when(slot >= 0)(lambda token=token, slot=slot: copy(row + token, 1, slot))

        return carry

    jax.lax.fori_loop(0, ROWS // EIGHT, eight, None)


def kernel(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    interpret: Any = False,
) -> Float[Array, "*leading P O K H"]:
    """Writes R · (x + u v) to `slots` of the pool; raises NotImplementedError for what it does not take.

    In place where the pool is donated to the program that this is traced in.
    """
    form, total = Form.of(operands, layout), math.prod(pool.shape[-4:-2])
    counted = jnp.arange(len(slots)) < (len(slots) if length is None else length)
    slots = jnp.where((slots >= 0) & (slots < total) & counted, slots, -1)
    slots = jnp.pad(slots, (0, -len(slots) % ROWS), constant_values=-1)
    eights = slots.reshape(-1, EIGHT)
    follow = (eights == eights[:, :1] + jnp.arange(EIGHT, dtype=jnp.int32)).all(-1)
    rows = pool.reshape(-1, total, math.prod(pool.shape[-2:]))
    # A mutable reference of which the kernel writes a part, so that XLA makes no second pool.
    reference = jax.new_ref(as_words(rows) if form.words else rows)
    places = slots, jnp.where(follow, eights[:, 0], -1), reference
    run_tiles(send, form, operands, length, places, interpret=interpret)
    return jax.lax.bitcast_convert_type(jax.freeze(reference), jnp.bfloat16).reshape(pool.shape)
