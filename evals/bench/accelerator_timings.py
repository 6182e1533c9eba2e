"""Timings on an accelerator: rotate_patch and splice beside a copy, and the factorisation."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import factorise, rotate_patch, splice
from pallas_kernels.rotate_patch import reference

from .accelerator_tasks import PAGE_SIZE, KernelCase, Row, Task, cases, draw, implementation, spread
from .device_timing import OverSets, ThroughPool, median_seconds, seconds_of

LEAST_TOKENS = 2048
REPEATS = 30
SETS = 24
"""Calls in one timed program, each on inputs of its own: none is found in a cache or left out as a repetition."""
MEMORY = 4 << 30
"""Bytes that inputs and results of one timed program may take together; larger shapes get fewer sets."""

Drawn = Mapping[str, Any]
"""A chunk as `rotate_patch` takes it, by the names of its arguments."""


def moved_bytes(case: KernelCase) -> int:
    """Counts the bytes that must move: x in, the result out, u, v, cosines and sines in."""
    x = math.prod(case.sizes) * 2
    factors = case.sizes[0] * case.rank * (case.tokens + math.prod(case.sizes[-2:])) * 2
    return 2 * x + factors + 2 * case.tokens * (case.shape.rotary // 2) * 4


@functools.lru_cache(maxsize=1)
def copy_bandwidth(size: int, sets: int, repeats: int) -> float:
    """Measures bytes a second of a copy that moves `size` bytes, half in and half out, each number negated on the way.

    A plain copy inside a compiled program may be left out by the compiler; this one cannot.
    """
    numbers = [jnp.full((size // 4,), i, jnp.bfloat16) for i in range(sets)]
    return size / median_seconds(OverSets(jnp.negative, numbers), sets, repeats)


def unfused(chunk: Drawn, layout: str) -> Array:
    """Runs the XLA path with its steps kept apart: product, sum, rotation, cast."""
    apart = jax.lax.optimization_barrier
    value = apart(chunk["x"].astype(jnp.float32))
    if "u" in chunk:
        value = apart(value + apart(reference.product(chunk["u"], chunk["v"], value.shape[-2])))
    if "cos" in chunk:
        value = apart(reference.rotate(value, chunk["cos"], chunk["sin"], layout))
    return value.astype(chunk["x"].dtype)


def separate(chunk: Drawn, layout: str, implementation: str) -> Array:
    """Runs patch and rotation as two kernels."""
    patched = rotate_patch(chunk["x"], u=chunk["u"], v=chunk["v"], implementation=implementation)
    patched = jax.lax.optimization_barrier(patched)
    return rotate_patch(patched, chunk["cos"], chunk["sin"], layout=layout, implementation=implementation)


def bandwidth(tiny: bool, which: str) -> Iterator[Task]:
    """Yields achieved bandwidths as a share of a copy's of the same size, of the kernel or of the XLA paths."""
    name = implementation(which)
    for case in cases(tiny, LEAST_TOKENS):
        operations = ["rotate_patch", "splice"]
        operations += ["rotate_patch, two kernels"] * bool(case.rank and case.shape.rotary)
        operations += ["rotate_patch, unfused"] * (which == "xla")
        for operation in operations:
            yield Task(f"{operation} {name} {case.name}", functools.partial(_timed, case, operation, name, tiny))


def _timed(case: KernelCase, operation: str, name: str, tiny: bool) -> Row:
    """Times one operation on as many sets of inputs as memory allows, and a copy of as many bytes."""
    size, layout, repeats = moved_bytes(case), case.shape.layout, 3 if tiny else REPEATS
    count = max(2, min(SETS, MEMORY // size))
    sets = [draw(case, key) for key in jax.random.split(jax.random.key(0), count)]

    if operation == "splice":
        # Every set goes into one pool at slots of its own, beginning in the middle of a page.
        pages = -(-(count * case.tokens + PAGE_SIZE) // PAGE_SIZE)
        sizes = (case.sizes[0], pages, PAGE_SIZE, *case.sizes[-2:])
        first = jnp.arange(case.tokens, dtype=jnp.int32) + PAGE_SIZE // 2
        placed = [chunk | {"slots": first + index * case.tokens} for index, chunk in enumerate(sets)]
        program = ThroughPool(
            lambda pool, chunk: splice(pool, **chunk, layout=layout, implementation=name),
            lambda: jnp.zeros(sizes, jnp.bfloat16),
            placed,
        )
    else:
        calls: dict[str, Callable[[Drawn], Array]] = {
            "rotate_patch": lambda chunk: rotate_patch(**chunk, layout=layout, implementation=name),
            "rotate_patch, two kernels": lambda chunk: separate(chunk, layout, name),
            "rotate_patch, unfused": lambda chunk: unfused(chunk, layout),
        }
        program = OverSets(calls[operation], sets)

    seconds, copied = seconds_of(program, count, repeats), copy_bandwidth(size, count, repeats)
    achieved = size / statistics.median(seconds)
    row = {"operation": operation, "implementation": name, "case": case.name, "calls in one program": count}
    rates = {"bytes": size, "GB/s": achieved / 1e9, "copy GB/s": copied / 1e9, "share of copy": achieved / copied}
    return row | spread(seconds) | rates


NOTES = [
    f"microseconds: median of {REPEATS} rounds, by call; a round queues several runs of one program of many calls, "
    "each call on inputs of its own.",
    "bytes: x, u, v, cosines and sines in, the result out. share of copy: of the bandwidth of a copy of as many bytes.",
    "unfused: the XLA path with its steps kept apart; two kernels: patch and rotation apart. xla over it: the XLA "
    "path's seconds over this row's. Above 1 this row is faster.",
]


def factorisation(tiny: bool, which: str) -> Iterator[Task]:
    """Yields a 1024-token chunk of a 7B model, keys and values of 28 layers at rank 32: ours, and a batched SVD."""
    del which
    sizes, rank = ((4, 32, 16), 4) if tiny else ((2 * 28, 1024, 512), 32)
    name = f"{' × '.join(map(str, sizes))} M={rank}"
    runs = {
        "randomised": (lambda value: factorise(value, rank), 3 if tiny else 10),
        "full SVD": (lambda value: jnp.linalg.svd(value, full_matrices=False), 1),
    }
    for case, (run, repeats) in runs.items():
        yield Task(case, functools.partial(_factorised, case, name, run, sizes, repeats))


def _factorised(case: str, name: str, run: Callable[[Array], Any], sizes: tuple[int, ...], repeats: int) -> Row:
    decay = jnp.exp(-jnp.arange(sizes[-1]) / (sizes[-1] / 5))
    matrix = jax.random.normal(jax.random.key(0), sizes) * decay
    seconds = seconds_of(functools.partial(jax.jit(run), matrix), 1, repeats)
    return {"operation": "factorise", "case": case, "matrices": name} | spread(seconds)
