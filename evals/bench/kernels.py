"""Kernels on this machine: one compiled pass against its steps one by one, splice's cost, the factorisation, and the
operators over them: CPU time of placing a chunk beside a jitted x · 2, and of the operators' checks.

Rows with a `bar` say whether they pass it. On an accelerator `evals/bench/accelerator.sh` measures more.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels import rotate_patch, splice
from pallas_kernels.factorise.shapes import PRODUCTION, SMALL, FactoriseShape

from ..results.environment import environment
from ..results.tables import aligned_table
from .operators import check_rows, placing_rows
from .patch import factorise_rows
from .timing import spread, take_turns, time_calls

STEPS_BAR = 3.0
"""The compiled pass is at least this many times as fast as its steps one by one."""
POOL_BAR = 1.2
"""A pool 16 times as large costs at most this much more."""
LINEAR_BAR = 0.95
"""Share of the variance of splice's seconds that a straight line in tokens leaves nothing of."""


@dataclasses.dataclass(frozen=True)
class KernelSizes:
    """What is timed.

    Attributes:
      layers, tokens, heads, width: of the chunk that is rotated and patched, bfloat16.
      ranks: of its patches.
      spliced: token counts of the chunks that are spliced, into a pool of `splice_layers` layers.
      pages, page_size: of the pool; the large one has 16 times the pages.
      matrices: of the factorisation.
      placed: tokens of the chunk that the operators place; its layers, heads and width are those above.
    """

    layers: int = 28
    tokens: int = 1024
    heads: int = 4
    width: int = 128
    ranks: tuple[int, ...] = (0, 16)
    spliced: tuple[int, ...] = (512, 1024, 2048, 4096)
    splice_layers: int = 4
    pages: int = 256
    page_size: int = 64
    matrices: FactoriseShape = PRODUCTION[0]
    placed: int = 2048


TINY = KernelSizes(2, 16, 2, 16, (0, 4), (8, 16, 32), 2, 4, 16, SMALL[0], 16)
"""To see that everything runs; its times say nothing."""


def draw(sizes: KernelSizes, layers: int, tokens: int, rank: int, seed: int) -> dict[str, Any]:
    """Draws a chunk of bfloat16 keys as `rotate_patch` takes it."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    angle = rng.uniform(0, 2 * math.pi, (tokens, sizes.width // 2))
    chunk = {"x": normal(layers, tokens, sizes.heads, sizes.width)}
    chunk |= {"cos": jnp.asarray(np.cos(angle), jnp.float32), "sin": jnp.asarray(np.sin(angle), jnp.float32)}
    if rank:
        chunk |= {"u": normal(layers, tokens, rank), "v": normal(layers, rank, sizes.heads * sizes.width)}
    return chunk


def one_by_one(
    x: Float[Array, "L T K H"],
    cos: Float[Array, "T _"],
    sin: Float[Array, "T _"],
    u: Float[Array, "L T M"] | None = None,
    v: Float[Array, "L M F"] | None = None,
) -> Float[Array, "L T K H"]:
    """Computes `rotate_patch` (half), each step dispatched for itself: multiply, add, rotate, cast."""
    value = x.astype(jnp.float32)
    if u is not None and v is not None:
        delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        value = value + delta.reshape(value.shape)
    cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2
    first, second = value[..., :half], value[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def pass_rows(sizes: KernelSizes, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Times the compiled XLA path against its steps, at every rank."""
    rows = []
    jitted = jax.jit(lambda given: rotate_patch(**given, implementation="xla"))
    for rank in sizes.ranks:
        given = draw(sizes, sizes.layers, sizes.tokens, rank, seed)
        wide = lambda value: np.asarray(value, np.float32)
        close = np.allclose(wide(jitted(given)), wide(one_by_one(**given)), rtol=2**-6, atol=2**-6)
        calls = {"one pass": lambda given=given: jitted(given), "steps": lambda given=given: one_by_one(**given)}
        seconds = time_calls(calls, repeats)
        ratios = [slow / fast for slow, fast in zip(seconds["steps"], seconds["one pass"], strict=True)]
        row = {"metric": "steps over one pass", "arm": f"rank {rank}", "seconds": seconds, "agrees": bool(close)}
        rows.append(row | _verdict(ratios, STEPS_BAR, lambda value, close=close: close and value >= STEPS_BAR))
    return rows


def _verdict(values: Sequence[float], bar: float, passes: Callable[[float], bool]) -> dict[str, Any]:
    row = spread(values)
    return row | {"bar": bar, "passed": bool(passes(row["value"]))}


