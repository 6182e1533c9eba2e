"""splice for Hopper GPUs, on Mosaic GPU: rotate_patch's kernel, with slots of a paged pool for a destination, in place.

The pool is a mutable reference, so that nothing of it is copied. Where the slots of a warpgroup's 64 tokens follow each
other, they leave as one copy of the item; else tokens go in eights, and where an eight's slots do not follow each other
either, every token leaves as a copy of its own. The copy engine wants a copy to start at a multiple of 128 bytes in
shared memory, so runs are exactly that long. Copies of one row start inside a swizzled tile of 1024 bytes, which no
manual promises to work: `evals/bench/accelerator.sh` tries that first on a device.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .._operands import Operands
from ..hopper import arithmetic, block, prepare
from ..hopper.launch import ROWS, LaunchPlan

EIGHT = 8
"""Tokens that leave together: rows of one swizzled tile."""
SCATTERED, NOWHERE = -1, -2
"""In place of an eight's first slot: tokens that leave one by one, and eights of which no token goes anywhere."""


def unsupported(pool: Array | jax.ShapeDtypeStruct, operands: Operands, layout: str) -> str | None:
    """Returns why this kernel cannot take such arguments; None if it can."""
    return prepare.unsupported(operands, layout, pool.dtype.name, whole_lines=True)


def places(
    slots: Int[Array, " T"], length: Int[Array, ""] | None, total: int, padding: int
) -> tuple[Int[Array, " _"], Int[Array, " _"]]:
    """Finds where tokens go, −1 for nowhere, padded; and where eights go whose slots follow each other.

    Padding at the end of an eight whose slots follow each other scatters it; an eight of padding alone goes nowhere.

    Args:
      slots: one per token. length: tokens that count. total: slots of the pool. padding: multiple of tokens to pad to.

    Returns:
      Slots, and for every eight its first slot, `SCATTERED` or `NOWHERE`.
    """
    tokens = slots.shape[0]
    keep = (slots >= 0) & (slots < total)
    if length is not None:
        keep &= jnp.arange(tokens, dtype=jnp.int32) < length
    slots = jnp.pad(jnp.where(keep, slots, -1), (0, -tokens % padding), constant_values=-1)

    eights = slots.reshape(-1, EIGHT)
    follow = (eights == eights[:, :1] + jnp.arange(EIGHT, dtype=jnp.int32)).all(-1) & (eights[:, 0] >= 0)
    elsewhere = jnp.where((eights < 0).all(-1), NOWHERE, SCATTERED)
    return slots, jnp.where(follow, eights[:, 0], elsewhere)


def _work(here: block.RunningBlock, given, shared) -> None:
    # A block of padding alone writes nothing, and so does nothing.
    def active(role):
        return lambda: pl.when(here.start < given["length"][0])(lambda: role(here, given, shared))

    block.roles(here, active(_fetch), active(_compute))


def _fetch(here: block.RunningBlock, given, shared) -> None:
    """Brings the block's slots, once for all items, then what every block of these kernels fetches."""
    rows = pl.ds(here.start, here.launch.rows)
    plgpu.copy_gmem_to_smem(given["slots"].at[rows], shared["slots"], shared["slots_ready"])
    block.fetch(here, given, shared)


def _compute(here: block.RunningBlock, given, shared) -> None:
    """Runs a computing warpgroup: its tokens of every item, sent to their slots in as few copies as possible."""
    items = here.launch.items
    angles = arithmetic.Angles.of(here, given, shared)

    # Where eights go is the same for all items: found once, and kept in registers.
    first_eight = (here.start + here.group * ROWS) // EIGHT
    eights = [given["eights"][first_eight + number] for number in range(ROWS // EIGHT)]
    following = [eight == eights[0] + EIGHT * number for number, eight in enumerate(eights)]
    in_one = functools.reduce(operator.and_, following, eights[0] >= 0)
    scattered = functools.reduce(operator.or_, [eight == SCATTERED for eight in eights])
    plgpu.barrier_wait(shared["slots_ready"])

    def deliver(number):
        layer, head = here.item(number)
        arithmetic.put(here, shared, number, arithmetic.compute(here, shared, angles, number))
        columns = [pl.ds(column, items.span) for column in items.sources(here.kind, head)]
        item = ReadyItem(here, *block.outlet(here, shared, number), given["pool"], layer, columns)
        pl.when(in_one)(lambda: item.send(0, ROWS, eights[0]))

        @pl.when(~in_one)
        def _():
            for number_of_eight, slot in enumerate(eights):
                pl.when(slot >= 0)(
                    lambda slot=slot, first=EIGHT * number_of_eight: item.send(first, EIGHT, slot),
                )

        pl.when(scattered)(lambda: _scatter(item, given["eights"], first_eight, shared["slots"]))

    block.consume(here, shared, deliver)


class ReadyItem(NamedTuple):
    """An item that lies ready in shared memory: where, and where in the pool its columns are."""

    here: block.RunningBlock
    buffer: Any
    stage: Any
    pool: Any
    layer: Any
    columns: list[Any]

    def send(self, first, count: int, slot) -> None:
        """Starts the copies of `count` of the warpgroup's tokens, from its `first`, to as many slots from `slot`."""
        rows = pl.ds(self.here.group * ROWS + first, count)
        for run, column in enumerate(self.columns):
            place = self.pool.at[self.layer, pl.ds(slot, count), column]
            plgpu.copy_smem_to_gmem(self.buffer.at[self.stage, run, rows], place, commit_group=False)


def _scatter(item: ReadyItem, eights, first_eight, slots) -> None:
    """Sends the tokens of scattered eights one by one; a loop over eights, for its code is long."""

    def eight(number, carry):
        @pl.when(eights[first_eight + number] == SCATTERED)
        def _():
            for row in range(EIGHT):
                token = number * EIGHT + row
                slot = slots[item.here.group * ROWS + token]
                pl.when(slot >= 0)(lambda token=token, slot=slot: item.send(token, 1, slot))

        return carry

    jax.lax.fori_loop(0, ROWS // EIGHT, eight, None)


def kernel(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    plan: LaunchPlan | None = None,
    interpret=False,
) -> Float[Array, "*leading P O K H"]:
    """Writes R · (x + u v + dense) to `slots` of the pool, for arguments that `unsupported` has nothing against.

    In place where the pool is donated to the program that this is traced in.

    Args:
      plan: how the launch is cut up; None chooses.
      interpret: how to interpret the kernel where there is no GPU.
    """
    launch = prepare.launch_of(operands, layout, pool.dtype.name, whole_lines=True)
    assert launch is not None
    launch = launch if plan is None else launch._replace(plan=plan)
    arrays = prepare.arrays_of(launch, operands)
    pages, offsets, heads, width = pool.shape[-4:]
    arrays["slots"], arrays["eights"] = places(slots, length, pages * offsets, launch.rows)
    arrays["length"] = prepare.length_of(launch, length)

    # A mutable reference of which the kernel writes a part, so that XLA makes no second pool.
    reference = jax.new_ref(prepare.rows_of(pool.reshape(-1, pages * offsets, heads, width), launch.items))
    own = {"slots": plgpu.SMEM((launch.rows,), jnp.int32), "slots_ready": plgpu.Barrier()}
    run = block.kernel_of("splice", launch, (*arrays, "pool"), _work, interpret, own=own)
    run(*arrays.values(), reference)
    return prepare.from_rows(jax.freeze(reference), pool.shape, pool.dtype)
