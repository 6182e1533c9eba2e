"""The reuse-or-rebuild gate of Kamera App. D: what divergence of antecedents says about loss, and how often it lies."""

from collections.abc import Callable

import numpy as np

from kvpatch_jax.patching import reuse_curve

from ...results import intervals
from ..results_table import ResultsTable
from .drift import Safety

COVERAGES = (0.25, 0.5, 0.75)
SAFE_SHARE = 0.5


def gate_rows(table: ResultsTable, safety: Safety) -> None:
    """Adds rows "window.gate": false reuse at each coverage, medians of divergence, and their rank correlation.

    A reuse is safe where the stored patch removes at least half of what blind reuse loses in that context
    (η ≥ 0.5); the gate reuses the share of lowest divergence (those as near
    as the last one too). Contexts in which blind reuse loses nothing are left out.
    """
    divergence, kl, blind = (np.array(values) for values in (safety.divergence, safety.kl, safety.blind))
    cluster, name = np.array(safety.cluster), np.array(safety.name)
    kept = blind > 1e-3
    divergence, kl, blind, cluster, name = (values[kept] for values in (divergence, kl, blind, cluster, name))
    if not kept.any():
        return

    curve = reuse_curve(divergence.tolist(), (kl / blind).tolist(), SAFE_SHARE)
    safe = kl / blind <= SAFE_SHARE
    for coverage in COVERAGES:
        reused = divergence <= curve.threshold[np.argmax(curve.coverage >= coverage)]
        wrong = intervals.mean((~safe[reused]).astype(float), cluster[reused])
        table.row("window.gate", f"coverage={coverage:g}", "false_reuse", wrong)

    for word, which in (("safe", safe), ("unsafe", ~safe)):
        if which.any():
            median = resampled(np.median, cluster[which], divergence[which])
            table.row("window.gate", word, "divergence_median", median)

    table.row("window.gate", "all", "unsafe_share", intervals.mean((~safe).astype(float), cluster))
    table.row("window.gate", "all", "rank_correlation", resampled(rank_correlation, cluster, divergence, kl))
    for each in dict.fromkeys(name.tolist()):
        here = name == each
        table.row("window.gate", each, "divergence", intervals.mean(divergence[here], cluster[here]))
        table.row("window.gate", each, "stored_kl", intervals.mean(kl[here], cluster[here]))
        table.row("window.gate", each, "unsafe_share", intervals.mean((~safe[here]).astype(float), cluster[here]))


def resampled(
    statistic: Callable[..., float], cluster: np.ndarray, *columns: np.ndarray, draws: int = 500
) -> intervals.Interval:
    """Estimates any statistic of columns [items], with a 95 % interval over resampled contexts."""
    value, names = float(statistic(*columns)), np.unique(cluster)
    if len(names) < 2:
        return intervals.Interval(value, np.nan, np.nan, len(cluster))

    members, rng = {name: np.flatnonzero(cluster == name) for name in names}, np.random.default_rng(0)
    drawn = []
    for _ in range(draws):
        items = np.concatenate([members[name] for name in rng.choice(names, len(names))])
        drawn.append(float(statistic(*(column[items] for column in columns))))

    low, high = np.percentile(drawn, [intervals.LOW, intervals.HIGH])
    return intervals.Interval(value, float(low), float(high), len(cluster))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Computes Spearman's rank correlation, equal values sharing their mean rank; 0 where one does not vary."""
    ranks = []
    for values in (a, b):
        _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count + 1) / 2)[inverse])
    if min(np.ptp(rank) for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])
