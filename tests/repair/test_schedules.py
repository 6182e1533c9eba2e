"""VLCache's sensitivities and their allocation to layers."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import RATIOS, best_schedule, logit_error, recomputed_sensitivity
from kvpatch_jax.repair.methods import vlcache
from tests.repair.splices import CHUNK, LAYERS, changed, error, in_chunk, make_splice


@pytest.mark.nightly
def test_one_layer_alone_is_recomputed_as_it_would_be_while_serving(backbone, spliced):
    """The tokens run through the layers below as served, and only their KV at the one layer is new."""
    splice, _ = spliced
    seen = []
    recomputed_sensitivity(backbone, [splice], [0.0, 0.5], lambda _, cache: seen.append(cache) or 0.0)
    assert len(seen) == 1 + LAYERS  # the reused cache once, and each layer
    for layer, cache in enumerate(seen[1:]):
        differs = changed(cache, splice.cache)
        assert differs[layer, :, : CHUNK // 2].all() == (layer > 0)  # layer 0 does not depend on the antecedent
        assert not differs[np.arange(LAYERS) != layer].any()
        assert not differs[:, :, CHUNK // 2 :].any()
    # The first layers above the embeddings see what a served schedule of these tokens sees there.
    served = vlcache(backbone, splice, 0.5, schedules={0.5: (0.5, 0.5, 0.0, 0.0)})
    for name in splice.cache:
        assert error(in_chunk(seen[2])[name][1, :, :1], in_chunk(served.cache)[name][1, :, :1]) <= 1e-5


@pytest.mark.nightly
def test_sensitivities_are_means_over_proxies_and_errors_are_squared(backbone, spliced):
    splice, _ = spliced
    other, _ = make_splice(backbone, seed=5)
    losses = {0: 3.0, 1: 5.0}
    found = recomputed_sensitivity(backbone, [splice, other], [0.25], lambda number, _: losses[number])
    np.testing.assert_allclose(found, np.full((LAYERS, 1), 4.0))
    assert logit_error(np.array([1.0, 2.0]), np.array([1.5, 4.0])) == pytest.approx((0.25 + 4) / 2)
    with pytest.raises(InputError, match="got none"):
        recomputed_sensitivity(backbone, [], [0.1], lambda *_: 0.0)
    with pytest.raises(InputError, match=r"got \[1\.5\]"):
        recomputed_sensitivity(backbone, [splice], [1.5], lambda *_: 0.0)


def optimum(sensitivity: np.ndarray, ratios: list[float], target: float) -> float:
    """The least sum over every schedule that does not increase with depth and keeps to the target."""
    least = np.inf
    for steps in itertools.combinations_with_replacement(range(len(ratios) - 1, -1, -1), len(sensitivity)):
        if sum(ratios[step] for step in steps) <= target + 1e-12:
            least = min(least, sum(sensitivity[layer, step] for layer, step in enumerate(steps)))
    return least


@given(st.integers(0, 2**32 - 1), st.booleans())
@example(0, False)
def test_the_best_schedule_is_the_optimum(seed, falling):
    rng = np.random.default_rng(seed)
    layers, count = rng.integers(1, 6), rng.integers(2, 7)
    ratios = np.sort(rng.choice(RATIOS, count, replace=False)).tolist()
    sensitivity = rng.random((layers, count))
    if falling:
        sensitivity = np.sort(sensitivity, axis=1)[:, ::-1] * rng.random((layers, 1))
    target = float(rng.uniform(layers * ratios[0], layers * ratios[-1]))
    schedule = best_schedule(sensitivity, ratios, target)
    assert len(schedule) == layers
    assert list(schedule) == sorted(schedule, reverse=True)
    assert sum(schedule) <= target + 1e-9
    total = sum(sensitivity[layer, ratios.index(ratio)] for layer, ratio in enumerate(schedule))
    assert total == pytest.approx(optimum(sensitivity, ratios, target), rel=1e-9)


@pytest.mark.parametrize(
    ("sensitivity", "ratios", "target", "words"),
    [
        (np.ones((4, 2)), [0.1, 0.1], 1.0, "ascending"),
        (np.ones((4, 2)), [0.2, 0.1], 1.0, "ascending"),
        (np.ones((4, 2)), [0.1], 1.0, "ascending"),
        (np.ones((4, 2)), [-0.1, 0.1], 1.0, "ascending"),
        (np.ones((4, 2)), [0.1, 0.2], 0.3, r"at least 0\.4"),
        (np.full((2, 2), np.nan), [0.1, 0.3], 1.0, "expected finite"),
    ],
)
def test_schedules_that_cannot_be(sensitivity, ratios, target, words, unchecked):
    with pytest.raises(InputError, match=words):
        best_schedule(sensitivity, ratios, target)
