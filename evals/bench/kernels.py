"""Kernels beside XLA: every one against float64 on fresh inputs, then timed; on a CPU the XLA path alone.

A benchmark checks one operation at one shape of a released model in every number format, with poisoned memory, and
then times the kernel, the XLA path and a copy of as many numbers in bfloat16. Errors are in units of the last place
of bfloat16 at the row's largest value.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
"""Least share that a factorisation captures of the energy that the best factors of its rank capture."""
LEAST_TOKENS, MEMORY, MOST_SETS, QUEUED = 2048, 4 << 30, 24, 4
"""Tokens of a production case at least; bytes of inputs and results; inputs of one program; programs queued."""
Arrays = dict[str, Any]
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
        """Sizes of the chunk, [L, T, K, H]."""
        return (*self.shape.leading, self.tokens, self.shape.heads, self.shape.width)

    @property
    def layers(self) -> np.ndarray:
        """Layers that are compared with float64: the first, the middle and the last."""
        return np.unique([0, self.sizes[0] // 2, self.sizes[0] - 1])

    @property
    def formats(self) -> list[tuple[str, str]]:
        """Dtypes of the chunk and of the result: bfloat16, and at one rank those of eight bits."""
        narrow = [(dtype, "bfloat16") for dtype in NARROW] + [("int8", "float32")]
        return [("bfloat16", "bfloat16"), *(narrow if self.rank in (4, 16) else ())]


def cases(tiny: bool) -> list[KernelCase]:
    """Lists every production shape at every rank, with token counts doubled until they reach LEAST_TOKENS."""
    if tiny:
        small = (SMALL[0], 0), (SMALL[0], 4), (SMALL[2], 4)
        return [KernelCase(shape, shape.tokens, rank) for shape, rank in small]
    chosen = []
    for shape in PRODUCTION:
        tokens = shape.tokens * 2 ** math.ceil(math.log2(LEAST_TOKENS / shape.tokens))
        chosen += [KernelCase(shape, tokens, rank) for rank in RANKS if rank or shape.rotary]
        # A narrow rope key in pairs too.
        if shape.width == 64:
            chosen.append(KernelCase(shape._replace(name=f"{shape.name}_pairs", layout="pairs"), tokens, 16))
    return chosen


def implementations() -> tuple[str, ...]:
    """Names what runs here: the platform's kernel and XLA, or XLA alone."""
    backend = jax.default_backend()
    return (backend, "xla") if backend in ("gpu", "tpu") else ("xla",)


