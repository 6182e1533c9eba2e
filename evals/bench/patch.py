"""Factorisation: a randomised one against the full SVD, in time and in energy captured.

The synthetic deficit is 28 layers × 1024 tokens × width 512 with a spectrum that needs about 120 directions for 90 % of
its energy, which is slower to fall, and so harder to sketch, than the deficits that were measured.
"""

import pathlib
import statistics
import tempfile
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvpatch_jax import deficit
from pallas_kernels import factorise
from pallas_kernels.factorise.shapes import PRODUCTION, FactoriseShape

from ..results.environment import environment
from .timing import spread, time_calls

Deltas = Float[Array | np.ndarray, "*batch T F"]


def synthetic_deficit(
    layers: int, tokens: int, features: int, seed: int = 0, decay: float = 101.0
) -> Float[np.ndarray, "L T F"]:
    """Draws matrices with singular values exp(−i / decay), i = 0, 1, …: e90 is about 120 at the default decay."""
    generator = np.random.default_rng(seed)
    count = min(tokens, features)
    spectrum = np.exp(-np.arange(count) / decay)
    result = np.empty((layers, tokens, features), np.float32)
    for layer in range(layers):
        left = np.linalg.qr(generator.standard_normal((tokens, count)))[0]
        right = np.linalg.qr(generator.standard_normal((features, count)))[0]
        result[layer] = (left * spectrum) @ right.T
    return result


def energy_ratio(deltas: Deltas, rank: int, method: str = "randomised", seed: int = 0) -> Float[np.ndarray, "*batch"]:
    """Measures the energy that our rank-`rank` factors capture, over the most that any could; 1 where it is zero."""
    deltas = jnp.asarray(deltas, jnp.float32)
    u, v = factorise(deltas, rank, method=method, key=jax.random.key(seed))
    return np.asarray(deficit.energy_ratio(deltas, u, v))


def shipped_deficits(contexts: int = 16, seed: int = 4242) -> dict[str, np.ndarray]:
    """Computes real deficits of the shipped backbone's pages behind their legends: {channel: [contexts · L, T, F]}."""
    from evals.small_task.scenes import reused_page, scene_at
    from evals.trained import shipped
    from models import load

    backbone = load(shipped("qwen2_5_vl"), dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        scene, _ = scene_at(backbone, seed, 0, pathlib.Path(folder), contexts)
        delta = reused_page(scene).delta
    return {name: np.asarray(value).reshape(-1, value.shape[2], value[0, 0, 0].size) for name, value in delta.items()}


def _real_deficits(deficits: Mapping[str, np.ndarray], ranks: tuple[int, ...]) -> list[dict]:
    rows = []
    for name, deltas in deficits.items():
        matrices = deltas.reshape(*deltas.shape[:2], -1) if deltas.ndim == 4 else deltas
        for rank in ranks:
            if rank <= min(matrices.shape[-2:]):
                ratio = energy_ratio(matrices, rank)
                row = {"metric": "real_energy_ratio", "arm": f"{name}.rank={rank}", "value": float(ratio.mean())}
                rows.append({**row, "low": float(ratio.min()), "high": float(ratio.max()), "n": int(ratio.size)})
    return rows


def factorise_rows(shape: FactoriseShape, repeats: int, seed: int) -> tuple[list[dict], int]:
    """Times both factorisations of a synthetic deficit, with the energy captured; and gives the deficit's e90."""
    matrix = jnp.asarray(synthetic_deficit(shape.batch[0], shape.tokens, shape.features, seed))
    needed = deficit.e90({"delta": matrix[:2, :, None, :]})["delta"]
    key = jax.random.key(seed)
    randomised = jax.jit(lambda value: factorise(value, shape.rank, method="randomised", key=key))
    full = jax.jit(lambda value: jnp.linalg.svd(value, full_matrices=False))
    seconds = time_calls({"randomised": lambda: randomised(matrix), "svd": lambda: full(matrix)}, repeats)
    ratios = [slow / fast for slow, fast in zip(seconds["svd"], seconds["randomised"], strict=True)]
    u, v = randomised(matrix)
    energy = np.asarray(deficit.energy_ratio(matrix, u, v))
    rows = [
        {"metric": "seconds", "arm": arm, "value": statistics.median(values), "all": values}
        for arm, values in seconds.items()
    ]
    rows.append({"metric": "speedup"} | spread(ratios))
    rows.append({"metric": "energy_ratio", "value": float(energy.mean()), "low": float(energy.min())})
    return rows, int(np.median(needed))


def run(*, repeats: int = 5, seed: int = 0, deficits: str | None = None) -> dict:
    """Times both factorisations and measures what the randomised one captures.

    Args:
      repeats: interleaved timings of each.
      seed: of the synthetic matrices.
      deficits: an .npz of real deficits, each [L,T,F] or [L,T,K,H]; None measures the shipped backbone's.

    Returns:
      {"config", "environment", "rows"}, ready for JSON; seconds, ratios of medians, and energy captured / optimal.
    """
    shape = PRODUCTION[0]
    rows, needed = factorise_rows(shape, repeats, seed)
    if deficits is None:
        real = shipped_deficits()
    else:
        with np.load(deficits) as archive:
            real = {name: archive[name] for name in archive.files}
    rows += _real_deficits(real, (4, 8, 16, 32))
    config = shape._asdict() | {"repeats": repeats, "seed": seed, "e90": needed}
    return {"config": config, "environment": environment(), "rows": rows}
