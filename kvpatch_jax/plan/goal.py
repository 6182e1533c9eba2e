"""Bounds that a plan must meet: on what an answer loses, and on what the edits may cost."""

import dataclasses

from ..errors import PlanError

DEFAULT_KL = 0.05
"""Nats that an answer may lose where there is a certificate and no goal."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """Bounds of a plan; None is no bound.

    Without any bound, every piece is served as the window promises, in the least time. With a bound on fidelity,
    certified approximate points are used where they save time. With a budget alone, fidelity is as high as it allows.

    Attributes:
      kl: nats, KL(as promised ‖ as planned) of an answer behind the whole window.
      flips: share of answers whose most likely token changes.
      bytes: KV, factors and stored objects that the edits read and write.
      seconds: predicted duration of the edits.

    Raises:
      PlanError: a bound is negative, not finite or not a number.
    """

    kl: float | None = None
    flips: float | None = None
    bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            bound = getattr(self, field.name)
            is_number = isinstance(bound, int | float) and not isinstance(bound, bool)

            # `math.isfinite` overflows for large integers; the comparison does not, and refuses NaN.
            if bound is not None and not (is_number and 0 <= bound < 2**63):
                raise PlanError(f"goal.{field.name}: got {bound!r:.80}; expected a number >= 0, or None")

    @property
    def as_promised(self) -> bool:
        """Whether nothing is bounded."""
        return self == Goal()

    @property
    def budgeted(self) -> bool:
        """Whether bytes or seconds are bounded."""
        return self.bytes is not None or self.seconds is not None

    def __str__(self) -> str:
        units = {"kl": "nats", "flips": "of answers", "bytes": "bytes", "seconds": "s"}
        bounds = [(name, getattr(self, name), unit) for name, unit in units.items()]
        shown = [f"{name} ≤ {bound:g} {unit}" for name, bound, unit in bounds if bound is not None]
        return ", ".join(shown) or "as promised"
