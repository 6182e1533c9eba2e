"""Schedules of VLCache: how many tokens each layer needs, measured on a proxy set, and their allocation.

Source: VLCache (Qin et al. 2025), sections 3.2 and 4.1, equations 5 to 9.
"""

import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..backbone import KV, Backbone
from ..errors import InputError
from .recomputation import LayerSet, all_tokens, begin, run_layers
from .repair_budget import RepairBudget
from .spliced_cache import AnyArray, SplicedCache, check_splice

RATIOS = tuple(round(0.002 * step, 3) for step in range(1, 151))
"""VLCache's ratios, 0.002 to 0.300 (equation 9)."""
MOST_STARTS, MOST_EXCHANGES = 64, 2_000_000
"""First moves that a greedy schedule tries, and numbers of one round of exchanges, at most."""


def recomputed_sensitivity(
    backbone: Backbone,
    proxies: Sequence[SplicedCache],
    ratios: Sequence[float | int],
    loss: Callable[[int, KV], float],
) -> Float[np.ndarray, "L n"]:
    """Measures VLCache's S_i(r): the loss when layer i alone is recomputed for the first tokens of every chunk.

    Source: VLCache section 3.2 and equation 5. The first ⌊r·T⌋ tokens of each chunk run through the layers below
    without being written (their residual enters layer i as it would while serving), and are written at layer i alone.

    Args:
      proxies: splices of the proxy set, whose caches hold KV made behind another prompt.
      ratios: shares of each chunk's tokens, 0 … 1.
      loss: maps a proxy's number and a cache to the distance of its answers from the original model's; the paper's is
        the mean squared error of logits of the text that the original model decodes (`logit_error`).

    Returns:
      The mean over proxies, one row per layer.

    Raises:
      InputError: no proxies, one without a cached chunk, or a ratio out of range. ShapeError, LayoutError:
        a splice does not match the backbone.
    """
    layers = backbone.layout.layers
    if not proxies:
        raise InputError("recomputed_sensitivity.proxies: got none; expected splices of cached images")
    for splice in proxies:
        if splice.chunks == ():
            raise InputError("recomputed_sensitivity.proxies: got a prompt without cached images; expected some")
        check_splice(backbone.layout, splice)

    total = np.zeros((layers, len(ratios)))
    for number, splice in enumerate(proxies):
        reused = loss(number, dict(splice.cache))
        for place, ratio in enumerate(ratios):
            RepairBudget(share=float(ratio))
            counts = [int(ratio * (last - first) + 1e-9) for first, last in splice.parts]
            if not any(counts):
                total[:, place] += reused
                continue
            parts = zip(splice.parts, counts, strict=True)
            tokens = np.concatenate([np.arange(first, first + count) for (first, _), count in parts])
            index = all_tokens(splice, tokens)
            for layer in range(layers):
                total[layer, place] += loss(number, _recomputed_at(backbone, splice, index, layer))

    return total / len(proxies)


def _recomputed_at(backbone: Backbone, splice: SplicedCache, index: Int[Array, "B n"], layer: int) -> KV:
    """Returns the cache with the tokens recomputed at one layer alone."""
    run = begin(backbone.layout.layers, splice)
    if layer:
        below = run_layers(backbone, splice, run, LayerSet(0, layer, index, (0,) * layer))
        run = run._replace(residual=below.residual)
    return run_layers(backbone, splice, run, LayerSet(layer, layer + 1, index)).cache


def logit_error(expected: Float[AnyArray, "*B V"], logits: Float[AnyArray, "*B V"]) -> float:
    """Computes the mean squared error of logits (VLCache equation 5)."""
    return float(jnp.mean(jnp.square(jnp.asarray(expected) - jnp.asarray(logits))))


