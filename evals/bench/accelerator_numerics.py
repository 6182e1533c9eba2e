"""Part 1 on an accelerator: every implementation against float64, on fresh inputs, with poisoned memory."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import KernelUnavailableError, factorise, rotate_patch, splice

from .accelerator_cases import PAGE_SIZE, Case, cases_of_numbers, draw, environment, implementations

NARROW = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
FACTORISE_ENERGY = 0.99
LIMITS = {"bfloat16": 1.0, "float32": 2.0**-9}
"""The largest error that passes, by dtype of the result, in the units that `NOTES` tells of."""


def numerics(tiny: bool) -> dict[str, Any]:
    """Errors of every kernel that this platform has, in units in the last place of a row's largest bfloat16 value."""
    # Other numbers every time: a kernel that is right for one seed alone is not right.
    seed = int.from_bytes(os.urandom(4), "little")
    rows = []
    for index, case in enumerate(cases_of_numbers(tiny)):
        key = jax.random.fold_in(jax.random.key(seed), index)
        rows += _rows(case, key, "bfloat16", tiny)
        if case.rank in (4, 16):
            for dtype in list(NARROW)[: 1 if tiny else None]:
                rows += _rows(case, jax.random.fold_in(key, 1), dtype, tiny)
    rows.append(_factorised(tiny, seed))
    return {"environment": environment(), "seed": seed, "rows": rows, "notes": NOTES}


NOTES = [
    "error: largest difference from float64, in units of the last place of bfloat16 at the row's largest value; at "
    f"most 1 passes, or {LIMITS['float32']:.1e} where the result is float32. First, middle and last layer are "
    "compared; of a splice also every slot not named, bit by bit.",
    "pools are filled with NaN of an odd payload before a splice; the allocator has held NaN where results may lie.",
]


