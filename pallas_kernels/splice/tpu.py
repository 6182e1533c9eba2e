"""splice for TPU, on Mosaic: one launch over all layers, which writes into the pool where it lies.

A block of tokens is made as rotate_patch makes it, then copied to its slots. Where a slot is a whole row [K, H] of the
pool, every token is one copy, or every 32 tokens whose slots are consecutive, and the copies of two blocks overlap. A
channel of one head is stored with its tokens packed into tiles, and a copy must cover whole tiles: there a block reads
the tiles it touches, replaces its rows, and writes them back, one block after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._operands import LANES, Operands, first_reason, refusals
from ..tpu.block import write_block
from ..tpu.prepare import Tile, arrays_of, reach, specs_of, tile_for, untyped

UNIT = 32
"""Tokens whose slots, where they are consecutive, are one copy."""
SLOT_LIMIT = 65536
"""Tokens whose slots fit the scalar memory."""


def unsupported(pool: Array | jax.ShapeDtypeStruct, operands: Operands, layout: str) -> str | None:
    """Returns why this kernel cannot take such arguments; None if it can. Any `layout` will do."""
    tokens, heads, width = operands.x.shape[-3:]
    pages, offsets = pool.shape[-4:-2]
    rows = group_of(pool.dtype)
    copied = "else the pool would be copied to be laid out anew"
    split = heads == 1 and (offsets % rows != 0 or pages * offsets < 2 * UNIT)
    checks = [
        *refusals(operands, pool.dtype.name),
        (width % LANES != 0, f"a width of {width}; expected a multiple of {LANES}, {copied}"),
        (
            heads not in (1, 2, 4) and heads % 8 != 0,
            f"{heads} heads; expected 1, 2, 4 or a multiple of 8, {copied}",
        ),
        (tokens > SLOT_LIMIT, f"{tokens} tokens; expected at most {SLOT_LIMIT}"),
        (split, f"{pages} pages of {offsets} slots; expected a multiple of {rows} of one head in a page"),
    ]
    return first_reason(checks)


def group_of(dtype: jax.typing.DTypeLike) -> int:
    """Counts the rows of one tile: the least that a copy of single-head rows may cover."""
    return 32 // jnp.dtype(dtype).itemsize


def _plan(
    slots: Array, total: int, length: Array, blocks: int, block: int, unit: int, open_end: bool
) -> tuple[Array, Array]:
    """Finds slots by block, −1 where nothing is written; and of every unit its first slot if consecutive, else −1.

    `open_end`: a unit that the length cuts short is consecutive where what is left of it is.
    """
    tokens = slots.shape[0]
    keep = (slots >= 0) & (slots < total) & (jnp.arange(tokens) < length)
    padded = jnp.pad(jnp.where(keep, slots, -1), (0, blocks * block - tokens), constant_values=-1)
    units = jnp.pad(padded.reshape(blocks, block), ((0, 0), (0, -block % unit)), constant_values=-1)

    by_unit = units.reshape(-1, unit)
    fits = by_unit == by_unit[:, :1] + jnp.arange(unit)
    if open_end:
        fits |= jnp.arange(by_unit.size).reshape(by_unit.shape) >= length
    return units.reshape(-1), jnp.where(fits.all(1) & (by_unit[:, 0] >= 0), by_unit[:, 0], -1)


def _body(slots, firsts, length, *refs, names: tuple[str, ...], rotary: int, layout: str, interpret, unit: int) -> None:
    """Writes rows of several heads: copies start here and are awaited one step later, once the next have started."""
    given = dict(zip(names, refs[: len(names)], strict=True))
    pool, made, semaphores = refs[len(names) + 1 :]
    rows = made.shape[1]
    layers = pl.num_programs(1)
    step = pl.program_id(0) * layers + pl.program_id(1)
    last = step == pl.num_programs(0) * layers - 1
    block = given["x"].shape[0]
    wanted = pl.program_id(0) * block < length[0]

    @pl.when(wanted)
    def _():
        write_block(given, made.at[step % 2, pl.ds(0, block)], rotary, layout, interpret)

    # Starts the copies of this step, then awaits those of the step before, so that its buffer is free for the next; the
    # last step leaves nothing on the way. One loop, for the code that finds the copies is long.
    @pl.loop(jnp.where(wanted, 0, 1), jnp.where(last, 3, 2))
    def _(turn):
        number = step - (turn == 1).astype(jnp.int32)
        buffer = number % 2

        def copy(row, slot, count):
            source = made.at[buffer, pl.ds(row, count)]
            there = pool.at[pl.program_id(1), pl.ds(slot, count)]
            moving = pltpu.make_async_copy(source, there, semaphores.at[buffer])
            pl.when(turn == 0)(moving.start)
            pl.when(turn > 0)(moving.wait)  # for its size; its place does not matter

        def of_unit(index, carry):
            first, row = firsts[number // layers * (rows // unit) + index], index * unit

            def whole():
                return copy(row, first, unit)

            jax.lax.cond(first >= 0, whole, lambda: jax.lax.fori_loop(row, row + unit, of_token, None))
            return carry

        def of_token(row, carry):
            slot = slots[number // layers * rows + row]
            pl.when(slot >= 0)(lambda: copy(row, slot, 1))
            return carry

        @pl.when(number >= 0)
        def _():
            jax.lax.fori_loop(0, rows // unit, of_unit, None)


def _rows_body(
    slots, firsts, length, *refs, names: tuple[str, ...], rotary: int, layout: str, interpret, group: int
) -> None:
    """Writes rows of one head: reads, changes and writes whole tiles."""
    given = dict(zip(names, refs[: len(names)], strict=True))
    pool, made, tiles, semaphore = refs[len(names) + 1 :]
    block, width = given["x"].shape
    layer, start = pl.program_id(1), pl.program_id(0) * block
    window = tiles.shape[0]
    total = pool.shape[1]

    def move(tile, place, inward: bool) -> None:
        """Copies whole tiles and waits: the next copy may be of the same tiles."""
        there = pool.at[layer, pl.ds(pl.multiple_of(place, group), tile.shape[0])]
        copy = pltpu.make_async_copy(*((there, tile) if inward else (tile, there)), semaphore)
        copy.start()
        copy.wait()

    def replace(first, count, fresh) -> None:
        """Puts rows of `fresh` [window, H] at window rows first … first + count − 1."""
        row = jax.lax.broadcasted_iota(jnp.int32, fresh.shape, 0)
        mixed = jnp.where((row >= first) & (row < first + count), fresh, tiles[...].astype(jnp.float32))
        tiles[...] = mixed.astype(tiles.dtype)

    def straight() -> None:
        """Writes a block whose slots are consecutive: a window of tiles at once."""
        first = firsts[pl.program_id(0)]
        count = jnp.minimum(length[0] - start, block)
        place = jnp.minimum(first // group * group, total - window)
        move(tiles, place, True)
        replace(first - place, count, pltpu.roll(made[...], first - place, 0))
        move(tiles, place, False)

    def token(row, carry):
        """Returns a token of scattered slots: its tile alone."""
        slot = slots[start + row]
        tile = tiles.at[pl.ds(0, group)]

        @pl.when(slot >= 0)
        def _():
            place = slot // group * group
            move(tile, place, True)
            at = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0) == slot - place
            fresh = jnp.broadcast_to(made[pl.ds(row, 1)], tile.shape)
            tile[...] = jnp.where(at, fresh, tile[...].astype(jnp.float32)).astype(tile.dtype)
            move(tile, place, False)

        return carry

    @pl.when(start < length[0])
    def _():
        write_block(given, made.at[pl.ds(0, block)], rotary, layout, interpret)
        # What is rolled into the window from behind the block must be a number, though none of it is kept.
        made[pl.ds(block, group)] = jnp.zeros((group, width), jnp.float32)
        pl.when(firsts[pl.program_id(0)] >= 0)(straight)

        @pl.when(firsts[pl.program_id(0)] < 0)
        def _():
            jax.lax.fori_loop(0, block, token, 0)


def kernel(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    tile: Tile | None = None,
    layout: str,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading P O K H"]:
    """Writes R · (x + u v + dense) to `slots` of the pool, for arguments that `unsupported` has nothing against.

    Args:
      tile: tokens per block; None asks the device's configuration, then `tpu.prepare.tile_of`.
      interpret: how to interpret the kernel where there is no TPU.
    """
    tokens, heads, width = operands.x.shape[-3:]
    total = pool.shape[-4] * pool.shape[-3]
    arrays = arrays_of(operands, layout)
    tile = tile or tile_for(operands, pool.dtype)
    block = min(tile.tokens, tokens)
    group = group_of(pool.dtype)
    if heads == 1:
        # Whole tiles, and a window of one tile more that fits the pool.
        block = min(-(-block // UNIT), (total - group) // UNIT) * UNIT

    blocks = -(-tokens // block)
    unit = block if heads == 1 else min(UNIT, block)

    length = jnp.minimum(tokens, jnp.int32(tokens) if length is None else length)
    plan = _plan(slots, total, length, blocks, block, unit, heads == 1)
    common = {"names": tuple(arrays), "rotary": operands.rotary, "layout": layout, "interpret": interpret}
    if heads == 1:
        flat = pool.reshape(-1, total, width)
        body = functools.partial(_rows_body, **common, group=group)
        window = block + group, width
        scratch = [pltpu.VMEM(window, jnp.float32), pltpu.VMEM(window, pool.dtype), pltpu.SemaphoreType.DMA(())]
    else:
        flat = pool.reshape(-1, total, heads, width)
        body = functools.partial(_body, **common, unit=unit)
        rows = -(-block // unit) * unit
        scratch = [pltpu.VMEM((2, rows, heads, width), pool.dtype), pltpu.SemaphoreType.DMA((2,))]

    whole = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks, flat.shape[0]),
            in_specs=[*specs_of(arrays, block, flat.shape[0]), whole],
            out_specs=whole,
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
    result = untyped(run, flat)(*plan, reach(length, block, blocks - 1), *arrays.values(), flat)
    return result.reshape(pool.shape)
