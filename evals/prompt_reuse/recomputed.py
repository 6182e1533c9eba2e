"""VLCache on proxy and held-out contexts: sensitivities, schedules, and which tokens are recomputed.

Source: VLCache (Qin et al. 2025), sections 3.1, 3.2 and 4.1. Axis letters: B contexts, T tokens, L layers, M tokens of
questions, Q questions.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from kvpatch_jax.backbone import KV
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import (
    RATIOS,
    RepairBudget,
    SplicedCache,
    first_k,
    greedy_schedule,
    layer_counts,
    logit_error,
    random_tokens,
    recomputed_sensitivity,
    repair_everywhere,
    vlcache,
)
from models import ModelBackbone

from .contexts import ImagePrompts

STATIC = (0.1, 0.2, 0.3)
"""Ratios of all layers that are compared with a schedule of the same mean."""
STEPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Ratios whose sensitivity is measured: every ratio is a program of its own, and images here have few tokens."""
SIDES = (0.1, 0.3)
"""Shares of each image's tokens, its first or its last ones, that are recomputed in every layer."""


def distinct_ratios(sizes: Sequence[int], ratios: Sequence[float] = RATIOS) -> tuple[float, ...]:
    """Keeps the ratios at which images of these sizes have other numbers of recomputed tokens than at any below.

    Raises:
      InputError: no images.
    """
    if not sizes:
        raise InputError("distinct_ratios.sizes: got no images; expected the tokens of at least one")
    kept, last = [], (0,) * len(sizes)
    for ratio in ratios:
        counts = tuple(int(ratio * size + 1e-9) for size in sizes)
        if counts != last:
            kept.append(ratio)
            last = counts
    return tuple(kept)


def menu_of(sizes: Sequence[int]) -> tuple[float, ...]:
    """Picks the ratios that a schedule chooses among: of each step the largest at which another token is recomputed.

    Raises:
      InputError: no images.
    """
    distinct = distinct_ratios(sizes)
    return tuple(dict.fromkeys(max(ratio for ratio in distinct if ratio <= max(step, distinct[0])) for step in STEPS))


def sensitivity_of(proxies: Sequence[ImagePrompts], ratios: Sequence[float]) -> Float[np.ndarray, "L n"]:
    """Measures S_i(r) over proxy contexts: logit error of what the original model says behind every question.

    Raises:
      InputError: no proxies.
    """
    if not proxies:
        raise InputError("sensitivity_of.proxies: got none; expected contexts with stored images")
    expected = [prompts.read(prompts.reference)[0] for prompts in proxies]

    def loss(number: int, cache: KV) -> float:
        return logit_error(expected[number], proxies[number].read(cache)[0])

    splices = [prompts.splice for prompts in proxies]
    return recomputed_sensitivity(proxies[0].backbone, splices, [0.0, *ratios], loss)


def optimal_schedule(
    sensitivity: Float[np.ndarray, "L n"], ratios: Sequence[float], target: float
) -> tuple[float, ...]:
    """Finds the schedule of the least sum by dynamic programming over thousandths of a ratio; see `greedy_schedule`."""
    units = [round(1000 * ratio) for ratio in ratios]
    counts = layer_counts(np.asarray(sensitivity), units, int(1000 * target + 1e-6))
    return tuple(count / 1000 for count in counts)


@dataclasses.dataclass(frozen=True, eq=False)
class RecomputedArm:
    """A way of recomputing under its name: the mended cache, and token-layers per context."""

    name: str
    cache: KV
    token_layers: float


def schedule_arms(
    backbone: ModelBackbone, splice: SplicedCache, schedules: dict[str, tuple[float, ...]]
) -> Iterator[RecomputedArm]:
    """Mends a splice with no tokens, static ratios, schedules, and MPIC's and random tokens at the same number."""
    yield RecomputedArm("reuse", splice.cache, 0.0)
    for ratio in STATIC:
        static = vlcache(backbone, splice, ratio)
        tokens = float(static.token_layers[0])
        yield RecomputedArm(f"static {ratio:g}", static.cache, tokens)
        drawn = random_tokens(backbone, splice, RepairBudget(tokens=round(tokens / backbone.layout.layers)))
        yield RecomputedArm(f"random {ratio:g}", drawn.cache, float(drawn.token_layers[0]))
    for name, schedule in schedules.items():
        dynamic = vlcache(backbone, splice, RepairBudget(by_layer=schedule))
        yield RecomputedArm(name, dynamic.cache, float(dynamic.token_layers[0]))
    for k in (4,):
        mended = first_k(backbone, splice, RepairBudget(tokens=k))
        yield RecomputedArm(f"MPIC-{k}", mended.cache, float(mended.token_layers[0]))


