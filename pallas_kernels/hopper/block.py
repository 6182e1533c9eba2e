"""How a block of the Hopper kernels works: shared memory, the fetching warpgroup, the turns of those that compute.

A block owns 64 or 128 tokens and keeps their cosines and sines in registers while it goes through layers and heads. One
warpgroup only asks the copy engine for the next items (x, its scales, v, and u once per layer), several in flight; the
others compute (`arithmetic.py`) and leave the item in the shared memory it came in, or, where the result has another
dtype than x, in one of two buffers of its own. How rows and launches are cut up: `launch.py`.

In what follows `given` are the arrays in global memory and `shared` the buffers and barriers of the block, by name.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .factors import TILE_ROWS
from .launch import ROWS, Launch
from .prepare import stored_dtype

REGISTERS_FETCHING, REGISTERS_COMPUTING = 40, 232
"""Registers of a thread that asks for copies and of one that computes: 128 · 40 + 256 · 232 of a processor's 65 536."""


class RunningBlock(NamedTuple):
    """What a block works on, and which of its warpgroups this is: its place in the grid, traced."""

    launch: Launch
    tile: Any
    kind: Any
    block: Any
    group: Any

    @classmethod
    def of(cls, launch: Launch) -> "RunningBlock":
        """Returns the indices of the running block."""
        return cls(launch, *(jax.lax.axis_index(name) for name in ("tile", "kind", "block", "group")))

    @property
    def start(self):
        """The block's first token."""
        return self.tile * self.launch.rows

    @property
    def count(self):
        """Items of this block."""
        return jnp.minimum(self.launch.share, self.launch.total - self.block * self.launch.share)

    def item(self, step) -> tuple[Any, Any]:
        """Returns layer and head of one of its items."""
        place = self.block * self.launch.share + step
        return place // self.launch.items.heads, place % self.launch.items.heads

    def turn(self, step):
        """Returns how many layers it has begun before this item's."""
        return self.item(step)[0] - self.item(0)[0]

    def opens(self, step):
        """Returns whether an item is the block's first of its layer."""
        return (step == 0) | (self.item(step)[1] == 0)

    def closes(self, step):
        """Returns whether an item is the block's last of its layer."""
        return (step == self.count - 1) | (self.item(step)[1] == self.launch.items.heads - 1)


def rows_of_group(here: RunningBlock) -> Any:
    """Says which rows of a buffer are this warpgroup's."""
    return pl.ds(here.group * ROWS, ROWS)


