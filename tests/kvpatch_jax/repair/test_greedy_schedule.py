"""VLCache's greedy schedule against every schedule there is."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import RATIOS, greedy_schedule


def optimum(sensitivity: np.ndarray, ratios: list[float], target: float) -> float:
    """The least sum over every schedule that does not increase with depth and keeps to the target."""
    least = np.inf
    for steps in itertools.combinations_with_replacement(range(len(ratios) - 1, -1, -1), len(sensitivity)):
        if sum(ratios[step] for step in steps) <= target + 1e-12:
            least = min(least, sum(sensitivity[layer, step] for layer, step in enumerate(steps)))
    return least


def drawn(seed: int, shape: str) -> tuple[np.ndarray, list[float], float]:
    rng = np.random.default_rng(seed)
    layers, count = rng.integers(1, 6), rng.integers(2, 7)
    ratios = np.sort(rng.choice(RATIOS, count, replace=False))
    sensitivity = rng.random((layers, count))
    if shape == "falling":
        sensitivity = np.sort(sensitivity, axis=1)[:, ::-1] * rng.random((layers, 1))
    if shape == "convex":
        sensitivity = rng.random((layers, 1)) * np.exp(-ratios * rng.uniform(1, 30, (layers, 1)))
        sensitivity += 0.1 * rng.random((layers, 1))
    if shape == "noisy":
        sensitivity = np.exp(-3 * np.cumsum(sensitivity, axis=1) / count) * rng.random((layers, 1))
        sensitivity = np.abs(sensitivity * (1 + 0.2 * rng.standard_normal((layers, count))))
    return sensitivity, ratios.tolist(), float(rng.uniform(layers * ratios[0], layers * ratios[-1]))


def check(sensitivity: np.ndarray, ratios: list[float], target: float) -> None:
    schedule = greedy_schedule(sensitivity, ratios, target)
    assert len(schedule) == len(sensitivity)
    assert all(lower >= upper for lower, upper in itertools.pairwise(schedule))
    assert sum(schedule) <= target + 1e-9
    total = sum(sensitivity[layer, ratios.index(ratio)] for layer, ratio in enumerate(schedule))
    assert total <= 1.05 * optimum(sensitivity, ratios, target)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["uniform", "falling", "convex", "noisy"]))
@example(0, "uniform")
def test_greedy_is_within_five_percent_of_the_optimum(seed, shape):
    check(*drawn(seed, shape))


@pytest.mark.parametrize(
    ("ratios", "target"), [([0.1, 0.1], 1.0), ([0.2, 0.1], 1.0), ([0.1], 1.0), ([-0.1, 0.1], 1.0), ([0.1, 0.2], 0.3)]
)
def test_bad_ratios_and_targets_are_refused(ratios, target, unchecked):
    with pytest.raises(InputError, match="greedy_schedule"):
        greedy_schedule(np.ones((4, 2)), ratios, target)
