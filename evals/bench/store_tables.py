"""The store's rows as text and as a picture: comparisons first, then every operation against the number of objects."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..results.tables import markdown_table
from .benchmark import Row, rows_table
from .store_scale import BARS, EVICTING, GET, GROUP, LISTED, PATCHES, PUT, STAT

DRAWN = ((PUT, "value"), (EVICTING, "p99"), (LISTED, "value"), (GROUP, "value"), (GET, "value"), (STAT, "value"))
"""Operations that are drawn, and which of their figures."""


def format_result(result: Mapping[str, Any]) -> str:
    """Formats a result of the store's suite as Markdown."""
    rows: Sequence[Row] = result["rows"]
    pairs = [row for row in rows if "side" not in row]
    parts = [rows_table(pairs, ("against",)) if pairs else "", scale_table(rows)]
    judged = [row for row in rows if "side" in row and "passed" in row]
    if judged:
        parts.append(f"{sum(row['passed'] for row in judged)} of {len(judged)} of these within their bars\n")
    parts += [f"{name} was left out: {reason}\n" for name, reason in result["config"].get("absent", {}).items()]
    return "\n".join(part for part in parts if part)


def scale_table(rows: Sequence[Row]) -> str:
    """Formats rows of sides: a line per operation and side, a column per number of objects.

    A cell is the median, the 99th percentile and the longest of all calls (of fewer than 20, the median alone), or a
    ratio; "no" marks a missed bar.
    """
    rows = [row for row in rows if "side" in row]
    columns = sorted({(row["objects"], row.get("place", "")) for row in rows})
    cells: dict[tuple[str, str], dict[tuple[int, str], str]] = {}
    bars: dict[tuple[str, str], str] = {}
    for row in rows:
        key = (row["operation"], row["side"])
        cells.setdefault(key, {})[row["objects"], row.get("place", "")] = _cell(row)
        if "bar" in row:
            bars[key] = f"{row['bar']:g}{row['unit']}"

    head = ["operation", "side", *(f"{count:,} {place}".strip() for count, place in columns), "bar"]
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
    rows = [row for row in result["rows"] if "side" in row]
    sides = list(dict.fromkeys(row["side"] for row in rows))

    for axes, (operation, key) in zip(panels, DRAWN, strict=True):
        drawn = [operation, PATCHES] if operation == STAT else [operation]
        for word in drawn:
            for number, side in enumerate(sides):
                points = sorted(
                    (row["objects"], row[key]) for row in rows if (row["operation"], row["side"]) == (word, side)
                )
                if points:
                    counts, seconds = zip(*points, strict=True)
                    style = "--" if word == PATCHES else "-"
                    axes.plot(counts, seconds, style, marker="o", markersize=4, color=f"C{number}", label=side)
            if word in BARS:
                axes.axhline(BARS[word], color="C0", linestyle=":", linewidth=1)
        statistic = "99th percentile" if key == "p99" else "median"
        axes.set_title(f"{operation}, {statistic}" + (f"; dashed: {PATCHES}" if operation == STAT else ""), fontsize=8)
        axes.set(xscale="log", yscale="log")
        axes.tick_params(labelsize=8)

    figure.supxlabel("objects", fontsize=9)
    figure.supylabel("seconds (dotted: the store's bar)", fontsize=9)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
