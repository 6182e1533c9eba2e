"""The operators and kernels on this machine: XLA's compiled path beside its steps, splices, factorisation, placement.

`BENCHMARK` runs all of it. `FACTORISATION` (--suite=patch) is the factorisation alone, with the energy captured of real
deficits. Rows with a bar say whether they pass it. On an accelerator `evals/bench/accelerator.sh` measures more.
"""

import dataclasses
import math
import pathlib
import statistics
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvpatch_jax import deficit
from pallas_kernels import factorise, rotate_patch, splice
from pallas_kernels.factorise.shapes import PRODUCTION, SMALL, FactoriseShape

from ..harness.environment import environment
from .benchmark import Benchmark, Row, comparison_row, measured_row
from .operators import check_rows, placing_rows
from .timing import Samples, interleave, interleave_calls, stopwatch

STEPS_BAR = 3.0
"""The compiled pass is at least this many times as fast as its steps one by one."""
POOL_BAR = 1.2
"""A pool 16 times as large costs at most this much more."""
LINEAR_BAR = 0.95
"""Share of the variance of splice's seconds that a straight line in tokens explains."""
REAL_RANKS = (4, 8, 16, 32)


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


def run(*, repeats: int = 5, seed: int = 0) -> dict[str, Any]:
    """Times the XLA path of the kernels, and the operators, at the sizes of a 7B model's chunk."""
    return run_sizes(KernelSizes(), repeats, seed)


def run_sizes(sizes: KernelSizes, repeats: int, seed: int) -> dict[str, Any]:
    """Times everything at these sizes; returns {"config", "environment", "rows"}."""
    factorised, e90 = factorise_rows(sizes.matrices, repeats, seed)
    rows = [
        *pass_rows(sizes, repeats, seed),
        *splice_rows(sizes, repeats, seed),
        *factorised,
        *placing_rows(sizes.layers, sizes.placed, sizes.heads, sizes.width, max(repeats, 9), seed),
        *check_rows(repeats, seed),
    ]
    config = dataclasses.asdict(sizes) | {"repeats": repeats, "seed": seed, "e90": e90}
    config["matrices"] = sizes.matrices._asdict()
    return {"config": config, "environment": environment(), "rows": rows}


# ------------------------------------------------------------------------------------- one pass, beside its steps


