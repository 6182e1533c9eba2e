"""What rotate_patch and splice share on Hopper GPUs: shared memory, fetching, and R · (x + u v) of one item.

A block owns 64 or 128 tokens and keeps their cosines and sines in registers while it goes through layers and heads. One
warpgroup only asks the copy engine for the next items (x, its scales, v, and u once per layer), several in flight; the
others widen, multiply on the tensor cores, add, rotate, round, and leave the item in the shared memory it came in, or,
where the result has another dtype than x, in one of two buffers of its own. How rows and launches are cut: `_cuts.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ._cuts import PROCESSORS, ROWS, Items, Launch
from ._pieces import TILE_ROWS

REGISTERS_FETCHING, REGISTERS_COMPUTING = 40, 232


def unsuitable_device() -> str | None:
    """Why the process's own GPU cannot run these kernels; None if it can, or if it has none."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    return None if capability == "9.0" else f"a GPU of compute capability {capability}; expected 9.0"


def processors() -> int:
    """Counts the processors of the process's own GPU; an H200's where it has none."""
    own = getattr(jax.devices()[0], "core_count", None) if jax.default_backend() == "gpu" else None
    return PROCESSORS if own is None else int(own)


class Here(NamedTuple):
    """What a block works on, and which of its warpgroups this is."""

    launch: Launch
    tile: Any
    kind: Any
    block: Any
    group: Any

    @classmethod
    def of(cls, launch: Launch) -> "Here":
        """Of the block that is running."""
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
        """Layer and head of one of its items."""
        place = self.block * self.launch.share + step
        return place // self.launch.items.heads, place % self.launch.items.heads

    def turn(self, step):
        """How many layers it has begun before this item's."""
        return self.item(step)[0] - self.item(0)[0]

    def opens(self, step):
        """Whether an item is the block's first of its layer."""
        return (step == 0) | (self.item(step)[1] == 0)

    def closes(self, step):
        """Whether an item is the block's last of its layer."""
        return (step == self.count - 1) | (self.item(step)[1] == self.launch.items.heads - 1)


def rows_of_group(here: Here) -> Any:
    """The rows of a buffer that are this warpgroup's."""
    return pl.ds(here.group * ROWS, ROWS)


