"""Choosing among the options of all pieces: the least cost within bounds, exactly, by the rule that bounds compose by.

The rule is the certificate's own (`Certificate.together`): an answer behind a window loses no more than behind one of
which every piece from the first approximate one on is served in the worst of the ways that are taken; what is prefilled
there counts among them, for it reads what is approximate. So a choice is the first place that may be approximate and
the ways that may be taken from there on, and given both every piece takes its cheapest option.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .serving_options import UNKNOWN, ServingOption, Way

Unknown = Literal["none", "patches", "all"]
"""Which ways that nothing bounds are taken: none; what stands already, and of each piece the patch of largest rank that
belongs there; all."""


class CertifiedBounds:
    """What a certificate bounds, looked up once. None: nothing is certified.

    Attributes:
      beyond: in what the window is beyond all that the certificate was measured on; then nothing is certified.
    """

    def __init__(self, certificate: Any, promise: str, most: int, beyond: str | None = None):
        """Asks a `Certificate` for what a window of at most so many pieces promises."""
        self._certificate, self._promise, self._most = None if beyond else certificate, promise, most
        self.beyond = beyond
        self._rows: dict[tuple[str, Way], list[float]] = {}

    def kl(self, way: Way, others: int) -> float | None:
        """Nats of an answer behind a window of so many other approximate pieces; None where nothing bounds it."""
        found = self.growing("bound", way)
        return found[others] if others < len(found) else None

    def flips(self, way: Way, others: int) -> float | None:
        """Share of answers likewise."""
        found = self.growing("flips", way)
        return found[others] if others < len(found) else None

    def growing(self, what: Literal["bound", "flips"], way: Way) -> list[float]:
        """The numbers of 0, 1, … other approximate pieces, as far as they are certified; they never fall."""
        found = self._rows.get((what, way))
        if found is None:
            found = []
            if self._certificate is not None and way != UNKNOWN:
                found = self._certificate.growing(what, *way, promise=self._promise, most=self._most)
            self._rows[what, way] = found
        return found


@dataclasses.dataclass(frozen=True)
class OptionSelection:
    """An option for each piece, and bounds of an answer behind all of them; None where nothing bounds it."""

    options: list[ServingOption]
    kl: float | None
    flips: float | None

    @functools.cached_property
    def seconds(self) -> float:
        """Of all pieces."""
        return sum(option.seconds for option in self.options)

    @functools.cached_property
    def bytes(self) -> int:
        """Of all pieces."""
        return sum(option.bytes for option in self.options)


class OptionSolver:
    """The options of all pieces, and the bounds of their ways.

    Pieces of which something is to be chosen are its places; their options lie in a row, place after place, in each
    those first that are as promised.
    """

    def __init__(self, options: Sequence[Sequence[ServingOption]], bounds: CertifiedBounds):
        """Args: as `Menu.options` gives them, the promised one first."""
        self.options, self.bounds = options, bounds
        self.places = [index for index, own in enumerate(options) if own[0].open or len(own) > 1]
        self._row: list[ServingOption] = []
        begins, ends, number_of = [], [], list[int]()
        for number, place in enumerate(self.places):
            own = options[place]
            begins.append(len(self._row))
            self._row += own if len(own) == 1 or own[1].way is not None else sorted(own, key=_is_reuse)
            ends.append(len(self._row))
            number_of += [number] * len(own)
        columns = [*zip(*self._row, strict=True)] or [()] * len(ServingOption._fields)
        _, _, nbytes, _, seconds, way, reads, _ = columns
        self.ways: list[Way] = sorted(set(way) - {None})

        numbers = {None: -1, **{way: number for number, way in enumerate(self.ways)}}
        self._begins, self._ends, self._place = (np.array(each, int) for each in (begins, ends, number_of))
        self._way = np.array([numbers[each] for each in way], int)
        self._reads = np.array(reads, bool) | (self._way >= 0)
        self._seconds, self._bytes = np.array(seconds, float), np.array(nbytes, float)
        self._found: dict[tuple[tuple[int, ...], Unknown, float], OptionSelection] = {}

    def within(self, kl: float, flips: float, unknown: Unknown = "none", per_byte: float = 0.0) -> OptionSelection:
        """The cheapest choice of which an answer loses at most this.

        Args:
          kl, flips: bounds; infinite ones take every way that is certified at all.
          unknown: which ways that are not certified are taken too.
          per_byte: seconds that a byte counts for; infinite: bytes alone count.
        """
        fitting = tuple(self._fitting(way, kl, flips) for way in self.ways)
        found = self._found.get((fitting, unknown, per_byte))
        if found is None:
            costs = self._bytes if math.isinf(per_byte) else self._seconds + per_byte * self._bytes
            if unknown == "none":
                found = self._bounded(self._cheapest(costs, fitting))
            else:
                found = self._bounded(self._cheapest_of_unknown(costs, fitting, unknown))
            self._found[fitting, unknown, per_byte] = found
        return found

    def limits(self) -> list[float]:
        """The bounds on KL at which something more can be taken, ascending, from 0."""
        count = len(self.places)
        return sorted({0.0}.union(*(self.bounds.growing("bound", way)[:count] for way in self.ways)))

    def affordable(
        self, limits: tuple[float, float], kl: float, flips: float, unknown: Unknown = "none"
    ) -> OptionSelection | None:
        """A choice within bounds and a budget of (seconds, bytes); None where none was found."""
        seconds, nbytes = limits
        fits = lambda chosen: chosen.seconds <= seconds and chosen.bytes <= nbytes
        quickest = self.within(kl, flips, unknown)
        if fits(quickest):
            return quickest
        if quickest.seconds > seconds:
            return None
        smallest = self.within(kl, flips, unknown, math.inf)
        if smallest.bytes > nbytes:
            return None
        if fits(smallest):
            found, low, high = smallest, 1e-15, 1.0
            for _ in range(12):  # quicker ones that still fit
                middle = math.sqrt(low * high)
                chosen = self.within(kl, flips, unknown, middle)
                if fits(chosen):
                    found, high = min(found, chosen, key=lambda each: each.seconds), middle
                else:
                    low = middle
            return found
        for power in range(-15, 1):
            chosen = self.within(kl, flips, unknown, 10.0**power)
            if fits(chosen):
                return chosen
        return None

    def truest(self, limits: tuple[float, float], kl: float, flips: float) -> OptionSelection | None:
        """The choice within a budget of (seconds, bytes) whose bound on KL is least, and at most `kl`."""
        steps = [limit for limit in self.limits() if limit <= kl]
        if self.affordable(limits, steps[-1], flips) is None:
            return None
        place = bisect.bisect_left(
            range(len(steps)), True, key=lambda place: self.affordable(limits, steps[place], flips) is not None
        )
        return self.affordable(limits, steps[min(place, len(steps) - 1)], flips)

    # ------------------------------------------------------------------------------------------------ inside

    def _fitting(self, way: Way, kl: float, flips: float) -> int:
        """Of how many pieces that are approximate together, this way among them, an answer stays within bounds."""
        count = bisect.bisect_right(self.bounds.growing("bound", way), kl)
        if flips < 1.0:
            count = min(count, bisect.bisect_right(self.bounds.growing("flips", way), flips))
        return min(count, len(self.places))

    def _cheapest(self, costs: np.ndarray, fitting: Sequence[int]) -> np.ndarray:
        """For each place which option of the row is taken, over all first places and ways behind them."""
        count = len(self.places)
        if not count:
            return np.empty(0, int)
        fits = np.array([*fitting, count])[self._way]  # the last one is that of options as promised, whose way is -1
        promised = _behind(self._least(costs, self._way < 0))
        best, first, allowed, low = promised[0], count, 0, 0
        for high in sorted(set(fitting) - {0}):
            # From `low` to `high` - 1 pieces may stand behind the first one: then these ways fit, and no others.
            behind = _behind(self._least(costs, fits >= high))
            firsts = np.arange(count - 1 - low, count - 1 - high, -1)
            together = promised[0] - promised[firsts] + behind[firsts]
            cheapest = int(together.argmin())
            if together[cheapest] < best:
                best, first, allowed = together[cheapest], int(firsts[cheapest]), high
            low = high
        return self._taken(costs, (self._way < 0) | ((fits >= allowed) & (self._place >= first)))

    def _cheapest_of_unknown(self, costs: np.ndarray, fitting: Sequence[int], unknown: Unknown) -> np.ndarray:
        """The same where ways that nothing bounds are taken too."""
        count, taken = len(self.places), []
        for begin, end in zip(self._begins, self._ends, strict=True):
            own = range(begin, end)
            allowed = [*own]
            if unknown == "patches":
                allowed = [at for at in own if self._way[at] < 0 or fitting[self._way[at]] == count]
                others = [at for at in own if self._way[at] >= 0]
                allowed += [at for at in others if self._row[at].service.how == "keep"]
                patches = [at for at in others if self._row[at].stocked is not None and self._row[at].way != UNKNOWN]
                allowed += [max(patches, key=lambda at: self._row[at].rank)] if patches else []
            taken.append(min(allowed, key=costs.__getitem__))
        return np.array(taken, int)

    def _least(self, costs: np.ndarray, may: np.ndarray) -> np.ndarray:
        """The least cost of each place among the options that may be taken."""
        return np.minimum.reduceat(np.where(may, costs, np.inf), self._begins)

    def _taken(self, costs: np.ndarray, may: np.ndarray) -> np.ndarray:
        """For each place the first among the cheapest options that may be taken."""
        least = self._least(costs, may)
        at = np.flatnonzero(may & (costs == least[self._place]))[::-1]
        taken = np.empty(len(self.places), int)
        taken[self._place[at]] = at  # of several the last one written stays, which is the first in the row
        return taken

    def _bounded(self, taken: np.ndarray) -> OptionSelection:
        """A choice with its bounds; pieces of which nothing is to be chosen as they are."""
        chosen = [own[0] for own in self.options]
        for place, at in zip(self.places, taken.tolist(), strict=True):
            chosen[place] = self._row[at]
        approximate = np.flatnonzero(self._way[taken] >= 0)
        if not len(approximate):
            return OptionSelection(chosen, 0.0, 0.0)
        behind = taken[approximate[0] :]
        others = int(self._reads[behind].sum()) - 1
        ways = [self.ways[number] for number in set(self._way[behind].tolist()) - {-1}]
        kl, flips = ([of(way, others) for way in ways] for of in (self.bounds.kl, self.bounds.flips))
        return OptionSelection(chosen, _largest(kl), _largest(flips))


def _is_reuse(option: ServingOption) -> bool:
    return option.way is not None


def _behind(costs: np.ndarray) -> np.ndarray:
    """Their sums from each on; 0 from behind the last."""
    return np.append(np.cumsum(costs[::-1])[::-1], 0.0)


def _largest(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return max(known) if len(known) == len(numbers) else None