class _Splicing:
    """A pool, a chunk, and a call that splices it at other slots each time; the pool is donated and kept."""

    def __init__(self, sizes: KernelSizes, tokens: int, pages: int, seed: int):
        shape = (sizes.splice_layers, pages, sizes.page_size, sizes.heads, sizes.width)
        # Written once, so that the system has given the memory before anything is timed.
        self.pool = jnp.ones(shape, jnp.bfloat16)
        self.chunk = draw(sizes, sizes.splice_layers, tokens, sizes.ranks[-1], seed)
        self.rng = np.random.default_rng(seed)
        self.room = pages * sizes.page_size - tokens

    def seconds(self) -> float:
        """Times one splice, to a run of slots that begins anywhere."""
        slots = np.arange(self.chunk["x"].shape[1], dtype=np.int32) + int(self.rng.integers(self.room + 1))
        slots = jax.block_until_ready(jnp.asarray(slots))
        begin = time.perf_counter()
        self.pool = jax.block_until_ready(splice(self.pool, slots, **self.chunk, implementation="xla"))
        return time.perf_counter() - begin


def splice_seconds(
    sizes: KernelSizes, cases: Mapping[str, tuple[int, int]], repeats: int, seed: int
) -> dict[str, list[float]]:
    """Times splices in turns; cases are (tokens, pages) by name. One warm-up each."""
    own = {name: _Splicing(sizes, *case, seed) for name, case in cases.items()}
    return take_turns({name: case.seconds for name, case in own.items()}, repeats, warm_ups=1, pause=0.0)


def splice_rows(sizes: KernelSizes, repeats: int, seed: int) -> list[dict[str, Any]]:
    """Times splices by tokens, with a line through their medians; and by size of the pool."""
    taken = splice_seconds(sizes, {str(tokens): (tokens, sizes.pages) for tokens in sizes.spliced}, repeats, seed)
    medians = np.asarray([statistics.median(values) for values in taken.values()])
    slope, intercept = np.polyfit(sizes.spliced, medians, 1)
    rest = medians - (slope * np.asarray(sizes.spliced) + intercept)
    linear = 1 - float((rest**2).sum() / max(((medians - medians.mean()) ** 2).sum(), 1e-30))
    line = {"seconds_per_token": float(slope), "seconds_at_none": float(intercept), "seconds": taken}
    passed = linear >= LINEAR_BAR and slope > 0
    rows = [{"metric": "splice is linear in tokens", "arm": "R²", "value": linear, "bar": LINEAR_BAR} | line]
    rows[0]["passed"] = bool(passed)
    tokens = sizes.spliced[-2]
    cases = {"pool": (tokens, sizes.pages), "16 × pool": (tokens, 16 * sizes.pages)}
    seconds = splice_seconds(sizes, cases, repeats, seed)
    ratios = [large / small for small, large in zip(*seconds.values(), strict=True)]
    row = {"metric": "splice into 16 × the pool", "arm": f"{tokens} tokens", "seconds": seconds}
    rows.append(row | _verdict(ratios, POOL_BAR, lambda value: value <= POOL_BAR))
    return rows


def run(*, repeats: int = 5, seed: int = 0, sizes: KernelSizes | None = None) -> dict[str, Any]:
    """Times the XLA path of the kernels.

    Args:
      repeats: interleaved timings of each.
      seed: of the synthetic arrays.
      sizes: None for those of a 7B model's chunk.

    Returns:
      {"config", "environment", "rows"}, ready for JSON; rows with a bar have `passed`.
    """
    sizes = KernelSizes() if sizes is None else sizes
    rows = pass_rows(sizes, repeats, seed) + splice_rows(sizes, repeats, seed)
    factorised, needed = factorise_rows(sizes.matrices, repeats, seed)
    rows += [row | {"metric": f"factorise {row['metric']}"} for row in factorised]
    rows += placing_rows(sizes.layers, sizes.placed, sizes.heads, sizes.width, max(repeats, 9), seed)
    rows += check_rows(repeats, seed)
    config = dataclasses.asdict(sizes) | {"repeats": repeats, "seed": seed, "e90": needed}
    config["matrices"] = sizes.matrices._asdict()
    return {"config": config, "environment": environment(), "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """Formats the rows for reading, and how many are within their bars."""
    verdicts = {None: "", True: "pass", False: "FAIL"}
    lines = []
    for row in result["rows"]:
        numbers = ["" if row.get(name) is None else f"{row[name]:.3g}" for name in ("value", "low", "high", "bar")]
        lines.append((row["metric"], row.get("arm", ""), *numbers, verdicts[row.get("passed")]))
    text = aligned_table(("metric", "", "value", "low", "high", "bar", ""), lines)
    judged = [row for row in result["rows"] if "passed" in row]
    return f"{text}\n{sum(row['passed'] for row in judged)} of {len(judged)} rows within their bars"
