"""The reuse-or-rebuild gate of Kamera App. D: what divergence of antecedents says about loss, and how often it lies."""

import numpy as np

from kvpatch_jax.gate import reuse_curve

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
    for word, median, count in (("safe", curve.safe, safe.sum()), ("unsafe", curve.unsafe, (~safe).sum())):
        if count:
            table.value("window.gate", word, "divergence_median", median, int(count))
    table.value("window.gate", "all", "unsafe_share", float((~safe).mean()), len(safe))
    table.value("window.gate", "all", "rank_correlation", rank_correlation(divergence, kl), len(safe))
    for each in dict.fromkeys(name.tolist()):
        here = name == each
        table.row("window.gate", each, "divergence", intervals.mean(divergence[here], cluster[here]))
        table.row("window.gate", each, "stored_kl", intervals.mean(kl[here], cluster[here]))
        table.row("window.gate", each, "unsafe_share", intervals.mean((~safe[here]).astype(float), cluster[here]))


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Computes Spearman's rank correlation, equal values sharing their mean rank; 0 where one does not vary."""
    ranks = []
    for values in (a, b):
        _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count + 1) / 2)[inverse])
    if min(np.ptp(rank) for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])
