"""Who wins at each number of antecedents: total bytes, Pareto fronts, the fewest bytes at a quality."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..harness.frame import Rows
from ..harness.intervals import Interval
from .arms import BASES_ALONE, OURS, RIVALS, SIMPLE, BytesArm, all_arms

COUNTS = (1, 2, 4, 16)
"""Antecedents of one chunk."""
ENOUGH = 0.93
"""η at which bytes are compared."""
BARS = {2: 0.85, 4: 0.5, 16: 0.3}
"""At most so many times the best simple rival's bytes, by antecedents."""
JUDGED = (SIMPLE, OURS, RIVALS, BASES_ALONE)
"""Families that something can be kept of."""


@dataclasses.dataclass(frozen=True)
class Point:
    """An arm at a number of antecedents.

    Attributes:
      arm: what is kept. row: name of its rows. probe: where they are.
      total: bytes per antecedent, all of them, as a share of the KV's. eta: share of blind reuse's KL that it removes.
    """

    arm: BytesArm
    row: str
    probe: str
    total: float
    eta: Interval


def total_share(kept: float, once: float, antecedents: int) -> float:
    """Computes all that is kept for each antecedent: its own, and an N-th of what is kept once."""
    return kept + once / antecedents


def points_of(results: Mapping[str, Any], model: str, probe: str, antecedents: int) -> list[Point]:
    """Lists the arms of a model at a number of antecedents.

    An arm whose base depends on that number is taken where it was measured with as many. Sixteen were measured on
    chunks of their own (probe "….16"): there arms are read, where there are such rows, and published rivals elsewhere.
    """
    own = f"{probe}.{antecedents}"
    rows, known = Rows(results, model), all_arms()
    measured = any(where == own for where, _, _ in rows.table)
    found = []
    for where in (own, probe) if measured else (probe,):
        for row in rows.arms(where):
            name, _, count = row.partition("@")
            arm = known.get(name)
            if arm is None or arm.family not in JUDGED or (count and int(count) != antecedents):
                continue
            # Rivals that were not measured there keep as much for any number of antecedents.
            if measured and where == probe and arm.family != RIVALS:
                continue
            kept, once = (rows.get(where, row, metric).value for metric in ("kept", "once"))
            eta = rows.get(where, row, "eta")
            if math.isfinite(eta.value) and math.isfinite(kept):
                found.append(Point(arm, row, where, total_share(kept, once, antecedents), eta))
    return found


def front(points: Iterable[Point]) -> list[Point]:
    """Picks the points that no other has at least the η of for at most the bytes; fewest bytes first."""
    best, picked = -math.inf, []
    for point in sorted(points, key=lambda point: (point.total, -point.eta.value)):
        if point.eta.value > best:
            picked.append(point)
            best = point.eta.value
    return picked


def cheapest(points: Iterable[Point], families: Sequence[str], enough: float = ENOUGH) -> Point | None:
    """Finds the fewest bytes at a quality among families; None where none reaches it."""
    reached = [point for point in points if point.arm.family in families and point.eta.value >= enough]
    return min(reached, key=lambda point: point.total, default=None)


@dataclasses.dataclass(frozen=True)
class Winner:
    """Who keeps the fewest bytes at a number of antecedents.

    Attributes:
      antecedents: N. winner: of all families. ours, simple, rival: of a patch, of KV in few bits, of published rivals.
    """

    antecedents: int
    winner: Point | None
    ours: Point | None
    simple: Point | None
    rival: Point | None

    @property
    def ratio(self) -> float | None:
        """Our bytes over the best simple rival's; None where either is missing."""
        if self.ours is None or self.simple is None:
            return None
        return self.ours.total / self.simple.total

    @property
    def within(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        bar = BARS.get(self.antecedents)
        return None if bar is None or self.ratio is None else self.ratio <= bar


def winners(results: Mapping[str, Any], model: str, probe: str, counts: Sequence[int] = COUNTS) -> list[Winner]:
    """Finds who wins at each number of antecedents, of a model."""
    found = []
    for count in counts:
        points = points_of(results, model, probe, count)
        by_family = [cheapest(points, (family,)) for family in (OURS, SIMPLE, RIVALS)]
        found.append(Winner(count, cheapest(points, JUDGED), *by_family))
    return found