def schedule_records(prompts: ImagePrompts, schedules: dict[str, tuple[float, ...]]) -> Iterator[dict[str, Any]]:
    """Yields the KL of every chain question of a batch from re-prefill's answer, arm by arm."""
    reference = prompts.answers(prompts.reference)
    rows, questions = np.nonzero(prompts.chain)
    for arm in schedule_arms(prompts.backbone, prompts.splice, schedules):
        kl = prompts.answers(arm.cache).divergence_from(reference)[rows, questions]
        yield {
            "arm": arm.name,
            "token_layers": arm.token_layers,
            "kl": np.round(kl, 6).tolist(),
            "cluster": prompts.clusters[rows].tolist(),
        }


def side_tokens(parts: Sequence[tuple[int, int]], share: float, first: bool) -> np.ndarray:
    """Lists the first or the last tokens of every image, rounded half up."""
    tokens = []
    for begin, end in parts:
        count = int(share * (end - begin) + 0.5)
        tokens += range(begin, begin + count) if first else range(end - count, end)
    return np.array(tokens, np.int32)


def side_records(prompts: ImagePrompts) -> Iterator[dict[str, Any]]:
    """Yields errors after recomputing earlier or later tokens (VLCache Figures 2 and 5).

    Of KV: ‖found − true‖ / ‖true‖ of each token, the mean over layers and channels, in thirds of an image. Of what is
    computed behind the images: the residual of the questions' scored tokens as it enters each layer, likewise.
    """
    backbone, splice = prompts.backbone, prompts.splice
    layers = tuple(range(1, backbone.layout.layers))
    reference = prompts.answers(prompts.reference)
    residuals = prompts.read(prompts.reference, layers)[1]
    rows, questions = np.nonzero(prompts.chain)

    arms: list[tuple[str, KV]] = [("reuse", splice.cache)]
    for share, first in itertools.product(SIDES, (True, False)):
        index = np.repeat(side_tokens(prompts.parts, share, first)[None], len(prompts.clusters), axis=0)
        name = f"{'first' if first else 'last'} {share:.0%}"
        arms.append((name, repair_everywhere(backbone, splice, jnp.asarray(index)).cache))

    for name, cache in arms:
        hidden = prompts.read(cache, layers)[1]
        errors = [_error(hidden[layer], residuals[layer], (-1,))[:, prompts.scored] for layer in layers]
        kv = np.mean([_error(cache[name], prompts.reference[name], (-2, -1)) for name in prompts.reference], axis=0)
        kl = prompts.answers(cache).divergence_from(reference)
        by_third = _thirds(kv.mean(axis=0), prompts.parts)
        for row, cluster in enumerate(prompts.clusters):
            yield {
                "arm": name,
                "cluster": int(cluster),
                "kv": np.round(by_third[row], 5).tolist(),
                "residual": float(np.round(np.mean([error[row].mean() for error in errors]), 6)),
                "kl": float(np.round(kl[row][questions[rows == row]].mean(), 6)) if (rows == row).any() else None,
            }


def _error(found: Any, true: Any, axes: tuple[int, ...]) -> np.ndarray:
    found, true = np.asarray(found, np.float64), np.asarray(true, np.float64)
    return np.sqrt(np.square(found - true).sum(axes) / np.square(true).sum(axes))


def _thirds(error: Float[np.ndarray, "B T"], parts: Sequence[tuple[int, int]]) -> Float[np.ndarray, "B 3"]:
    """Averages over the first, middle and last third of every image."""
    columns = []
    for third in range(3):
        tokens = []
        for begin, end in parts:
            edges = begin + np.arange(4) * (end - begin) // 3
            tokens += range(edges[third], edges[third + 1])
        columns.append(error[:, tokens].mean(axis=1))
    return np.stack(columns, axis=1)


def allocations(
    sensitivity: Float[np.ndarray, "L n"], ratios: Sequence[float]
) -> dict[str, tuple[tuple[float, ...], float]]:
    """Allocates the total of each static ratio, greedily and optimally: schedule and sum of sensitivities by name.

    A layer may have no token: VLCache's equation 8 lets r be 0, its equation 9 begins at 0.002, of which images of less
    than 500 tokens have none either.
    """
    found = {}
    layers, menu = len(sensitivity), (0.0, *ratios)
    for ratio in STATIC:
        target = ratio * layers
        for name, solve in (("greedy", greedy_schedule), ("optimal", optimal_schedule)):
            schedule = solve(sensitivity, menu, target)
            total = sum(sensitivity[layer, menu.index(own)] for layer, own in enumerate(schedule))
            found[f"{name} {ratio:g}"] = (schedule, float(total))
    return found