def draw(case: KernelCase, key: Array, dtype: str = "bfloat16") -> Arrays:
    """Draws a chunk, its angles and its factors, on the device; eight bits have scales."""
    keys, wide = jax.random.split(key, 4), "float32" if dtype in NARROW else dtype

    def normal(key: Array, *sizes: int) -> Array:
        return jax.random.normal(key, sizes, jnp.float32).astype(wide)

    chunk: Arrays = {"x": normal(keys[0], *case.sizes)}
    if case.shape.rotary:
        angle = jax.random.uniform(keys[1], (case.tokens, case.shape.rotary // 2), maxval=2 * np.pi)
        chunk |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if case.rank:
        chunk["u"] = normal(keys[2], *case.shape.leading, case.tokens, case.rank)
        chunk["v"] = normal(keys[3], *case.shape.leading, case.rank, case.shape.heads * case.shape.width)
    return narrowed(chunk, dtype) if dtype in NARROW else chunk


def narrowed(wide: Arrays, dtype: str) -> Arrays:
    """Quantises a float32 chunk to eight bits, with a scale along each axis that `rotate_patch` takes one for."""
    narrow = dict(wide)
    for name, axis in (("x", -3), ("u", -2), ("v", -1)):
        if name in wide:
            scale = jnp.abs(wide[name]).max(axis, keepdims=True) / NARROW[dtype]
            scaled = wide[name] / scale
            narrow[name] = (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype)
            narrow[f"{name}_scale"] = scale
    return narrow


def expected(chunk: Mapping[str, Any], layers: np.ndarray | list[int], layout: str) -> Float[np.ndarray, "..."]:
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


def units(actual: Any, exact: Any) -> float:
    """Measures the largest difference in units of the last place of bfloat16 at each row's largest value; NaN: inf."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    largest = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    error = np.abs(actual - exact) / 2.0 ** (np.floor(np.log2(largest)) - 7)
    return float(np.nan_to_num(error, nan=np.inf).max())


def fresh_key() -> Array:
    """Makes another key every time: a kernel that is right for one seed alone is not right."""
    return jax.random.key(int.from_bytes(os.urandom(4), "little"))


def format_errors(
    case: KernelCase, formats: Iterable[tuple[str, str]], measure: Callable[[Arrays, Any, str, str], float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Measures the error of every implementation in every number format.

    Args:
      measure: (chunk, its exact result, dtype of the result, implementation) → error in units of the last place.

    Returns:
      Errors over their tolerance, by side (bfloat16 has the implementation's bare name); reasons of sides that refuse.
    """
    errors, refusals = {}, {}
    for dtype, result in formats:
        chunk = draw(case, fresh_key(), dtype)
        exact = expected(chunk, case.layers, case.shape.layout)
        for name in implementations():
            side = name if (dtype, result) == ("bfloat16", "bfloat16") else f"{name}, {dtype} to {result}"
            try:
                errors[side] = measure(chunk, exact, result, name) / UNITS[result]
            except KernelUnavailableError as refusal:
                refusals[side] = str(refusal)
    return errors, refusals


def drawn_sets(case: KernelCase) -> list[Arrays]:
    """Draws as many chunks as memory allows: no call of a program finds its inputs in a cache."""
    count = max(2, min(MOST_SETS, MEMORY // moved_bytes(case))) if jax.default_backend() != "cpu" else 2
    return [draw(case, key) for key in jax.random.split(fresh_key(), count)]


def moved_bytes(case: KernelCase) -> int:
    """Counts the bytes that must move: x in, the result out, u, v, cosines and sines in."""
    factors = case.sizes[0] * case.rank * (case.tokens + math.prod(case.sizes[-2:])) * 2
    return 2 * math.prod(case.sizes) * 2 + factors + 2 * case.tokens * (case.shape.rotary // 2) * 4


# --------------------------------------------------------------------------------------------------------- benchmarks


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the benchmarks; on a CPU those of Qwen2.5-VL's shape alone."""
    small = options.quick or jax.default_backend() != "cpu"
    return (benchmark for benchmark in benchmarks(options.quick) if small or "qwen2_5" in benchmark.case)


def benchmarks(tiny: bool) -> Iterator[Benchmark]:
    """Yields splices, which would serve a wrong answer unseen, then the other kernels."""
    for name, prepare in (("splice", _splices), ("rotate_patch", _rotations)):
        for case in cases(tiny):
            yield Benchmark(f"kernels.{name}", case.name, functools.partial(prepare, case))
    for rows in (64, 128):
        yield Benchmark("kernels.block_product", f"blocks of {rows}", functools.partial(_products, tiny, rows))
    yield Benchmark("kernels.factorise", (SMALL_MATRICES if tiny else MATRICES)[0].name, functools.partial(_svd, tiny))


def _rotations(case: KernelCase) -> Sides:
    """Prepares `rotate_patch` by every implementation, and a copy of x with each number negated."""
    errors, refusals = format_errors(case, case.formats, functools.partial(_rotation_error, case))
    sets = drawn_sets(case)
    programs = {}
    for name in (name for name in implementations() if name in errors):
        call = functools.partial(_rotated, layout=case.shape.layout, implementation=name)
        programs[name] = over_sets(call, sets)
    # A plain copy inside a compiled program may be left out by the compiler; this one cannot.
    programs["copy"] = over_sets(lambda chunk: jnp.negative(chunk["x"]), sets)
    calls = {name: timed(program, runs=QUEUED, calls=len(sets)) for name, program in programs.items()}
    return Sides(calls, lambda: errors, moved_bytes(case), notes=refusals)


def _rotated(chunk: Arrays, **plan: Any) -> Array:
    return rotate_patch(**chunk, **plan)


def _rotation_error(case: KernelCase, chunk: Arrays, exact: np.ndarray, result: str, name: str) -> float:
    """Measures the error of `rotate_patch` on a padded chunk; infinite where the padding is not zero."""
    length = case.tokens - 3
    plan: Arrays = {"layout": case.shape.layout, "out_dtype": result, "implementation": name}
    program = jax.jit(lambda chunk, length: rotate_patch(**chunk, length=length, **plan))
    compiled = program.lower(chunk, jnp.int32(length)).compile()
    # The allocator is likely to give this memory next: what a kernel leaves unwritten is NaN then.
    jax.block_until_ready([jnp.full(case.sizes, jnp.nan, jnp.bfloat16) for _ in range(2)])
    rotated = np.asarray(compiled(chunk, jnp.int32(length))[case.layers].astype(jnp.float32))
    return units(rotated[:, :length], exact[:, :length]) if (rotated[:, length:] == 0).all() else np.inf


def _splices(case: KernelCase) -> Sides:
    """Prepares splices into pools by every implementation: every set at slots of its own, from the middle of a page."""
    formats = [(dtype, result) for dtype, result in case.formats if result == "bfloat16"]
    errors, refusals = format_errors(case, formats, functools.partial(_splice_error, case))
    sets, first = drawn_sets(case), jnp.arange(case.tokens, dtype=jnp.int32) + PAGE_SIZE // 2
    placed = [chunk | {"slots": first + index * case.tokens} for index, chunk in enumerate(sets)]
    pages = -(-(len(sets) * case.tokens + PAGE_SIZE) // PAGE_SIZE)
    calls = {}
    for name in (name for name in implementations() if name in errors):
        call = functools.partial(_spliced, layout=case.shape.layout, implementation=name)
        pool = jnp.zeros((case.sizes[0], pages, PAGE_SIZE, *case.sizes[-2:]), jnp.bfloat16)
        calls[name] = timed(ThroughPool(call, pool, placed), runs=QUEUED, calls=len(sets))
    return Sides(calls, lambda: errors, moved_bytes(case), notes=refusals)


def _spliced(pool: Array, chunk: Arrays, **plan: Any) -> Array:
    return splice(pool, **chunk, **plan)


def _splice_error(case: KernelCase, chunk: Arrays, exact: np.ndarray, _: str, name: str) -> float:
    """Measures the larger error of splices to contiguous and scattered slots; infinite where others' bits changed."""
    length, total = case.tokens - 3, -(-2 * case.tokens // PAGE_SIZE) * PAGE_SIZE
    sizes = (case.sizes[0], total // PAGE_SIZE, PAGE_SIZE, *case.sizes[-2:])
    plan: Arrays = {"layout": case.shape.layout, "length": length, "implementation": name}
    program = jax.jit(functools.partial(_spliced, **plan), donate_argnums=0)
    # A NaN with an odd payload: whatever is written over it shows, bit by bit.
    pattern, error = np.uint16(0x7FA5), 0.0
    for order in ((np.arange(total) + total // 7) % total, np.random.default_rng().permutation(total)):
        slots = order[: case.tokens].astype(np.int32)
        pool = jax.lax.bitcast_convert_type(jnp.full(sizes, pattern), jnp.bfloat16)
        flat = program(pool, chunk | {"slots": jnp.asarray(slots)}).reshape(case.sizes[0], total, *case.sizes[-2:])
        rows = flat[case.layers][:, slots[:length]].astype(jnp.float32)
        others = jnp.asarray(np.setdiff1d(np.arange(total), slots[:length]))
        intact = (jax.lax.bitcast_convert_type(flat[:, others], jnp.uint16) == pattern).all()
        error = max(error, units(rows, exact[:, :length]) if intact else np.inf)
    return error


def _products(tiny: bool, rows: int) -> Sides:
    """Prepares `block_product` beside XLA's grouped product, at the experts of one layer of Qwen3-30B-A3B.

    The last quarter of the blocks is unused.
    """
    experts, depth, width, blocks = (5, 64, 192, 8) if tiny else (128, 2048, 768, 640)
    keys, used = jax.random.split(fresh_key(), 3), blocks * 3 // 4
    x = jax.random.normal(keys[0], (blocks * rows, depth), jnp.float32).astype(jnp.bfloat16)
    stack = jax.random.normal(keys[1], (experts, depth, width), jnp.float32).astype(jnp.bfloat16)
    expert = jnp.sort(jax.random.randint(keys[2], (blocks,), 0, experts, jnp.int32))

    errors, refusals, calls = {}, {}, {}
    for name in implementations():
        product = jax.jit(functools.partial(block_product, implementation=name))
        run = functools.partial(product, x, stack, expert, jnp.int32(used))
        try:
            result = run()
        except KernelUnavailableError as refusal:
            refusals[name] = str(refusal)
            continue
        errors[name] = 0.0
        for block in sorted({*range(0, used, 1 + used // 16), used - 1}):
            place = slice(block * rows, (block + 1) * rows)
            exact = np.asarray(x[place], np.float64) @ np.asarray(stack[expert[block]], np.float64)
            errors[name] = max(errors[name], units(result[place].astype(jnp.float32), exact))
        calls[name] = timed(run, runs=QUEUED)
    sizes = jnp.bincount(expert[:used], length=experts) * rows
    calls["jax.lax.ragged_dot"] = timed(functools.partial(jax.jit(jax.lax.ragged_dot), x, stack, sizes), runs=QUEUED)
    return Sides(calls, lambda: errors, notes=refusals)


def _svd(tiny: bool) -> Sides:
    """Prepares factors of a slowly falling spectrum beside a full SVD, by the energy that they capture."""
    shape = (SMALL_MATRICES if tiny else MATRICES)[0]
    layers = shape.batch[0] if jax.default_backend() != "cpu" else 2
    matrix = jax.random.normal(fresh_key(), (layers, shape.tokens, shape.features), jnp.float32)
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
