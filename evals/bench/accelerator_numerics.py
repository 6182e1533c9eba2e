"""Numerics on an accelerator: an implementation against float64, on fresh inputs, with poisoned memory."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import block_product, factorise, rotate_patch, splice
from pallas_kernels.rotate_patch.shapes import PRODUCTION, SMALL

from .accelerator_tasks import PAGE_SIZE, KernelCase, Row, Task, cases, draw, implementation

NARROW = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
CONSECUTIVE, SCATTERED = "splice", "splice, scattered"
"""Splices to slots that follow one another, and to slots in no order."""
FACTORISE_ENERGY = 0.99
LIMITS = {"bfloat16": 1.0, "float32": 2.0**-9}
"""The largest error that passes, by dtype of the result, in the units that `NOTES` describes."""


def scattered(tiny: bool, which: str) -> Iterator[Task]:
    """Yields the splices to slots in no order: numbered rows, then every production shape and rank."""
    name = implementation(which)
    for column in (False, True):
        yield Task(f"single rows by {'column' if column else 'token'}", functools.partial(_single_rows, name, column))
    yield from _tasks(tiny, name, (SCATTERED,))


def numerics(tiny: bool, which: str) -> Iterator[Task]:
    """Yields errors of an implementation, in units in the last place of a row's largest bfloat16 value."""
    name = implementation(which)
    # Scattered splices of the kernel are a part of their own, which runs first.
    operations = ("rotate_patch", CONSECUTIVE)
    yield from _tasks(tiny, name, (*operations, SCATTERED) if which == "xla" else operations)
    for rows in (64, 128):
        yield Task(f"block_product {name} {rows}", functools.partial(_multiplied, tiny, name, rows, _fresh_seed()))
    if which == "xla":
        yield Task("factorise", lambda: _factorised(tiny, _fresh_seed()))


NOTES = [
    "error: largest difference from float64, in units of the last place of bfloat16 at the row's largest value; at "
    f"most 1 passes, or {LIMITS['float32']:.1e} where the result is float32. First, middle and last layer are "
    "compared; of a splice also every slot not named, bit by bit.",
    "pools are filled with NaN of an odd payload before a splice; the allocator has held NaN where results may lie.",
]


