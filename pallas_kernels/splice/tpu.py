"""splice for TPU, on Mosaic: one launch over all layers, which writes into the pool where it lies.

A block of tokens is made as rotate_patch makes it, then copied to its slots. Where a slot is a row [K, H] of the pool,
every 32 tokens whose slots are consecutive are one copy, else every token is, and copies overlap with the next block. A
channel of one head is stored with its tokens packed into tiles of 16: there a block whose slots are consecutive, else
every 32 tokens, else a token, reads the tiles it touches, replaces its rows, and writes them back, one after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._operands import LANES, Operands, refuse
from ..rotate_patch.tpu import UNIT, prepare

TILE = 16
"""Rows of bfloat16 in a tile: the least that a copy of rows of one head may cover."""
SLOT_LIMIT = 65536
"""Tokens whose slots fit the scalar memory."""


def _body(write_block, slots, firsts, reach, *refs) -> None:
    """Writes rows of several heads: copies start here and are awaited one step later, once the next have started."""
    pool, made, semaphores = refs[-3:]
    block, layer, layers = made.shape[1], pl.program_id(1), pl.num_programs(1)
    step = pl.program_id(0) * layers + layer
    count = reach[0] - pl.program_id(0) * block

    def copies(step, act: str) -> None:
        """Starts or awaits all copies of a step."""
        start, buffer = step // layers * block, step % 2

        def copy(row, slot, rows) -> None:
            there = pool.at[layer, pl.ds(slot, rows)]  # of one that is awaited the size counts, not the place
            getattr(pltpu.make_async_copy(made.at[buffer, pl.ds(row, rows)], there, semaphores.at[buffer]), act)()

        @pl.loop(0, block // UNIT)
        def _(unit):
            row, first = unit * UNIT, firsts[start // UNIT + unit]
            pl.when(first >= 0)(lambda: copy(row, first, UNIT))

            @pl.loop(row, jnp.where(first >= 0, row, row + UNIT))
            def _(row):
                pl.when(slots[start + row] >= 0)(lambda: copy(row, slots[start + row], 1))

    @pl.when(count > 0)
    def _():
        write_block(refs, made.at[step % 2], count)
        copies(step, "start")

    pl.when(step > 0)(lambda: copies(step - 1, "wait"))
    pl.when(step == pl.num_programs(0) * layers - 1)(lambda: copies(step, "wait"))


def _rows_body(write_block, slots, firsts, reach, *refs) -> None:
    """Writes rows of one head: reads, changes and writes whole tiles."""
    pool, made, tiles = refs[-3:]
    (window, width), layer = made.shape, pl.program_id(1)
    block, start = window - TILE, pl.program_id(0) * (window - TILE)
    count, first = jnp.clip(reach[0] - start, 0, block), firsts[pl.program_id(0)]

    def write(slot, count, rows: int, fresh) -> None:
        """Writes `count` rows to slots from `slot` on, inside `rows` rows of the pool: fresh(i) has them from i on."""
        place = pl.multiple_of(jnp.minimum(slot // TILE * TILE, pool.shape[1] - rows), TILE)
        there, here = pool.at[layer, pl.ds(place, rows)], tiles.at[pl.ds(0, rows)]
        row = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0) - (slot - place)
        pltpu.sync_copy(there, here)
        rows_of_ours = (row >= 0) & (row < count)
        here[...] = jnp.where(rows_of_ours, fresh(slot - place).astype(here.dtype), here[...])
        pltpu.sync_copy(here, there)

    @pl.when(count > 0)
    def _():
        write_block(refs, made.at[pl.ds(0, block)], count)
        pl.when(first >= 0)(lambda: write(first, count, window, lambda by: pltpu.roll(made[...], by, 0)))

        @pl.loop(0, jnp.where(first >= 0, 0, (count + UNIT - 1) // UNIT))
        def _(unit):
            row, first = pl.multiple_of(unit * UNIT, UNIT), firsts[pl.num_programs(0) + start // UNIT + unit]
            end, piece = jnp.minimum(row + UNIT, count), made[pl.ds(row, UNIT + TILE)]
            pl.when(first >= 0)(lambda: write(first, end - row, UNIT + TILE, lambda by: pltpu.roll(piece, by, 0)))

            @pl.loop(jnp.where(first >= 0, end, row), end)
            def _(row):
                slot, token = slots[start + row], jnp.broadcast_to(made[pl.ds(row, 1)], (TILE, width))
                pl.when(slot >= 0)(lambda: write(slot, 1, TILE, lambda _: token))


def kernel(
    pool: Float[Array, "*leading P O K H"],
    slots: Int[Array, " T"],
    operands: Operands,
    length: Int[Array, ""] | None,
    *,
    layout: str,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "*leading P O K H"]:
    """Writes R · (x + u v) to `slots` of a bfloat16 pool in place; NotImplementedError says what it does not take."""
    tokens, heads, width = operands.x.shape[-3:]
    pages, offsets = pool.shape[-4:-2]
    total, copied = pages * offsets, "else the pool would be copied to be laid out anew"
    split = heads == 1 and (offsets % TILE != 0 or total < UNIT + TILE)
    refuse(
        (width % LANES != 0, f"a width of {width}; expected a multiple of {LANES}, {copied}"),
        (heads not in (1, 2, 4) and heads % 8 != 0, f"{heads} heads; expected 1, 2, 4 or a multiple of 8, {copied}"),
        (tokens > SLOT_LIMIT, f"{tokens} tokens; expected at most {SLOT_LIMIT}"),
        (split, f"{pages} pages of {offsets} slots; expected a multiple of {TILE} of one head in a page"),
    )
    most = (total - TILE) // UNIT * UNIT if heads == 1 else None  # a window of one tile more must fit the pool
    write_block, arrays, specs, block, grid, reach = prepare(operands, layout, length, interpret, most)
    if heads == 1:
        body, flat = _rows_body, pool.reshape(-1, total, width)
        scratch = [pltpu.VMEM((block + TILE, width), dtype) for dtype in (jnp.float32, pool.dtype)]
    else:
        body, flat = _body, pool.reshape(-1, total, heads, width)
        scratch = [pltpu.VMEM((2, block, heads, width), pool.dtype), pltpu.SemaphoreType.DMA((2,))]

    # Slots, −1 where nothing is written; and of every unit the first if they are consecutive, else −1: of one head of
    # whole blocks, then of 32 tokens, where what is past the length may be anything.
    named = (slots >= 0) & (slots < total) & (jnp.arange(tokens) < reach[0])
    places = jnp.pad(jnp.where(named, slots, -1), (0, -tokens % block), constant_values=-1)
    past = (jnp.arange(places.size) >= reach[0]) & (heads == 1)
    firsts = []
    for unit in (block, UNIT) if heads == 1 else (UNIT,):
        by_unit = places.reshape(-1, unit)
        fits = (by_unit == by_unit[:, :1] + jnp.arange(unit)) | past.reshape(-1, unit)
        firsts.append(jnp.where(fits.all(1), by_unit[:, 0], -1))

    run = pl.pallas_call(
        functools.partial(body, write_block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={3 + len(arrays): 0},  # the pool, behind the prefetched scalars and the arrays
        # One block after the other: they write to the same pool, and a copy is awaited one step later.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="splice",
    )
    return run(places, jnp.concatenate(firsts), reach, *arrays, flat).reshape(pool.shape)
