"""Kernels beside XLA: every one against XLA and float64 on fresh inputs, then timed; on a CPU the XLA path alone.

The name of a benchmark is the text of its `Case`, for which `pallas_kernels` chooses. Its side "gpu" or "tpu" is the
kernel. Errors are in units of the last place of bfloat16 at the row's largest value.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from pallas_kernels import KernelUnavailableError, block_product, factorise, rotate_patch, splice
from pallas_kernels._dispatch import Case
from pallas_kernels._operands import Codes, padded_width
from pallas_kernels._target import interpretation, platform
from pallas_kernels.shapes import LARGE_MATRICES, MATRICES, PRODUCTION, SMALL, ChunkShape, arguments_of, draw

from .benchmark import Benchmark, BenchOptions, Sides, ThroughPool, over_sets, timed

STAGES = ("correctness", "times", "more times")
ENERGY = 0.99
"""Least share that a factorisation captures of the energy that the best factors of its rank capture."""
CACHE, FEWEST_SETS, MOST_SETS, QUEUED = 256 << 20, 3, 24, 4
"""Bytes that no cache holds; inputs of one program; programs queued."""
EXPERTS, SMALL_EXPERTS = (128, 2048, 768, 640), (5, 64, 192, 8)
"""Matrices, their rows and columns, and blocks of rows: the experts of one layer of Qwen3-30B-A3B, and few."""
PATTERN = np.uint16(0x7FA5)
"""A NaN with an odd payload: whatever is written over it shows, bit by bit."""
STATIC = ("layout", "implementation")
Arrays = dict[str, Any]
"""A chunk as `rotate_patch` takes it, by the names of its arguments."""


class KernelCase(NamedTuple):
    """What is done with a chunk: "rotate_patch", or "splice" with so many slots in a page; dtype of u and v."""

    operation: str
    shape: ChunkShape
    page_size: int = 0
    factors: str = "bfloat16"

    @property
    def name(self) -> str:
        """Model, tokens, rank, slots of a page and dtype of the factors."""
        words = [self.shape.name, f"T={self.shape.tokens} M={self.shape.rank}"]
        return " ".join([*words, *[f"O={self.page_size}"] * bool(self.page_size), self.factors])

    @property
    def dispatched(self) -> Case:
        """What `pallas_kernels` chooses for."""
        return Case(self.operation, self.shape.heads == 1, self.shape.rank > 0, self.shape.group > 0)

    @property
    def moved(self) -> int:
        """Bytes that must move: the arguments in, the result out."""
        leaves = jax.tree.leaves(arguments_of(self.shape, self.factors))
        slots = 4 * self.shape.tokens if self.page_size else 0
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) + 2 * math.prod(self.shape.x) + slots

    def drawn(self) -> Arrays:
        """Draws a chunk."""
        return jax.jit(draw, static_argnums=(0, 2))(self.shape, fresh_key(), self.factors)

    def pool(self, slots: int) -> tuple[int, ...]:
        """Returns the shape of a pool of at least so many slots; engines for TPUs pad its rows to 128 lanes."""
        width = padded_width(self.shape.width) if platform() == "tpu" else self.shape.width
        return self.shape.pool(-(-slots // self.page_size), self.page_size, width)


def checked_cases(tiny: bool) -> Iterator[KernelCase]:
    """Yields every production shape with an odd number of tokens, at ranks 0 (where it rotates), 8 and 32."""
    shapes = SMALL
    if not tiny:
        odd = [shape._replace(tokens=shape.tokens - 3) for shape in PRODUCTION]
        shapes = [shape._replace(rank=rank) for shape in odd for rank in (0, 8, 32) if rank or shape.rotary]
    for shape in shapes:
        yield KernelCase("rotate_patch", shape)
        yield from (KernelCase("splice", shape, size) for size in ((16,) if tiny else (64, 16)))
    float32 = (SMALL if tiny else PRODUCTION)[0]._replace(tokens=77)
    yield from (KernelCase("rotate_patch", float32, 0, "float32"), KernelCase("splice", float32, 64, "float32"))


def timed_cases(tiny: bool, more: bool) -> Iterator[KernelCase]:
    """Yields the sizes that tell most, some of every `Case`; or `more` of them."""
    gqa, rope, latent, _, keys, values = PRODUCTION
    small, middle, large = (256,), (1024, 4096), (16384,)
    if tiny:
        sizes = [(SMALL[more], (SMALL[more].tokens,), SMALL[more].rank)]
    elif more:
        sizes = [(shape, large + small, 32) for shape in (gqa, rope, latent)]
        sizes += [(shape, middle, rank) for shape in (gqa, latent, rope) for rank in (8, 64)]
    else:
        sizes = [(shape, middle, 32) for shape in (gqa, rope, latent, keys)]
        sizes += [(shape, middle, 0) for shape in (gqa, rope, keys)] + [(values, (4096,), 32)]
    for shape, counts, rank in sizes:
        for tokens in counts:
            chunk = shape._replace(tokens=tokens, rank=rank)
            yield KernelCase("rotate_patch", chunk)
            # Other ranks tell of splices what they tell of rotations.
            if rank in (0, 32) or tiny:
                yield KernelCase("splice", chunk, 64)
            if tokens in large:
                yield KernelCase("splice", chunk._replace(tokens=1024), 16)


def kernel_name() -> str | None:
    """Names the kernels that run here, "gpu" or "tpu"; None on a CPU."""
    return platform() if platform() in ("gpu", "tpu") else None


def fresh_key() -> Array:
    """Makes another key every time: a kernel that is right for one seed alone is not right."""
    return jax.random.key(int.from_bytes(os.urandom(4), "little"))


def spoiled(chunk: Mapping[str, Any], length: int) -> Arrays:
    """Puts NaN into all that belongs to tokens from `length` on alone."""
    x, result = chunk["x"], {name: chunk[name] for name in chunk}
    if isinstance(x, Codes):
        first = length if x.by_token else -(-length // x.group)
        bad = {name: getattr(x, name).at[..., first:, :].set(jnp.nan) for name in ("scale", "least")}
        result["x"] = dataclasses.replace(x, **bad)
    else:
        result["x"] = x.at[..., length:, :, :].set(jnp.nan)
    return result | ({"u": chunk["u"].at[..., length:, :].set(jnp.nan)} if "u" in chunk else {})


def numbers(x: Num[Array, "..."] | Codes, layers: np.ndarray | list[int]) -> Float[np.ndarray, "..."]:
    """Returns what x stands for in these layers, in float64; codes are rounded to bfloat16."""
    if not isinstance(x, Codes):
        return np.asarray(x[np.asarray(layers)], np.float64)
    codes, scales = np.asarray(x.codes[layers]), (x.scale, x.least)
    digits = np.concatenate([codes & 15, codes >> 4], -1)
    groups = (np.asarray(value, np.float64)[layers] for value in scales)
    scale, least = (value.repeat(x.group, -1 if x.by_token else -2) for value in groups)
    value = digits * scale[:, : digits.shape[1], : digits.shape[2]] + least[:, : digits.shape[1], : digits.shape[2]]
    return value.astype(np.float32).astype(jnp.bfloat16).astype(np.float64).reshape(-1, *x.shape[1:])


def expected(chunk: Mapping[str, Any], layers: np.ndarray | list[int], layout: str) -> Float[np.ndarray, "..."]:
    """Computes R · (x + u v) in float64 for these layers."""
    x = numbers(chunk["x"], layers)
    if "u" in chunk:
        x = x + (numbers(chunk["u"], layers) @ numbers(chunk["v"], layers)).reshape(x.shape)
    if "cos" not in chunk:
        return x

    cos, sin = (np.asarray(chunk[name], np.float64)[:, None] for name in ("cos", "sin"))
    half, result = cos.shape[-1], x.copy()
    first = slice(0, half) if layout == "half" else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if layout == "half" else slice(1, 2 * half, 2)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def units(actual: Any, exact: Any) -> float:
    """Measures the largest difference in units of the last place of bfloat16 at each row's largest value; NaN: inf."""
    return float(_units(jnp.asarray(actual), jnp.asarray(exact, jnp.float32)))


