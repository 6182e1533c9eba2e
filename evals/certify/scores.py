"""From scored answers to certified rows: means, upper quantiles of calibration windows, coverage of held-out ones.

An answer is scored by KL(promised ‖ served). Answers behind one window are alike, windows are not: bounds are quantiles
of hierarchical conformal prediction (`conformal_bound`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import CertifiedLoss, CertifiedPlan, RankChoice

from ..harness import intervals
from ..harness.frame import rounded
from ..harness.intervals import Interval
from ..harness.parts import Record
from .modes import Mode

Values = Float[np.ndarray, " answers"]
Clusters = Int[np.ndarray, " answers"]
SUFFICIENT, NEGLIGIBLE = 0.9, 1e-3
"""Share of blind reuse's KL that a sufficient rank removes; mean KL, in nats, below which patches are hardly needed."""
LEAST_BOUND = 1e-6
"""Nats. Rounding of float32 logits alone reaches this order, so no smaller bound is certified."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of windows of one size: KL and flips by mode, [answers], with each answer's window and its half."""

    kl: Mapping[Mode, Values]
    flips: Mapping[Mode, Values]
    cluster: Clusters
    held_out: Bool[np.ndarray, " answers"]

    @classmethod
    def of(cls, parts: Sequence[Sequence[Record]]) -> "Scores":
        """Joins the records of batches: each part's windows first, then its modes."""
        kl, flips = dict[Mode, Values](), dict[Mode, Values]()
        for record in (record for _, *records in parts for record in records):
            mode = Mode(*record["mode"])
            for name, table in (("kl", kl), ("flips", flips)):
                table[mode] = np.append(table.get(mode, np.zeros(0)), np.asarray(record[name], float))
        clusters = [np.asarray(windows["cluster"], int) for windows, *_ in parts]
        sides = [np.full(len(windows["cluster"]), windows["held_out"]) for windows, *_ in parts]
        return cls(kl, flips, np.concatenate(clusters), np.concatenate(sides))

    def calibration(self, mode: Mode) -> tuple[Values, Clusters]:
        """Returns KL and window of the answers that calibrate."""
        return self.kl[mode][~self.held_out], self.cluster[~self.held_out]


def rows_of(by_size: Sequence[Scores], level: float) -> list[CertifiedLoss]:
    """Makes a certified row for every mode. InputError: too few calibration windows of a size.

    A bound is the largest of those of each size in which the mode was measured; means are over all windows of these.
    """
    rows = [_row(mode, by_size, level) for mode in {mode for scores in by_size for mode in scores.kl}]
    return sorted(rows, key=lambda row: (row.promise, row.point, row.behind, row.rank))


def _row(mode: Mode, by_size: Sequence[Scores], level: float) -> CertifiedLoss:
    measured = [scores for scores in by_size if mode in scores.kl]
    for scores in measured:
        if not np.isfinite(scores.kl[mode]).all():
            raise InputError(f"certificate.kl: got no number for an answer of {mode}; expected finite ones")
    bound = max(conformal_bound(*scores.calibration(mode), level) for scores in measured)
    bound = rounded_up(max(LEAST_BOUND, bound))
    # Of flips the upper end is a bound, so that of the worst size counts.
    highest = max(intervals.mean(scores.flips[mode], scores.cluster).high for scores in measured)
    kl, flips = (np.concatenate([getattr(scores, name)[mode] for scores in measured]) for name in ("kl", "flips"))
    cluster, held_out = (np.concatenate([getattr(s, name) for s in measured]) for name in ("cluster", "held_out"))
    coverage = _coverage(kl[held_out] <= bound, cluster[held_out])
    mean, flipped, eta = intervals.mean(kl, cluster), intervals.mean(flips, cluster), math.nan
    blind = Mode("bare", 0, mode.behind, mode.promise)
    if all(blind in scores.kl for scores in measured):
        eta = intervals.eta(kl, np.concatenate([scores.kl[blind] for scores in measured]), cluster).value
    return CertifiedLoss(
        *mode,
        # An interval always contains its value.
        *map(rounded, (mean.value, min(mean.low, mean.value), max(mean.high, mean.value))),
        kl_bound=bound,
        **coverage,
        eta=rounded(eta) if math.isfinite(eta) else None,
        flips=rounded(flipped.value),
        flips_high=rounded(max(highest, flipped.high, flipped.value)),
        answers=len(kl),
    )


