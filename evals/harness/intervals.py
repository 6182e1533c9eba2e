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


@functools.lru_cache(maxsize=8)
def _resamples(clusters: int) -> Shaped[np.ndarray, "draws clusters"]:
    """Draws how often each cluster is in a resample; cached, for every arm of a probe is compared on the same draws."""
    counts = np.random.default_rng(0).multinomial(clusters, np.full(clusters, 1 / clusters), DRAWS)
    counts = counts.astype(np.float64)
    counts.flags.writeable = False
    return counts
