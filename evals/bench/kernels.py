"""Kernels beside XLA: every one against float64 on fresh inputs, then timed; on a CPU the XLA path alone.

`checks` come first: results of every kernel and number format at shapes of released models, with poisoned memory.
`timings` hold the kernel, the XLA path and a copy of as many numbers against each other. Errors
are in units of the last place of bfloat16 at the row's largest value.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import KernelUnavailableError, block_product, factorise, rotate_patch, splice
from pallas_kernels.factorise.shapes import PRODUCTION as MATRICES
from pallas_kernels.factorise.shapes import SMALL as SMALL_MATRICES
from pallas_kernels.rotate_patch.shapes import PRODUCTION, SMALL, RotateShape

from .benchmark import Benchmark, BenchOptions, Sides, ThroughPool, over_sets, timed

RANKS = (0, 16, 64)
PAGE_SIZE = 64
NARROW = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""Formats of eight bits, with their largest numbers."""
UNITS = {"bfloat16": 1.0, "float32": 2.0**-9}
"""The largest error that is right, by dtype of the result."""
ENERGY = 0.99
"""Of the most that any factors of the rank capture."""
LEAST_TOKENS, MEMORY, MOST_SETS, QUEUED = 2048, 4 << 30, 24, 4
"""Of what is timed: tokens at least; bytes of inputs and results; inputs of one program; programs queued."""
Drawn = dict[str, Any]
"""A chunk as `rotate_patch` takes it, by the names of its arguments."""


class KernelCase(NamedTuple):
    """A chunk's shape at one rank and length, [L, T, K, H]."""

    shape: RotateShape
    tokens: int
    rank: int

    @property
    def name(self) -> str:
        """Model, tokens and rank."""
        return f"{self.shape.name} T={self.tokens} M={self.rank}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the chunk, [L, T, K, H]."""
        return (*self.shape.leading, self.tokens, self.shape.heads, self.shape.width)


def cases(tiny: bool, least_tokens: int = 0) -> list[KernelCase]:
    """Lists every production shape at every rank; token counts doubled until they reach `least_tokens`."""
    chosen = []
    for shape in SMALL[:1] if tiny else PRODUCTION:
        tokens = shape.tokens
        while tokens < least_tokens and not tiny:
            tokens *= 2
        ranks = (0, 4) if tiny else RANKS
        chosen += [KernelCase(shape, tokens, rank) for rank in ranks if rank or shape.rotary]
    return chosen


def implementations() -> tuple[str, ...]:
    """Names what runs here: the platform's kernel and XLA, or XLA alone."""
    backend = jax.default_backend()
    return (backend, "xla") if backend in ("gpu", "tpu") else ("xla",)


