"""splice for TPU, on Mosaic: one launch over all layers, which writes into the pool where it lies.

A block of tokens is made as rotate_patch makes it, then copied to its slots. Where a slot is a row [K, H] of the pool,
every 32 tokens whose slots are consecutive are one copy, else every token is, and the copies of two blocks overlap. A
channel of one head is stored with its tokens packed into tiles of 16: there a block reads the tiles it touches,
replaces its rows, and writes them back, one after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._operands import LANES, Operands, refuse
from ..rotate_patch.tpu import UNIT, arrays_of, block_of, reach, specs_of, untyped, write_block

TILE = 16
"""Rows of bfloat16 in a tile: the least that a copy of rows of one head may cover."""
SLOT_LIMIT = 65536
"""Tokens whose slots fit the scalar memory."""


def _firsts(slots: Array, unit: int, length: Array | None) -> Array:
    """Returns the first slot of every `unit` whose slots are consecutive, else −1; tokens from `length` on may be
    anything.
    """
    by_unit = slots.reshape(-1, unit)
    fits = by_unit == by_unit[:, :1] + jnp.arange(unit)
    if length is not None:
        fits |= jnp.arange(slots.size).reshape(by_unit.shape) >= length
    return jnp.where(fits.all(1) & (by_unit[:, 0] >= 0), by_unit[:, 0], -1)


def _body(slots, firsts, reach, *refs, names: tuple[str, ...], **plan) -> None:
    """Writes rows of several heads: copies start here and are awaited one step later, once the next have started."""
    pool, made, semaphores = refs[-3:]
    block, layer, layers = made.shape[1], pl.program_id(1), pl.num_programs(1)
    step = pl.program_id(0) * layers + layer
    last = step == pl.num_programs(0) * layers - 1
    count = reach[0] - pl.program_id(0) * block

    @pl.when(count > 0)
    def _():
        write_block(dict(zip(names, refs, strict=False)), made.at[step % 2], count, **plan)

    # Turn 0 starts the copies of this step; turn 1 awaits those of the step before, so that its buffer is free for the
    # next; in the last step turn 2 awaits its own. One loop, for the code that finds the copies is long.
    @pl.loop(jnp.where(count > 0, 0, 1), jnp.where(last, 3, 2))
    def _(turn):
        number = jnp.maximum(step - (turn == 1).astype(jnp.int32), 0)
        buffer, first_row = number % 2, number // layers * block

        def copy(row, slot, count):
            there = pool.at[layer, pl.ds(slot, count)]
            moving = pltpu.make_async_copy(made.at[buffer, pl.ds(row, count)], there, semaphores.at[buffer])
            pl.when(turn == 0)(moving.start)
            pl.when(turn > 0)(moving.wait)  # for its size; its place does not matter

        def of_unit(unit, carry):
            first, row = firsts[first_row // UNIT + unit], unit * UNIT
            pl.when(first >= 0)(lambda: copy(row, first, UNIT))
            jax.lax.fori_loop(row, jnp.where(first >= 0, row, row + UNIT), of_token, None)
            return carry

        def of_token(row, carry):
            slot = slots[first_row + row]
            pl.when(slot >= 0)(lambda: copy(row, slot, 1))
            return carry

        jax.lax.fori_loop(0, jnp.where((turn == 1) & (step == 0), 0, block // UNIT), of_unit, None)


def _rows_body(slots, firsts, reach, *refs, names: tuple[str, ...], **plan) -> None:
    """Writes rows of one head: reads, changes and writes whole tiles."""
    pool, made, tiles, semaphore = refs[-4:]
    block, (window, width) = made.shape[0] - TILE, made.shape
    number, layer = pl.program_id(0), pl.program_id(1)
    count = jnp.clip(reach[0] - number * block, 0, block)

    def write(slot, count, rows, fresh) -> None:
        """Writes `count` rows to slots from `slot` on, inside `rows` rows of whole tiles; fresh(i) has them from i on."""
        place = pl.multiple_of(jnp.minimum(slot // TILE * TILE, pool.shape[1] - rows), TILE)
        there, here = pool.at[layer, pl.ds(place, rows)], tiles.at[pl.ds(0, rows)]

        def move(source, target) -> None:  # and waits: the next may be of the same tiles
            moving = pltpu.make_async_copy(source, target, semaphore)
            moving.start()
            moving.wait()

        move(there, here)
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0) - (slot - place)
        mixed = jnp.where((row >= 0) & (row < count), fresh(slot - place), here[...].astype(jnp.float32))
        here[...] = mixed.astype(here.dtype)
        move(here, there)

    def of_token(row, carry):
        slot = slots[number * block + row]
        fresh = lambda _: jnp.broadcast_to(made[pl.ds(row, 1)], (TILE, width))
        pl.when(slot >= 0)(lambda: write(slot, 1, TILE, fresh))
        return carry

    @pl.when(count > 0)
    def _():
        write_block(dict(zip(names, refs, strict=False)), made.at[pl.ds(0, block)], count, **plan)
        # What is rolled into the window from behind the block must be a number, though none of it is written.
        made[pl.ds(block, TILE)] = jnp.zeros((TILE, width), jnp.float32)
        first = firsts[number]
        pl.when(first >= 0)(lambda: write(first, count, window, lambda by: pltpu.roll(made[...], by, 0)))
        jax.lax.fori_loop(0, jnp.where(first >= 0, 0, count), of_token, None)


def kernel(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading P O K H"]:
    """Writes R · (x + u v) to `slots` of a bfloat16 pool in place. See `api.splice`.

    Args:
      interpret: how to interpret the kernel where there is no TPU.

    Raises:
      NotImplementedError: a pool or operands that this kernel does not take.
    """
    tokens, heads, width = operands.x.shape[-3:]
    pages, offsets = pool.shape[-4:-2]
    total = pages * offsets
    copied = "else the pool would be copied to be laid out anew"
    split = heads == 1 and (offsets % TILE != 0 or total < UNIT + TILE)
    refuse(
        (width % LANES != 0, f"a width of {width}; expected a multiple of {LANES}, {copied}"),
        (heads not in (1, 2, 4) and heads % 8 != 0, f"{heads} heads; expected 1, 2, 4 or a multiple of 8, {copied}"),
        (tokens > SLOT_LIMIT, f"{tokens} tokens; expected at most {SLOT_LIMIT}"),
        (split, f"{pages} pages of {offsets} slots; expected a multiple of {TILE} of one head in a page"),
    )
    arrays = arrays_of(operands, layout)
    block = block_of(tokens, heads, width, arrays["u"].shape[-1] if "u" in arrays else 0)
    if heads == 1:  # a window of one tile more must fit the pool
        block = min(block, (total - TILE) // UNIT * UNIT)
        window, flat = (block + TILE, width), pool.reshape(-1, total, width)
        scratch = [pltpu.VMEM(window, jnp.float32), pltpu.VMEM(window, pool.dtype), pltpu.SemaphoreType.DMA(())]
    else:
        flat = pool.reshape(-1, total, heads, width)
        scratch = [pltpu.VMEM((2, block, heads, width), pool.dtype), pltpu.SemaphoreType.DMA((2,))]

    limits = reach(length, tokens, block)
    wanted = (slots >= 0) & (slots < total) & (jnp.arange(tokens) < limits[0])
    places = jnp.pad(jnp.where(wanted, slots, -1), (0, -tokens % block), constant_values=-1)
    firsts = _firsts(places, block, limits[0]) if heads == 1 else _firsts(places, UNIT, None)
    plan = {"layout": layout, "rotary": operands.rotary, "interpret": interpret}
    run = pl.pallas_call(
        functools.partial(_rows_body if heads == 1 else _body, names=tuple(arrays), **plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(-(-tokens // block), flat.shape[0]),
            in_specs=[*specs_of(arrays, block, flat.shape[0]), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        # The pool, behind the prefetched scalars and the arrays.
        input_output_aliases={3 + len(arrays): 0},
        # One block after the other: they write to the same pool, and a copy is awaited one step later.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="splice",
    )
    return untyped(run, flat)(places, firsts, limits, *arrays.values(), flat).reshape(pool.shape)