def greedy_schedule(
    sensitivity: Float[np.ndarray, "L n"], ratios: Sequence[float | int], target: float
) -> tuple[float, ...]:
    """Allocates a ratio to each layer, not increasing with depth, so that the sum of sensitivities is small.

    Source: VLCache section 4.1, equations 6 to 9, "a simple greedy algorithm", of which it says no more. Here the move
    that lowers the sum most for each unit of ratio is made until the total is spent; a move raises the layers 1 … l to
    at least a ratio, which keeps the order. By itself that was up to 43 % above the optimum of five layers and six
    ratios, so it starts from the smallest ratio everywhere and once more behind each of the best first moves, and the
    best end is improved while raising some layers and lowering others helps (within 3 % then, of 12 000 drawn).

    Args:
      sensitivity: S_i(r), one row per layer and one column per ratio.
      ratios: ascending.
      target: sum of the ratios of all layers at most (P_tar).

    Raises:
      InputError: ratios do not ascend or do not match the columns, a sensitivity is not finite, or the target is below
        the smallest ratio for every layer.
    """
    sensitivity, steps = np.asarray(sensitivity, np.float64), np.asarray(ratios, np.float64)
    ascending = all(small < large for small, large in itertools.pairwise(ratios))
    if sensitivity.ndim != 2 or sensitivity.shape[1] != len(ratios) or not ascending or min(ratios, default=-1) < 0:
        shapes = f"counts {list(ratios)}, sensitivity {sensitivity.shape}"
        raise InputError(f"greedy_schedule: got {shapes}; expected ascending counts, one for each column")
    if not np.isfinite(sensitivity).all():
        raise InputError("greedy_schedule.sensitivity: got NaN or infinity; expected finite numbers")
    layers, rows = len(sensitivity), np.arange(len(sensitivity))
    if layers * steps[0] > target + 1e-12:
        raise InputError(f"greedy_schedule.target: got {target}; expected at least {layers * steps[0]}")

    # A schedule is a step for each layer. First moves are tried in the order of what they leave.
    firsts = np.unique(_raised(np.zeros(layers, int), len(steps)).reshape(-1, layers), axis=0)
    firsts = firsts[steps[firsts].sum(axis=1) <= target + 1e-12]
    tried = min(MOST_STARTS, max(4, 200_000 // (layers * layers * len(steps))))
    order = np.argsort(sensitivity[rows, firsts].sum(axis=1), kind="stable")[:tried]

    best = np.zeros(layers, int)
    for start in (best, *firsts[order]):
        taken = _completed(sensitivity, steps, start, target)
        if sensitivity[rows, taken].sum() < sensitivity[rows, best].sum():
            best = taken
    best = _exchanged(sensitivity, steps, best, target)
    return tuple(float(steps[step]) for step in best)


def _raised(taken: np.ndarray, count: int) -> Int[np.ndarray, "L count L"]:
    """Raises the layers up to each layer to at least each step: one schedule for each of both."""
    rows = np.arange(len(taken))
    return np.where(rows <= rows[:, None, None], np.maximum(taken, np.arange(count)[:, None]), taken)


def _completed(sensitivity: np.ndarray, steps: np.ndarray, taken: np.ndarray, target: float) -> np.ndarray:
    """Makes the best move for each unit of ratio until none helps or fits."""
    rows = np.arange(len(taken))
    while True:
        raised = _raised(taken, len(steps))
        cost = steps[raised].sum(axis=-1) - steps[taken].sum()
        gain = sensitivity[rows, taken].sum() - sensitivity[rows, raised].sum(axis=-1)
        fits = (cost > 0) & (cost <= target - steps[taken].sum() + 1e-12) & (gain > 0)
        if not fits.any():
            return taken
        rate = np.where(fits, gain / np.where(fits, cost, 1.0), -1.0)
        taken = raised[np.unravel_index(rate.argmax(), rate.shape)]


def _exchanged(sensitivity: np.ndarray, steps: np.ndarray, taken: np.ndarray, target: float) -> np.ndarray:
    """Raises the lower layers and lowers the upper ones, or does either, while that helps and fits."""
    layers, count = sensitivity.shape
    rows = np.arange(layers)
    # Of many layers and ratios only steps nearby are looked at.
    reach = count
    while reach > 1 and layers * (reach * layers) ** 2 > MOST_EXCHANGES:
        reach -= 1

    while True:
        near = np.abs(_raised(taken, count) - taken).max(axis=-1) <= reach
        raised = np.unique(np.concatenate([taken[None], _raised(taken, count)[near]]), axis=0)
        candidates = [raised]
        for layer in range(layers):
            for step in range(max(0, taken[layer] - reach), min(count, taken[layer] + reach)):
                candidates.append(np.where(rows >= layer, np.minimum(raised, step), raised))
        schedules = np.unique(np.concatenate(candidates), axis=0)
        schedules = schedules[steps[schedules].sum(axis=1) <= target + 1e-12]
        values = sensitivity[rows, schedules].sum(axis=1)
        best = values.argmin()
        if values[best] >= sensitivity[rows, taken].sum() - 1e-12 * max(1.0, np.abs(sensitivity).max()):
            return taken
        taken = schedules[best]
