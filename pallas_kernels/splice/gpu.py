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
SCATTERED, NOWHERE = -1, -2
"""In place of an eight's first slot: tokens that leave one by one, and eights of which no token goes anywhere."""


def places(
    slots: Int[Array, " T"], length: Int[Array, ""] | None, total: int
) -> tuple[Int[Array, " _"], Int[Array, " _"]]:
    """Returns where tokens go, −1 for nowhere, padded to whole blocks; and for every eight its first slot where its
    slots follow each other, `SCATTERED` or `NOWHERE`. The pool has `total` slots.
    """
    tokens = jnp.arange(len(slots), dtype=jnp.int32)
    goes = (slots >= 0) & (slots < total) & (tokens < (len(slots) if length is None else length))
    slots = jnp.pad(jnp.where(goes, slots, -1), (0, -len(slots) % ROWS), constant_values=-1)
    eights = slots.reshape(-1, EIGHT)
    follow = (eights == eights[:, :1] + jnp.arange(EIGHT, dtype=jnp.int32)).all(-1) & (eights[:, 0] >= 0)
    return slots, jnp.where(follow, eights[:, 0], jnp.where((eights < 0).all(-1), NOWHERE, SCATTERED))


def send(refs: tuple[Any, Any, Any], part: Any, layer: Any, start: Any, columns: Any) -> None:
    """Starts the copies of 64 tokens to their slots."""
    slots, eights, pool = refs

    def copy(row, count: int, slot) -> None:
        place = pool.at[layer, pl.ds(slot, count), columns]
        plgpu.copy_smem_to_gmem(part.at[pl.ds(row, count)], place, commit_group=False)

    def eight(number, carry):
        row = number * EIGHT
        first = eights[(start + row) // EIGHT]
        pl.when(first >= 0)(lambda: copy(row, EIGHT, first))

        @pl.when(first == SCATTERED)
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
    rows = pool.reshape(-1, total, math.prod(pool.shape[-2:]))
    # A mutable reference of which the kernel writes a part, so that XLA makes no second pool.
    reference = jax.new_ref(as_words(rows) if form.words else rows)
    run_tiles(send, form, operands, length, (*places(slots, length, total), reference), interpret=interpret)
    return jax.lax.bitcast_convert_type(jax.freeze(reference), jnp.bfloat16).reshape(pool.shape)
