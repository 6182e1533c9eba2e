"""The figures of placement: forming cost by policy, and fidelity against the number of pieces rebuilt."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {
    "arrival": "#8a8a8a",
    "LRU": "#5f5f5f",
    "prefix cache": "#c58b2a",
    "prefix cache, ordered": "#8f5d0b",
    "online": "#2a6fb0",
    "offline": "#0b3d70",
}


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws what there is."""
    drawn = [_forming(result["rows"], folder / "placement.png")]
    if result["cascade"]:
        drawn.append(_rebuilding(result["cascade"], folder / "cascade.png"))
    return drawn


def _forming(rows: list[dict[str, Any]], path: Path) -> Path:
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    figure = Figure(figsize=(6.2 * len(budgets), 3.8), layout="constrained")
    axes = figure.subplots(1, len(budgets), sharey=True)

    for axis, budget in zip(axes, budgets, strict=True):
        shown = [row for row in rows if row["budget"] == budget]
        for place, (name, colour) in enumerate(COLOURS.items()):
            cells = [row["of re-prefill"][name] for row in shown]
            at = [number + 0.13 * (place - 2.5) for number in range(len(shown))]
            heights = [cell["value"] for cell in cells]
            ends = [
                [max(cell["value"] - cell["low"], 0) for cell in cells],
                [max(cell["high"] - cell["value"], 0) for cell in cells],
            ]
            axis.bar(at, heights, 0.12, yerr=ends, color=colour, label=name, error_kw={"linewidth": 0.8})

        axis.axhline(1, color="#222222", linewidth=0.8, linestyle=(0, (4, 3)))
        axis.set_xticks(range(len(shown)), [row["kind"] for row in shown])
        axis.set_title(f"{budget} store")

    axes[0].set_ylabel("forming FLOPs over re-prefill's")
    axes[0].legend(fontsize=8, ncol=2)
    figure.savefig(path, dpi=150)
    return path


def _rebuilding(cascade: dict[str, Any], path: Path) -> Path:
    figure = Figure(figsize=(6.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, curve in cascade["curves"].items():
        style = {"cascade": "-o", "best order": "--", "any": "-."}.get(name, "-")
        axis.plot(range(len(curve)), curve, style, markersize=4, linewidth=1.4, label=name)

    axis.set(xlabel="pieces rebuilt", ylabel="KL(re-prefill ‖ served), nats")
    axis.set_xticks(range(len(cascade["predicted"])))
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    return path