def draw(sizes: KernelSizes, layers: int, tokens: int, rank: int, seed: int) -> dict[str, Any]:
    """Draws a chunk of bfloat16 keys as `rotate_patch` takes it."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

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
    """Computes `rotate_patch` (half), each step dispatched by itself: multiply, add, rotate, cast."""
    value = x.astype(jnp.float32)
    if u is not None and v is not None:
        delta = jnp.matmul(u, v, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        value = value + delta.reshape(value.shape)

    cos, sin = cos[:, None], sin[:, None]
    half = x.shape[-1] // 2
    first, second = value[..., :half], value[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def pass_rows(sizes: KernelSizes, repeats: int, seed: int) -> list[Row]:
    """Times the compiled XLA path against its steps, at every rank."""
    rows = []
    one_pass = jax.jit(lambda chunk: rotate_patch(**chunk, implementation="xla"))
    for rank in sizes.ranks:
        chunk = draw(sizes, sizes.layers, sizes.tokens, rank, seed)
        found, expected = (np.asarray(value, np.float32) for value in (one_pass(chunk), one_by_one(**chunk)))
        agrees = bool(np.allclose(found, expected, rtol=2**-6, atol=2**-6))

        calls = {"ours": lambda chunk=chunk: one_pass(chunk), "theirs": lambda chunk=chunk: one_by_one(**chunk)}
        samples = interleave_calls(calls, repeats)
        labels = {"arm": f"rank {rank}", "agrees": agrees}
        rows.append(comparison_row("steps over one pass", samples, at_least=STEPS_BAR, valid=agrees, **labels))

    return rows


# ------------------------------------------------------------------------------------------------------------ splice


class _Splicing:
    """A pool, a chunk, and a call that splices it at other slots each time; the pool is donated and kept."""

    def __init__(self, sizes: KernelSizes, tokens: int, pages: int, seed: int):
        shape = (sizes.splice_layers, pages, sizes.page_size, sizes.heads, sizes.width)
        # Written once, so that the system has provided the memory before anything is timed.
        self.pool = jnp.ones(shape, jnp.bfloat16)
        self.chunk = draw(sizes, sizes.splice_layers, tokens, sizes.ranks[-1], seed)
        self.rng = np.random.default_rng(seed)
        self.room = pages * sizes.page_size - tokens

    def seconds(self) -> float:
        """Times one splice, to a run of slots that begins anywhere."""
        slots = np.arange(self.chunk["x"].shape[1], dtype=np.int32) + int(self.rng.integers(self.room + 1))
        slots = jax.block_until_ready(jnp.asarray(slots))

        def run() -> None:
            self.pool = jax.block_until_ready(splice(self.pool, slots, **self.chunk, implementation="xla"))

        return stopwatch(run)


def splice_seconds(sizes: KernelSizes, cases: Mapping[str, tuple[int, int]], repeats: int, seed: int) -> Samples:
    """Times splices in turns; cases are (tokens, pages) by name."""
    measured = {name: _Splicing(sizes, *case, seed).seconds for name, case in cases.items()}
    return interleave(measured, repeats, warm_ups=1, pause=0.0)


def splice_rows(sizes: KernelSizes, repeats: int, seed: int) -> list[Row]:
    """Times splices by tokens, with a line through their medians; and by size of the pool."""
    samples = splice_seconds(sizes, {str(tokens): (tokens, sizes.pages) for tokens in sizes.spliced}, repeats, seed)
    medians = np.asarray([statistics.median(values) for values in samples.values()])
    slope, intercept = np.polyfit(sizes.spliced, medians, 1)
    rest = medians - (slope * np.asarray(sizes.spliced) + intercept)
    explained = 1 - float((rest**2).sum() / max(((medians - medians.mean()) ** 2).sum(), 1e-30))
    line = {"seconds_per_token": float(slope), "seconds_at_none": float(intercept), "seconds": samples}
    linear = measured_row(
        "splice is linear in tokens", [explained], at_least=LINEAR_BAR, valid=bool(slope > 0), arm="R²", **line
    )

    tokens = sizes.spliced[-2]
    samples = splice_seconds(
        sizes, {"ours": (tokens, 16 * sizes.pages), "theirs": (tokens, sizes.pages)}, repeats, seed
    )
    return [linear, comparison_row("splice into 16 × the pool", samples, at_most=POOL_BAR, arm=f"{tokens} tokens")]


# ----------------------------------------------------------------------------------------------------- factorisation


def synthetic_deficit(
    layers: int, tokens: int, features: int, seed: int = 0, decay: float = 101.0
) -> Float[np.ndarray, "L T F"]:
    """Draws matrices with singular values exp(−i / decay), i = 0, 1, …: e90 is about 120 at the default decay.

    That spectrum falls more slowly, and so is harder to sketch, than those of the deficits that were measured.
    """
    generator = np.random.default_rng(seed)
    count = min(tokens, features)
    spectrum = np.exp(-np.arange(count) / decay)
    result = np.empty((layers, tokens, features), np.float32)

    for layer in range(layers):
        left = np.linalg.qr(generator.standard_normal((tokens, count)))[0]
        right = np.linalg.qr(generator.standard_normal((features, count)))[0]
        result[layer] = (left * spectrum) @ right.T

    return result


def factorise_rows(shape: FactoriseShape, repeats: int, seed: int) -> tuple[list[Row], int]:
    """Times both factorisations of a synthetic deficit, with the energy captured; and gives the deficit's e90."""
    matrix = jnp.asarray(synthetic_deficit(shape.batch[0], shape.tokens, shape.features, seed))
    e90 = deficit.e90({"delta": matrix[:2, :, None, :]})["delta"]
    key = jax.random.key(seed)
    randomised = jax.jit(lambda value: factorise(value, shape.rank, method="randomised", key=key))
    full = jax.jit(lambda value: jnp.linalg.svd(value, full_matrices=False))

    samples = interleave_calls({"ours": lambda: randomised(matrix), "theirs": lambda: full(matrix)}, repeats)
    u, v = randomised(matrix)
    energy = np.asarray(deficit.energy_ratio(matrix, u, v)).ravel()
    rows = [
        comparison_row("full SVD over the randomised factorisation", samples),
        measured_row("energy captured over the most possible", energy.tolist(), statistic=statistics.fmean),
    ]
    return rows, int(np.median(e90))


def shipped_deficits(contexts: int = 16, seed: int = 4242) -> dict[str, np.ndarray]:
    """Computes real deficits of the shipped backbone's pages after their legends: {channel: [contexts · L, T, F]}."""
    from evals.small_task.scenes import reused_page, scene_at
    from evals.trained import shipped
    from models import load

    backbone = load(shipped("qwen2_5_vl"), dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        scene, _ = scene_at(backbone, seed, 0, pathlib.Path(folder), contexts)
        delta = reused_page(scene).delta
    return {name: np.asarray(value).reshape(-1, value.shape[2], value[0, 0, 0].size) for name, value in delta.items()}


def run_factorisation(*, repeats: int = 5, seed: int = 0, deficits: str | None = None) -> dict[str, Any]:
    """Times both factorisations and measures what the randomised one captures.

    Args:
      repeats: interleaved timings of each.
      seed: of the synthetic matrices.
      deficits: an .npz of real deficits, each [L,T,F] or [L,T,K,H]; None measures the shipped backbone's.
    """
    shape = PRODUCTION[0]
    rows, e90 = factorise_rows(shape, repeats, seed)
    if deficits is None:
        real = shipped_deficits()
    else:
        with np.load(deficits) as archive:
            real = {name: archive[name] for name in archive.files}

    for name, deltas in real.items():
        matrices = jnp.asarray(deltas.reshape(*deltas.shape[:2], -1), jnp.float32)
        for rank in REAL_RANKS:
            if rank <= min(matrices.shape[-2:]):
                # The energy that our factors capture, over the most that any could.
                u, v = factorise(matrices, rank, method="randomised", key=jax.random.key(0))
                energy = np.asarray(deficit.energy_ratio(matrices, u, v)).ravel().tolist()
                arm = f"{name}, rank {rank}"
                rows.append(measured_row("energy of a real deficit", energy, statistic=statistics.fmean, arm=arm))

    config = shape._asdict() | {"repeats": repeats, "seed": seed, "e90": e90}
    return {"config": config, "environment": environment(), "rows": rows}


BENCHMARK = Benchmark("kernels", run, ("arm",))
FACTORISATION = Benchmark("patch", run_factorisation, ("arm",))
