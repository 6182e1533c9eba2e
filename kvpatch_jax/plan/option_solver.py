"""Exact choice among the options of all pieces: the least time within bounds, as certificates compose bounds.

`Certificate.together` states the rule: an answer behind a window loses no more than if every piece, from the first
approximate one on, were served in the worst of the ways used there. Pieces prefilled there count too, because they
read approximate KV. A selection is therefore the first place that may be approximate and the set of ways allowed from
there on; given both, every piece takes its cheapest option.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..cache import UNKNOWN, Ways
from ..window import KEEP, Promise
from .certificate import Certificate
from .goal import Goal
from .serving_options import ServingOption


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


class OptionSelection(NamedTuple):
    """One option for each piece, with bounds for an answer behind all of them; None where nothing bounds it."""

    options: list[ServingOption]
    kl: float | None
    flips: float | None


def select(
    options: Sequence[Sequence[ServingOption]], bounds: CertifiedBounds, goal: Goal, uncertified: bool
) -> OptionSelection:
    """Returns the quickest selection that meets a goal.

    Args:
      options: of each piece, the cheapest one that is as promised first.
      uncertified: without a goal, also uses what nothing bounds.
    """
    if not goal.as_promised:
        chosen = _cheapest(options, bounds, goal)
    elif uncertified:
        chosen = [_uncertified(own) for own in options]
    else:
        chosen = [own[0] for own in options]

    # From the first approximate piece on, all that inherits an error counts; the worst way bounds the answer.
    approximate = [index for index, option in enumerate(chosen) if option.ways]
    if not approximate:
        return OptionSelection(chosen, 0.0, 0.0)
    first = approximate[0]
    others = sum(option.inherits or bool(option.ways) for option in chosen[first:]) - 1
    ways = {chosen[index].ways for index in approximate}
    worst: list[float | None] = []
    for what in ("bound", "flips"):
        growing = [bounds.growing(what, own) for own in ways]
        certified = all(others < len(own) for own in growing)
        worst.append(max(own[others] for own in growing) if certified else None)
    return OptionSelection(chosen, *worst)


def _cheapest(options: Sequence[Sequence[ServingOption]], bounds: CertifiedBounds, goal: Goal) -> list[ServingOption]:
    """Returns the quickest options, the best over all first places and sets of ways behind them."""
    kl, flips = (math.inf if bound is None else float(bound) for bound in (goal.kl, goal.flips))
    # Pieces with a choice, and those that are prefilled, may be approximate.
    places = [index for index, own in enumerate(options) if own[0].inherits or len(own) > 1]
    # Of each way: how many of the last places may be approximate at once.
    limits: dict[Ways, int] = {(): len(places)}
    for ways in {option.ways for own in options for option in own if option.ways}:
        by_kl = bisect.bisect_right(bounds.growing("bound", ways), kl)
        by_flips = bisect.bisect_right(bounds.growing("flips", ways), flips)
        limits[ways] = min(by_kl, by_flips, len(places))

    best, least = [own[0] for own in options], math.inf
    for limit in sorted(set(limits.values())):
        # Exactly the ways that may be among so many places are allowed; a later first place is no quicker.
        chosen = [own[0] for own in options]
        for index in places[len(places) - limit :]:
            allowed = [option for option in options[index] if limits[option.ways] >= limit]
            chosen[index] = min(allowed, key=lambda option: option.seconds)
        seconds = sum(option.seconds for option in chosen)
        if seconds < least:
            best, least = chosen, seconds
    return best


def _uncertified(options: Sequence[ServingOption]) -> ServingOption:
    """Returns the quickest option as promised, as the piece is, or with its valid patch of the largest rank."""
    allowed = [option for option in options if not option.ways or option.service is KEEP]
    patches = [option for option in options if option.patch is not None and UNKNOWN not in option.ways]
    allowed += [max(patches, key=lambda option: option.rank)] if patches else []
    return min(allowed, key=lambda option: option.seconds)
