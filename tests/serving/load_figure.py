"""The figure of docs/experiments/vllm.md: first-token time and throughput against the rate at which requests arrive."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
STYLES = {
    "reuse off": ("black", ":"),
    "prefix cache": ("grey", "--"),
    "chunks and patches": ("tab:blue", "-"),
    "as they come": ("tab:orange", "-"),
}
TITLES = {"repeated": "the same prompts again and again", "reordered": "images in another order each time"}


def draw(load: Mapping[str, Any], path: Path) -> Path:
    """Draws both kinds of traffic beside each other; thin lines are 95th percentiles."""
    figure = Figure(figsize=(8.4, 5.6), layout="constrained")
    panels = figure.subplots(2, len(TITLES), sharex=True, sharey="row")
    for column, (traffic, title) in enumerate(TITLES.items()):
        above, below = panels[0][column], panels[1][column]
        for way, (colour, line) in STYLES.items():
            rows = [row for row in load["rows"] if (row["traffic"], row["way"]) == (traffic, way)]
            _lines(above, below, rows, colour, line, way)
        above.set(title=title, yscale="log")
        below.set(xlabel="requests arriving in a second", xscale="log")
        rates = sorted({row["rate"] for row in load["rows"]})
        below.set_xticks(rates, [f"{rate:g}" for rate in rates])
        below.minorticks_off()
        for panel in (above, below):
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("first token, ms\n(median; thin: 95th percentile)")
    panels[1][0].set_ylabel("output tokens in a second")
    panels[1][0].legend(fontsize=8)
    figure.savefig(path, dpi=90)
    return path


def _lines(above: Axes, below: Axes, rows: list[dict[str, Any]], colour: str, line: str, way: str) -> None:
    rates = [row["rate"] for row in rows]
    first = [row["first_token_ms"] for row in rows]
    above.plot(rates, [own["p50"] for own in first], color=colour, linestyle=line, marker="o", markersize=3)
    above.plot(rates, [own["p95"] for own in first], color=colour, linestyle=line, linewidth=0.7)
    spoken = [row["output_tokens_per_second"] for row in rows]
    below.plot(rates, spoken, color=colour, linestyle=line, marker="o", markersize=3, label=way)
