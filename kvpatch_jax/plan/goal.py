"""Bounds that a plan must meet, on what an answer loses."""

import dataclasses

from ..errors import PlanError

DEFAULT_KL = 0.05
"""Nats that an answer may lose where there is a certificate and no goal."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """Bounds of a plan; None is no bound.

    Without any bound, every piece is served as the window promises, in the least time. With a bound, certified
    approximate points are used where they save time.

    Attributes:
      kl: nats, KL(as promised ‖ as planned) of an answer behind the whole window.
      flips: share of answers whose most likely token changes.

    Raises:
      PlanError: a bound is negative, not finite or not a number.
    """

    kl: float | None = None
    flips: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("kl", self.kl), ("flips", self.flips)):
            # `math.isfinite` overflows for large integers; the comparison does not, and refuses NaN.
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
            if bound is not None and not (is_number and 0 <= bound < 2**63):
                raise PlanError(f"goal.{name}: got {bound!r:.80}; expected a number >= 0, or None")

    @property
    def as_promised(self) -> bool:
        """Whether nothing is bounded."""
        return self.kl is None and self.flips is None

    def __str__(self) -> str:
        bounds = (("kl", self.kl, "nats"), ("flips", self.flips, "of answers"))
        shown = [f"{name} ≤ {bound:g} {unit}" for name, bound, unit in bounds if bound is not None]
        return ", ".join(shown) or "as promised"
