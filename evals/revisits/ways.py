"""Ways of serving a visit: options of a session over a store, and sessions that agents could run.

Sessions over a store *remember*: their truth is a session that reuses nothing and is given the same pieces. Those
without a store *forget*, as a prefix cache of the last prompt does: a prefill of the window is what they serve, and
their truth.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

NO_STORE = "no store"
DEFAULT, UNCERTIFIED = "default", "uncertified"
ONE_BY_ONE, BATCHED = "prefix cache, one leaves", "prefix cache, batched"
REPREFILL, PLACEHOLDER = "re-prefill", "placeholder in place"
UNBOUNDED, KEPT_OVER_VISITS = ", unbounded", ", kept over visits"


@dataclasses.dataclass(frozen=True)
class RevisitWay:
    """One way of running sessions.

    Attributes:
      options: of the session.
      stored: whether the sessions of all visits share a store.
      batched: whether chunks leave together, from twice the window down to it.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stored: bool = True
    batched: bool = False

    def opened(self, window: int) -> dict[str, Any]:
        """Returns the arguments of every session of one trace."""
        return {**self.options, "keep": (window, 2 * window) if self.batched else window}


WAYS: dict[str, RevisitWay] = {
    NO_STORE: RevisitWay(stored=False),
    DEFAULT: RevisitWay(),
    # What a patch of the very history would serve, its stored prefill serves, so none is formed.
    UNCERTIFIED: RevisitWay({"uncertified": True, "rank": 0}),
    ONE_BY_ONE: RevisitWay({"promise": "forget"}, stored=False),
    BATCHED: RevisitWay({"promise": "forget"}, stored=False, batched=True),
}
"""What is run, in the order of tables."""
STORED_WAYS = tuple(name for name, way in WAYS.items() if way.stored)
FORGETTING_WAYS = (ONE_BY_ONE, BATCHED)
COUNTED_WAYS = (
    REPREFILL,
    ONE_BY_ONE + UNBOUNDED,
    ONE_BY_ONE + KEPT_OVER_VISITS,
    BATCHED + UNBOUNDED,
    BATCHED + KEPT_OVER_VISITS,
    PLACEHOLDER,
)
"""What agents can do without this library, counted and not run."""
