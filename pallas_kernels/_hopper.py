"""What rotate_patch and splice share on Hopper GPUs: items, shared memory, fetching, and R · (x + u v) of one item.

A block owns 64 or 128 tokens and keeps their cosines and sines in registers while it goes through layers and heads. One
warpgroup only asks the copy engine for the next items (x, v, and u once per layer), several in flight; the others
multiply on the tensor cores, add, rotate, round, and leave the item in the shared memory it came in.

An item is two runs of columns of equal width, `first` and `second`, which rotate against each other: pieces of the
halves of a head, the even and the odd channels of a piece of pairs, or, where nothing rotates, two neighbours.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from ._pieces import TILE_ROWS

ROWS = 64
"""Tokens of one warpgroup: what one tensor core instruction takes."""
SWIZZLE = 128
"""Bytes of a row of a run at most: one row of a swizzled tile, so that rows lie one behind the other."""
NARROWEST = 16
"""Columns of a run at least: a row of v is then 32 bytes."""
SHARED_MEMORY = 232_448 - 2048
"""Bytes of shared memory that the buffers of a block may take; the rest is for barriers."""
PROCESSORS = 132
STARTING = 1.5
"""What starting a block costs, in items; chooses how many blocks share the items of a tile of tokens."""
REGISTERS_FETCHING, REGISTERS_COMPUTING = 40, 232


class Items(NamedTuple):
    """How a row of F channels is cut into items.

    Attributes:
      heads: heads in a row. Where nothing rotates, a head is any block of columns.
      head: columns of a head.
      width: columns of a run.
      turning: kinds of item in a head that rotate; they come first.
      kinds: kinds of item in a head.
      apart: columns from `first` to `second` of an item that rotates.
      words: x is seen as 32-bit words, each a pair of bfloat16; v has a head's even columns before its odd ones.
    """

    heads: int
    head: int
    width: int
    turning: int
    kinds: int
    apart: int
    words: bool

    @property
    def runs(self) -> int:
        """Runs of x in an item: one where a word holds both channels of a pair."""
        return 1 if self.words else 2

    def columns(self, kind, head) -> tuple[Any, Any]:
        """Where `first` and `second` start in v; and, unless they are words, in x."""
        turned = head * self.head + kind * self.width
        plain = head * self.head + kind * 2 * self.width
        if self.turning == self.kinds or self.words:
            return turned, turned + self.apart
        if not self.turning:
            return plain, plain + self.width
        turns = kind < self.turning
        first = jnp.where(turns, turned, plain)
        return first, first + jnp.where(turns, self.apart, self.width)

    def sources(self, kind, head) -> tuple[Any, ...]:
        """Where the runs of x start."""
        return (head * (self.head // 2) + kind * self.width,) if self.words else self.columns(kind, head)


def items_of(heads: int, width: int, rotary: int, layout: str, itemsize: int, widest: int = SWIZZLE) -> Items | None:
    """How a row of `heads` · `width` channels is cut; None where no run of 16 columns or more fits.

    Args:
      widest: bytes of a run of x at most, a power of two.
    """
    words = bool(rotary) and layout == "pairs"
    widest //= 2 * itemsize if words else itemsize
    half, rest = rotary // 2, width - rotary
    run = math.gcd(half, width // 2 if words else rest // 2, widest) if rotary else math.gcd(heads * width // 2, widest)
    if run < NARROWEST or rotary % 2 or width % 2:
        return None
    if not rotary:
        return Items(heads * width // (2 * run), 2 * run, run, 0, 1, run, False)
    return Items(heads, width, run, half // run, width // (2 * run), width // 2 if words else half, words)


class Plan(NamedTuple):
    """How a launch is cut up.

    Attributes:
      groups: warpgroups that compute, 1 or 2; a block has 64 tokens for each.
      stages: items in flight.
      blocks: blocks that share the items of one tile of tokens.
    """

    groups: int
    stages: int
    blocks: int


class Launch(NamedTuple):
    """Everything static about a launch. `rank` is padded; `itemsize` is that of x as it was given."""

    items: Items
    plan: Plan
    tokens: int
    layers: int
    rank: int
    itemsize: int
    dense: bool

    @property
    def rows(self) -> int:
        """Tokens of a block."""
        return ROWS * self.plan.groups

    @property
    def total(self) -> int:
        """Items of one kind of one tile of tokens."""
        return self.layers * self.items.heads

    @property
    def share(self) -> int:
        """Items of a block."""
        return -(-self.total // self.plan.blocks)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tiles of tokens, kinds of item, blocks."""
        return -(-self.tokens // self.rows), self.items.kinds, self.plan.blocks

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the buffers take."""
        item = self.rows * 2 * self.items.width * self.itemsize
        v = 2 * self.rank * self.items.width * 2
        u = 2 * self.rows * self.rank * 2
        return self.plan.stages * (item * (1 + self.dense) + v) + u


def unsuitable_device() -> str | None:
    """Why the process's own GPU cannot run these kernels; None if it can, or if it has none."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    return None if capability == "9.0" else f"a GPU of compute capability {capability}; expected 9.0"


CUTS = (((2, 6), (2, 5), (2, 4), (2, 3), (1, 6), (1, 5), (1, 4), (1, 3)), ((2, 2), (1, 2)))
"""Warpgroups and stages, best first: many tokens share v; two stages only where no width leaves room for more."""


def launch_of(ways: Sequence[Items], tokens: int, layers: int, rank: int, itemsize: int, dense: bool) -> Launch | None:
    """The first of `CUTS` that fits shared memory by any of the ways to cut rows; None if none does."""
    for cuts, items in itertools.product(CUTS, ways):
        for groups, stages in cuts:
            if groups > 1 and tokens <= ROWS:
                continue
            launch = Launch(items, Plan(groups, stages, 1), tokens, layers, rank, itemsize, dense)
            if launch.shared_memory <= SHARED_MEMORY:
                return launch._replace(plan=Plan(groups, stages, blocks_of(launch)))
    return None


def ways_of(heads: int, width: int, rotary: int, layout: str, itemsize: int, whole_lines: bool = False) -> list[Items]:
    """Ways to cut rows into items, widest runs first; none where `items_of` finds none.

    Args:
      whole_lines: only runs of exactly 128 bytes of x.
    """
    sizes = (SWIZZLE,) if whole_lines else (SWIZZLE, 64, 32)
    ways = [items_of(heads, width, rotary, layout, itemsize, widest) for widest in sizes]
    fits = lambda way: not whole_lines or way.width * itemsize * (1 + way.words) == SWIZZLE
    return list(dict.fromkeys(way for way in ways if way is not None and fits(way)))


def blocks_of(launch: Launch) -> int:
    """How many blocks share a tile's items so that the last processor ends earliest, by count of items."""
    tiles, kinds, _ = launch.grid

    def end(blocks: int) -> float:
        waves = -(-tiles * kinds * blocks // PROCESSORS)
        return waves * (-(-launch.total // blocks) + STARTING)

    return min(range(1, launch.total + 1), key=end)


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


def _buffer(shape: tuple[int, ...], dtype, rows: int, columns: int) -> Any:
    """Shared memory in swizzled tiles of `rows` and of as many columns as divide `columns`."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    tiles = (
        plgpu.TilingTransform((rows, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=tiles)


def scratch_of(launch: Launch, dtype) -> dict[str, Any]:
    """Shared memory of a block. `dtype` is that of x as the kernel sees it."""
    items, (groups, stages, _), rank = launch.items, launch.plan, launch.rank
    # Tiles of one row let copies start at any token or slot, and end anywhere; in memory they lie as those of eight do.
    runs = _buffer((stages, items.runs, launch.rows, items.width), dtype, 1, items.width)
    copies = items.runs * (1 + launch.dense) + (2 if rank else 0)
    scratch = {
        "x": runs,
        "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "taken": plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
    }
    if launch.dense:
        scratch["dense"] = runs
    if rank:
        # The tensor cores want one tiling of both, of eight rows.
        shared = math.gcd(rank, items.width)
        scratch["u"] = _buffer((2, launch.rows, rank), jnp.bfloat16, TILE_ROWS, shared)
        scratch["v"] = _buffer((stages, 2, rank, items.width), jnp.bfloat16, TILE_ROWS, shared)
        scratch["u_ready"] = plgpu.Barrier(num_barriers=2)
        scratch["u_taken"] = plgpu.Barrier(num_arrivals=groups, num_barriers=2)
    return {name + "_shared": buffer for name, buffer in scratch.items()}


def fetch(here: Here, given: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
    """What the fetching warpgroup does: asks for every item as soon as its stage is free."""
    launch, items = here.launch, here.launch.items
    stages, rows = launch.plan.stages, pl.ds(here.start, launch.rows)

    def step(number, carry):
        stage = number % stages
        layer, head = here.item(number)
        ready = shared["ready"].at[stage]

        @pl.when(number >= stages)
        def _():
            plgpu.barrier_wait(shared["taken"].at[stage])

        for name in ("x", "dense") if launch.dense else ("x",):
            source = given[name]
            for run, column in enumerate(items.sources(here.kind, head)):
                block = source.at[layer % source.shape[0], rows, pl.ds(column, items.width)]
                plgpu.copy_gmem_to_smem(block, shared[name].at[stage, run], ready)
        if launch.rank:
            v = given["v"]
            for run, column in enumerate(items.columns(here.kind, head)):
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


def _split(word: Array) -> tuple[Array, Array]:
    """The two bfloat16 of a word, as float32."""
    widen = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32)
    return widen(word << 16), widen(word & jnp.uint32(0xFFFF0000))


def _join(first: Array, second: Array) -> Array:
    """Two float32 as a word of two bfloat16."""
    narrow = lambda value: jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    return narrow(first) | (narrow(second) << 16)


def read(items: Items, buffer, stage, rows) -> tuple[Array, Array]:
    """`first` and `second` of an item in shared memory, float32."""
    load = lambda run: plgpu.layout_cast(buffer[stage, run, rows], plgpu.Layout.WGMMA)
    if items.words:
        return _split(load(0))
    return load(0).astype(jnp.float32), load(1).astype(jnp.float32)


def rounded(items: Items, values: tuple[Array, Array], dtype) -> tuple[Array, ...]:
    """The runs of an item as x has them."""
    return (_join(*values),) if items.words else tuple(value.astype(dtype) for value in values)


def _product(launch: Launch, u, v) -> tuple[Array, Array]:
    """u v for both runs, float32, on the tensor cores."""

    def run(first, second):
        plgpu.wgmma(first, u, v.at[0])
        plgpu.wgmma(second, u, v.at[1])
        return first[...], second[...]

    return pl.run_scoped(run, *[plgpu.ACC((ROWS, launch.items.width), jnp.float32)] * 2)


class Angles(NamedTuple):
    """Cosines and sines of a warpgroup's tokens, in registers; `turns`: whether this kind of item rotates."""

    cos: Array
    sin: Array
    turns: Any

    @classmethod
    def of(cls, here: Here, given: Mapping[str, Any]) -> "Angles | None":
        """Loads them once, for all items; None where nothing rotates."""
        items = here.launch.items
        if not items.turning:
            return None
        kind = jnp.minimum(here.kind, items.turning - 1)
        place = pl.ds(here.start + here.group * ROWS, ROWS), pl.ds(kind * items.width, items.width)
        load = lambda name: plgpu.load(given[name].at[place], layout=plgpu.Layout.WGMMA, optimized=False)
        return cls(load("cos"), load("sin"), None if items.turning == items.kinds else here.kind < items.turning)

    def rotate(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Both runs of an item, rotated."""
        turned = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        if self.turns is None:
            return turned
        turns = jnp.broadcast_to(self.turns, first.shape)
        return jnp.where(turns, turned[0], first), jnp.where(turns, turned[1], second)


def compute(here: Here, shared: Mapping[str, Any], angles: Angles | None, number) -> tuple[Array, Array]:
    """R · (x + u v + dense) of one item, float32, once it has arrived."""
    launch, stage = here.launch, number % here.launch.plan.stages
    rows = pl.ds(here.group * ROWS, ROWS)
    turn = here.turn(number) % 2
    if launch.rank:

        @pl.when(here.opens(number))
        def _():
            plgpu.barrier_wait(shared["u_ready"].at[turn])

    plgpu.barrier_wait(shared["ready"].at[stage])
    values = read(launch.items, shared["x"], stage, rows)
    add = lambda others: tuple(value + other for value, other in zip(values, others, strict=True))
    if launch.rank:
        values = add(_product(launch, shared["u"].at[turn, rows], shared["v"].at[stage]))

        @pl.when(here.closes(number))
        def _():
            plgpu.barrier_arrive(shared["u_taken"].at[turn])

    if launch.dense:
        values = add(read(launch.items, shared["dense"], stage, rows))
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
    name: str, launch: Launch, names: tuple[str, ...], work: Callable, dtype, interpret, out_type: Any = ()
) -> Callable:
    """A launch of `work(here, given, shared)`; `given` maps `names` to the operands and what is of `out_type`."""

    def body(*refs, **scratch):
        shared = {name.removesuffix("_shared"): buffer for name, buffer in scratch.items()}
        work(Here.of(launch), dict(zip(names, refs, strict=True)), shared)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_of(launch, dtype),
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
