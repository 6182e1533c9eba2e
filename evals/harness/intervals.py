"""Bootstrap intervals of statistics over questions that come in clusters.

Questions about one context share its images, so contexts, not questions, are resampled. The resamples depend on the
number of contexts alone: two arms over the same questions are compared on the same draws (paired), and an interval
never depends on which other arms were run. All intervals are 95 % percentile intervals.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from kvpatch_jax.errors import InputError

Items = Shaped[np.ndarray, "items"]
LOW, HIGH = 2.5, 97.5
DRAWS = 1000
"""Resamples of an interval."""


class Interval(NamedTuple):
    """A statistic with its 95 % interval.

    value, low, high: in the unit of the statistic; low and high are NaN where no interval can be given (fewer than
    two contexts, a value that is not finite). n: how many items the value rests on.
    """

    value: float
    low: float
    high: float
    n: int


UNDEFINED = Interval(math.nan, math.nan, math.nan, 0)


def mean(values: Items, cluster: Items) -> Interval:
    """Estimates the mean over items, resampling whole clusters.

    Args:
      values: numbers or booleans [items].
      cluster: which context each item belongs to [items], any labels.
    """
    return ratio(values, np.ones(len(values)), cluster)


def paired_difference(a: Items, b: Items, cluster: Items) -> Interval:
    """Estimates the mean of a − b over items [items], resampling whole clusters."""
    return mean(np.asarray(a, np.float64) - np.asarray(b, np.float64), cluster)


def ratio(a: Items, b: Items, cluster: Items) -> Interval:
    """Estimates Σ a / Σ b over items [items], resampling whole clusters; NaN where Σ b is 0 or not finite.

    Resamples whose Σ b is 0 are left out of the interval; n is the number of items.
    """
    columns = np.stack([np.asarray(a, np.float64), np.asarray(b, np.float64)], axis=1)
    count, bottom = len(columns), columns[:, 1].sum()
    if not count or bottom == 0 or not math.isfinite(bottom):
        return UNDEFINED._replace(n=count)

    value = float(columns[:, 0].sum() / bottom)
    labels, where = np.unique(cluster, return_inverse=True)
    if len(labels) < 2 or not np.isfinite(columns).all():
        return Interval(value, math.nan, math.nan, count)

    # Summed by cluster first, a resample is a weighted sum of clusters: one matrix product for all draws.
    sums = np.stack([np.bincount(where, column, len(labels)) for column in columns.T], axis=1)
    drawn = _resamples(len(labels)) @ sums
    drawn = drawn[drawn[:, 1] != 0]
    if not len(drawn):
        return Interval(value, math.nan, math.nan, count)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [LOW, HIGH])
    return Interval(value, float(low), float(high), count)


def eta(kl_arm: Items, kl_blind: Items, cluster: Items) -> Interval:
    """Estimates η = 1 − Σ KL(re-prefill‖arm) / Σ KL(re-prefill‖blind), the share of blind's KL an arm removes.

    Args:
      kl_arm, kl_blind: nats per item [items].
      cluster: as in `mean`.

    Returns:
      1 for re-prefill, 0 for blind reuse, negative for an arm worse than blind; NaN where Σ KL(blind) is 0 or not
      finite. n is the number of items.
    """
    # 1 − x turns the interval round: its low end comes from the ratio's high end.
    share = ratio(kl_arm, kl_blind, cluster)
    return Interval(1 - share.value, 1 - share.high, 1 - share.low, share.n)


def flip_recover(
    reference_pred: Items,
    blind_pred: Items,
    arm_pred: Items,
    cluster: Items,
) -> Interval:
    """Estimates the share an arm brings back of the items whose re-prefill decision blind reuse flips.

    Args:
      reference_pred, blind_pred, arm_pred: decisions [items] (token ids) of re-prefill, blind reuse and the arm.
      cluster: as in `mean`.

    Returns:
      The share in 0…1; n is the number of flips; NaN when blind reuse flips nothing.
    """
    flipped = reference_pred != blind_pred
    share = ratio(flipped & (arm_pred == reference_pred), flipped, cluster)
    return share._replace(n=int(flipped.sum()))


def conformal_bound(values: Items, cluster: Items, level: float) -> float:
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


def covered(within: Items, cluster: Items) -> Interval:
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


@functools.lru_cache(maxsize=8)
def _resamples(clusters: int) -> Shaped[np.ndarray, "draws clusters"]:
    """Draws how often each cluster is in a resample; cached, for every arm of a probe is compared on the same draws."""
    counts = np.random.default_rng(0).multinomial(clusters, np.full(clusters, 1 / clusters), DRAWS)
    counts = counts.astype(np.float64)
    counts.flags.writeable = False
    return counts
