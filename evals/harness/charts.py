"""Charts of a run: what an arm answers against what it costs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .frame import Lookup

# Okabe and Ito's palette: told apart by colour-blind readers and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#777777")
REFERENCE_COLOUR = "#222222"
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
}


def draw_chart(lookup: Lookup, chart: Mapping[str, Any], out: Path) -> Path | None:
    """Draws one chart: a line per method, a point per setting; narrow enough for a telephone.

    Args:
      chart: file, title, probe, model; x, y: metrics; x_label, y_label; log: whether y is on a log axis, of numbers
        above zero; lines: names of arms by the line that joins them; reference: an arm drawn as a horizontal line.

    Returns:
      The PNG, or None where nothing of it was measured.
    """
    import matplotlib
    from matplotlib.figure import Figure

    place = {name: chart[name] for name in ("probe", "model") if name in chart}
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(4.6, 3.6), layout="constrained")
        axis = figure.subplots()
        drawn = 0
        for (name, arms), colour in zip(chart["lines"].items(), COLOURS, strict=False):
            points = _points(lookup, place, chart, arms)
            drawn += len(points)
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(x, y, "o-", color=colour, label=name, markersize=4, linewidth=1.2)
        reference = chart.get("reference")
        if reference:
            level = lookup.get(**place, arm=reference, metric=chart["y"]).value
            if math.isfinite(level):
                axis.axhline(level, color=REFERENCE_COLOUR, linewidth=1, linestyle="--", label=reference)
        if not drawn:
            return None
        if chart.get("log"):
            axis.set_yscale("log")
        axis.set(title=chart.get("title", ""), xlabel=chart.get("x_label", chart["x"]), ylabel=chart.get("y_label"))
        axis.legend(frameon=False, fontsize=7.5)
        figure.savefig(out / chart["file"], dpi=160)
    return out / chart["file"]


def _points(
    lookup: Lookup, place: Mapping[str, str], chart: Mapping[str, Any], arms: Sequence[str]
) -> list[tuple[float, float]]:
    points = []
    for arm in arms:
        x, y = (lookup.get(**place, arm=arm, metric=chart[name]).value for name in ("x", "y"))
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not chart.get("log")):
            points.append((x, y))
    return points
