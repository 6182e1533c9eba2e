"""The store's rows as text and as a picture: comparisons first, then every operation against the number of objects."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.tables import markdown_table
from .benchmark import Row, rows_table
from .store_scale import BARS, EVICTING, GET, GROUP, LISTED, PATCHES, PUT, STAT

DRAWN = ((PUT, "value"), (EVICTING, "p99"), (LISTED, "value"), (GROUP, "value"), (GET, "value"), (STAT, "value"))
"""Operations that are drawn, and which of their figures."""


def format_result(result: Mapping[str, Any]) -> str:
    """Formats a result of the store's suite as Markdown."""
    rows: Sequence[Row] = result["rows"]
    pairs = [row for row in rows if "place" not in row]
    parts = [rows_table(pairs, ("against",)) if pairs else "", scale_table(rows)]
    judged = [row for row in rows if "place" in row and "passed" in row]
    if judged:
        parts.append(f"{sum(row['passed'] for row in judged)} of {len(judged)} of these within their bars\n")
    parts += [f"{name} was left out: {reason}\n" for name, reason in result["config"].get("absent", {}).items()]
    return "\n".join(part for part in parts if part)


def scale_table(rows: Sequence[Row]) -> str:
    """Formats rows of sides: a line per operation and side, a column per number of objects.

    A cell is the median, the 99th percentile and the longest of all calls (of fewer than 20, the median alone), or a
    ratio; "no" marks a missed bar.
    """
    rows = [row for row in rows if "place" in row]
    columns = sorted({(row["objects"], row["place"]) for row in rows})
    cells: dict[tuple[str, str], dict[tuple[int, str], str]] = {}
    bars: dict[tuple[str, str], str] = {}
    for row in rows:
        key = (row["operation"], row["side"])
        cells.setdefault(key, {})[row["objects"], row["place"]] = _cell(row)
        if "bar" in row:
            bars[key] = f"{row['bar']:g}{row['unit']}"

    head = ["operation", "side", *(f"{count:,} {place}" for count, place in columns), "bar"]
    lines = []
    for (operation, side), found in cells.items():
        lines.append([operation, side, *(found.get(column, "") for column in columns), bars.get((operation, side), "")])
    return markdown_table(head, lines) + "\n" if lines else ""


def _cell(row: Row) -> str:
    missed = " **no**" if row.get("passed") is False else ""
    if row["unit"] == "×":
        return f"{row['value']:.3g}×{missed}"
    tail = "" if row["calls"] < 20 else f" / {duration(row['p99'])} / {duration(row['longest'])}"
    return f"{duration(row['value'])}{tail}{missed}"


def duration(seconds: float) -> str:
    """Formats seconds with three digits in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws how times grow with the number of objects, of every side, with the store's bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.0), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).flat
    rows = [row for row in result["rows"] if "place" in row]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    markers = dict(zip(dict.fromkeys(row["place"] for row in rows), "o^sD", strict=False))

    for axes, (operation, key) in zip(panels, DRAWN, strict=True):
        words = [operation, PATCHES] if operation == STAT else [operation]
        for row in rows:
            if row["operation"] in words:
                style = {
                    "marker": markers[row["place"]],
                    "fillstyle": "none" if row["operation"] == PATCHES else "full",
                }
                axes.plot(row["objects"], row[key], color=f"C{sides.index(row['side'])}", linestyle="", **style)
        for word, side, place in itertools.product(words, sides, markers):
            own = [row for row in rows if (row["operation"], row["side"], row["place"]) == (word, side, place)]
            points = sorted((row["objects"], row[key]) for row in own)
            color = f"C{sides.index(side)}"
            axes.plot([count for count, _ in points], [seconds for _, seconds in points], color=color, linewidth=1)
        for word in words:
            if word in BARS:
                axes.axhline(BARS[word], color="C0", linestyle=":", linewidth=1)
        axes.set_title(f"{operation}, {'99th percentile' if key == 'p99' else 'median'}", fontsize=9)
        if operation == STAT:
            axes.set_title("stat; hollow: get_patches of 5000", fontsize=9)
        axes.set(xscale="log", yscale="log")
        axes.tick_params(labelsize=8)

    first = figure.axes[0]
    for number, side in enumerate(sides):
        first.plot([], [], color=f"C{number}", label=side)
    for place, marker in markers.items():
        first.plot([], [], color="grey", marker=marker, linestyle="", label=place)
    first.legend(frameon=False, fontsize=8)
    figure.supxlabel("objects", fontsize=9)
    figure.supylabel("seconds (dotted: the store's bar)", fontsize=9)
    figure.savefig(path, dpi=130)