def _single_rows(name: str, column: bool) -> Row:
    """Splices rows of 256 bytes, each holding its token's number or its columns' numbers, one by one.

    A kernel may send a row from inside a swizzled tile of its fast memory. Where the copy engine reads such a row
    otherwise than the kernel wrote it, this says which row or columns came in place of which.
    """
    tokens, width = 64, 128
    counted = jnp.arange(width)[None] if column else jnp.arange(tokens)[:, None]
    x = jnp.broadcast_to(counted, (tokens, width)).astype(jnp.bfloat16)
    cos, sin = jnp.ones((tokens, width // 2)), jnp.zeros((tokens, width // 2))
    slots = jnp.arange(tokens, dtype=jnp.int32)[::-1]
    pool = jnp.full((1, 1, tokens, 1, width), -1, jnp.bfloat16)
    found = splice(pool, slots, x[None, :, None], cos, sin, implementation=name)[0, 0, ::-1, 0]
    wrong = np.argwhere(np.asarray(found != x))
    row: Row = {"operation": "splice, single rows", "implementation": name, "verdict": "FAIL" if len(wrong) else "pass"}
    if len(wrong):
        token, place = (int(number) for number in wrong[0])
        row["first wrong"] = f"token {token} column {place}: {float(found[token, place])}; {len(wrong)} in all"
    return row


def _tasks(tiny: bool, name: str, operations: Sequence[str]) -> Iterator[Task]:
    """Yields checks of the operations at every case and dtype."""
    # The rope key of latent attention in pairs is for numerics alone.
    pairs = [shape._replace(name=f"{shape.name}_pairs", layout="pairs") for shape in PRODUCTION if shape.width == 64]
    shapes = SMALL[2:3] if tiny else pairs

    for case in cases(tiny) + [KernelCase(shape, shape.tokens, 4 if tiny else 16) for shape in shapes]:
        narrow = NARROW if case.rank in (4, 16) else ()
        for dtype in ("bfloat16", *narrow):
            results = [(operation, "bfloat16") for operation in operations]
            if dtype == "int8" and "rotate_patch" in operations:
                results.append(("rotate_patch", "float32"))

            for operation, result in results:
                key = f"{operation} {name} {case.name} {dtype} to {result}"
                yield Task(key, functools.partial(_row, case, name, dtype, operation, result))


def _fresh_seed() -> int:
    """Draws another seed every time: a kernel that is right for one seed alone is not right."""
    return int.from_bytes(os.urandom(4), "little")


def _row(case: KernelCase, name: str, dtype: str, operation: str, result: str) -> Row:
    """Measures the error of an operation whose result is of the dtype `result`."""
    seed = _fresh_seed()
    chunk = draw(case, jax.random.key(seed), "float32" if dtype in NARROW else dtype)
    if dtype in NARROW:
        chunk = _narrowed(chunk, dtype)
    layers = sorted({0, case.sizes[0] // 2, case.sizes[0] - 1})
    exact = expected(chunk, layers, case.shape.layout)

    if operation == "rotate_patch":
        error = _rotated(case, chunk, exact, layers, name, result)
    else:
        total = -(-2 * case.tokens // PAGE_SIZE) * PAGE_SIZE
        consecutive = (np.arange(total) + total // 7) % total
        order = np.random.default_rng().permutation(total) if operation == SCATTERED else consecutive
        error = _spliced(case, chunk, exact, layers, name, order)

    row = {"operation": operation, "implementation": name, "case": case.name, "dtype": dtype, "result": result}
    return row | {"seed": seed, "error": error, "verdict": "pass" if error <= LIMITS[result] else "FAIL"}


def _narrowed(wide: Mapping[str, Array], dtype: str) -> dict[str, Any]:
    """Quantises a float32 chunk, with a scale along each axis that `rotate_patch` takes one for."""
    narrow = dict(wide)
    for name, axis in (("x", -3), ("u", -2), ("v", -1)):
        if name in wide:
            scale = jnp.abs(wide[name]).max(axis, keepdims=True) / NARROW[dtype]
            scaled = wide[name] / scale
            narrow[name] = (jnp.round(scaled) if dtype == "int8" else scaled).astype(dtype)
            narrow[f"{name}_scale"] = scale
    return narrow


def expected(chunk: Mapping[str, Array], layers: list[int], layout: str) -> Float[np.ndarray, "..."]:
    """Computes R · (x + u v) in float64 for these layers."""
    exact = {}
    for name, value in chunk.items():
        of_layers = value if name in ("cos", "sin") else value[np.asarray(layers)]
        exact[name] = np.asarray(of_layers, np.float64)

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
    """Measures the largest difference in units in the last place of bfloat16 at each row's largest value; NaN: inf."""
    largest = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    error = np.abs(found.astype(np.float64) - exact) / 2.0 ** (np.floor(np.log2(largest)) - 7)
    return float(np.nan_to_num(error, nan=np.inf).max())


def _rotated(case: KernelCase, chunk, exact, layers: list[int], implementation: str, result: str) -> float:
    """Measures the error of `rotate_patch` on a padded chunk; infinite where the padding is not zero."""
    length = case.tokens - 3
    run = jax.jit(
        lambda chunk, length: rotate_patch(
            **chunk,
            layout=case.shape.layout,
            length=length,
            out_dtype=result,
            implementation=implementation,
        )
    )
    compiled = run.lower(chunk, jnp.int32(length)).compile()
    # The allocator is likely to give this memory next. What a kernel leaves unwritten is NaN then, and not by chance
    # what an earlier call left there.
    jax.block_until_ready([jnp.full(case.sizes, jnp.nan, jnp.bfloat16) for _ in range(2)])
    found = np.asarray(compiled(chunk, jnp.int32(length))[np.asarray(layers)].astype(jnp.float32))
    wanted = exact.copy()
    wanted[:, length:] = 0
    return max(units(found[:, :length], wanted[:, :length]), 0.0 if (found[:, length:] == 0).all() else np.inf)


def _spliced(case: KernelCase, chunk, exact, layers: list[int], implementation: str, order: np.ndarray) -> float:
    """Measures the error of a splice to the first slots of this order; infinite where another slot's bits changed."""
    length = case.tokens - 3
    total = order.size
    sizes = (case.sizes[0], total // PAGE_SIZE, PAGE_SIZE, *case.sizes[-2:])
    slots = order[: case.tokens].astype(np.int32)

    # A NaN with an odd payload: whatever is written over it shows, bit by bit.
    pattern = np.uint16(0x7FA5)
    pool = jax.lax.bitcast_convert_type(jnp.full(sizes, pattern), jnp.bfloat16)

    def run(pool: Array, slots: Array, chunk: Mapping[str, Any]) -> Array:
        return splice(pool, slots, **chunk, layout=case.shape.layout, length=length, implementation=implementation)

    pool = jax.jit(run, donate_argnums=0)(pool, jnp.asarray(slots), chunk)
    flat = pool.reshape(case.sizes[0], total, *case.sizes[-2:])
    found = np.asarray(flat[np.asarray(layers)][:, slots[:length]].astype(jnp.float32))
    others = np.setdiff1d(np.arange(total), slots[:length])
    bits = jax.lax.bitcast_convert_type(flat[:, jnp.asarray(others)], jnp.uint16)
    return units(found, exact[:, :length]) if bool((bits == pattern).all()) else np.inf


def _multiplied(tiny: bool, name: str, rows: int, seed: int) -> Row:
    """Multiplies blocks of rows by a layer's experts of Qwen3-30B-A3B's shape; the last quarter of blocks is unused."""
    experts, depth, width, blocks = (5, 64, 192, 8) if tiny else (128, 2048, 768, 640)
    used = blocks * 3 // 4
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (blocks * rows, depth), jnp.float32).astype(jnp.bfloat16)
    stack = jax.random.normal(keys[1], (experts, depth, width), jnp.float32).astype(jnp.bfloat16)
    which = jax.random.randint(keys[2], (blocks,), 0, experts, jnp.int32)
    found = jax.jit(functools.partial(block_product, implementation=name))(x, stack, which, jnp.int32(used))
    error = 0.0

    for block in sorted({*range(0, used, 1 + used // 16), used - 1}):
        place = slice(block * rows, (block + 1) * rows)
        exact = np.asarray(x[place], np.float64) @ np.asarray(stack[which[block]], np.float64)
        error = max(error, units(np.asarray(found[place].astype(jnp.float32)), exact))

    case = f"{blocks} × {rows} × {depth} · {depth} × {width} of {experts}"
    row: Row = {"operation": "block_product", "implementation": name, "case": case, "dtype": "bfloat16"}
    verdict = "pass" if error <= LIMITS["bfloat16"] else "FAIL"
    return row | {"result": "bfloat16", "seed": seed, "error": error, "verdict": verdict}


def _factorised(tiny: bool, seed: int) -> dict[str, Any]:
    """Measures the energy captured over the most possible, and how orthonormal v is, of a slowly falling spectrum."""
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
