"""splice for Hopper GPUs, on Mosaic GPU: rotate_patch's kernel, with slots of a paged pool for a destination, in place.

The pool is a mutable reference, so that nothing of it is copied. Tokens go in eights: where their slots follow each
other, the eight leave as one copy of the item; else every token leaves as a copy of its own. The copy engine wants a
copy to start at a multiple of 128 bytes in shared memory, so runs are exactly that long.
"""

import functools

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


def unsupported(pool, given: rotate_patch.Given, per_head: bool, layout: str) -> str | None:
    """Why this kernel cannot take such arguments; None if it can."""
    return rotate_patch.unsupported(given, per_head, layout, pool.dtype.name, whole_lines=True)


def places(
    slots: Int[Array, " T"], length: Int[Array, ""] | None, total: int, padding: int
) -> tuple[Int[Array, " _"], Int[Array, " _"]]:
    """Where tokens go, −1 for nowhere, padded; and where eights go whose slots follow each other, −1 for the others.

    Args:
      slots: one per token. length: tokens that count. total: slots of the pool. padding: multiple of tokens to pad to.
    """
    tokens = slots.shape[0]
    keep = (slots >= 0) & (slots < total)
    if length is not None:
        keep &= jnp.arange(tokens, dtype=jnp.int32) < length
    slots = jnp.pad(jnp.where(keep, slots, -1), (0, -tokens % padding), constant_values=-1)
    eights = slots.reshape(-1, EIGHT)
    follow = (eights == eights[:, :1] + jnp.arange(EIGHT, dtype=jnp.int32)).all(-1) & (eights[:, 0] >= 0)
    return slots, jnp.where(follow, eights[:, 0], -1)


def _work(here: hopper.Here, given, shared) -> None:
    active = lambda role: lambda: pl.when(here.start < given["length"][0])(lambda: role(here, given, shared))
    hopper.roles(here, active(hopper.fetch), active(_compute))


def _compute(here: hopper.Here, given, shared) -> None:
    items = here.launch.items
    angles = hopper.Angles.of(here, given, shared)
    first_token = here.start + here.group * hopper.ROWS
    eights = [given["eights"][first_token // EIGHT + number] for number in range(hopper.ROWS // EIGHT)]
    scattered = functools.reduce(jnp.minimum, eights) < 0

    def deliver(number):
        layer, head = here.item(number)
        columns = [pl.ds(column, items.span) for column in items.sources(here.kind, head)]
        hopper.put(here, shared, number, hopper.compute(here, shared, angles, number))
        buffer, stage = hopper.outlet(here, shared, number)
        for number_of_eight, slot in enumerate(eights):

            @pl.when(slot >= 0)
            def _(slot=slot, number_of_eight=number_of_eight):
                eight = pl.ds(here.group * hopper.ROWS + EIGHT * number_of_eight, EIGHT)
                for run, column in enumerate(columns):
                    place = given["pool"].at[layer, pl.ds(slot, EIGHT), column]
                    plgpu.copy_smem_to_gmem(buffer.at[stage, run, eight], place, commit_group=False)

        @pl.when(scattered)
        def _():
            _scatter(here, given, buffer, stage, layer, columns)

    hopper.consume(here, shared, deliver)


def _scatter(here: hopper.Here, given, buffer, stage, layer, columns) -> None:
    """Sends the tokens of a warpgroup one by one, but for those that left in eights."""
    first_token = here.start + here.group * hopper.ROWS

    def row(number, carry):
        slot = given["slots"][first_token + number]
        together = given["eights"][(first_token + number) // EIGHT] >= 0

        @pl.when((slot >= 0) & ~together)
        def _():
            for run, column in enumerate(columns):
                place = given["pool"].at[layer, pl.ds(slot, 1), column]
                source = buffer.at[stage, run, pl.ds(here.group * hopper.ROWS + number, 1)]
                plgpu.copy_smem_to_gmem(source, place, commit_group=False)

        return carry

    jax.lax.fori_loop(0, hopper.ROWS, row, None)


def splice(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    given: rotate_patch.Given,
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
    run = hopper.kernel_of("splice", launch, (*arrays, "pool"), _work, interpret)
    run(*arrays.values(), reference)
    return rotate_patch.from_rows(jax.freeze(reference), pool.shape, pool.dtype)
