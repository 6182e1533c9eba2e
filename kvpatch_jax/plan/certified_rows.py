"""Rows of certificates: the measured loss of one operating point, and of plans; and checks of their values."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

from ..errors import CertificateError
from ..window import Promise
from .operating_points import EXACT_POINTS, MEASURED_POINTS

MAX_LETTERS = 2000


@dataclasses.dataclass(frozen=True)
class CertifiedLoss:
    """Measured loss of one operating point. An answer is one question, or one continuation, behind one window.

    Attributes:
      point: the operating point.
      rank: of the patches; of a token repair the percentage of tokens recomputed; of survivors the slides of their
        window: chunks that left it, each when another came in, since it was a prefill of itself. 0 if none applies.
      behind: how many other chunks of the window were served in the same way: 0 is one chunk among exact ones.
      promise: the reference: "forget", a re-prefill of the window; "remember", the window with survivors as they are
        kept and everything else prefilled behind them.
      kl, kl_low, kl_high: mean KL(promised ‖ served) of an answer, in nats, with its 95 % interval, over all windows.
      kl_bound: upper quantile of an answer's KL over the calibration windows, in nats, at the certificate's level.
      coverage, coverage_low, coverage_high: share of held-out answers whose KL is within the bound, with its 95 %
        interval.
      eta: 1 − Σ KL(served) / Σ KL(bare), over all windows; None if undefined.
      flips, flips_high: share of next tokens whose most likely token changed, with the upper end of its 95 % interval.
      answers: how many were scored, held-out ones included.

    Raises:
      CertificateError: an unknown point or promise, a number out of range or not finite, an int instead of a float.
    """

    point: str
    rank: int
    behind: int
    promise: Promise
    kl: float
    kl_low: float
    kl_high: float
    kl_bound: float
    coverage: float
    coverage_low: float
    coverage_high: float
    eta: float | None
    flips: float
    flips_high: float
    answers: int

    def __post_init__(self) -> None:
        what = f"certified {self.point!r:.40}"
        if self.point not in (*EXACT_POINTS, *MEASURED_POINTS) or self.promise not in ("remember", "forget"):
            raise CertificateError(
                f"{what}: got promise {self.promise!r:.40}; expected one of {', '.join(MEASURED_POINTS)}, and "
                "'remember' or 'forget'"
            )

        for name in ("rank", "behind", "answers"):
            check_integer(getattr(self, name), f"{what}.{name}", 1 if name == "answers" else 0)
        if self.point == "survivor":
            check_integer(self.rank, f"{what}.rank", 1)

        # The KL of equal logits may round below 0.
        for name in ("kl", "kl_low", "kl_high"):
            check_float(getattr(self, name), f"{what}.{name}", -1.0, math.inf)
        check_float(self.kl_bound, f"{what}.kl_bound", 0.0, math.inf)
        for name in ("coverage", "coverage_low", "coverage_high", "flips", "flips_high"):
            check_float(getattr(self, name), f"{what}.{name}", 0.0, 1.0)
        if self.eta is not None:
            check_float(self.eta, f"{what}.eta", -math.inf, math.inf)

        check_ascending(what, self.kl_low, self.kl, self.kl_high)
        check_ascending(what, self.coverage_low, self.coverage, self.coverage_high)
        check_ascending(what, self.flips, self.flips_high)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Point, rank, behind and promise, which identify a row."""
        return self.point, self.rank, self.behind, self.promise


@dataclasses.dataclass(frozen=True)
class CertifiedPlan:
    """Measured result of plans under a bound, on held-out windows whose chunks were served in different ways at once.

    Attributes:
      name: what was planned.
      kl: the bound that the plans were given, in nats.
      windows, answers: how many were served and scored.
      approximate: share of the chunks that were served approximately.
      coverage, coverage_low, coverage_high: share of answers whose KL is within the bound, with its 95 % interval.

    Raises:
      CertificateError: a number out of range or not finite, an int instead of a float.
    """

    name: str
    kl: float
    windows: int
    answers: int
    approximate: float
    coverage: float
    coverage_low: float
    coverage_high: float

    def __post_init__(self) -> None:
        check_text(self.name, "certified plan.name")
        what = f"certified plan {self.name:.40}"
        for name in ("windows", "answers"):
            check_integer(getattr(self, name), f"{what}.{name}", 1)
        check_float(self.kl, f"{what}.kl", 0.0, math.inf)
        for name in ("approximate", "coverage", "coverage_low", "coverage_high"):
            check_float(getattr(self, name), f"{what}.{name}", 0.0, 1.0)
        check_ascending(what, self.coverage_low, self.coverage, self.coverage_high)


class RankChoice(NamedTuple):
    """A recommended rank, and the reason for it."""

    rank: int
    reason: str


# Checks of values that may come from a stranger's file: exact types (True is no number, 1 no float), finite, bounded.


def check_integer(value: Any, what: str, least: int) -> None:
    """Raises CertificateError unless a value is an int from `least` to 2**40."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**40:
        raise CertificateError(f"{what}: got {shortened(value)}; expected an integer >= {least}")


def check_float(value: Any, what: str, least: float, most: float) -> None:
    """Raises CertificateError unless a value is a finite float from `least` to `most`."""
    if not isinstance(value, float) or not math.isfinite(value) or not least <= value <= most:
        raise CertificateError(f"{what}: got {shortened(value)}; expected a finite float from {least:g} to {most:g}")


def check_ascending(what: str, *numbers: float) -> None:
    """Raises CertificateError unless the numbers ascend, within the rounding of a file."""
    # Ends of an interval are rounded when they are written: equal ones may cross by that much.
    for low, high in itertools.pairwise(numbers):
        if low > high + 1e-4 * abs(high):
            raise CertificateError(f"{what}: got {low} above {high}; expected an interval around its value")


def check_text(value: Any, what: str) -> None:
    """Raises CertificateError unless a value is a string of 1 to `MAX_LETTERS` letters."""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_LETTERS:
        raise CertificateError(f"{what}: got {shortened(value)}; expected a string of 1 to {MAX_LETTERS} letters")


def shortened(value: Any) -> str:
    """Describes a value that may be huge."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**62:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"