@jax.jit
def _units(actual: Array, exact: Array) -> Array:
    exponent = jnp.frexp(jnp.maximum(jnp.abs(exact).max(-1, keepdims=True), 1e-30))[1]
    error = jnp.abs(actual.astype(jnp.float32) - exact) / jnp.ldexp(jnp.float32(1), exponent - 8)
    return jnp.where(jnp.isnan(error), jnp.inf, error).max()


class Errors(dict[str, float]):
    """Errors of sides over their tolerance; `notes` say why others cannot run. A kernel that raises is wrong."""

    def __init__(self):
        self.notes: dict[str, str] = {}

    def add(self, side: str, measure: Callable[..., float], *arguments: Any) -> None:
        """Measures the error of a side."""
        try:
            self[side] = measure(*arguments)
        except KernelUnavailableError as refusal:
            self.notes[side] = str(refusal)
        except Exception as error:
            if side == "xla":
                raise
            self[side], self.notes[side] = math.inf, f"{type(error).__name__}: {str(error)[:600]}"

    def sides(self, calls: Mapping[str, Callable[[], float]], moved: int = 0) -> Sides:
        """Returns what is timed: of the sides that were right, in their order."""
        return Sides(
            {side: calls[side] for side in calls if side not in self.notes}, lambda: self, moved, notes=self.notes
        )


