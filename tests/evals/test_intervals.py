"""Cluster bootstrap: against direct resampling, its coverage, its degenerate cases."""

import json
import math

import numpy as np
import pytest

from evals.harness import intervals
from evals.harness.frame import Lookup, measured_row, without_nan
from evals.harness.intervals import Interval


def draw(seed=0, clusters=40, size=6):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(clusters), rng.integers(1, size, clusters))
    values = rng.normal(size=clusters)[cluster] + rng.normal(size=len(cluster))
    return rng.permutation(np.stack([values, cluster]), axis=1)


def test_equals_direct_resampling():
    """The matrix product gives, draw for draw, what repeating the items of every drawn cluster gives."""
    values, cluster = draw()
    counts = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), intervals.DRAWS)
    direct = [np.mean(np.repeat(values, count[cluster.astype(int)])) for count in counts]
    got = intervals.mean(values, cluster)
    np.testing.assert_allclose(got[:3], [values.mean(), *np.percentile(direct, [2.5, 97.5])], atol=1e-12)
    assert got.n == len(values)


def test_coverage_of_a_clustered_binomial():
    """95 % intervals hold the truth about 95 % of the time; ignoring the clusters they would not."""
    rng = np.random.default_rng(5)
    covered = naive = 0
    for _ in range(300):
        correct = np.repeat(rng.random(100) < 0.7, 8)
        got = intervals.mean(correct, np.repeat(np.arange(100), 8))
        covered += got.low <= 0.7 <= got.high
        flat = intervals.mean(correct, np.arange(800))
        naive += flat.low <= 0.7 <= flat.high
    assert 0.91 <= covered / 300 <= 0.985
    assert naive / 300 < 0.7


def test_arms_are_paired():
    """Two arms that differ by a constant differ by that constant in every draw: an interval of width zero."""
    values, cluster = draw()
    gap = intervals.paired_difference(values + 0.25, values, cluster)
    np.testing.assert_allclose(gap[:3], 0.25)
    assert intervals.mean(values + 0.25, cluster).high - intervals.mean(values, cluster).high == pytest.approx(0.25)


def test_eta_is_the_share_of_the_blind_loss_that_is_recovered():
    blind, cluster = np.array([1.0, 3.0, 0.0, 4.0]), np.array([0, 0, 1, 1])
    assert intervals.eta(blind, blind, cluster)[:3] == (0, 0, 0)
    assert intervals.eta(0 * blind, blind, cluster)[:3] == (1, 1, 1)
    half = intervals.eta(np.array([4.0, 0.0, 0.0, 0.0]), blind, cluster)
    assert (half.value, half.n) == (0.5, 4)
    assert half.low <= half.value <= half.high
    assert intervals.eta(3 * blind, blind, cluster).value == -2


def test_flip_recover_counts_flips_only():
    reference, blind = np.array([1, 2, 3, 4, 5]), np.array([1, 0, 0, 0, 5])
    arm = np.array([9, 2, 3, 7, 9])
    got = intervals.flip_recover(reference, blind, arm, np.array([0, 0, 1, 1, 2]))
    assert got.value == pytest.approx(2 / 3)
    assert got.n == 3
    none = intervals.flip_recover(reference, reference, arm, np.arange(5))
    assert math.isnan(none.value)
    assert none.n == 0


def test_what_cannot_be_said_is_nan():
    nothing = np.zeros(0)
    assert intervals.mean(nothing, nothing).n == 0
    assert math.isnan(intervals.mean(nothing, nothing).value)
    one_context = intervals.mean(np.array([0.0, 1.0]), np.zeros(2))
    assert one_context.value == 0.5
    assert math.isnan(one_context.low)
    assert math.isnan(one_context.high)
    zeros, cluster = np.zeros(4), np.arange(4)
    assert math.isnan(intervals.eta(zeros + 1, zeros, cluster).value)
    assert math.isnan(intervals.eta(zeros, zeros + np.inf, cluster).value)
    assert intervals.eta(np.array([np.inf, 0, 0, 0]), zeros + 1, cluster).value == -math.inf
    assert math.isnan(intervals.mean(np.array([1.0, np.nan]), np.arange(2)).value)


def test_rows_round_trip_as_strict_json():
    rows = [
        measured_row("documents.4", "a", "blind", "accuracy.chain", Interval(0.8, 0.7, 0.9, 10)),
        measured_row("documents.4", "a", "patch.rank=2", "eta.chain", Interval(math.nan, math.nan, math.nan, 5)),
    ]
    lookup = Lookup(json.loads(json.dumps(without_nan(rows), allow_nan=False)))
    assert lookup.get("documents.4", "a", "blind", "accuracy.chain") == (0.8, 0.7, 0.9, 10)
    undefined = lookup.get("documents.4", "a", "patch.rank=2", "eta.chain")
    assert math.isnan(undefined.value)
    assert undefined.n == 5
    assert lookup.get("slide", "a", "keep", "kl.chain").n == 0
    assert lookup.values("arm", {"probe": "documents.4"}) == ["blind", "patch.rank=2"]
