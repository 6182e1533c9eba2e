"""The figure of docs/experiments/vllm.md: memory and bytes that are held while thousands of requests come."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.use("Agg")
HELD = {
    "disk": ("store on the disk", "tab:blue", "disk"),
    "host": ("copies in memory", "tab:green", "host"),
    "survivors": ("survivors", "tab:orange", "survivor_bytes"),
}
"""Of a sample: what it is called, its colour, and the setting that limits it."""


def draw(bounded: Mapping[str, Any], path: Path) -> Path:
    """Draws the process's memory above what it holds; dotted lines are limits."""
    samples, limits = bounded["samples"], bounded["limits"]
    requests = [sample["requests"] for sample in samples]
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.4])
    resident = [sample["resident"] / 2**30 for sample in samples]
    above.plot(requests, resident, color="black")
    above.set(ylabel="memory of the\nprocess, GiB", ylim=(0, 1.15 * max(resident)))
    files = [sample["disk_files"] / 2**20 for sample in samples]
    below.plot(requests, files, color="tab:blue", linewidth=0.7, label="store on the disk, with its index")
    for name, (title, colour, limit) in HELD.items():
        below.plot(requests, [sample[name] / 2**20 for sample in samples], color=colour, label=title)
        below.axhline(limits[limit] / 2**20, color=colour, linestyle=":", linewidth=1)
    below.set(xlabel="requests", ylabel="MiB held\n(dotted: the limit)", ylim=(0, None), xlim=(0, requests[-1]))
    below.legend(fontsize=8, loc="center right")
    for panel in (above, below):
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    return path
