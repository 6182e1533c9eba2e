"""VLCache's sensitivities and their allocation to layers."""

import itertools

import jax
import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import (
    RepairBudget,
    greedy_schedule,
    logit_error,
    recomputed_sensitivity,
    vlcache,
)
from tests.kvpatch_jax.repair.splices import (
    CHUNK,
    LAYERS,
    changed,
    error,
    in_chunk,
    make_splice,
    tiny_backbone,
)


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def backbone():
    return tiny_backbone()


@pytest.fixture(scope="module")
def spliced(backbone):
    with jax.default_matmul_precision("highest"):
        return make_splice(backbone)


@pytest.mark.slow
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
    served = vlcache(backbone, splice, RepairBudget(by_layer=(0.5, 0.5, 0.0, 0.0)))
    for name in splice.cache:
        assert error(in_chunk(seen[2])[name][1, :, :1], in_chunk(served.cache)[name][1, :, :1]) <= 1e-5


@pytest.mark.slow
def test_sensitivities_are_means_over_proxies_and_errors_are_squared(backbone, spliced):
    splice, _ = spliced
    other, _ = make_splice(backbone, seed=5)
    losses = {0: 3.0, 1: 5.0}
    found = recomputed_sensitivity(backbone, [splice, other], [0.25], lambda number, _: losses[number])
    np.testing.assert_allclose(found, np.full((LAYERS, 1), 4.0))
    assert logit_error(np.array([1.0, 2.0]), np.array([1.5, 4.0])) == pytest.approx((0.25 + 4) / 2)
    with pytest.raises(InputError, match="got none"):
        recomputed_sensitivity(backbone, [], [0.1], lambda *_: 0.0)
    with pytest.raises(InputError, match="without cached images"):
        recomputed_sensitivity(backbone, [splice.replace(chunks=())], [0.1], lambda *_: 0.0)
    with pytest.raises(InputError, match=r"got 1\.5"):
        recomputed_sensitivity(backbone, [splice], [1.5], lambda *_: 0.0)


def exact(sensitivity, ratios, target):
    """The least sum over every non-increasing allocation."""
    best = np.inf
    for taken in itertools.product(range(len(ratios)), repeat=len(sensitivity)):
        own = [ratios[place] for place in taken]
        if own == sorted(own, reverse=True) and sum(own) <= target + 1e-12:
            best = min(best, sum(sensitivity[layer][place] for layer, place in enumerate(taken)))
    return best


@pytest.mark.slow
def test_the_greedy_allocation_keeps_its_rules_and_is_near_the_least():
    rng, ratios = np.random.default_rng(0), (0.0, 0.02, 0.06, 0.1, 0.2, 0.3)
    worst = []
    for _ in range(60):
        layers = int(rng.integers(2, 6))
        # Losses that fall with the ratio, by steps of any size.
        found = np.cumsum(rng.exponential(size=(layers, 6)) * rng.exponential(size=(layers, 1)), axis=1)[:, ::-1]
        target = float(rng.uniform(0, 0.3 * layers))
        schedule = greedy_schedule(found, ratios, target)
        assert list(schedule) == sorted(schedule, reverse=True)
        assert sum(schedule) <= target + 1e-9
        own = sum(found[layer][ratios.index(ratio)] for layer, ratio in enumerate(schedule))
        worst.append(own / exact(found, ratios, target))
    assert min(worst) >= 1 - 1e-9


def test_schedules_that_cannot_be():
    with pytest.raises(InputError, match="ascending"):
        greedy_schedule(np.zeros((2, 2)), (0.3, 0.1), 1.0)
    with pytest.raises(InputError, match="expected finite"):
        greedy_schedule(np.full((2, 2), np.nan), (0.1, 0.3), 1.0)
    with pytest.raises(InputError, match=r"at least 0\.2"):
        greedy_schedule(np.zeros((2, 2)), (0.1, 0.3), 0.1)
