"""Exact choice among the options of all pieces: the least cost within bounds, as certificates compose bounds.

`Certificate.together` states the rule: an answer behind a window loses no more than if every piece, from the first
approximate one on, were served in the worst of the ways used there. Pieces prefilled there count too, because they
read approximate KV. A selection is therefore the first place that may be approximate and the set of ways allowed from
there on; given both, every piece takes its cheapest option.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ..window import UNKNOWN, Promise, Ways
from .certificate import Certificate
from .serving_options import ServingOption

Uncertified = Literal["none", "patches", "all"]
"""Which options that nothing bounds may be used: none; pieces as they are and, of each piece, its valid patch of the
largest rank; all."""

BUDGET_STEPS = 12
"""Bisections of the price of a byte, from 1e-15 to 1 second."""


class CertifiedBounds:
    """Bounds of a certificate for one window, looked up once. None: nothing is certified.

    Attributes:
      beyond: how the window exceeds everything the certificate was measured on; then nothing is certified.
    """

    def __init__(self, certificate: Certificate | None, promise: Promise, most: int, beyond: str | None = None):
        """Prepares lookups for a window of at most `most` pieces with this promise."""
        self._certificate = None if beyond else certificate
        self._promise: Promise = promise
        self._most = most
        self.beyond = beyond
        self._rows: dict[tuple[str, Ways], list[float]] = {}

    def kl(self, ways: Ways, others: int) -> float | None:
        """Returns the bound in nats for an answer with so many other approximate pieces; None without a bound."""
        bounds = self.growing("bound", ways)
        return bounds[others] if others < len(bounds) else None

    def growing(self, what: Literal["bound", "flips"], ways: Ways) -> list[float]:
        """Returns the bounds with 0, 1, … other approximate pieces, as far as certified. They never decrease.

        Of a piece that is approximate in several ways, the worst one's.
        """
        bounds = self._rows.get((what, ways))
        if bounds is None:
            bounds = []
            if self._certificate is not None and UNKNOWN not in ways:
                growing = functools.partial(self._certificate.growing, promise=self._promise, most=self._most)
                bounds = [max(own) for own in zip(*(growing(what, *way) for way in ways), strict=False)]
            self._rows[what, ways] = bounds
        return bounds


@dataclasses.dataclass(frozen=True)
class OptionSelection:
    """One option for each piece, with bounds for an answer behind all of them; None where nothing bounds it."""

    options: list[ServingOption]
    kl: float | None
    flips: float | None

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted duration of all edits."""
        return sum(option.seconds for option in self.options)

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all edits."""
        return sum(option.bytes for option in self.options)

    def fits(self, seconds: float, nbytes: float) -> bool:
        """Returns whether it is within a budget."""
        return self.seconds <= seconds and self.bytes <= nbytes


class OptionSolver:
    """Solver over the options of all pieces.

    Pieces with a choice are *places*. The options of all places form one row, place after place; within a place,
    options that are as promised come first.

    Attributes:
      options: of each piece. bounds: of their ways. ways: all that occur, sorted.
    """

    def __init__(self, options: Sequence[Sequence[ServingOption]], bounds: CertifiedBounds):
        """Lays the row out as arrays. `options` are as `OptionTable.options` returns them, the promised one first."""
        self.options, self.bounds = options, bounds
        self._places = [index for index, own in enumerate(options) if own[0].inherits or len(own) > 1]
        self._row: list[ServingOption] = []
        begins, ends, place_of = [], [], list[int]()

        for number, place in enumerate(self._places):
            own = options[place]
            begins.append(len(self._row))
            # Sorting is stable and rarely needed: a second promised option exists only where KV can be restored.
            promised_first = len(own) == 1 or bool(own[1].ways)
            self._row += own if promised_first else sorted(own, key=lambda option: bool(option.ways))
            ends.append(len(self._row))
            place_of += [number] * len(own)

        # One transposition is quicker than attribute access per option: there may be thousands.
        columns = [*zip(*self._row, strict=True)] or [()] * len(ServingOption._fields)
        _, _, nbytes, _, seconds, ways_of, inherits, _ = columns
        self.ways: list[Ways] = sorted(set(ways_of) - {()})
        numbers = {(): -1, **{ways: number for number, ways in enumerate(self.ways)}}

        self._begins, self._ends, self._place = (np.array(column, int) for column in (begins, ends, place_of))
        self._way = np.array([numbers[ways] for ways in ways_of], int)  # -1: as promised
        self._counts_as_other = np.array(inherits, bool) | (self._way >= 0)
        self._seconds, self._bytes = np.array(seconds, float), np.array(nbytes, float)
        self._solved: dict[tuple[tuple[int, ...], Uncertified, float], OptionSelection] = {}

    def cheapest(
        self, kl: float, flips: float, uncertified: Uncertified = "none", seconds_per_byte: float = 0.0
    ) -> OptionSelection:
        """Returns the cheapest selection within bounds.

        Args:
          kl, flips: bounds; infinite ones allow every way that is certified at all.
          uncertified: which other options may be used.
          seconds_per_byte: weight of bytes in the cost; infinite: only bytes count.
        """
        # Selections depend on the bounds only through how many pieces each way may be combined with.
        limits = []
        for way in self.ways:
            limit = bisect.bisect_right(self.bounds.growing("bound", way), kl)
            if flips < 1.0:
                limit = min(limit, bisect.bisect_right(self.bounds.growing("flips", way), flips))
            limits.append(min(limit, len(self._places)))

        key = tuple(limits), uncertified, seconds_per_byte
        if key not in self._solved:
            costs = self._bytes if math.isinf(seconds_per_byte) else self._seconds + seconds_per_byte * self._bytes
            if uncertified == "none":
                chosen = self._cheapest_certified(costs, limits)
            else:
                chosen = self._cheapest_uncertified(costs, limits, uncertified)
            self._solved[key] = self._selection(chosen)

        return self._solved[key]

    def cheapest_in_budget(
        self, budget: tuple[float, float], kl: float, flips: float, uncertified: Uncertified = "none"
    ) -> OptionSelection | None:
        """Returns a selection within bounds and a budget of (seconds, bytes); None if none was found."""
        # The quickest and the smallest selection decide most cases, without a search.
        seconds, nbytes = budget
        quickest = self.cheapest(kl, flips, uncertified)
        if quickest.fits(*budget):
            return quickest
        if quickest.seconds > seconds:
            return None

        smallest = self.cheapest(kl, flips, uncertified, math.inf)
        if smallest.bytes > nbytes:
            return None

        # Both limits matter. Where the smallest selection fits, a lower price of a byte finds quicker ones that do.
        if smallest.fits(*budget):
            best, low, high = smallest, 1e-15, 1.0
            for _ in range(BUDGET_STEPS):
                middle = math.sqrt(low * high)
                selection = self.cheapest(kl, flips, uncertified, middle)
                if selection.fits(*budget):
                    best, high = min(best, selection, key=lambda own: own.seconds), middle
                else:
                    low = middle

            return best

        # The two ends miss the budget, each in one of its limits; a price in between may meet both.
        for power in range(-15, 1):
            selection = self.cheapest(kl, flips, uncertified, 10.0**power)
            if selection.fits(*budget):
                return selection

        return None

    def most_faithful(self, budget: tuple[float, float], kl: float, flips: float) -> OptionSelection | None:
        """Returns the selection within a budget of (seconds, bytes) with the least bound on KL, at most `kl`."""
        # Only at these bounds does another way become available; the least is always 0.
        count = len(self._places)
        steps = {0.0}.union(*(self.bounds.growing("bound", way)[:count] for way in self.ways))
        limits = sorted(limit for limit in steps if limit <= kl)
        if self.cheapest_in_budget(budget, limits[-1], flips) is None:
            return None

        place = bisect.bisect_left(
            limits, True, key=lambda limit: self.cheapest_in_budget(budget, limit, flips) is not None
        )
        return self.cheapest_in_budget(budget, limits[min(place, len(limits) - 1)], flips)

    # ------------------------------------------------------------------------------------------------ internals

    def _cheapest_certified(self, costs: np.ndarray, limits: Sequence[int]) -> np.ndarray:
        """Returns each place's option in the row, the best over all first places and sets of ways behind them."""
        count = len(self._places)
        if not count:
            return np.empty(0, int)

        allowed_with = np.array([*limits, count])[self._way]  # index -1: options as promised are always allowed
        promised = _suffix_sums(self._least(costs, self._way < 0))
        best, best_first, best_limit, low = promised[0], count, 0, 0

        for high in sorted(set(limits) - {0}):
            # If the first approximate place leaves between `low` and `high` - 1 pieces behind it, exactly the ways with
            # a limit of at least `high` are allowed.
            approximate = _suffix_sums(self._least(costs, allowed_with >= high))
            firsts = np.arange(count - 1 - low, count - 1 - high, -1)
            totals = promised[0] - promised[firsts] + approximate[firsts]
            at = int(totals.argmin())
            if totals[at] < best:
                best, best_first, best_limit = totals[at], int(firsts[at]), high
            low = high

        # Of equal options, the first in the row: it is written last.
        allowed = (self._way < 0) | ((allowed_with >= best_limit) & (self._place >= best_first))
        at = np.flatnonzero(allowed & (costs == self._least(costs, allowed)[self._place]))[::-1]
        chosen = np.empty(count, int)
        chosen[self._place[at]] = at
        return chosen

    def _cheapest_uncertified(self, costs: np.ndarray, limits: Sequence[int], uncertified: Uncertified) -> np.ndarray:
        """Returns each place's cheapest option where nothing is bounded, so that places are independent."""
        count, chosen = len(self._places), []
        for begin, end in zip(self._begins, self._ends, strict=True):
            own = range(begin, end)
            allowed = [*own]
            if uncertified == "patches":
                # What is certified for so many pieces; pieces as they are; and the patch of the largest rank.
                allowed = [at for at in own if self._way[at] < 0 or limits[self._way[at]] == count]
                others = [at for at in own if self._way[at] >= 0]
                allowed += [at for at in others if self._row[at].choice.how == "keep"]
                patches = [at for at in others if self._row[at].patch is not None and UNKNOWN not in self._row[at].ways]
                allowed += [max(patches, key=lambda at: self._row[at].rank)] if patches else []

            chosen.append(min(allowed, key=costs.__getitem__))

        return np.array(chosen, int)

    def _least(self, costs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Returns the least cost of each place among the allowed options."""
        return np.minimum.reduceat(np.where(allowed, costs, np.inf), self._begins)

    def _selection(self, chosen: np.ndarray) -> OptionSelection:
        """Returns the selection with its bounds. Pieces without a choice keep their only option."""
        options = [own[0] for own in self.options]
        for place, at in zip(self._places, chosen.tolist(), strict=True):
            options[place] = self._row[at]
        approximate = np.flatnonzero(self._way[chosen] >= 0)
        if not len(approximate):
            return OptionSelection(options, 0.0, 0.0)

        # From the first approximate piece on, all that inherits an error counts; the worst way bounds the answer.
        following = chosen[approximate[0] :]
        others = int(self._counts_as_other[following].sum()) - 1
        ways = [self.ways[number] for number in set(self._way[following].tolist()) - {-1}]
        worst: list[float | None] = []
        for what in ("bound", "flips"):
            of_ways = [self.bounds.growing(what, way) for way in ways]
            certified = all(others < len(bounds) for bounds in of_ways)
            worst.append(max(bounds[others] for bounds in of_ways) if certified else None)
        return OptionSelection(options, *worst)


def _suffix_sums(costs: np.ndarray) -> np.ndarray:
    """Returns the sums from each place on, and 0 behind the last."""
    return np.append(np.cumsum(costs[::-1])[::-1], 0.0)
