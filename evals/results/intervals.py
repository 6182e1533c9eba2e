"""Bootstrap intervals of statistics over questions that come in clusters.

Questions about one context share its images, so contexts, not questions, are resampled. The resamples depend on the
number of contexts and the seed alone: two arms over the same questions are compared on the same draws (paired), and
an interval never depends on which other arms were run. All intervals are 95 % percentile intervals.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

Items = Shaped[np.ndarray, "items"]
LOW, HIGH = 2.5, 97.5


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


def mean(values: Items, cluster: Items, seed: int = 0, draws: int = 1000) -> Interval:
    """Estimates the mean over items, resampling whole clusters.

    Args:
      values: numbers or booleans [items].
      cluster: which context each item belongs to [items], any labels.
      seed: of the resamples; the same seed gives the same draws to every arm.
      draws: how many resamples.

    Raises:
      ValueError: lengths differ, or draws < 1.
    """
    return ratio(values, np.ones(len(values)), cluster, seed, draws)


def paired_difference(a: Items, b: Items, cluster: Items, seed: int = 0, draws: int = 1000) -> Interval:
    """Estimates the mean of a − b over items [items], resampling whole clusters. Raises ValueError as `mean` does."""
    _check(a, b, cluster)
    return mean(np.asarray(a, np.float64) - np.asarray(b, np.float64), cluster, seed, draws)


def ratio(a: Items, b: Items, cluster: Items, seed: int = 0, draws: int = 1000) -> Interval:
    """Estimates Σ a / Σ b over items [items], resampling whole clusters; NaN where Σ b is 0 or not finite.

    Resamples whose Σ b is 0 are left out of the interval; n is the number of items. Raises ValueError as `mean` does.
    """
    _check(a, b, cluster)
    columns = np.stack([np.asarray(a, np.float64), np.asarray(b, np.float64)], axis=1)
    count = len(columns)
    bottom = columns[:, 1].sum()
    if not count or bottom == 0 or not math.isfinite(bottom):
        return UNDEFINED._replace(n=count)

    value = float(columns[:, 0].sum() / bottom)
    # Summed by cluster first, a resample is a weighted sum of clusters: one matrix product for all draws.
    sums, counts = _cluster_sums(columns, cluster), _resamples(len(np.unique(cluster)), seed, draws)
    if counts is None or not np.isfinite(columns).all():
        return Interval(value, math.nan, math.nan, count)

    drawn = counts @ sums
    drawn = drawn[drawn[:, 1] != 0]
    return _interval(value, drawn[:, 0] / drawn[:, 1], count)


def eta(kl_arm: Items, kl_blind: Items, cluster: Items, seed: int = 0, draws: int = 1000) -> Interval:
    """Estimates η = 1 − Σ KL(re-prefill‖arm) / Σ KL(re-prefill‖blind), the share of blind's KL an arm removes.

    Args:
      kl_arm, kl_blind: nats per item [items].
      cluster, seed, draws: as in `mean`.

    Returns:
      1 for re-prefill, 0 for blind reuse, negative for an arm worse than blind; NaN where Σ KL(blind) is 0 or not
      finite. n is the number of items.

    Raises:
      ValueError: lengths differ, or draws < 1.
    """
    # 1 − x turns the interval round: its low end comes from the ratio's high end.
    share = ratio(kl_arm, kl_blind, cluster, seed, draws)
    return Interval(1 - share.value, 1 - share.high, 1 - share.low, share.n)


def median_eta(
    kl_arm: Items,
    kl_blind: Items,
    kl_control: Items,
    cluster: Items,
    seed: int = 0,
    draws: int = 1000,
) -> Interval:
    """Estimates the median of 1 − KL(arm)/KL(blind) where KL(blind) > 10 × the position-matched control's KL.

    Elsewhere the per-item quotient is noise. n is the number of items kept; NaN when none is.
    Arguments [items] in nats, and errors, as for `eta`.
    """
    _check(kl_arm, kl_blind, kl_control, cluster)
    arm, blind = np.asarray(kl_arm, np.float64), np.asarray(kl_blind, np.float64)
    keep = blind > 10 * np.asarray(kl_control, np.float64)
    kept = int(keep.sum())
    if not kept:
        return UNDEFINED

    quotient = 1 - arm[keep] / blind[keep]
    value = float(np.median(quotient))
    labels, where = np.unique(cluster, return_inverse=True)
    counts = _resamples(len(labels), seed, draws)
    if counts is None or not np.isfinite(quotient).all():
        return Interval(value, math.nan, math.nan, kept)

    # A resample repeats items by whole numbers: its median is a weighted one over the values sorted once.
    order = np.argsort(quotient)
    return _interval(value, _weighted_medians(quotient[order], counts[:, where[keep][order]]), kept)


def flip_recover(
    reference_pred: Items,
    blind_pred: Items,
    arm_pred: Items,
    cluster: Items,
    seed: int = 0,
    draws: int = 1000,
) -> Interval:
    """Estimates the share an arm brings back of the items whose re-prefill decision blind reuse flips.

    Args:
      reference_pred, blind_pred, arm_pred: decisions [items] (token ids) of re-prefill, blind reuse and the arm.
      cluster, seed, draws: as in `mean`.

    Returns:
      The share in 0…1; n is the number of flips; NaN when blind reuse flips nothing.

    Raises:
      ValueError: lengths differ, or draws < 1.
    """
    _check(reference_pred, blind_pred, arm_pred, cluster)
    flipped = reference_pred != blind_pred
    share = ratio(flipped & (arm_pred == reference_pred), flipped, cluster, seed, draws)
    return share._replace(n=int(flipped.sum()))


def _check(*columns: np.ndarray) -> None:
    shapes = [np.shape(column) for column in columns]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"expected columns of one length, [items] each, got shapes {shapes}")


def _cluster_sums(columns: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """Sums per cluster [clusters, columns] of columns [items, columns], clusters in the order of their labels."""
    labels, where = np.unique(cluster, return_inverse=True)
    return np.stack([np.bincount(where, column, len(labels)) for column in columns.T], axis=1)


def _resamples(clusters: int, seed: int, draws: int) -> np.ndarray | None:
    """Returns how often each cluster is drawn [draws, clusters]; None for fewer than two clusters (nothing to
    resample).
    """
    if draws < 1:
        raise ValueError(f"expected at least one draw, got {draws}")
    return _multinomial(clusters, seed, draws) if clusters > 1 else None


@functools.lru_cache(maxsize=8)
def _multinomial(clusters: int, seed: int, draws: int) -> np.ndarray:
    # Cached: every arm of a probe is compared on the very same draws.
    counts = np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), draws)
    counts = counts.astype(np.float64)
    counts.flags.writeable = False
    return counts


def _weighted_medians(ordered: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Medians of ascending values [items], repeated by whole-number weights [draws, items]; empty draws left out."""
    reached = np.cumsum(weights, axis=1)
    total = reached[:, -1:]
    reached, total = reached[total[:, 0] > 0], total[total[:, 0] > 0]
    lower, upper = (reached >= total / 2).argmax(axis=1), (reached > total / 2).argmax(axis=1)
    return (ordered[lower] + ordered[upper]) / 2


def _interval(value: float, drawn: np.ndarray, n: int) -> Interval:
    if not drawn.size:
        return Interval(value, math.nan, math.nan, n)
    low, high = np.percentile(drawn, [LOW, HIGH])
    return Interval(value, float(low), float(high), n)