def draw(case: KernelCase, key: Array, dtype: str = "bfloat16") -> Drawn:
    """Draws a chunk, its angles and its factors, on the device."""
    keys = jax.random.split(key, 4)

    def normal(key: Array, *sizes: int) -> Array:
        return jax.random.normal(key, sizes, jnp.float32).astype(dtype)

    chunk: Drawn = {"x": normal(keys[0], *case.sizes)}
    if case.shape.rotary:
        angle = jax.random.uniform(keys[1], (case.tokens, case.shape.rotary // 2), maxval=2 * np.pi)
        chunk |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if case.rank:
        chunk["u"] = normal(keys[2], *case.shape.leading, case.tokens, case.rank)
        chunk["v"] = normal(keys[3], *case.shape.leading, case.rank, case.shape.heads * case.shape.width)
    return chunk


def narrowed(wide: Drawn, dtype: str) -> Drawn:
    """Quantises a float32 chunk to eight bits, with a scale along each axis that `rotate_patch` takes one for."""
    narrow = dict(wide)
    for name, axis in (("x", -3), ("u", -2), ("v", -1)):
        if name in wide:
            scale = jnp.abs(wide[name]).max(axis, keepdims=True) / NARROW[dtype]
            scaled = wide[name] / scale
            narrow[name] = (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype)
            narrow[f"{name}_scale"] = scale
    return narrow


def expected(chunk: Mapping[str, Any], layers: list[int], layout: str) -> Float[np.ndarray, "..."]:
    """Computes R · (x + u v) in float64 for these layers."""
    exact = {}
    for name, value in chunk.items():
        exact[name] = np.asarray(value if name in ("cos", "sin") else value[np.asarray(layers)], np.float64)
    for name in ("x", "u", "v"):
        if f"{name}_scale" in exact:
            exact[name] = exact[name] * exact[f"{name}_scale"]
    x = exact["x"]
    if "u" in exact:
        x = x + (exact["u"] @ exact["v"]).reshape(x.shape)
    if "cos" not in exact:
        return x

    cos, sin = exact["cos"][:, None], exact["sin"][:, None]
    half, result = cos.shape[-1], x.copy()
    first = slice(0, half) if layout == "half" else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if layout == "half" else slice(1, 2 * half, 2)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def units(found: Any, exact: Any) -> float:
    """Measures the largest difference in units of the last place of bfloat16 at each row's largest value; NaN: inf."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    largest = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    error = np.abs(found - exact) / 2.0 ** (np.floor(np.log2(largest)) - 7)
    return float(np.nan_to_num(error, nan=np.inf).max())


def errors_of(measure: Callable[[str], float]) -> tuple[dict[str, float], dict[str, str]]:
    """Measures the error of every implementation here; returns errors, and the reasons of those that refuse."""
    errors, refusals = {}, {}
    for name in implementations():
        try:
            errors[name] = measure(name)
        except KernelUnavailableError as refusal:
            refusals[name] = str(refusal)
    return errors, refusals


# ---------------------------------------------------------------------------------------------------------- checks


def checks(tiny: bool) -> Iterator[Benchmark]:
    """Yields the comparisons with float64: first the scattered splices, which would serve a wrong answer unseen."""
    pairs = [shape._replace(name=f"{shape.name}_pairs", layout="pairs") for shape in PRODUCTION if shape.width == 64]
    every = cases(tiny)
    # The rope key of latent attention in pairs is for numerics alone.
    every += [KernelCase(shape, shape.tokens, 4 if tiny else 16) for shape in (SMALL[2:3] if tiny else pairs)]
    for operation in ("splice, scattered", "splice", "rotate_patch"):
        for case in every:
            for dtype in ("bfloat16", *(NARROW if case.rank in (4, 16) else ())):
                results = ("bfloat16", "float32") if (dtype, operation) == ("int8", "rotate_patch") else ("bfloat16",)
                for result in results:
                    prepare = functools.partial(_checked, case, operation, dtype, result)
                    yield Benchmark(f"check.{operation}", f"{case.name} {dtype} to {result}", prepare)
    for rows in (64, 128):
        yield Benchmark("kernels.block_product", f"blocks of {rows}", functools.partial(_multiplied, tiny, rows))


def _checked(case: KernelCase, operation: str, dtype: str, result: str) -> Sides:
    """Prepares a check of every implementation on one chunk; a fresh seed each time."""
    chunk = draw(case, jax.random.key(_fresh_seed()), "float32" if dtype in NARROW else dtype)
    chunk = narrowed(chunk, dtype) if dtype in NARROW else chunk
    layers = sorted({0, case.sizes[0] // 2, case.sizes[0] - 1})
    exact = expected(chunk, layers, case.shape.layout)
    if operation == "rotate_patch":
        measure = functools.partial(_rotated, case, chunk, exact, layers, result)
    else:
        total = -(-2 * case.tokens // PAGE_SIZE) * PAGE_SIZE
        order = np.random.default_rng().permutation(total)
        if operation == "splice":
            order = (np.arange(total) + total // 7) % total
        measure = functools.partial(_spliced, case, chunk, exact, layers, order)
    errors, refusals = errors_of(lambda name: measure(name) / UNITS[result])
    return Sides({}, lambda: errors, notes=refusals)


def _fresh_seed() -> int:
    """Draws another seed every time: a kernel that is right for one seed alone is not right."""
    return int.from_bytes(os.urandom(4), "little")


def _rotated(case: KernelCase, chunk: Drawn, exact: np.ndarray, layers: list[int], result: str, name: str) -> float:
    """Measures the error of `rotate_patch` on a padded chunk; infinite where the padding is not zero."""
    length = case.tokens - 3
    plan: Drawn = {"layout": case.shape.layout, "out_dtype": result, "implementation": name}
    run = jax.jit(lambda chunk, length: rotate_patch(**chunk, length=length, **plan))
    compiled = run.lower(chunk, jnp.int32(length)).compile()
    # The allocator is likely to give this memory next: what a kernel leaves unwritten is NaN then.
    jax.block_until_ready([jnp.full(case.sizes, jnp.nan, jnp.bfloat16) for _ in range(2)])
    found = np.asarray(compiled(chunk, jnp.int32(length))[np.asarray(layers)].astype(jnp.float32))
    return units(found[:, :length], exact[:, :length]) if (found[:, length:] == 0).all() else np.inf


def _spliced(
    case: KernelCase, chunk: Drawn, exact: np.ndarray, layers: list[int], order: np.ndarray, name: str
) -> float:
    """Measures the error of a splice to the first slots of this order; infinite where another slot's bits changed."""
    length, total = case.tokens - 3, order.size
    sizes = (case.sizes[0], total // PAGE_SIZE, PAGE_SIZE, *case.sizes[-2:])
    slots = order[: case.tokens].astype(np.int32)
    # A NaN with an odd payload: whatever is written over it shows, bit by bit.
    pattern = np.uint16(0x7FA5)
    pool = jax.lax.bitcast_convert_type(jnp.full(sizes, pattern), jnp.bfloat16)
    plan: Drawn = {"layout": case.shape.layout, "length": length, "implementation": name}
    run = jax.jit(lambda pool, slots, chunk: splice(pool, slots, **chunk, **plan), donate_argnums=0)
    flat = run(pool, jnp.asarray(slots), chunk).reshape(case.sizes[0], total, *case.sizes[-2:])
    found = flat[np.asarray(layers)][:, slots[:length]].astype(jnp.float32)
    others = jnp.asarray(np.setdiff1d(np.arange(total), slots[:length]))
    bits = jax.lax.bitcast_convert_type(flat[:, others], jnp.uint16)
    return units(found, exact[:, :length]) if bool((bits == pattern).all()) else np.inf


def _blocks(tiny: bool, rows: int) -> tuple[Array, Array, Array, int]:
    """Draws blocks of rows and a layer's experts of Qwen3-30B-A3B's shape; the last quarter of blocks is unused."""
    experts, depth, width, blocks = (5, 64, 192, 8) if tiny else (128, 2048, 768, 640)
    keys = jax.random.split(jax.random.key(_fresh_seed()), 3)
    x = jax.random.normal(keys[0], (blocks * rows, depth), jnp.float32).astype(jnp.bfloat16)
    stack = jax.random.normal(keys[1], (experts, depth, width), jnp.float32).astype(jnp.bfloat16)
    return x, stack, jnp.sort(jax.random.randint(keys[2], (blocks,), 0, experts, jnp.int32)), blocks * 3 // 4


def _multiplied(tiny: bool, rows: int) -> Sides:
    """Prepares the check of `block_product`, and its timing beside XLA's grouped product."""
    x, stack, which, used = _blocks(tiny, rows)

    def multiply(name: str) -> Callable[..., Array]:
        return jax.jit(functools.partial(block_product, implementation=name))

    def error(name: str) -> float:
        found, largest = multiply(name)(x, stack, which, jnp.int32(used)), 0.0
        for block in sorted({*range(0, used, 1 + used // 16), used - 1}):
            place = slice(block * rows, (block + 1) * rows)
            exact = np.asarray(x[place], np.float64) @ np.asarray(stack[which[block]], np.float64)
            largest = max(largest, units(found[place].astype(jnp.float32), exact))
        return largest

    errors, refusals = errors_of(error)
    sizes = jnp.bincount(which[:used], length=len(stack)) * rows
    ragged = jax.jit(jax.lax.ragged_dot)
    calls = {}
    for name in errors:
        calls[name] = timed(functools.partial(multiply(name), x, stack, which, jnp.int32(used)), runs=QUEUED)
    calls["jax.lax.ragged_dot"] = timed(lambda: ragged(x, stack, sizes), runs=QUEUED)
    return Sides(calls, lambda: errors, notes=refusals)


# --------------------------------------------------------------------------------------------------------- timings


def timings(tiny: bool) -> Iterator[Benchmark]:
    """Yields what is timed: kernels beside XLA at every shape and rank, factorisation."""
    for case in cases(tiny, LEAST_TOKENS):
        yield Benchmark("kernels.rotate_patch", case.name, functools.partial(_rotations, case))
        yield Benchmark("kernels.splice", case.name, functools.partial(_splices, case))
    yield Benchmark("kernels.factorise", (SMALL_MATRICES if tiny else MATRICES)[0].name, functools.partial(_svd, tiny))


def moved_bytes(case: KernelCase) -> int:
    """Counts the bytes that must move: x in, the result out, u, v, cosines and sines in."""
    factors = case.sizes[0] * case.rank * (case.tokens + math.prod(case.sizes[-2:])) * 2
    return 2 * math.prod(case.sizes) * 2 + factors + 2 * case.tokens * (case.shape.rotary // 2) * 4


def drawn_sets(case: KernelCase) -> list[Drawn]:
    """Draws as many chunks as memory allows: no call of a program finds its inputs in a cache."""
    count = max(2, min(MOST_SETS, MEMORY // moved_bytes(case))) if jax.default_backend() != "cpu" else 2
    return [draw(case, key) for key in jax.random.split(jax.random.key(_fresh_seed()), count)]


def _rotations(case: KernelCase) -> Sides:
    """Prepares `rotate_patch` by every implementation, and a copy of x with each number negated."""
    sets, layout = drawn_sets(case), case.shape.layout
    layers = [0, case.sizes[0] - 1]
    exact = expected(sets[0], layers, layout)
    programs: dict[str, Callable[[], Any]] = {}

    def error(name: str) -> float:
        program = over_sets(lambda chunk: rotate_patch(**chunk, layout=layout, implementation=name), sets)
        found = program()[0][np.asarray(layers)].astype(jnp.float32)
        programs[name] = program
        return units(found, exact)

    errors, refusals = errors_of(error)
    # A plain copy inside a compiled program may be left out by the compiler; this one cannot.
    programs["copy"] = over_sets(lambda chunk: jnp.negative(chunk["x"]), sets)
    calls = {name: timed(program, runs=QUEUED, calls=len(sets)) for name, program in programs.items()}
    return Sides(calls, lambda: errors, moved_bytes(case), notes=refusals)


def _splices(case: KernelCase) -> Sides:
    """Prepares splices into pools by every implementation: every set at slots of its own, from the middle of a page."""
    sets, first = drawn_sets(case), jnp.arange(case.tokens, dtype=jnp.int32) + PAGE_SIZE // 2
    placed = [chunk | {"slots": first + index * case.tokens} for index, chunk in enumerate(sets)]
    pages = -(-(len(sets) * case.tokens + PAGE_SIZE) // PAGE_SIZE)
    exact = expected(sets[-1], [0], case.shape.layout)[0]
    programs = {}

    def error(name: str) -> float:
        plan: Drawn = {"layout": case.shape.layout, "implementation": name}
        pool = jnp.zeros((case.sizes[0], pages, PAGE_SIZE, *case.sizes[-2:]), jnp.bfloat16)
        programs[name] = ThroughPool(lambda pool, chunk: splice(pool, **chunk, **plan), pool, placed)
        flat = programs[name]()[0].reshape(-1, *case.sizes[-2:])
        return units(flat[placed[-1]["slots"]].astype(jnp.float32), exact)

    errors, refusals = errors_of(error)
    calls = {name: timed(programs[name], runs=QUEUED, calls=len(sets)) for name in errors}
    return Sides(calls, lambda: errors, moved_bytes(case), notes=refusals)


def _svd(tiny: bool) -> Sides:
    """Prepares factors of a slowly falling spectrum beside a full SVD, by the energy that they capture."""
    shape = (SMALL_MATRICES if tiny else MATRICES)[0]
    layers = shape.batch[0] if jax.default_backend() != "cpu" else 2
    matrix = jax.random.normal(jax.random.key(_fresh_seed()), (layers, shape.tokens, shape.features), jnp.float32)
    matrix = matrix * jnp.exp(-jnp.arange(shape.features) / (shape.features / 5))
    run = jax.jit(lambda value: factorise(value, shape.rank))
    full = jax.jit(lambda value: jnp.linalg.svd(value, full_matrices=False))
    energy = []

    def check() -> dict[str, float]:
        exact = np.asarray(matrix, np.float64)
        u, v = (np.asarray(value, np.float64) for value in run(matrix))
        singular = np.linalg.svd(exact, compute_uv=False)
        captured = (singular**2).sum(-1) - ((exact - u @ v) ** 2).sum((-1, -2))
        energy.append(float((captured / (singular[:, : shape.rank] ** 2).sum(-1)).min()))
        skew = float(np.abs(v @ np.swapaxes(v, -1, -2) - np.eye(shape.rank)).max())
        return {"factorise": max(skew / 1e-4, (1 - energy[0]) / (1 - ENERGY))}

    calls = {"factorise": timed(lambda: run(matrix)), "full SVD": timed(lambda: full(matrix))}
    return Sides(calls, check, figures=lambda: {("factorise", "energy"): energy})


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the checks and the timings; on a CPU the checks are of small shapes, for the XLA path has tests."""
    small = options.quick or jax.default_backend() == "cpu"
    yield from checks(small)
    chosen = timings(options.quick)
    yield from (each for each in chosen if options.quick or jax.default_backend() != "cpu" or "qwen2_5" in each.case)
