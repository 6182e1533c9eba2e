"""What methods need ahead, fitted on contexts that nothing is measured on: VLCache's schedules, and a pooled basis."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.backbone import KV
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.patching import Basis, fit_basis
from kvpatch_jax.repair import (
    RATIOS,
    SplicedCache,
    best_schedule,
    logit_error,
    recomputed_sensitivity,
    spliced_chunks,
)

from ..harness import datasets
from ..harness.methods import parse

NUMBER = 10_000
"""Number of the batch that is fitted on; none that is measured has it."""
CONTEXTS = 8
TRIED = 5
"""Ratios, about, that sensitivities are measured at: each compiles a program for every layer."""


def prepared(
    draw: Callable[[int, int], datasets.Batch], backbone: ModelBackbone, methods: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Fits what the methods of a run need, by method.

    Args:
      draw: makes the batch of a number, of so many contexts.
      methods: names of arms.
    """
    arms = [arm for name in methods if (arm := parse(name)).method in ("vlcache", "pooled")]
    if not arms:
        return {}
    batch, settings = draw(NUMBER, CONTEXTS), {}
    shares = {arm.tokens or 0.0 for arm in arms if arm.method == "vlcache"}
    if shares:
        settings["vlcache"] = {"schedules": schedules(backbone, batch, sorted(shares))}
    if any(arm.method == "pooled" for arm in arms):
        settings["pooled"] = {"basis": pooled_basis(backbone, batch.splice)}
    return settings


def schedules(
    backbone: ModelBackbone, batch: datasets.Batch, shares: Sequence[float]
) -> dict[float, tuple[float, ...]]:
    """Fits VLCache's shares of tokens by layer, for each mean share up to its largest ratio.

    Source: VLCache, equations 5 to 9: the error of what is answered, and the best allocation.
    """
    tokens, layers = batch.splice.slots.shape[1], backbone.layout.layers
    # Of the paper's ratios only those that differ in whole tokens of this page.
    counted = {int(ratio * tokens + 1e-9): ratio for ratio in reversed(RATIOS)}
    ratios = sorted(ratio for count, ratio in counted.items() if count)
    ratios = [0.0, *ratios[:: max(1, len(ratios) // TRIED)]]
    expected = _answers(batch, batch.reference)

    def loss(_: int, cache: KV) -> float:
        return logit_error(expected, _answers(batch, cache))

    sensitivity = recomputed_sensitivity(backbone, [batch.splice], ratios, loss)
    allowed = [share for share in shares if share <= max(ratios)]
    return {share: best_schedule(sensitivity, ratios, share * layers) for share in allowed}


def _answers(batch: datasets.Batch, cache: KV) -> np.ndarray:
    """Returns the log-probabilities of all answers to questions that count."""
    answers: Any = batch.read(cache)
    return answers.log_probabilities[answers.questions.answer >= 0]


def pooled_basis(backbone: ModelBackbone, splice: SplicedCache) -> Basis:
    """Fits the directions that deficits share, as many as channels have features."""
    parts = spliced_chunks(backbone, splice)
    ranks = {channel.name: channel.features for channel in backbone.layout.channels}
    return fit_basis([(part.chunk, part.conditioned) for part in parts], ranks)
