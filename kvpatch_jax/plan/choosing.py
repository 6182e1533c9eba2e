"""Choosing among the options of all pieces: the least cost within bounds, exactly, by the rule that bounds compose by.

The rule is the certificate's own (`Certificate.together`): an answer behind a window loses no more than behind one of
which every piece from the first approximate one on is served in the worst of the ways that are taken; what is prefilled
there counts among them, for it reads what is approximate. So a choice is the first place that may be approximate and
the ways that may be taken from there on, and given both every piece takes its cheapest option.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .menu import UNKNOWN, Option, Way

Kinds = frozenset[Way]
Unknown = Literal["none", "patches", "all"]
"""Which ways that nothing bounds are taken: none; what stands already, and of each piece the patch of largest rank that
belongs there; all."""


class Bounds:
    """What a certificate bounds, looked up once. None: nothing is certified."""

    def __init__(self, certificate: Any, promise: str, most: int):
        """Asks a `Certificate` for what a window of at most so many pieces promises."""
        self._certificate, self._promise, self._most = certificate, promise, most
        self._rows: dict[tuple[str, Way], list[float]] = {}

    def kl(self, way: Way, others: int) -> float | None:
        """Nats of an answer behind a window of so many other approximate pieces; None where nothing bounds it."""
        return self._largest("bound", way, others)

    def flips(self, way: Way, others: int) -> float | None:
        """Share of answers likewise."""
        return self._largest("flips", way, others)

    def reach(self, way: Way) -> int:
        """How many other pieces there may be at most; -1 where the way is not certified at all."""
        self._largest("bound", way, self._most)
        return len(self._rows["bound", way]) - 1

    def _largest(self, what: str, way: Way, others: int) -> float | None:
        """The largest number up to so many others: more of them never count as better."""
        if self._certificate is None or way == UNKNOWN:
            self._rows.setdefault((what, way), [])
            return None
        found = self._rows.setdefault((what, way), [])
        ask = getattr(self._certificate, what)
        while len(found) <= min(others, self._most):
            number = ask(way[0], way[1], behind=len(found), promise=self._promise)
            if number is None:
                break
            found.append(max(number, found[-1]) if found else number)
        return found[others] if others < len(found) else None


class Chosen(NamedTuple):
    """An option for each piece, and bounds of an answer behind all of them; None where nothing bounds it."""

    options: list[Option]
    kl: float | None
    flips: float | None

    @property
    def seconds(self) -> float:
        """Of all pieces."""
        return sum(option.seconds for option in self.options)

    @property
    def bytes(self) -> int:
        """Of all pieces."""
        return sum(option.bytes for option in self.options)


class Chooser:
    """The options of all pieces, and the bounds of their ways."""

    def __init__(self, options: Sequence[Sequence[Option]], bounds: Bounds):
        """Args: as `Menu.options` gives them, the promised one first."""
        self.options, self.bounds = options, bounds
        self.places = [index for index, own in enumerate(options) if own[0].open or len(own) > 1]
        ways = {option.way for own in options for option in own if option.way is not None}
        self.ways: list[Way] = sorted(ways)
        self._promised = [[option for option in options[place] if option.way is None] for place in self.places]
        self._others = [[option for option in options[place] if option.way is not None] for place in self.places]

    def within(self, kl: float, flips: float, unknown: Unknown = "none", per_byte: float = 0.0) -> Chosen:
        """The cheapest choice of which an answer loses at most this.

        Args:
          kl, flips: bounds; infinite ones take every way that is certified at all.
          unknown: which ways that are not certified are taken too.
          per_byte: seconds that a byte counts for; infinite: bytes alone count.
        """
        count = len(self.places)
        if unknown != "none":
            kinds = frozenset(way for way in self.ways if self._fits(way, count - 1, kl, flips))
            return self._taken(0, kinds, unknown, per_byte)
        alone = [self._cheapest(own, per_byte) for own in self._promised]
        promised = _behind(alone)
        sets = {frozenset[Way](): promised}
        best_cost, best_first, best_kinds = math.inf, count, frozenset[Way]()
        for first in self._firsts():
            kinds = frozenset(way for way in self.ways if self._fits(way, count - first - 1, kl, flips))
            if kinds not in sets:
                sets[kinds] = _behind(self._costs(kinds, alone, per_byte))
            cost = promised[0] - promised[first] + sets[kinds][first]
            if cost < best_cost:
                best_cost, best_first, best_kinds = cost, first, kinds
        return self._taken(best_first, best_kinds, "none", per_byte)

    def limits(self) -> list[float]:
        """The bounds on KL at which something more can be taken, ascending, from 0."""
        count = len(self.places)
        found = {0.0}
        for way in self.ways:
            for others in range(min(count, self.bounds.reach(way) + 1)):
                number = self.bounds.kl(way, others)
                found |= {number} if number is not None else set()
        return sorted(found)

    def affordable(
        self, limits: tuple[float, float], kl: float, flips: float, unknown: Unknown = "none"
    ) -> Chosen | None:
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

    def truest(self, limits: tuple[float, float], kl: float, flips: float) -> Chosen | None:
        """The choice within a budget of (seconds, bytes) whose bound on KL is least, and at most `kl`."""
        steps = [limit for limit in self.limits() if limit <= kl]
        if self.affordable(limits, steps[-1], flips) is None:
            return None
        place = bisect.bisect_left(
            range(len(steps)), True, key=lambda place: self.affordable(limits, steps[place], flips) is not None
        )
        return self.affordable(limits, steps[min(place, len(steps) - 1)], flips)

    # ------------------------------------------------------------------------------------------------ inside

    def _firsts(self) -> range:
        """Where the first approximate piece may stand, among the places where something is to be chosen."""
        count = len(self.places)
        reach = max((self.bounds.reach(way) for way in self.ways), default=-1)
        return range(count, max(count - reach - 2, -1), -1)

    def _fits(self, way: Way, others: int, kl: float, flips: float) -> bool:
        if others < 0:
            return False
        bound = self.bounds.kl(way, others)
        if bound is None or bound > kl:
            return False
        if flips >= 1.0:
            return True
        turned = self.bounds.flips(way, others)
        return turned is not None and turned <= flips

    def _costs(self, kinds: Kinds, alone: Sequence[float], per_byte: float) -> list[float]:
        """Least costs of all places, with these ways allowed; `alone`: without any."""
        costs = list(alone)
        for number, others in enumerate(self._others):
            for option in others:
                if option.way in kinds:
                    costs[number] = min(costs[number], self._cost(option, per_byte))
        return costs

    def _cheapest(self, options: Sequence[Option], per_byte: float) -> float:
        if len(options) == 1 and not per_byte:
            return options[0].seconds
        return min(self._cost(option, per_byte) for option in options)

    def _allowed(self, number: int, kinds: Kinds, unknown: Unknown) -> Sequence[Option]:
        others = self._others[number]
        if unknown == "all":
            return [*self._promised[number], *others]
        found = [*self._promised[number], *(option for option in others if option.way in kinds)]
        if unknown == "patches":
            found += [option for option in others if option.service.how == "keep"]
            patches = [option for option in others if option.stocked is not None and option.way != UNKNOWN]
            found += [max(patches, key=lambda option: option.rank)] if patches else []
        return found

    @staticmethod
    def _cost(option: Option, per_byte: float) -> float:
        return float(option.bytes) if math.isinf(per_byte) else option.seconds + per_byte * option.bytes

    def _taken(self, first: int, kinds: Kinds, unknown: Unknown, per_byte: float) -> Chosen:
        """Each piece by its cheapest option, those that nothing is to be chosen of as they are."""
        chosen = [own[0] for own in self.options]
        for number, place in enumerate(self.places):
            options = self._allowed(number, kinds, unknown) if number >= first else self._promised[number]
            chosen[place] = options[0]
            if len(options) > 1:
                chosen[place] = min(options, key=lambda option: self._cost(option, per_byte))
        return self.bounded(chosen)

    def bounded(self, chosen: list[Option]) -> Chosen:
        """A choice with its bounds."""
        approximate = [place for place, option in enumerate(chosen) if option.way is not None]
        if not approximate:
            return Chosen(chosen, 0.0, 0.0)
        behind = chosen[approximate[0] :]
        others = sum(option.open or option.way is not None for option in behind) - 1
        ways = {option.way for option in behind if option.way is not None}
        kl, flips = ([of(way, others) for way in ways] for of in (self.bounds.kl, self.bounds.flips))
        return Chosen(chosen, _largest(kl), _largest(flips))


def _behind(costs: Sequence[float]) -> list[float]:
    """Their sums from each on; 0 from behind the last."""
    return [*itertools.accumulate(reversed(costs), initial=0.0)][::-1]


def _largest(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return max(known) if len(known) == len(numbers) else None
