"""From scored answers to certified rows: means, upper quantiles of calibration windows, coverage of held-out ones.

An answer is scored by KL(promised ‖ served). Answers behind one window are alike, windows are not. Bounds are therefore
those of hierarchical conformal prediction (Lee, Barber and Willett 2023): with K windows of Nₖ answers each, the score
of an answer has the weight 1 / ((K+1) Nₖ), and the window to come has 1 / (K+1) at infinity. A random answer behind a
new window of this kind is then within the quantile at a level with at least that probability.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import CertifiedLoss, CertifiedPlan, RankChoice

from ..harness import intervals

Values = Float[np.ndarray, " answers"]
Clusters = Int[np.ndarray, " answers"]
DIGITS = 6
SUFFICIENT, NEGLIGIBLE = 0.9, 1e-3
"""Share of blind reuse's KL that a sufficient rank removes; mean KL, in nats, below which patches are hardly needed."""
LEAST_BOUND = 1e-6
"""Nats. Rounding of float32 logits alone reaches this order, so no smaller bound is certified."""
Key = tuple[str, int, int, str]
"""Point, rank, other chunks, promise."""


class Share(NamedTuple):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass
class Scores:
    """Scores of windows of one size in every mode, under one order of the answers; each list has an array per batch.

    Attributes:
      kl, flips: by mode, [answers].
      cluster: number of the window. held_out: whether that is held out.
    """

    kl: dict[Key, list[Values]] = dataclasses.field(default_factory=dict)
    flips: dict[Key, list[Values]] = dataclasses.field(default_factory=dict)
    cluster: list[Clusters] = dataclasses.field(default_factory=list)
    held_out: list[Bool[np.ndarray, " answers"]] = dataclasses.field(default_factory=list)

    def add(self, more: "Scores") -> None:
        """Appends the scores of other windows."""
        for table, others in ((self.kl, more.kl), (self.flips, more.flips)):
            for key, values in others.items():
                table.setdefault(key, []).extend(values)
        self.cluster += more.cluster
        self.held_out += more.held_out

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values that restore the scores bit by bit."""
        written: dict[str, Any] = {}
        for name, table in (("kl", self.kl), ("flips", self.flips)):
            written[name] = []
            for key, values in table.items():
                written[name].append([*key, [part.tolist() for part in values]])
        for name, parts in (("cluster", self.cluster), ("held_out", self.held_out)):
            written[name] = [part.tolist() for part in parts]
        return written

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> "Scores":
        """Reads what `to_json` returned."""
        scores = cls()
        for name, table in (("kl", scores.kl), ("flips", scores.flips)):
            for point, rank, behind, promise, parts in written[name]:
                table[point, rank, behind, promise] = [np.asarray(part, float) for part in parts]
        scores.cluster = [np.asarray(part, int) for part in written["cluster"]]
        scores.held_out = [np.asarray(part, bool) for part in written["held_out"]]
        return scores

    def of(self, key: Key) -> tuple[Values, Values]:
        """Returns KL and flips of all answers in a mode."""
        return np.concatenate(self.kl[key]), np.concatenate(self.flips[key])

    @property
    def sides(self) -> tuple[Clusters, Bool[np.ndarray, " answers"]]:
        """Window, and whether it is held out, of all answers."""
        return np.concatenate(self.cluster), np.concatenate(self.held_out)


def conformal_bound(values: Values, cluster: Clusters, level: float) -> float:
    """Returns the bound that a random answer behind a new window stays within with probability `level`.

    Raises:
      InputError: too few windows for the level: K of them reach K / (K + 1) at most.
    """
    windows, where, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    wanted = level * (len(windows) + 1)
    if wanted > len(windows):
        least = least_windows(level)
        raise InputError(
            f"certify: got {len(windows)} calibration windows for level {level:g}; expected {least} or more"
        )

    order = np.argsort(values, kind="stable")
    weights = np.cumsum(1 / counts[where[order]])
    place = int(np.searchsorted(weights, wanted - 1e-9))
    return float(values[order[min(place, len(order) - 1)]])


def least_windows(level: float) -> int:
    """Returns how many calibration windows a level needs."""
    return math.ceil(level / (1 - level) - 1e-9)


def covered(within: Bool[np.ndarray, " answers"], cluster: Clusters) -> Share:
    """Returns the share of answers within a bound, each window counting alike, with Wilson's interval over windows.

    Answers behind one window may all be right or wrong together, so windows are counted: that errs on the wide side.
    Unlike resampling, it gives an interval even if all are within.
    """
    windows, where, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    share = float((np.bincount(where, within.astype(float)) / counts).mean())
    n, z = len(windows), 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Share(share, max(0.0, min(middle - reach, share)), min(1.0, max(middle + reach, share)))


def rows_of(by_size: Sequence[Scores], level: float) -> list[CertifiedLoss]:
    """Returns a certified row for every mode.

    A bound holds for windows of each size in which the mode was measured: it is the largest of theirs, each of the
    size's own calibration windows. Means are over all windows of all these sizes.

    Args:
      by_size: scores of the windows of each size.

    Raises:
      InputError: too few calibration windows of a size.
    """
    rows = []
    for key in dict.fromkeys(key for scores in by_size for key in scores.kl):
        point, rank, behind, promise = key
        measured = [scores for scores in by_size if key in scores.kl]
        bounds, high = [], []
        for scores in measured:
            own, flips = scores.of(key)
            cluster, held_out = scores.sides
            bounds.append(conformal_bound(own[~held_out], cluster[~held_out], level))
            high.append(intervals.mean(flips, cluster).high)
        bound = rounded_up(max(LEAST_BOUND, *bounds))

        kl, flips = (np.concatenate(parts) for parts in zip(*(scores.of(key) for scores in measured), strict=True))
        cluster, held_out = (np.concatenate(parts) for parts in zip(*(own.sides for own in measured), strict=True))
        share = covered(kl[held_out] <= bound, cluster[held_out])

        # An interval always contains its value. Of flips the upper end is a bound, so that of the worst size counts.
        mean, flipped = intervals.mean(kl, cluster), intervals.mean(flips, cluster)
        eta = math.nan
        if all(("bare", 0, behind, promise) in scores.kl for scores in measured):
            blind = np.concatenate([scores.of(("bare", 0, behind, promise))[0] for scores in measured])
            eta = intervals.eta(kl, blind, cluster).value
        rows.append(
            CertifiedLoss(
                point=point,
                rank=rank,
                behind=behind,
                promise=promise,  # pyright: ignore[reportArgumentType]
                kl=rounded(mean.value),
                kl_low=rounded(min(mean.low, mean.value)),
                kl_high=rounded(max(mean.high, mean.value)),
                kl_bound=bound,
                coverage=rounded(share.value),
                coverage_low=rounded(share.low),
                coverage_high=rounded(share.high),
                eta=rounded(eta) if math.isfinite(eta) else None,
                flips=rounded(flipped.value),
                flips_high=rounded(max(*high, flipped.high, flipped.value)),
                answers=len(kl),
            )
        )

    return rows


def recommend(by_size: Sequence[Scores], goal: float | None, level: float) -> RankChoice:
    """Recommends the smallest sufficient rank of stored patches, by calibration windows alone, all chunks patched.

    A rank suffices if its bound is at most `goal` nats; without a goal, if it removes the share SUFFICIENT of blind
    reuse's KL. Both promises must agree, and windows of all sizes.
    """
    # Of each promise and size: blind reuse's KL, that of every rank, and the windows.
    cases = []
    for scores in by_size:
        cluster, held_out = scores.sides
        others = max(behind for point, _, behind, _ in scores.kl if point == "stored")
        for promise in sorted({promise for *_, promise in scores.kl}):
            patched = {}
            for key in scores.kl:
                if (key[0], *key[2:]) == ("stored", others, promise):
                    patched[key[1]] = scores.of(key)[0][~held_out]
            if patched:
                blind = scores.of(("bare", 0, others, promise))[0][~held_out]
                cases.append((blind, patched, cluster[~held_out]))

    ranks = sorted(cases[0][1])
    most = max(float(blind.mean()) for blind, _, _ in cases)
    if goal is None and most < NEGLIGIBLE:
        reason = f"blind reuse alone loses {most:.2g} nats of an answer on average: hardly any patch is needed"
        return RankChoice(ranks[0], reason)

    result = ""
    for rank in ranks:
        if goal is None:
            share = min(intervals.eta(kl[rank], blind, cluster).low for blind, kl, cluster in cases)
            lost = f"what blind reuse loses ({most:.2g} nats)"
            result = f"with every chunk patched it removes at least {share:.1%} of {lost}"
            sufficient = share >= SUFFICIENT
        else:
            worst = max(conformal_bound(kl[rank], cluster, level) for _, kl, cluster in cases)
            result = f"an answer loses at most {worst:.3g} nats at level {level:g}, of {goal:g} wanted"
            sufficient = worst <= goal

        if sufficient:
            return RankChoice(rank, f"the smallest at which, on calibration windows, {result}")

    return RankChoice(ranks[-1], f"the largest that was measured, and not enough: {result}")


def plan_row(name: str, bound: float, kl: Values, cluster: Clusters, approximate: float) -> CertifiedPlan:
    """Returns the certified result of plans under a bound."""
    share = covered(kl <= bound, cluster)
    return CertifiedPlan(
        name=name,
        kl=bound,
        windows=len(np.unique(cluster)),
        answers=len(kl),
        approximate=rounded(approximate),
        coverage=rounded(share.value),
        coverage_low=rounded(share.low),
        coverage_high=rounded(share.high),
    )


def rounded(value: float) -> float:
    """Rounds to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def rounded_up(value: float) -> float:
    """Rounds a bound to DIGITS significant digits, never below its value."""
    nearest = rounded(value)
    return nearest if nearest >= value else float(f"{value * (1 + 10 ** (1 - DIGITS)):.{DIGITS}g}")