def plan_row(records: Sequence[Record]) -> CertifiedPlan:
    """Makes the certified result of mixtures under one bound."""
    kl, cluster = (np.concatenate([record[name] for record in records]) for name in ("kl", "cluster"))
    goal, size = records[0]["goal"], records[0]["size"]
    return CertifiedPlan(
        name=f"mixed at random for at most {goal:.3g} nats, {size} chunks",
        kl=goal,
        windows=len(np.unique(cluster)),
        answers=len(kl),
        approximate=rounded(float(np.mean([record["share"] for record in records]))),
        **_coverage(kl <= goal, cluster),
    )


def _coverage(within: Bool[np.ndarray, " answers"], cluster: Clusters) -> dict[str, float]:
    share = covered(within, cluster)
    return {"coverage": rounded(share.value), "coverage_low": rounded(share.low), "coverage_high": rounded(share.high)}


def recommend(by_size: Sequence[Scores], goal: float | None, level: float) -> RankChoice:
    """Recommends the smallest sufficient rank of stored patches, by calibration windows alone, all chunks patched.

    Its bound is at most `goal` nats; without a goal it removes the share SUFFICIENT of blind reuse's KL.
    """
    cases = []
    for scores in by_size:
        others = max(mode.behind for mode in scores.kl if mode.point == "stored")
        blind = [mode for mode in scores.kl if mode.point == "bare" and mode.behind == others]
        cases += [(scores, mode) for mode in blind]
    ranks = sorted({mode.rank for mode in by_size[0].kl if mode.point == "stored"})
    most = max(float(scores.calibration(blind)[0].mean()) for scores, blind in cases)
    if goal is None and most < NEGLIGIBLE:
        reason = f"blind reuse alone loses {most:.2g} nats of an answer on average: hardly any patch is needed"
        return RankChoice(ranks[0], reason)

    result = ""
    for rank in ranks:
        bounds, shares = [], []
        for scores, blind in cases:
            kl, cluster = scores.calibration(blind._replace(point="stored", rank=rank))
            bounds.append(conformal_bound(kl, cluster, level))
            shares.append(intervals.eta(kl, scores.calibration(blind)[0], cluster).low)
        if goal is None:
            lost = f"what blind reuse loses ({most:.2g} nats)"
            result = f"with every chunk patched it removes at least {min(shares):.1%} of {lost}"
        else:
            result = f"an answer loses at most {max(bounds):.3g} nats at level {level:g}, of {goal:g} wanted"
        if min(shares) >= SUFFICIENT if goal is None else max(bounds) <= goal:
            return RankChoice(rank, f"the smallest at which, on calibration windows, {result}")
    return RankChoice(ranks[-1], f"the largest that was measured, and not enough: {result}")


def rounded_up(value: float) -> float:
    """Rounds a bound to six significant digits, never below its value."""
    nearest = rounded(value)
    return nearest if nearest >= value else rounded(value * (1 + 1e-5))


# ----------------------------------------------------------------------------------------------------------- bounds


def conformal_bound(values: np.ndarray, cluster: np.ndarray, level: float) -> float:
    """Bounds a random item of a new cluster with a probability of at least `level`.

    Hierarchical conformal prediction (Lee, Barber and Willett 2023): with K clusters of Nₖ items, an item has the
    weight 1 / ((K+1) Nₖ), and the cluster to come has 1 / (K+1) at infinity. The bound is the quantile at the level.

    Raises:
      InputError: too few clusters for the level: K of them reach K / (K + 1) at most.
    """
    clusters, where, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    weight = level * (len(clusters) + 1)
    if weight > len(clusters):
        least = least_clusters(level)
        raise InputError(f"bound: got {len(clusters)} clusters for level {level:g}; expected {least} or more")
    order = np.argsort(values, kind="stable")
    weights = np.cumsum(1 / counts[where[order]])
    place = int(np.searchsorted(weights, weight - 1e-9))
    return float(values[order[min(place, len(order) - 1)]])


def least_clusters(level: float) -> int:
    """Returns how many clusters a bound at a level needs."""
    return math.ceil(level / (1 - level) - 1e-9)


def covered(within: np.ndarray, cluster: np.ndarray) -> Interval:
    """Estimates the share of items within a bound, each cluster counting alike, with Wilson's interval over clusters.

    Items of one cluster may all be right or wrong together, so clusters are counted: that errs on the wide side. Unlike
    resampling, it gives an interval even if all are within.
    """
    clusters, where, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    share = float((np.bincount(where, within.astype(float)) / counts).mean())
    n, z = len(clusters), 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(share, max(0.0, min(middle - reach, share)), min(1.0, max(middle + reach, share)), len(cluster))
