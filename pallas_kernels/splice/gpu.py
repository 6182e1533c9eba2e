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

from .. import _hopper as hopper
from .._cuts import Plan
from ..rotate_patch import gpu as rotate_patch

EIGHT = 8
"""Tokens that leave together: rows of one swizzled tile."""
SCATTERED, NOWHERE = -1, -2
"""In place of an eight's first slot: tokens that leave one by one, and eights of which no token goes anywhere."""


def unsupported(pool, given: rotate_patch.Operands, per_head: bool, layout: str) -> str | None:
    """Why this kernel cannot take such arguments; None if it can."""
    return rotate_patch.unsupported(given, per_head, layout, pool.dtype.name, whole_lines=True)


def places(
    slots: Int[Array, " T"], length: Int[Array, ""] | None, total: int, padding: int
) -> tuple[Int[Array, " _"], Int[Array, " _"]]:
    """Where tokens go, −1 for nowhere, padded; and where eights go whose slots follow each other.

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


def _work(here: hopper.Here, given, shared) -> None:
    active = lambda role: lambda: pl.when(here.start < given["length"][0])(lambda: role(here, given, shared))
    hopper.roles(here, active(_fetch), active(_compute))


def _fetch(here: hopper.Here, given, shared) -> None:
    """Brings the block's slots, once for all items, then what every block of these kernels fetches."""
    rows = pl.ds(here.start, here.launch.rows)
    plgpu.copy_gmem_to_smem(given["slots"].at[rows], shared["slots"], shared["slots_ready"])
    hopper.fetch(here, given, shared)


def _compute(here: hopper.Here, given, shared) -> None:
    items = here.launch.items
    angles = hopper.Angles.of(here, given, shared)
    first_eight = (here.start + here.group * hopper.ROWS) // EIGHT
    eights = [given["eights"][first_eight + number] for number in range(hopper.ROWS // EIGHT)]
    following = [eight == eights[0] + EIGHT * number for number, eight in enumerate(eights)]
    in_one = functools.reduce(operator.and_, following, eights[0] >= 0)
    scattered = functools.reduce(operator.or_, [eight == SCATTERED for eight in eights])
    plgpu.barrier_wait(shared["slots_ready"])

    def deliver(number):
        layer, head = here.item(number)
        hopper.put(here, shared, number, hopper.compute(here, shared, angles, number))
        columns = [pl.ds(column, items.span) for column in items.sources(here.kind, head)]
        item = Item(here, *hopper.outlet(here, shared, number), given["pool"], layer, columns)
        pl.when(in_one)(lambda: item.send(0, hopper.ROWS, eights[0]))

        @pl.when(~in_one)
        def _():
            for number_of_eight, slot in enumerate(eights):
                pl.when(slot >= 0)(
                    lambda slot=slot, first=EIGHT * number_of_eight: item.send(first, EIGHT, slot),
                )

        pl.when(scattered)(lambda: _scatter(item, given["eights"], first_eight, shared["slots"]))

    hopper.consume(here, shared, deliver)


class Item(NamedTuple):
    """An item that lies ready in shared memory: where, and where in the pool its columns are."""

    here: hopper.Here
    buffer: Any
    stage: Any
    pool: Any
    layer: Any
    columns: list[Any]

    def send(self, first, count: int, slot) -> None:
        """Starts the copies of `count` of the warpgroup's tokens, from its `first`, to as many slots from `slot`."""
        rows = pl.ds(self.here.group * hopper.ROWS + first, count)
        for run, column in enumerate(self.columns):
            place = self.pool.at[self.layer, pl.ds(slot, count), column]
            plgpu.copy_smem_to_gmem(self.buffer.at[self.stage, run, rows], place, commit_group=False)


def _scatter(item: Item, eights, first_eight, slots) -> None:
    """Sends the tokens of scattered eights one by one."""

    def eight(number, carry):
        @pl.when(eights[first_eight + number] == SCATTERED)
        def _():
            for row in range(EIGHT):
                token = number * EIGHT + row
                slot = slots[item.here.group * hopper.ROWS + token]
                pl.when(slot >= 0)(lambda token=token, slot=slot: item.send(token, 1, slot))

        return carry

    jax.lax.fori_loop(0, hopper.ROWS // EIGHT, eight, None)


def splice(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    given: rotate_patch.Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    plan: Plan | None = None,
    interpret=False,
) -> Float[Array, "*leading P O K H"]:
    """The pool with R · (x + u v + dense) at `slots`, for arguments that `unsupported` has nothing against.

    In place where the pool is donated to the program that this is traced in.

    Args:
      plan: how the launch is cut up; None chooses.
      interpret: how to interpret the kernel where there is no GPU.
    """
    launch = rotate_patch.launch_of(given, layout, pool.dtype.name, whole_lines=True)
    assert launch is not None
    launch = launch if plan is None else launch._replace(plan=plan)
    arrays = rotate_patch.operands(launch, given)
    pages, offsets, heads, width = pool.shape[-4:]
    arrays["slots"], arrays["eights"] = places(slots, length, pages * offsets, launch.rows)
    arrays["length"] = jnp.full((1,), launch.tokens, jnp.int32) if length is None else length.reshape(1)
    rows = rotate_patch.rows_of(pool.reshape(-1, pages * offsets, heads, width), launch.items)
    reference = jax.new_ref(rows)
    own = {"slots": plgpu.SMEM((launch.rows,), jnp.int32), "slots_ready": plgpu.Barrier()}
    run = hopper.kernel_of("splice", launch, (*arrays, "pool"), _work, interpret, own=own)
    run(*arrays.values(), reference)
    return rotate_patch.from_rows(jax.freeze(reference), pool.shape, pool.dtype)
