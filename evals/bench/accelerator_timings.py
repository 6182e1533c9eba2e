"""Part 2 on an accelerator: bandwidth of rotate_patch and splice beside a copy's, and seconds of the factorisation."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels import KernelUnavailableError, factorise, rotate_patch, splice, tune
from pallas_kernels.rotate_patch import reference

from .accelerator_cases import PAGE_SIZE, Case, cases, draw, environment, implementations

LEAST_TOKENS = 2048
SETS = 4
"""Sets of inputs that a timed program goes through, so that none is found in a cache of the device."""
REPEATS = 30


def median_seconds(program: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of many runs of a program, after two that are not counted."""
    taken = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        jax.block_until_ready(program())
        taken.append(time.perf_counter() - begin)
    return taken[2:]


def moved_bytes(case: Case) -> int:
    """What must move: x in, the result out, u, v, cosines and sines in."""
    x = math.prod(case.sizes) * 2
    factors = case.sizes[0] * case.rank * (case.tokens + math.prod(case.sizes[-2:])) * 2
    return 2 * x + factors + 2 * case.tokens * (case.shape.rotary // 2) * 4


def copy_bandwidth(size: int, repeats: int) -> float:
    """Bytes a second of a copy that moves `size` bytes, half in and half out, each number negated on the way.

    A plain copy inside a compiled program may be left out by the compiler; this one cannot.
    """
    numbers = tuple(jnp.full((size // 4,), i, jnp.bfloat16) for i in range(SETS))
    program = jax.jit(lambda given: tuple(-value for value in given))
    return SETS * size / statistics.median(median_seconds(lambda: program(numbers), repeats))


def unfused(given: Mapping[str, Any], layout: str) -> Array:
    """The XLA path with its steps kept apart: product, sum, rotation, cast."""
    apart = jax.lax.optimization_barrier
    value = apart(given["x"].astype(jnp.float32))
    if "u" in given:
        value = apart(value + apart(reference.product(given["u"], given["v"], value.shape[-2])))
    if "cos" in given:
        value = apart(reference.rotate(value, given["cos"], given["sin"], layout))
    return value.astype(given["x"].dtype)


def separate(given: Mapping[str, Any], layout: str, implementation: str) -> Array:
    """Patch and rotation as two kernels."""
    patched = rotate_patch(given["x"], u=given["u"], v=given["v"], implementation=implementation)
    turned = jax.lax.optimization_barrier(patched)
    return rotate_patch(turned, given["cos"], given["sin"], layout=layout, implementation=implementation)


def bandwidth(tiny: bool) -> dict[str, Any]:
    """Achieved bandwidth as a share of a copy's of the same size, and against XLA unfused and two kernels."""
    rows = []
    for index, case in enumerate(cases(tiny, LEAST_TOKENS)):
        rows += _timed(case, index, 3 if tiny else REPEATS)
    return {"environment": environment(), "rows": rows, "notes": NOTES}


def _timed(case: Case, seed: int, repeats: int) -> list[dict[str, Any]]:
    """The rows of one case."""
    sets = tuple(draw(case, key) for key in jax.random.split(jax.random.key(seed), SETS))
    copied = copy_bandwidth(moved_bytes(case), repeats)
    calls = {key: _through(sets, program) for key, program in _rotations(case).items()}
    calls |= {("splice", name): _splicing(case, sets, name) for name in implementations()}
    rows = []
    while calls:
        (operation, name) = next(iter(calls))
        call = calls.pop((operation, name))
        row = {"operation": operation, "case": case.name, "implementation": name}
        try:
            taken = [seconds / SETS for seconds in median_seconds(call, repeats)]
        except KernelUnavailableError as refused:
            rows.append(row | {"skipped": str(refused)})
            continue
        rows.append(row | _rates(taken, moved_bytes(case), copied))
    return _against(rows)


def _through(sets: Sequence[Mapping[str, Any]], program: Callable[[Mapping[str, Any]], Array]) -> Callable[[], Any]:
    jitted = jax.jit(lambda given: tuple(program(one) for one in given))
    return lambda: jitted(sets)


NOTES = [
    f"microseconds: median of {REPEATS} runs of one program that goes through {SETS} sets of inputs, by set.",
    "bytes: x, u, v, cosines and sines in, the result out. share of copy: of the bandwidth of a copy of as many bytes.",
    "unfused over it: the XLA path with its steps kept apart; two kernels over it: patch and rotation apart; both as "
    "seconds over this row's. Above 1 this row is faster.",
]


def _rotations(case: Case) -> dict[tuple[str, str], Callable[[Mapping[str, Any]], Array]]:
    layout = case.shape.layout
    programs: dict[tuple[str, str], Callable[[Mapping[str, Any]], Array]] = {
        ("rotate_patch", "unfused"): functools.partial(unfused, layout=layout)
    }
    for name in implementations():
        programs["rotate_patch", name] = lambda given, name=name: rotate_patch(
            **given, layout=layout, implementation=name
        )
        if case.rank and case.shape.rotary:
            programs["rotate_patch", f"{name}, two kernels"] = functools.partial(
                separate, layout=layout, implementation=name
            )
    return programs


def _splicing(case: Case, sets: Sequence[Mapping[str, Any]], implementation: str) -> Callable[[], Array]:
    """A call that splices every set into one pool at slots of its own, beginning in the middle of a page."""
    pages = -(-SETS * (case.tokens + PAGE_SIZE) // PAGE_SIZE)
    sizes = (case.sizes[0], pages, PAGE_SIZE, *case.sizes[-2:])
    starts = [index * case.tokens + PAGE_SIZE // 2 for index in range(SETS)]
    slots = [jnp.asarray(np.arange(case.tokens, dtype=np.int32) + start) for start in starts]

    def program(pool: Array, slots: Sequence[Array], given: Sequence[Mapping[str, Any]]) -> Array:
        for own, one in zip(slots, given, strict=True):
            pool = splice(pool, own, **one, layout=case.shape.layout, implementation=implementation)
        return pool

    jitted = jax.jit(program, donate_argnums=0)
    held: list[Array] = []

    def call() -> Array:
        if not held:  # made when it is first wanted, and gone with this call
            held.append(jnp.zeros(sizes, jnp.bfloat16))
        held[0] = jitted(held[0], slots, sets)
        return held[0]

    return call


def _rates(taken: Sequence[float], size: int, copied: float) -> dict[str, Any]:
    seconds = statistics.median(taken)
    return {
        "microseconds": seconds * 1e6,
        "fastest": min(taken) * 1e6,
        "slowest": max(taken) * 1e6,
        "bytes": size,
        "GB/s": size / seconds / 1e9,
        "copy GB/s": copied / 1e9,
        "share of copy": size / seconds / copied,
    }


def _against(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one case with their ratios to the unfused path and to two kernels."""
    seconds = {(row["operation"], row["implementation"]): row.get("microseconds") for row in rows}
    for row in rows:
        name, own = row["implementation"], row.get("microseconds")
        if row["operation"] != "rotate_patch" or name == "unfused" or own is None:
            continue
        row["unfused over it"] = seconds["rotate_patch", "unfused"] / own
        two = seconds.get(("rotate_patch", f"{name}, two kernels"))
        if two:
            row["two kernels over it"] = two / own
    return rows


def factorise_seconds(run: Callable[[Array], Any], matrix: Array, repeats: int) -> dict[str, Any]:
    """Median, fastest and slowest microseconds of a factorisation of this batch."""
    taken = median_seconds(functools.partial(jax.jit(run), matrix), repeats)
    micro = [seconds * 1e6 for seconds in taken]
    return {"microseconds": statistics.median(micro), "fastest": min(micro), "slowest": max(micro)}


def factorisation(tiny: bool) -> dict[str, Any]:
    """A 1024-token chunk of a 7B model, keys and values of 28 layers at rank 32: ours, and a batched full SVD."""
    sizes, rank = ((4, 32, 16), 4) if tiny else ((2 * 28, 1024, 512), 32)
    key = jax.random.key(0)
    decay = jnp.exp(-jnp.arange(sizes[-1]) / (sizes[-1] / 5))
    matrix = jax.random.normal(key, sizes) * decay
    ours = factorise_seconds(lambda value: factorise(value, rank), matrix, 3 if tiny else 10)
    full = factorise_seconds(lambda value: jnp.linalg.svd(value, full_matrices=False), matrix, 1)
    name = f"{' × '.join(map(str, sizes))} M={rank}"
    ratio = {"svd over it": full["microseconds"] / ours["microseconds"]}
    rows = [{"case": "randomised", "matrices": name} | ours | ratio, {"case": "full SVD", "matrices": name} | full]
    return {"environment": environment(), "rows": rows}


def configuration(tiny: bool) -> dict[str, Any]:
    """What `python -m pallas_kernels.tune` would write here: with it, kernels are taken unasked on this device."""
    body = tune.tune(tune.OPERATIONS, tiny)
    rows = [
        {"operation": operation, "shape": word, "candidate": name, "microseconds": 1e6 * seconds}
        for operation, shapes in body["seconds"].items()
        for word, candidates in shapes.items()
        for name, seconds in candidates.items()
    ]
    note = f"source: {body['source']}; `configuration` in the JSON is the file for pallas_kernels/configurations/"
    return {"environment": environment(), "rows": rows, "configuration": body, "notes": [note]}
