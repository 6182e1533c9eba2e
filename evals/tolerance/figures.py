"""Figure of tolerance: what answers lose by the antecedents that differ, against the number of pieces in front."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..harness.frame import Rows
from .contexts import TASKS
from .histories import ALONE, LEAD
from .rows import SMALL_LOSS, probe_of

matplotlib.use("Agg")
STYLES = {
    "farthest differs": ("tab:cyan", "-", "<"),
    "far moved": ("tab:blue", "-", "o"),
    "far differ": ("tab:green", "-", "v"),
    "mean, same nearest": ("tab:olive", "--", "D"),
    "nearest differs": ("tab:orange", "-", "^"),
    "all differ": ("tab:red", "-", "s"),
    LEAD: ("tab:purple", ":", "x"),
    ALONE: ("black", ":", "+"),
}
"""Colour, line and marker of each kind of history, about in the order of what they lose in text."""


def draw(results: Mapping[str, Any], path: Path) -> Path:
    """Draws KL by the number of pieces in front; a panel for each task, a line for each kind of history."""
    probes = {row["probe"] for row in results["rows"]}
    tasks = [task for task in TASKS if any(probe.startswith(f"{task}.") for probe in probes)]
    figure = Figure(figsize=(2.7 * len(tasks) + 0.6, 3.9), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axis, task in zip(panels, tasks, strict=True):
        rows = Rows(results, TASKS[task].backbone)
        fronts = sorted(int(probe.partition("=")[2]) for probe in probes if probe.startswith(f"{task}.front="))
        for number, (kind, (colour, line, marker)) in enumerate(STYLES.items()):
            found = [(place, rows.get(probe_of(task, front), kind, "kl")) for place, front in enumerate(fronts)]
            found = [(place, kl) for place, kl in found if kl.n]
            spread = [[kl.value - kl.low for _, kl in found], [kl.high - kl.value for _, kl in found]]
            # Side by side, so that intervals can be told apart.
            where = [place + 0.035 * (number - (len(STYLES) - 1) / 2) for place, _ in found]
            look: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4}
            axis.errorbar(where, [kl.value for _, kl in found], spread, capsize=1.5, label=kind, linewidth=1.2, **look)

        axis.axhline(SMALL_LOSS, color="black", linewidth=0.9, linestyle=(0, (1, 1)), label=f"{SMALL_LOSS:g} nats")
        axis.set(title=TASKS[task].title, xlabel="chunks in front", yscale="log")
        axis.set_xticks(range(len(fronts)), [str(front) for front in fronts])
        axis.grid(alpha=0.3)

    panels[0].set_ylabel("KL of an answer, nats")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, title="KV formed behind")
    figure.savefig(path, dpi=90)
    return path
