"""R · (x + u v + dense) of one item on a Hopper GPU: widening, products on tensor cores, rotation, rounding.

All of it happens in registers of the tensor cores' layout, in float32, so that an item is rounded once. Registers
cannot be moved within a thread: whatever needs a channel beside its partner has to arrive that way (`launch.Items`) or
go through the tensor cores (`_swapped`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from .block import RunningBlock, outlet, rows_of_group
from .launch import ROWS, Items, Launch


def _split(word: Array, dtype) -> tuple[Array, Array]:
    """Takes a word apart into its two channels, as float32."""
    if dtype == jnp.bfloat16:

        def widen(bits):
            return jax.lax.bitcast_convert_type(bits, jnp.float32)

        return widen(word << 16), widen(word & jnp.uint32(0xFFFF0000))
    word = word.astype(jnp.uint32)
    return _eight_bits(word & jnp.uint32(0xFF), dtype), _eight_bits(word >> 8, dtype)


def _eight_bits(bits: Array, dtype) -> Array:
    """Returns what the low eight bits of a uint32 stand for, as float32; by way of float16, which both float8 are
    parts of.
    """
    if dtype == jnp.int8:
        return (bits ^ jnp.uint32(0x80)).astype(jnp.int32).astype(jnp.float32) - 128.0

    def half(bits):
        return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)

    if dtype == jnp.float8_e5m2:
        return half(bits << 8)

    # float8_e4m3fn has one number per sign that is none, where float16 would see a large one; its exponent's bias is 7,
    # float16's 15: hence the factor of 2⁸.
    magnitude = bits & jnp.uint32(0x7F)
    value = half(((bits & jnp.uint32(0x80)) << 8) | (magnitude << 7)) * 256.0
    return jnp.where(magnitude == jnp.uint32(0x7F), jnp.float32(jnp.nan), value)


def _widened(value: Array) -> Array:
    """Widens channels to float32. bfloat16 holds every int8, and tensor core layouts have a short way there."""
    return (value.astype(jnp.bfloat16) if value.dtype == jnp.int8 else value).astype(jnp.float32)


def _join(first: Array, second: Array) -> Array:
    """Rounds two float32 and joins them to a word of two bfloat16."""

    def narrow(value):
        return jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)

    return narrow(first) | (narrow(second) << 16)


def read(items: Items, buffer, stage, rows, dtype) -> tuple[Array, Array]:
    """Reads `first` and `second` of an item in shared memory, float32. `dtype` is that of a channel."""

    def load(run):
        return plgpu.layout_cast(buffer[stage, run, rows], plgpu.Layout.WGMMA)

    if items.words:
        return _split(load(0), dtype)
    if items.joined:
        both = _widened(load(0))
        return both[:, : items.width], both[:, items.width :]
    return _widened(load(0)), _widened(load(1))


def rounded(items: Items, values: tuple[Array, Array], dtype) -> tuple[Array, ...]:
    """Rounds an item, and joins it to the runs that it travels as."""
    if items.words:
        return (_join(*values),)
    first, second = (value.astype(dtype) for value in values)
    return (jnp.concatenate([first, second], 1),) if items.joined else (first, second)


def put(here: RunningBlock, shared: Mapping[str, Any], number, values: tuple[Array, Array]) -> None:
    """Rounds an item and leaves it in shared memory, ready to be sent."""
    items, (buffer, stage) = here.launch.items, outlet(here, shared, number)
    rows = rows_of_group(here)
    for run, value in enumerate(rounded(items, values, here.launch.dtypes.result)):
        buffer[stage, run, rows] = value
    # The copy engine sees what threads wrote only from here on.
    plgpu.commit_smem()


def _scales(here: RunningBlock, shared: Mapping[str, Any], stage) -> tuple[Array, Array]:
    """Reads the scales of both runs of an item, one per column, spread over its tokens."""
    shape = ROWS, here.launch.items.width

    def load(run):
        return plgpu.layout_cast(shared["x_scale"][stage, run, pl.ds(0, shape[1])], plgpu.Layout.WGMMA.reduce(0))

    def spread(run):
        return jax.lax.broadcast_in_dim(load(run), shape, (1,))

    return spread(0), spread(1)


def _product(launch: Launch, u, v) -> tuple[Array, Array]:
    """Multiplies u v for both runs, float32, on the tensor cores."""

    def run(first, second):
        plgpu.wgmma(first, u, v.at[0])
        plgpu.wgmma(second, u, v.at[1])
        return first[...], second[...]

    return pl.run_scoped(run, *[plgpu.ACC((ROWS, launch.items.width), jnp.float32)] * 2)


class Angles(NamedTuple):
    """Cosines and sines of a warpgroup's tokens, in registers.

    Attributes:
      cos, sin: of both runs, or one for both.
      turns: whether this kind of item rotates; None where all do.
      swap: where items swap, what `_swapped` needs.
    """

    cos: tuple[Array, ...]
    sin: tuple[Array, ...]
    turns: Any = None
    swap: Any = None

    @classmethod
    def of(cls, here: RunningBlock, given: Mapping[str, Any], shared: Mapping[str, Any]) -> "Angles | None":
        """Loads them once, for all items; None where nothing rotates."""
        items = here.launch.items
        rows = pl.ds(here.start + here.group * ROWS, ROWS)

        def load(name: str, columns: Sequence[Any]) -> tuple[Array, ...]:
            places = [given[name].at[rows, pl.ds(column, items.width)] for column in columns]
            return tuple(plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False) for place in places)

        if items.swaps:
            plgpu.barrier_wait(shared["swap_ready"])
            columns = items.columns(here.kind, 0)
            swap = shared["swap"], shared["piece"].at[rows_of_group(here)]
            return cls(load("cos", columns), load("sin", columns), None, swap)
        if not items.turning:
            return None

        columns = [jnp.minimum(here.kind, items.turning - 1) * items.width]
        turns = None if items.turning == items.kinds else here.kind < items.turning
        return cls(load("cos", columns), load("sin", columns), turns)

    def rotate(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Returns both runs of an item, rotated."""
        if self.swap is not None:
            # One after the other: registers are few.
            first = first * self.cos[0] + _swapped(first, self.swap) * self.sin[0]
            return first, second * self.cos[1] + _swapped(second, self.swap) * self.sin[1]

        (cos,), (sin,) = self.cos, self.sin
        turned = first * cos - second * sin, second * cos + first * sin
        if self.turns is None:
            return turned
        turns = jnp.broadcast_to(self.turns, first.shape)
        return jnp.where(turns, turned[0], first), jnp.where(turns, turned[1], second)


