"""Accuracy, KL, η, flips and their clustered intervals equal what a second computation gives."""

import json
import math

import numpy as np
import pytest

from evals.harness import intervals, metrics
from evals.harness.frame import Lookup, measured_row, without_nan
from evals.harness.intervals import Interval


def draw(seed=0, clusters=40, size=6):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(clusters), rng.integers(1, size, clusters))
    values = rng.normal(size=clusters)[cluster] + rng.normal(size=len(cluster))
    return rng.permutation(np.stack([values, cluster]), axis=1)


def test_an_interval_is_that_of_resampled_clusters():
    """The matrix product gives, draw for draw, what repeating the items of every drawn cluster gives."""
    values, cluster = draw()
    counts = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), intervals.DRAWS)
    direct = [np.mean(np.repeat(values, count[cluster.astype(int)])) for count in counts]
    got = intervals.mean(values, cluster)
    np.testing.assert_allclose(got[:3], [values.mean(), *np.percentile(direct, [2.5, 97.5])], atol=1e-12)
    assert got.n == len(values)


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


def test_an_undefined_statistic_is_nan():
    nothing, zeros, cluster = np.zeros(0), np.zeros(4), np.arange(4)
    one_context = intervals.mean(np.array([0.0, 1.0]), np.zeros(2))
    assert one_context.value == 0.5
    assert intervals.eta(np.array([np.inf, 0, 0, 0]), zeros + 1, cluster).value == -math.inf
    undefined = [
        intervals.mean(nothing, nothing).value,
        one_context.low,
        one_context.high,
        intervals.eta(zeros + 1, zeros, cluster).value,
        intervals.eta(zeros, zeros + np.inf, cluster).value,
        intervals.mean(np.array([1.0, np.nan]), np.arange(2)).value,
    ]
    assert np.isnan(undefined).all()


def records():
    """Two batches of two contexts with two questions each; what blind reuse flips, the arm brings back but once."""
    asked = {"kind": [0, 1, 0, 1], "answer": [5, 6, 7, 8]}
    batches = []
    for first in (0, 2):
        cluster = [first, first, first + 1, first + 1]
        batches += [
            {"arm": "re-prefill", "predicted": [5, 6, 7, 0], "kl": [0.0] * 4, "cluster": cluster, **asked},
            {"arm": "blind", "predicted": [1, 6, 1, 0], "kl": [2.0, 0.0, 2.0, 0.0], "costs": {"stored_bytes": 0.0}},
            {"arm": "arm", "predicted": [5, 6, 1 if first else 7, 0], "kl": [0.5, 0.0, 3.0 if first else 0.5, 0.0]},
        ]
    batches.append({"arm": "half", "predicted": [5, 6, 7, 8], "kl": [0.0] * 4})
    return batches


def test_metrics_are_those_counted_by_hand():
    probe = metrics.ProbeRecords(records(), ("chain", "page"))
    expected = {
        "accuracy": (0.75, 4),
        "difference": (-0.25, 4),
        "kl": (4.5 / 4, 4),
        "flips": (0.25, 4),
        "within": (0.0, 4),
        "eta": (1 - 4.5 / 8, 4),
        "flip_recover": (0.75, 4),
        "worse": (0.25, 4),
        "harmful": (0.25, 4),
    }
    chain = probe.metrics("arm", "chain")
    assert {name: (pytest.approx(chain[name].value), chain[name].n) for name in expected} == expected
    # Blind reuse loses nothing of the page's questions: there is no share of it to bring back.
    assert math.isnan(probe.metrics("arm", "page")["eta"].value)
    rows = list(probe.rows("documents.4", "m", ("accuracy",)))
    assert {row["arm"] for row in rows} == {"re-prefill", "blind", "arm"}, "an arm of one batch alone has no rows"
    blind = [row["metric"] for row in rows if row["arm"] == "blind"]
    assert blind == ["accuracy.chain", "accuracy.page", "stored_bytes"]


def test_an_estimate_is_correlated_with_what_it_estimates_over_contexts():
    """Eight contexts of one question; estimates that are the share left correlate at 1, their inverse at −1."""
    left = np.array([0.9, 0.5, 0.1, 0.01, 0.3, 0.7, 0.05, 0.2])
    asked = {"kind": [0] * 8, "answer": [1] * 8, "cluster": list(range(8)), "predicted": [1] * 8}
    kl = {"re-prefill": 0 * left, "blind": 0 * left + 2, "right": 2 * left, "inverse": 2 * left}
    lines = [{"arm": arm, **asked, "kl": values.tolist()} for arm, values in kl.items()]
    lines[2]["estimate"], lines[3]["estimate"] = left.tolist(), (0.005 / left).tolist()
    probe = metrics.ProbeRecords(lines, ("chain",))
    for arm, correlation in (("right", 1), ("inverse", -1)):
        estimate = probe.metrics(arm, "chain")["estimate"]
        assert (estimate.value, estimate.n) == (pytest.approx(correlation), 8)


def test_means_over_seeds_need_every_seed():
    def rows(model, value):
        return [measured_row("p", model, "a", "accuracy.chain", Interval(value, 0.0, 1.0, 9))]

    (mean,) = metrics.mean_rows([*rows("a", 0.5), *rows("b", 0.9), *rows("control", 0.1)], ["a", "b"])
    assert (mean["value"], mean["low"], mean["high"], mean["n"]) == (pytest.approx(0.7), 0.5, 0.9, 2)
    assert metrics.mean_rows(rows("a", 0.5), ["a", "b"]) == []


def test_rows_round_trip_as_strict_json():
    rows = [
        measured_row("documents.4", "a", "blind", "accuracy.chain", Interval(0.8, 0.7, 0.9, 10)),
        measured_row("documents.4", "a", "patch.rank=2", "eta.chain", Interval(math.nan, math.nan, math.nan, 5)),
    ]
    lookup = Lookup(json.loads(json.dumps(without_nan(rows), allow_nan=False)))
    assert lookup.get("documents.4", "a", "blind", "accuracy.chain") == (0.8, 0.7, 0.9, 10)
    undefined = lookup.get("documents.4", "a", "patch.rank=2", "eta.chain")
    assert (math.isnan(undefined.value), undefined.n) == (True, 5)
    assert lookup.get("slide", "a", "keep", "kl.chain").n == 0
    assert lookup.values("arm", {"probe": "documents.4"}) == ["blind", "patch.rank=2"]