# --------------------------------------------------------------------------------------------------------- benchmarks


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the benchmarks of every stage."""
    for stage in STAGES:
        yield from benchmarks(options.quick, stage)


def benchmarks(tiny: bool, stage: str) -> Iterator[Benchmark]:
    """Yields the benchmarks of one of `STAGES`; on a CPU production shapes of Qwen2.5-VL alone."""
    checks = stage == "correctness"
    for case in checked_cases(tiny) if checks else timed_cases(tiny, stage == "more times"):
        if tiny or jax.default_backend() != "cpu" or "qwen2_5" in case.name:
            prepare = functools.partial(_checks if checks else _times, case)
            yield Benchmark(str(case.dispatched), f"{case.name}{', checked' * checks}", prepare)
    if stage == "times":
        for rows in (64, 128):
            prepare = functools.partial(_products, SMALL_EXPERTS if tiny else EXPERTS, rows)
            yield Benchmark(str(Case("block_product")), f"blocks of {rows}", prepare)
        yield Benchmark("factorise", (MATRICES if tiny else LARGE_MATRICES)[0].name, functools.partial(_svd, tiny))


def _checks(case: KernelCase) -> Sides:
    """Compares the kernel with XLA and both with float64; nothing is timed."""
    length, errors, kernel = case.shape.tokens - min(40, case.shape.tokens // 3), Errors(), kernel_name()
    layers = np.unique([0, case.shape.layers // 2, case.shape.layers - 1])
    chunk = spoiled(case.drawn(), length)
    exact = expected(chunk, layers, case.shape.layout)[:, :length]
    rotated = rotate_patch(**chunk, layout=case.shape.layout, implementation="xla")[:, :length]
    plan: Arrays = {"layout": case.shape.layout, "length": jnp.int32(length)}

    def measure(side: str) -> float:
        worst = 0.0
        run = functools.partial(splice if case.page_size else jax.jit(rotate_patch, static_argnames=STATIC), **chunk)
        for other in (False, True):
            if case.page_size:
                rows = _spliced_rows(case, functools.partial(run, **plan, implementation=side), length, other)
            else:
                # The allocator is likely to give this memory next: what a kernel leaves unwritten is NaN then.
                jax.block_until_ready([jnp.full(case.shape.x, jnp.nan, jnp.bfloat16) for _ in range(2 * other)])
                rows = _counted(run(**plan, implementation=side), length)
            worst = max(worst, units(rows[layers], exact), units(rows, rotated))
        return worst

    # On a device XLA's own splice is compared where it is timed.
    for side in [kernel] if kernel and case.page_size else [*[kernel] * bool(kernel), "xla"]:
        errors.add(side, measure, side)
    return errors.sides({})


@functools.partial(jax.jit, static_argnums=1)
def _counted(rows: Array, length: int) -> Array:
    """Returns the tokens that count, or NaN where the padding is not zero."""
    return jnp.where((rows[:, length:] == 0).all(), rows[:, :length], jnp.nan)


def _spliced_rows(case: KernelCase, run: Callable[..., Array], length: int, scattered: bool) -> Array:
    """Returns what was written, to slots from the middle of a page on or to scattered ones."""
    _, pages, page_size, *_ = shape = case.pool(2 * case.shape.tokens)
    order = (np.arange(pages * page_size) + page_size // 2) % (pages * page_size)
    order = np.random.default_rng().permutation(order) if scattered else order
    slots = order[: case.shape.tokens].astype(np.int32)
    pool = jax.lax.bitcast_convert_type(jnp.full(shape, PATTERN), jnp.bfloat16)
    return _written(run(pool, slots=slots), slots[:length], np.sort(order[length:]), case.shape.width)


@functools.partial(jax.jit, static_argnums=3)
def _written(pool: Array, slots: Array, others: Array, width: int) -> Array:
    """Returns rows of a pool, or NaN where the bits of other slots have changed or their padding is not zero."""
    flat = pool.reshape(pool.shape[0], -1, *pool.shape[3:])
    intact = (jax.lax.bitcast_convert_type(flat[:, others], jnp.uint16) == PATTERN).all()
    return jnp.where(intact & (flat[:, slots, :, width:] == 0).all(), flat[:, slots, :, :width], jnp.nan)


def _times(case: KernelCase) -> Sides:
    """Prepares the kernel, XLA and a copy of as many bytes, on as many chunks as no cache holds; compares results."""
    count = min(MOST_SETS, max(FEWEST_SETS, CACHE // case.moved)) if jax.default_backend() != "cpu" else 2
    sets, errors, programs, results = [case.drawn() for _ in range(count)], Errors(), {}, {}
    for side in _timed_sides():
        plan: Arrays = {"layout": case.shape.layout, "implementation": side}
        if case.page_size:
            # Every chunk at slots of its own, from the middle of a page on.
            slots = jnp.arange(case.shape.tokens, dtype=jnp.int32) + case.page_size // 2
            placed = [chunk | {"slots": slots + number * len(slots)} for number, chunk in enumerate(sets)]
            pool = jnp.zeros(case.pool(count * len(slots) + case.page_size), jnp.bfloat16)
            programs[side] = ThroughPool(lambda pool, chunk, plan=plan: splice(pool, **chunk, **plan), pool, placed)
        else:
            programs[side] = over_sets(lambda chunk, plan=plan: rotate_patch(**chunk, **plan), sets)

    def measure(side: str) -> float:
        results[side] = jax.tree.leaves(programs[side]())[0]
        return units(results[side], results["xla"])

    for side in reversed(_timed_sides()):
        errors.add(side, measure, side)
    # Half the bytes in, half out. A plain copy may be left out by the compiler.
    halves = [jnp.full(case.moved // 4, number, jnp.bfloat16) for number in range(count)]
    programs["copy"] = over_sets(jnp.negative, halves)
    calls = {side: timed(program, runs=QUEUED, calls=count) for side, program in programs.items()}
    return errors.sides(calls, case.moved)


def _timed_sides() -> list[str]:
    """Names what is timed: the kernel, unless it is interpreted, and XLA."""
    kernel = kernel_name()
    return [kernel, "xla"] if kernel and not interpretation() else ["xla"]


def _products(sizes: tuple[int, int, int, int], rows: int) -> Sides:
    """Prepares `block_product` beside XLA's grouped product. The last quarter of the blocks is unused."""
    experts, depth, width, blocks = sizes
    keys, used = jax.random.split(fresh_key(), 3), blocks * 3 // 4
    x = jax.random.normal(keys[0], (blocks * rows, depth), jnp.float32).astype(jnp.bfloat16)
    stack = jax.random.normal(keys[1], (experts, depth, width), jnp.float32).astype(jnp.bfloat16)
    expert = jnp.sort(jax.random.randint(keys[2], (blocks,), 0, experts, jnp.int32))
    errors, calls, kernel = Errors(), {}, kernel_name()

    def measure(run: Callable[[], Array]) -> float:
        result, found = run(), []
        for block in sorted({*range(0, used, 1 + used // 16), used - 1}):
            place = slice(block * rows, (block + 1) * rows)
            exact = np.asarray(x[place], np.float64) @ np.asarray(stack[expert[block]], np.float64)
            found.append(units(result[place], exact))
        return max(found)

    for side in [kernel, "xla"] if kernel else ["xla"]:
        product = jax.jit(functools.partial(block_product, implementation=side))
        run = functools.partial(product, x, stack, expert, jnp.int32(used))
        errors.add(side, measure, run)
        if side in _timed_sides():
            calls[side] = timed(run, runs=QUEUED)
    counts = jnp.bincount(expert[:used], length=experts) * rows
    peer = functools.partial(jax.jit(jax.lax.ragged_dot), x, stack, counts)
    try:
        jax.block_until_ready(peer())
    except Exception as error:  # Where it is no kernel it may want more memory than there is.
        errors.notes["jax.lax.ragged_dot"] = str(error)[:600]
    return errors.sides(calls | {"jax.lax.ragged_dot": timed(peer, runs=QUEUED)})


def _svd(tiny: bool) -> Sides:
    """Prepares factors of a slowly falling spectrum beside a full SVD, by the energy that they capture."""
    shape = (MATRICES if tiny else LARGE_MATRICES)[0]
    layers = shape.batch[0] if jax.default_backend() != "cpu" else 2
    matrix = jax.random.normal(fresh_key(), (layers, shape.tokens, shape.features), jnp.float32)
    matrix = matrix * jnp.exp(-jnp.arange(shape.features) / (shape.features / 5))
    run = jax.jit(lambda value: factorise(value, shape.rank))
    full = jax.jit(lambda value: jnp.linalg.svd(value, full_matrices=False))

    def check() -> dict[str, float]:
        exact = np.asarray(matrix, np.float64)
        u, v = (np.asarray(value, np.float64) for value in run(matrix))
        squares = np.linalg.svd(exact, compute_uv=False) ** 2
        captured = squares.sum(-1) - ((exact - u @ v) ** 2).sum((-1, -2))
        energy = float((captured / squares[:, : shape.rank].sum(-1)).min())
        skew = float(np.abs(v @ np.swapaxes(v, -1, -2) - np.eye(shape.rank)).max())
        return {"factorise": max(skew / 1e-4, (1 - energy) / (1 - ENERGY))}

    # A GPU takes long for it.
    layer = matrix[:1]
    return Sides({"factorise": timed(lambda: run(matrix)), "full SVD of one": timed(lambda: full(layer))}, check)