def _rows(case: Case, key: Array, dtype: str, tiny: bool) -> list[dict[str, Any]]:
    wide = draw(case, key, "float32" if dtype in NARROW else dtype)
    given = _narrowed(wide, dtype) if dtype in NARROW else wide
    layers = sorted({0, case.sizes[0] // 2, case.sizes[0] - 1})
    exact = expected(given, layers, case.shape.layout)
    rows = []
    for name in implementations():
        for operation, result, check in _checks(dtype):
            row = {"operation": operation, "implementation": name, "case": case.name, "dtype": dtype, "result": result}
            try:
                error = check(case, given, exact, layers, name, tiny)
            except KernelUnavailableError as refused:
                rows.append(row | {"error": None, "verdict": "skipped", "reason": str(refused)})
                continue
            rows.append(row | {"error": error, "verdict": "pass" if error <= LIMITS[result] else "FAIL"})
    return rows


def _checks(dtype: str) -> list[tuple[str, str, Callable[..., float]]]:
    """What is done with a chunk of this dtype: the operation, the result's dtype, the function that measures it."""
    checks = [("rotate_patch", "bfloat16", _rotated), ("splice", "bfloat16", _spliced)]
    wide = functools.partial(_rotated, result="float32")
    return checks + [("rotate_patch", "float32", wide)] * (dtype == "int8")


def _narrowed(wide: Mapping[str, Array], dtype: str) -> dict[str, Any]:
    given = dict(wide)
    for name, axis in (("x", -3), ("u", -2), ("v", -1)):
        if name in wide:
            scale = jnp.abs(wide[name]).max(axis, keepdims=True) / NARROW[dtype]
            scaled = wide[name] / scale
            given[name] = (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype)
            given[f"{name}_scale"] = scale
    return given


def expected(given: Mapping[str, Array], layers: list[int], layout: str) -> Float[np.ndarray, "..."]:
    """R · (x + u v) in float64 of these layers."""
    host = lambda name, value: np.asarray(value if name in ("cos", "sin") else value[np.asarray(layers)], np.float64)
    exact = {name: host(name, value) for name, value in given.items()}
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


def units(found: Float[np.ndarray, "..."], exact: Float[np.ndarray, "..."]) -> float:
    """The largest difference in units in the last place of bfloat16 at each row's largest value; NaN counts as much."""
    largest = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    error = np.abs(found.astype(np.float64) - exact) / 2.0 ** (np.floor(np.log2(largest)) - 7)
    return float(np.nan_to_num(error, nan=np.inf).max())


def _poison(sizes: tuple[int, ...]) -> None:
    """Leaves NaN in the memory that the allocator is likely to give next."""
    jax.block_until_ready([jnp.full(sizes, jnp.nan, jnp.bfloat16) for _ in range(2)])


def _rotated(
    case: Case, given, exact, layers: list[int], implementation: str, tiny: bool, result: str = "bfloat16"
) -> float:
    length = case.tokens - 3
    run = jax.jit(
        lambda given, length: rotate_patch(
            **given,
            layout=case.shape.layout,
            length=length,
            out_dtype=result,
            implementation=implementation,
        )
    )
    compiled = run.lower(given, jnp.int32(length)).compile()
    _poison(case.sizes)
    found = np.asarray(compiled(given, jnp.int32(length))[np.asarray(layers)].astype(jnp.float32))
    wanted = exact.copy()
    wanted[:, length:] = 0
    return max(units(found[:, :length], wanted[:, :length]), 0.0 if (found[:, length:] == 0).all() else np.inf)


def _spliced(case: Case, given, exact, layers: list[int], implementation: str, tiny: bool) -> float:
    length = case.tokens - 3
    pages = -(-2 * case.tokens // PAGE_SIZE)
    sizes = (case.sizes[0], pages, PAGE_SIZE, *case.sizes[-2:])
    total = pages * PAGE_SIZE
    error = 0.0
    for scattered in (False, True):
        order = np.random.default_rng().permutation(total) if scattered else np.arange(total) + total // 7
        slots = (order[: case.tokens] % total).astype(np.int32)
        pattern = np.uint16(0x7FA5)
        pool = jax.lax.bitcast_convert_type(jnp.full(sizes, pattern), jnp.bfloat16)
        run = lambda pool, slots, given: splice(
            pool, slots, **given, layout=case.shape.layout, length=length, implementation=implementation
        )
        pool = jax.jit(run, donate_argnums=0)(pool, jnp.asarray(slots), given)
        flat = pool.reshape(case.sizes[0], total, *case.sizes[-2:])
        found = np.asarray(flat[np.asarray(layers)][:, slots[:length]].astype(jnp.float32))
        error = max(error, units(found, exact[:, :length]))
        others = np.setdiff1d(np.arange(total), slots[:length])
        bits = jax.lax.bitcast_convert_type(flat[:, jnp.asarray(others)], jnp.uint16)
        if not bool((bits == pattern).all()):
            return np.inf
    return error


def _factorised(tiny: bool, seed: int) -> dict[str, Any]:
    """Energy captured over the most that could be, and how orthonormal v is; a slow spectrum."""
    layers, tokens, features, rank = (2, 40, 24, 4) if tiny else (4, 1024, 512, 32)
    rng = np.random.default_rng(seed)
    matrices = rng.standard_normal((layers, tokens, features)) * np.exp(-np.arange(features) / (features / 5))
    u, v = (np.asarray(value, np.float64) for value in factorise(jnp.asarray(matrices, jnp.float32), rank))
    singular = np.linalg.svd(matrices, compute_uv=False)
    best = (singular[:, :rank] ** 2).sum(-1)
    captured = (singular**2).sum(-1) - ((matrices - u @ v) ** 2).sum((-1, -2))
    energy = float((captured / best).min())
    skew = float(np.abs(v @ np.swapaxes(v, -1, -2) - np.eye(rank)).max())
    verdict = "pass" if energy >= FACTORISE_ENERGY and skew < 1e-4 else "FAIL"
    case = f"{layers} × {tokens} × {features} M={rank}"
    row = {"operation": "factorise", "implementation": "xla", "case": case, "dtype": "float32", "error": skew}
    return row | {"verdict": verdict, "energy": energy}
