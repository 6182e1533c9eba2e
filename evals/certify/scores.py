"""From what was said to certified rows: means, upper quantiles over calibration windows, their coverage on the others.

An answer is scored by KL(promised ‖ served). Answers behind one window are alike, windows are not: bounds are those of
hierarchical conformal prediction (Lee, Barber and Willett 2023), in which K windows with Nₖ answers each give the score
of an answer the weight 1 / ((K+1) Nₖ), and the window to come has 1 / (K+1) at infinity. A random answer behind a new
window like these is then within the quantile at a level with at least this probability.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import CertifiedLoss, CertifiedPlan, RankChoice

from ..results import intervals

Values = Float[np.ndarray, " answers"]
DIGITS = 6
REMOVED, ALIKE = 0.9, 1e-3
"""Of blind reuse's KL, what a sufficient rank removes; the mean KL, in nats, below which there is hardly any."""
LEAST = 1e-6
"""Nats that no bound is below: what rounding alone makes of logits in float32, and more."""
Key = tuple[str, int, int, str]


class Share(NamedTuple):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass
class Scores:
    """What was said in every way, answer by answer, under one order of the answers.

    Attributes:
      kl, flips: by way, [answers]. cluster: whose window, held_out: which side, [answers].
    """

    kl: dict[Key, list[Values]]
    flips: dict[Key, list[Values]]
    cluster: list[Int[np.ndarray, " answers"]]
    held_out: list[Bool[np.ndarray, " answers"]]

    @classmethod
    def none(cls) -> "Scores":
        """Nothing yet."""
        return cls({}, {}, [], [])

    def add(self, more: "Scores") -> None:
        """Adds what was said behind other windows."""
        for table, others in ((self.kl, more.kl), (self.flips, more.flips)):
            for key, values in others.items():
                table.setdefault(key, []).extend(values)
        self.cluster += more.cluster
        self.held_out += more.held_out

    def to_json(self) -> dict[str, Any]:
        """All of it, of JSON's types; numbers come back the same to the last bit."""
        tables = {"kl": self.kl, "flips": self.flips}
        said = {
            name: [[*key, [part.tolist() for part in values]] for key, values in table.items()]
            for name, table in tables.items()
        }
        return {**said, **{name: [part.tolist() for part in getattr(self, name)] for name in ("cluster", "held_out")}}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> "Scores":
        """Reads what `to_json` wrote."""
        table = lambda name: {tuple(key): [np.asarray(part, float) for part in parts] for *key, parts in written[name]}
        return cls(
            table("kl"),
            table("flips"),
            [np.asarray(part, int) for part in written["cluster"]],
            [np.asarray(part, bool) for part in written["held_out"]],
        )

    def of(self, key: Key) -> tuple[Values, Values]:
        """KL and flips of a way, all answers."""
        return np.concatenate(self.kl[key]), np.concatenate(self.flips[key])

    @property
    def sides(self) -> tuple[Int[np.ndarray, " answers"], Bool[np.ndarray, " answers"]]:
        """Clusters and sides of all answers."""
        return np.concatenate(self.cluster), np.concatenate(self.held_out)


def conformal_bound(values: Values, cluster: Int[np.ndarray, " answers"], level: float) -> float:
    """Upper quantile of a score of which a random answer behind a new window stays below with probability `level`.

    Raises:
      InputError: too few windows for the level: K of them reach K / (K + 1) at most.
    """
    windows, where, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    wanted = level * (len(windows) + 1)
    if wanted > len(windows):
        raise InputError(
            f"certify: {len(windows)} calibration windows for level {level:g}; expected {least_windows(level)} or more"
        )
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(1 / counts[where[order]])
    place = int(np.searchsorted(reached, wanted - 1e-9))
    return float(values[order[min(place, len(order) - 1)]])


def least_windows(level: float) -> int:
    """How many calibration windows a level takes."""
    return math.ceil(level / (1 - level) - 1e-9)


def covered(within: Bool[np.ndarray, " answers"], cluster: Int[np.ndarray, " answers"]) -> Share:
    """The share of answers within a bound, every window counting alike; Wilson's interval, as if of windows alone.

    Answers behind one window may all be right or wrong together: counting windows is the wide side of the truth, and
    unlike resampling it says something where all are within.
    """
    windows, where, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    share = float((np.bincount(where, within.astype(float)) / counts).mean())
    n, z = len(windows), 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Share(share, max(0.0, min(middle - reach, share)), min(1.0, max(middle + reach, share)))


def rows_of(scores: Scores, level: float) -> list[CertifiedLoss]:
    """A certified row for every way that was measured.

    Raises:
      InputError: too few calibration windows.
    """
    cluster, held_out = scores.sides
    rows = []
    for key in scores.kl:
        point, rank, behind, promise = key
        kl, flips = scores.of(key)
        bound = rounded_up(max(LEAST, conformal_bound(kl[~held_out], cluster[~held_out], level)))
        share = covered(kl[held_out] <= bound, cluster[held_out])
        mean, flipped = intervals.mean(kl, cluster), intervals.mean(flips, cluster)
        blind, _ = scores.of(("bare", 0, behind, promise))
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
                flips_high=rounded(max(flipped.high, flipped.value)),
                answers=len(kl),
            )
        )
    return rows


def recommend(scores: Scores, goal: float | None, level: float) -> RankChoice:
    """The smallest rank of stored patches that is enough, by calibration windows alone, all chunks being patched.

    Enough is a bound of `goal` nats; without a goal, a share REMOVED of blind reuse's KL. Under both promises.
    """
    cluster, held_out = scores.sides
    own, clusters = ~held_out, cluster[~held_out]
    keys = [key for key in scores.kl if key[0] == "stored" and key[2] == max(other[2] for other in scores.kl)]
    ranks = sorted({key[1] for key in keys})
    blind = {key[3]: scores.of(("bare", 0, key[2], key[3]))[0][own] for key in keys}
    most = max(float(values.mean()) for values in blind.values())
    if goal is None and most < ALIKE:
        return RankChoice(
            ranks[0], f"blind reuse alone loses {most:.2g} nats of an answer on average: hardly any patch is needed"
        )
    said = ""
    for rank in ranks:
        kl = {key[3]: scores.of(key)[0][own] for key in keys if key[1] == rank}
        if goal is not None:
            worst = max(conformal_bound(values, clusters, level) for values in kl.values())
            said, enough = (
                f"an answer loses at most {worst:.3g} nats at level {level:g}, of {goal:g} wanted",
                worst <= goal,
            )
        else:
            share = min(intervals.eta(kl[each], blind[each], clusters).low for each in kl)
            said = (
                f"with every chunk patched it removes at least {share:.1%} of what blind reuse loses ({most:.2g} nats)"
            )
            enough = share >= REMOVED
        if enough:
            return RankChoice(rank, f"the smallest at which, on calibration windows, {said}")
    return RankChoice(ranks[-1], f"the largest that was measured, and not enough: {said}")


def plan_row(
    name: str,
    bound: float,
    kl: Values,
    cluster: Int[np.ndarray, " answers"],
    approximate: float,
) -> CertifiedPlan:
    """What plans under a bound came to."""
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
    """A number of few digits."""
    return float(f"{value:.{DIGITS}g}")


def rounded_up(value: float) -> float:
    """A bound of few digits, not below what it is rounded from."""
    found = rounded(value)
    return found if found >= value else float(f"{value * (1 + 10 ** (1 - DIGITS)):.{DIGITS}g}")
