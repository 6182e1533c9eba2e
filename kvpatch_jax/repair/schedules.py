"""Schedules of VLCache: how many tokens each layer needs, measured on a proxy set, and their allocation.

Source: VLCache (Qin et al. 2025), sections 3.2 and 4.1, equations 5 to 9.
"""

import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..backbone import KV, Backbone
from ..core import AnyArray
from ..errors import InputError
from .recomputation import Recompute
from .spliced_cache import SplicedCache, check_splice

RATIOS = tuple(round(0.002 * step, 3) for step in range(1, 151))
"""VLCache's ratios, 0.002 to 0.300 (equation 9)."""


def recomputed_sensitivity(
    backbone: Backbone, proxies: Sequence[SplicedCache], ratios: Sequence[float | int], loss: Callable[[int, KV], float]
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
      InputError: no proxies, or a ratio out of range. Else as a method: a splice does not match the backbone.
    """
    layers = backbone.layout.layers
    if not proxies:
        raise InputError("recomputed_sensitivity.proxies: got none; expected splices of cached images")
    if min(ratios, default=0) < 0 or max(ratios, default=0) > 1:
        raise InputError(f"recomputed_sensitivity.ratios: got {list(ratios)}; expected shares, 0 to 1")
    for splice in proxies:
        check_splice(backbone.layout, splice)

    total = np.zeros((layers, len(ratios)))
    for number, splice in enumerate(proxies):
        reused = loss(number, dict(splice.cache))
        for place, ratio in enumerate(ratios):
            index = [np.arange(first, first + int(ratio * (last - first) + 1e-9)) for first, last in splice.parts]
            tokens = np.concatenate(index)
            if not len(tokens):
                total[:, place] += reused
                continue
            for layer in range(layers):
                # Nothing is written at the layers below.
                run = Recompute(backbone, splice).run(0, layer, tokens, (0,) * layer).run(layer, layer + 1, tokens)
                total[layer, place] += loss(number, run.cache)

    return total / len(proxies)


def logit_error(expected: Float[AnyArray, "*B V"], logits: Float[AnyArray, "*B V"]) -> float:
    """Computes the mean squared error of logits (VLCache equation 5)."""
    return float(jnp.mean(jnp.square(jnp.asarray(expected) - jnp.asarray(logits))))


def best_schedule(
    sensitivity: Float[np.ndarray, "L n"], ratios: Sequence[float | int], target: float
) -> tuple[float, ...]:
    """Allocates a ratio to each layer, not increasing with depth, so that the sum of sensitivities is least.

    Source: VLCache section 4.1, equations 6 to 9, which it solves by "a simple greedy algorithm", of which it says no
    more; here the optimum is found, by dynamic programming.

    Args:
      sensitivity: S_i(r), one row per layer and one column per ratio.
      ratios: ascending.
      target: sum of the ratios of all layers at most (P_tar).

    Raises:
      InputError: ratios do not ascend or do not match the columns, a sensitivity is not finite, or the target is below
        the smallest ratio for every layer.
    """
    sensitivity = np.asarray(sensitivity, np.float64)
    ascending = all(small < large for small, large in itertools.pairwise(ratios))
    if sensitivity.shape[1:] != (len(ratios),) or not ascending or min(ratios, default=-1) < 0:
        shapes = f"ratios {list(ratios)}, sensitivity {sensitivity.shape}"
        raise InputError(f"best_schedule: got {shapes}; expected ascending ratios, one for each column")
    if not np.isfinite(sensitivity).all():
        raise InputError("best_schedule.sensitivity: got NaN or infinity; expected finite numbers")
    if len(sensitivity) * ratios[0] > target + 1e-12:
        raise InputError(f"best_schedule.target: got {target}; expected at least {len(sensitivity) * ratios[0]}")

    # For each ratio, the schedules of the deepest layers that begin with at most that ratio: (cost, loss, ratios).
    schedules: list[list[tuple[float, float, tuple[float, ...]]]] = [[(0.0, 0.0, ())] for _ in ratios]
    for losses in sensitivity[::-1]:
        raised, candidates = [], []
        for ratio, loss, deeper in zip(ratios, losses, schedules, strict=True):
            longer = [(round(cost + ratio, 9), rest + loss, (float(ratio), *tail)) for cost, rest, tail in deeper]
            longer, candidates = sorted([*candidates, *longer]), []
            # A schedule that costs more than another one and loses no less is part of no best one.
            for candidate in longer:
                if candidate[0] <= target + 1e-9 and (not candidates or candidate[1] < candidates[-1][1]):
                    candidates.append(candidate)
            raised.append(candidates)
        schedules = raised
    return min(schedules[-1], key=lambda schedule: schedule[1])[2]
