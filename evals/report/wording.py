"""Rows in words: numbers as they are shown, lines of summaries, and verdicts on published directions."""

import math
from collections.abc import Mapping, Sequence

from ..harness.frame import Rows
from ..harness.intervals import Interval


def number(value: float) -> str:
    """Formats with three decimals, or two significant digits below 0.01; "–" where undefined.

    "<1e-6" for less; what rounding left below zero there is 0.
    """
    if not math.isfinite(value):
        return "–"
    if -1e-6 < value <= 0:
        return "0"
    if abs(value) < 0.01:
        return "<1e-6" if 0 < value < 1e-6 else f"{value:.2g}".replace("-", "−", 1 if value < 0 else 0)
    return f"{value:.3f}".replace("-", "−")


def show(interval: Interval) -> str:
    """Formats value and interval: "0.453 [0.421, 0.486]"; the value alone where there is none or it has no width."""
    if not math.isfinite(interval.low + interval.high) or interval.low == interval.value == interval.high:
        return number(interval.value)
    return f"{number(interval.value)} [{number(interval.low)}, {number(interval.high)}]"


def spread(interval: Interval) -> str:
    """Formats a mean with the least and the largest seed: "0.446 (0.223 to 0.561)"; alone where all are alike."""
    ends = [number(end) for end in (interval.low, interval.high)]
    value = number(interval.value)
    # Compared as shown: seeds that differ by less are alike to a reader.
    return value if ends == [value, value] else f"{value} ({ends[0]} to {ends[1]})"


def share(value: float) -> str:
    """Formats a share as per cent, with a decimal below 2 %; "–" where undefined."""
    if not math.isfinite(value):
        return "–"
    per_cent = 100 * value
    return f"{per_cent:.0f} %" if per_cent == 0 or per_cent >= 1.95 else f"{per_cent:.1f} %"


def blind_losses(rows: Rows, kinds: Sequence[str]) -> str:
    """Formats by kind the accuracy of re-prefill and of blind reuse: "chain 0.977 → 0.227, aggregate 1.000 → 0.194"."""
    shown = []
    for kind in kinds:
        whole, blind = (number(rows.accuracy(arm, kind).value) for arm in ("re-prefill", "blind"))
        shown.append(f"{kind} {whole} → {blind}")
    return ", ".join(shown)


def measured_line(rows: Rows, title: str, probe: str, metric: str, arms: Mapping[str, str]) -> list[str]:
    """Makes a line of a summary, "title: name value, name value."; [] where no arm was measured.

    Args:
      arms: names of arms in rows, by what they are called in the line.
    """
    values = {name: rows.get(probe, arm, metric).value for name, arm in arms.items()}
    if not any(map(math.isfinite, values.values())):
        return []
    return [f"{title}: " + ", ".join(f"{name} {number(value)}" for name, value in values.items()) + "."]


def within(got: Interval, low: float, high: float) -> str:
    """Judges whether a statistic lies in [low, high], by its whole interval (by its value where it has none).

    "same direction" if inside, "differs" if outside, "undecided" across an edge, "not measured" where undefined.
    """
    if not math.isfinite(got.value):
        return "not measured"
    left, right = _ends(got)
    if low <= left and right <= high:
        return "same direction"
    return "differs" if right < low or left > high else "undecided"


def above(a: Interval, b: Interval, margin: float = 0.0) -> str:
    """Judges whether a is above b by more than `margin`, interval against interval, in the words of `within`."""
    if not (math.isfinite(a.value) and math.isfinite(b.value)):
        return "not measured"
    if _ends(a)[0] - _ends(b)[1] > margin:
        return "same direction"
    return "differs" if _ends(a)[1] - _ends(b)[0] < margin else "undecided"


def _ends(got: Interval) -> tuple[float, float]:
    return (got.low, got.high) if math.isfinite(got.low + got.high) else (got.value, got.value)