def _swapped(value: Array, swap: tuple[Any, Any]) -> Array:
    """Returns a run with the channels of every pair swapped, exactly: three pieces of bfloat16 times a permutation.

    Registers cannot be moved within a thread, but the tensor cores can do it.

    Args:
      swap: in shared memory, the permutation, and a place for a piece.
    """
    permutation, place = swap

    def run(total):
        rest = value
        for _ in range(3):
            piece = _truncated(rest)
            rest = rest - piece
            place[...] = piece.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.wgmma(total, place, permutation)
            plgpu.wgmma_wait(0)

        return total[...]

    return pl.run_scoped(run, plgpu.ACC((ROWS, value.shape[1]), jnp.float32))


def _truncated(value: Array) -> Array:
    """Returns a float32's first eight bits of significand. Not a conversion there and back: a compiler may leave
    that out.
    """
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def compute(here: RunningBlock, shared: Mapping[str, Any], angles: Angles | None, number) -> tuple[Array, Array]:
    """Computes R · (x + u v + dense) of one item, float32, once it has arrived."""
    launch, stage, dtypes = here.launch, number % here.launch.plan.stages, here.launch.dtypes
    rows = rows_of_group(here)
    turn = here.turn(number) % 2

    if launch.rank:

        @pl.when(here.opens(number))
        def _():
            plgpu.barrier_wait(shared["u_ready"].at[turn])

    plgpu.barrier_wait(shared["ready"].at[stage])
    values = read(launch.items, shared["x"], stage, rows, jnp.dtype(dtypes.source))
    if dtypes.scaled:
        scales = _scales(here, shared, stage)
        values = values[0] * scales[0], values[1] * scales[1]

    def add(others: tuple[Array, Array]) -> tuple[Array, Array]:
        return values[0] + others[0], values[1] + others[1]

    if launch.rank:
        values = add(_product(launch, shared["u"].at[turn, rows], shared["v"].at[stage]))

        @pl.when(here.closes(number))
        def _():
            plgpu.barrier_arrive(shared["u_taken"].at[turn])

    if dtypes.dense:
        values = add(read(launch.items, shared["dense"], stage, rows, jnp.dtype(dtypes.dense)))
    return values if angles is None else angles.rotate(*values)
