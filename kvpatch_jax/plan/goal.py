"""What a plan is held to: bounds on what an answer loses, and on what bringing the window there may take."""

import dataclasses

from ..errors import PlanError

DEFAULT_KL = 0.05
"""Nats that an answer may lose where a certificate bounds it and nobody says how much."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """Bounds of a plan; None: not bounded.

    Without any, all is served as the window promises, at the least seconds. With a bound on fidelity, approximate
    points that a certificate bounds are taken where they save seconds. With a budget alone, fidelity is the best that
    it buys.

    Attributes:
      kl: nats, KL(as the window promises ‖ as planned) of an answer behind the whole window.
      flips: share of answers whose most likely token is another.
      bytes: of KV, factors and stored objects that the edits read and write.
      seconds: that the edits are predicted to take.

    Raises:
      PlanError: a bound that is negative, not finite or no number.
    """

    kl: float | None = None
    flips: float | None = None
    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            bound = getattr(self, field.name)
            number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if bound is not None and not (number and 0 <= bound < 2**63):  # of an int, `isfinite` may overflow
                raise PlanError(f"goal: {field.name} {bound!r:.80}; expected a number from 0, or None")

    @property
    def as_promised(self) -> bool:
        """Whether nothing is bounded."""
        return (self.kl, self.flips, self.bytes, self.seconds) == (None, None, None, None)

    @property
    def budgeted(self) -> bool:
        """Whether bytes or seconds are bounded."""
        return self.bytes is not None or self.seconds is not None

    def __str__(self) -> str:
        units = {"kl": "nats", "flips": "of answers", "bytes": "bytes", "seconds": "s"}
        parts = [f"{name} ≤ {getattr(self, name):g} {unit}" for name, unit in units.items() if self._has(name)]
        return ", ".join(parts) or "as promised"

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None