def _buffer(shape: tuple[int, ...], dtype, rows: int, columns: int) -> Any:
    """Describes shared memory in swizzled tiles of `rows` and of as many columns as divide `columns`.

    Swizzled, so that the threads of a warp, which read one column of several rows, meet in no bank.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiles = (
        plgpu.TilingTransform((rows, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=tiles)


def scratch_of(launch: Launch) -> dict[str, Any]:
    """Lists the shared memory of a block: buffers, and barriers by which warpgroups wait for each other.

    `ready` tells that a stage has arrived, `taken` that it may be overwritten; `u_ready` and `u_taken` the same of u,
    which has two places: for the layer that is worked on, and for the next.
    """
    items, dtypes, (groups, stages, _), rank = launch.items, launch.dtypes, launch.plan, launch.rank

    # Tiles of one row let copies start at any token or slot, and end anywhere; in memory they lie as those of eight do.
    def runs(count, dtype):
        return _buffer((count, items.runs, launch.rows, items.span), stored_dtype(items, dtype), 1, items.span)

    # Every copy of an item arrives at its stage's barrier: x and dense by runs, v and the scales once per half.
    copies = items.runs * (1 + bool(dtypes.dense)) + (2 if rank else 0) + (2 if dtypes.scaled else 0)
    scratch = {
        "x": runs(stages, dtypes.source),
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "taken": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    if dtypes.dense:
        scratch["dense"] = runs(stages, dtypes.dense)
    if dtypes.separate:
        # Two, so that an item is made while the one before leaves.
        scratch["out"] = runs(2, dtypes.result)

    if dtypes.scaled:
        scratch["x_scale"] = plgpu.SMEM((stages, 2, launch.scales), jnp.float32)
    if items.swaps:
        scratch["swap"] = _buffer((items.width, items.width), jnp.bfloat16, TILE_ROWS, items.width)
        scratch["piece"] = _buffer((launch.rows, items.width), jnp.bfloat16, TILE_ROWS, items.width)
        scratch["swap_ready"] = plgpu.Barrier()

    if rank:
        # The tensor cores want one tiling of both, of eight rows. v comes in two halves, one per accumulator.
        shared = math.gcd(rank, items.width)
        scratch["u"] = _buffer((2, launch.rows, rank), jnp.bfloat16, TILE_ROWS, shared)
        scratch["v"] = _buffer((stages, 2, rank, items.width), jnp.bfloat16, TILE_ROWS, shared)
        scratch["u_ready"] = plgpu.Barrier(num_barriers=2)
        scratch["u_taken"] = plgpu.Barrier(num_arrivals=groups, num_barriers=2)

    return scratch


def fetch(here: RunningBlock, given: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """Runs the fetching warpgroup: requests every item as soon as its stage is free."""
    launch, items = here.launch, here.launch.items
    stages, rows = launch.plan.stages, pl.ds(here.start, launch.rows)
    if items.swaps:
        plgpu.copy_gmem_to_smem(given["swap"], shared["swap"], shared["swap_ready"])

    def step(number, carry):
        stage = number % stages
        layer, head = here.item(number)
        ready = shared["ready"].at[stage]

        @pl.when(number >= stages)
        def _():
            plgpu.barrier_wait(shared["taken"].at[stage])

        # Arrays with one layer for all are read anew for each: the remainder is 0.
        for name in ("x", "dense") if launch.dtypes.dense else ("x",):
            source = given[name]
            for run, column in enumerate(items.sources(here.kind, head)):
                block = source.at[layer % source.shape[0], rows, pl.ds(column, items.span)]
                plgpu.copy_gmem_to_smem(block, shared[name].at[stage, run], ready)

        columns = items.columns(here.kind, head)
        if launch.dtypes.scaled:
            scale = given["x_scale"]
            for run, column in enumerate(columns):
                block = scale.at[layer % scale.shape[0], pl.ds(column, launch.scales)]
                plgpu.copy_gmem_to_smem(block, shared["x_scale"].at[stage, run], ready)

        if launch.rank:
            v = given["v"]
            for run, column in enumerate(columns):
                block = v.at[layer % v.shape[0], :, pl.ds(column, items.width)]
                plgpu.copy_gmem_to_smem(block, shared["v"].at[stage, run], ready)

            @pl.when(here.opens(number))
            def _():
                _fetch_u(here, given["u"], shared, layer, here.turn(number))

        return carry

    jax.lax.fori_loop(0, here.count, step, None)
    _drain(here, shared)


def _drain(here: RunningBlock, shared: Mapping[str, Any]) -> None:
    """Waits for what the computing warpgroups still have to say: no barrier is left with a phase unseen."""
    stages, last = here.launch.plan.stages, here.count - 1

    def wait(name: str, count: int):
        def step(number, carry):
            plgpu.barrier_wait(shared[name].at[number % count])
            return carry

        return step

    jax.lax.fori_loop(jnp.maximum(last + 1 - stages, 0), last, wait("taken", stages), None)
    if here.launch.rank:
        turns = here.turn(last) + 1
        jax.lax.fori_loop(jnp.maximum(turns - 2, 0), turns, wait("u_taken", 2), None)


def _fetch_u(here: RunningBlock, u, shared: Mapping[str, Any], layer, turn) -> None:
    """Asks for the u of a layer, once for all its heads, when the layer before the last has been done with."""

    @pl.when(turn >= 2)
    def _():
        plgpu.barrier_wait(shared["u_taken"].at[turn % 2])

    block = u.at[layer % u.shape[0], pl.ds(here.start, here.launch.rows)]
    plgpu.copy_gmem_to_smem(block, shared["u"].at[turn % 2], shared["u_ready"].at[turn % 2])


def outlet(here: RunningBlock, shared: Mapping[str, Any], number) -> tuple[Any, Any]:
    """Says which buffer an item leaves from, and its place there."""
    if here.launch.dtypes.separate:
        return shared["out"], number % 2
    return shared["x"], number % here.launch.plan.stages


def consume(here: RunningBlock, shared: Mapping[str, Any], deliver: Callable[[Any], None]) -> None:
    """Runs a computing warpgroup: `deliver` makes an item and starts its copies, as one group, for every item."""
    stages = here.launch.plan.stages

    def step(number, carry):
        deliver(number)
        plgpu.commit_smem_to_gmem_group()

        # The copies of the item before have read their memory: only now may its stage be filled again.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(number > 0)
        def _():
            plgpu.barrier_arrive(shared["taken"].at[(number - 1) % stages])

        return carry

    jax.lax.fori_loop(0, here.count, step, None)
    plgpu.wait_smem_to_gmem(0)


def kernel_of(
    name: str,
    launch: Launch,
    names: tuple[str, ...],
    work: Callable,
    interpret,
    out_type: Any = (),
    own: Mapping[str, Any] | None = None,
) -> Callable:
    """Makes a launch of `work(here, given, shared)` on every block.

    Args:
      names: of the operands and of what is of `out_type`, as `given` has them.
      own: what the operation wants in `shared` beside what all have.
    """
    # Suffixed, for an array and its buffer have one name and the launch takes no name twice.
    scratch = {name + "_shared": buffer for name, buffer in (scratch_of(launch) | dict(own or {})).items()}

    def body(*refs, **buffers):
        shared = {name.removesuffix("_shared"): buffer for name, buffer in buffers.items()}
        work(RunningBlock.of(launch), dict(zip(names, refs, strict=True)), shared)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=launch.grid,
        grid_names=("tile", "kind", "block"),
        num_threads=launch.plan.groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )


def roles(here: RunningBlock, fetching: Callable[[], None], computing: Callable[[], None]) -> None:
    """Runs one of the two, with the registers it needs.

    With one computing warpgroup there are enough for all, and nothing is exchanged.
    """
    groups = here.launch.plan.groups

    @pl.when(here.group == groups)
    def _():
        if groups > 1:
            plgpu.set_max_registers(REGISTERS_FETCHING, action="decrease")
        fetching()

    @pl.when(here.group < groups)
    def _():
        if groups > 1:
            plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        computing()