def _buffer(shape: tuple[int, ...], dtype, rows: int, columns: int) -> Any:
    """Shared memory in swizzled tiles of `rows` and of as many columns as divide `columns`."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiles = (
        plgpu.TilingTransform((rows, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=tiles)


def stored(items: Items, dtype) -> Any:
    """The dtype that channels of `dtype` are seen in: of words where items are words."""
    dtype = jnp.dtype(dtype)
    return {1: jnp.uint16, 2: jnp.uint32}[dtype.itemsize] if items.words else dtype


def scratch_of(launch: Launch) -> dict[str, Any]:
    """Shared memory of a block."""
    items, numbers, (groups, stages, _), rank = launch.items, launch.numbers, launch.plan, launch.rank
    # Tiles of one row let copies start at any token or slot, and end anywhere; in memory they lie as those of eight do.
    runs = lambda count, dtype: _buffer(
        (count, items.runs, launch.rows, items.span), stored(items, dtype), 1, items.span
    )
    copies = items.runs * (1 + bool(numbers.dense)) + (2 if rank else 0) + (2 if numbers.scaled else 0)
    scratch = {
        "x": runs(stages, numbers.source),
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "taken": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    if numbers.dense:
        scratch["dense"] = runs(stages, numbers.dense)
    if numbers.separate:
        scratch["out"] = runs(2, numbers.result)
    if numbers.scaled:
        scratch["x_scale"] = plgpu.SMEM((stages, 2, launch.scales), jnp.float32)
    if items.swaps:
        scratch["swap"] = _buffer((items.width, items.width), jnp.bfloat16, TILE_ROWS, items.width)
        scratch["piece"] = _buffer((launch.rows, items.width), jnp.bfloat16, TILE_ROWS, items.width)
        scratch["swap_ready"] = plgpu.Barrier()
    if rank:
        # The tensor cores want one tiling of both, of eight rows.
        shared = math.gcd(rank, items.width)
        scratch["u"] = _buffer((2, launch.rows, rank), jnp.bfloat16, TILE_ROWS, shared)
        scratch["v"] = _buffer((stages, 2, rank, items.width), jnp.bfloat16, TILE_ROWS, shared)
        scratch["u_ready"] = plgpu.Barrier(num_barriers=2)
        scratch["u_taken"] = plgpu.Barrier(num_arrivals=groups, num_barriers=2)
    return scratch


def fetch(here: Here, given: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """What the fetching warpgroup does: asks for every item as soon as its stage is free."""
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

        for name in ("x", "dense") if launch.numbers.dense else ("x",):
            source = given[name]
            for run, column in enumerate(items.sources(here.kind, head)):
                block = source.at[layer % source.shape[0], rows, pl.ds(column, items.span)]
                plgpu.copy_gmem_to_smem(block, shared[name].at[stage, run], ready)
        columns = items.columns(here.kind, head)
        if launch.numbers.scaled:
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


def _drain(here: Here, shared: Mapping[str, Any]) -> None:
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


def _fetch_u(here: Here, u, shared: Mapping[str, Any], layer, turn) -> None:
    @pl.when(turn >= 2)
    def _():
        plgpu.barrier_wait(shared["u_taken"].at[turn % 2])

    block = u.at[layer % u.shape[0], pl.ds(here.start, here.launch.rows)]
    plgpu.copy_gmem_to_smem(block, shared["u"].at[turn % 2], shared["u_ready"].at[turn % 2])


def _split(word: Array, dtype) -> tuple[Array, Array]:
    """The two channels of a word, as float32."""
    if dtype == jnp.bfloat16:
        widen = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
        return widen(word << 16), widen(word & jnp.uint32(0xFFFF0000))
    word = word.astype(jnp.uint32)
    return _eight_bits(word & jnp.uint32(0xFF), dtype), _eight_bits(word >> 8, dtype)


def _eight_bits(bits: Array, dtype) -> Array:
    """What the low eight bits of a uint32 stand for, as float32; by way of float16, which both float8 are parts of."""
    if dtype == jnp.int8:
        return (bits ^ jnp.uint32(0x80)).astype(jnp.int32).astype(jnp.float32) - 128.0
    half = lambda bits: jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)
    if dtype == jnp.float8_e5m2:
        return half(bits << 8)
    magnitude = bits & jnp.uint32(0x7F)
    value = half(((bits & jnp.uint32(0x80)) << 8) | (magnitude << 7)) * 256.0
    return jnp.where(magnitude == jnp.uint32(0x7F), jnp.float32(jnp.nan), value)


def _widened(value: Array) -> Array:
    """Channels as float32. bfloat16 holds every int8, and tensor core layouts have a short way there."""
    return (value.astype(jnp.bfloat16) if value.dtype == jnp.int8 else value).astype(jnp.float32)


def _join(first: Array, second: Array) -> Array:
    """Two float32 as a word of two bfloat16."""
    narrow = lambda value: jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    return narrow(first) | (narrow(second) << 16)


def read(items: Items, buffer, stage, rows, dtype) -> tuple[Array, Array]:
    """`first` and `second` of an item in shared memory, float32. `dtype` is that of a channel."""
    load = lambda run: plgpu.layout_cast(buffer[stage, run, rows], plgpu.Layout.WGMMA)
    if items.words:
        return _split(load(0), dtype)
    if items.joined:
        both = _widened(load(0))
        return both[:, : items.width], both[:, items.width :]
    return _widened(load(0)), _widened(load(1))


def rounded(items: Items, values: tuple[Array, Array], dtype) -> tuple[Array, ...]:
    """The runs of an item as they travel."""
    if items.words:
        return (_join(*values),)
    first, second = (value.astype(dtype) for value in values)
    return (jnp.concatenate([first, second], 1),) if items.joined else (first, second)


def put(here: Here, shared: Mapping[str, Any], number, values: tuple[Array, Array]) -> None:
    """Rounds an item and leaves it in shared memory, ready to be sent."""
    items, (buffer, stage) = here.launch.items, outlet(here, shared, number)
    rows = rows_of_group(here)
    for run, value in enumerate(rounded(items, values, here.launch.numbers.result)):
        buffer[stage, run, rows] = value
    plgpu.commit_smem()


def outlet(here: Here, shared: Mapping[str, Any], number) -> tuple[Any, Any]:
    """The buffer that an item leaves from, and its place there."""
    if here.launch.numbers.separate:
        return shared["out"], number % 2
    return shared["x"], number % here.launch.plan.stages


def _scales(here: Here, shared: Mapping[str, Any], stage) -> tuple[Array, Array]:
    """The scales of both runs of an item, over all of its tokens."""
    shape = ROWS, here.launch.items.width
    load = lambda run: plgpu.layout_cast(
        shared["x_scale"][stage, run, pl.ds(0, shape[1])], plgpu.Layout.WGMMA.reduce(0)
    )
    spread = lambda run: jax.lax.broadcast_in_dim(load(run), shape, (1,))
    return spread(0), spread(1)


def _product(launch: Launch, u, v) -> tuple[Array, Array]:
    """u v for both runs, float32, on the tensor cores."""

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
    def of(cls, here: Here, given: Mapping[str, Any], shared: Mapping[str, Any]) -> "Angles | None":
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
        """Both runs of an item, rotated."""
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
    """A run with the channels of every pair swapped, exactly: three pieces of bfloat16 times a permutation.

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
    """A float32's first eight bits of significand. Not a conversion there and back: a compiler may leave that out."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def compute(here: Here, shared: Mapping[str, Any], angles: Angles | None, number) -> tuple[Array, Array]:
    """R · (x + u v + dense) of one item, float32, once it has arrived."""
    launch, stage, numbers = here.launch, number % here.launch.plan.stages, here.launch.numbers
    rows = rows_of_group(here)
    turn = here.turn(number) % 2
    if launch.rank:

        @pl.when(here.opens(number))
        def _():
            plgpu.barrier_wait(shared["u_ready"].at[turn])

    plgpu.barrier_wait(shared["ready"].at[stage])
    values = read(launch.items, shared["x"], stage, rows, jnp.dtype(numbers.source))
    if numbers.scaled:
        scales = _scales(here, shared, stage)
        values = values[0] * scales[0], values[1] * scales[1]
    add = lambda others: tuple(value + other for value, other in zip(values, others, strict=True))
    if launch.rank:
        values = add(_product(launch, shared["u"].at[turn, rows], shared["v"].at[stage]))

        @pl.when(here.closes(number))
        def _():
            plgpu.barrier_arrive(shared["u_taken"].at[turn])

    if numbers.dense:
        values = add(read(launch.items, shared["dense"], stage, rows, jnp.dtype(numbers.dense)))
    return values if angles is None else angles.rotate(*values)


def consume(here: Here, shared: Mapping[str, Any], deliver: Callable[[Any], None]) -> None:
    """What a computing warpgroup does: `deliver` makes an item and starts its copies, as one group, for every item."""
    stages = here.launch.plan.stages

    def step(number, carry):
        deliver(number)
        plgpu.commit_smem_to_gmem_group()
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
    """A launch of `work(here, given, shared)`.

    Args:
      names: of the operands and of what is of `out_type`, as `given` has them.
      own: what the operation wants in `shared` beside what all have.
    """
    scratch = {name + "_shared": buffer for name, buffer in (scratch_of(launch) | dict(own or {})).items()}

    def body(*refs, **buffers):
        shared = {name.removesuffix("_shared"): buffer for name, buffer in buffers.items()}
        work(Here.of(launch), dict(zip(names, refs, strict=True)), shared)

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


def roles(here: Here, fetching: Callable[[], None], computing: Callable[[], None]) -> None:
    """Runs one of the two, with the registers it needs."""
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
