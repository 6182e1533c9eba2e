"""Figures of replays: work by question, fidelity against rank, and what a slide costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .replay_run import AGAIN, BATCHED, BLIND, FIRST, PLACEHOLDER, PREFILL, PREFIX, WINDOW

matplotlib.use("Agg")
Results = Mapping[str, Mapping[str, Any]]
STYLES = {
    PREFILL: ("black", "-"),
    PREFIX: ("grey", "--"),
    BATCHED: ("tab:purple", "-"),
    PLACEHOLDER: ("tab:brown", "--"),
    WINDOW: ("tab:blue", "-"),
    FIRST: ("tab:orange", (0, (4, 3))),
    AGAIN: ("tab:green", "-"),
    BLIND: ("tab:red", ":"),
}
FLOOR = 1e-8
"""KL below this is rounding, and is drawn here."""


def draw(results: Results, out: Path) -> list[Path]:
    """Draws every figure that the results allow; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    found = [work(results, out / "replay_work.png"), ranks(results, out / "replay_ranks.png")]
    if any("unpinned" in record for record in results.values()):
        found.append(slide(results, out / "replay_slide.png"))
    return found


def _panels(count: int, width: float = 3.6) -> tuple[Figure, Sequence[Any]]:
    figure = Figure(figsize=(width * count, 3.2), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, count)).ravel().tolist()


def _save(figure: Figure, panels: Sequence[Any], label: str, path: Path, **legend: Any) -> Path:
    """Adds grids, the label of the y axis and the legend to panels, and writes the figure."""
    for axis in panels:
        axis.grid(alpha=0.3)
    panels[0].set_ylabel(label)
    panels[0].legend(fontsize=7, **legend)
    figure.savefig(path, dpi=90)
    return path


def work(results: Results, path: Path) -> Path:
    """Draws FLOPs until each question, summed, by mode; a panel for each kind."""
    figure, panels = _panels(len(results))
    for axis, (kind, found) in zip(panels, results.items(), strict=True):
        for name, (colour, line) in STYLES.items():
            spent = np.cumsum(found["ways"][name]["each"]["flops"]) / 1e9
            axis.plot(np.arange(1, len(spent) + 1), spent, color=colour, linestyle=line, label=name)
        axis.set(title=f"{kind} ({found['promise']})", xlabel="question")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _save(figure, panels, "GFLOP so far", path)


def ranks(results: Results, path: Path) -> Path:
    """Draws KL against the rank of the patches, with blind reuse; a panel for each kind."""
    figure, panels = _panels(len(results))
    for axis, (kind, found) in zip(panels, results.items(), strict=True):
        rows = found["ranks"]
        value = [max(row["kl"], FLOOR) for row in rows]
        spread = [
            [max(own - max(row["kl_low"], FLOOR), 0) for own, row in zip(value, rows, strict=True)],
            [max(row["kl_high"] - own, 0) for own, row in zip(value, rows, strict=True)],
        ]
        axis.errorbar([row["rank"] for row in rows], value, spread, marker="o", capsize=2, color="tab:green")
        axis.axhline(max(found["ways"][BLIND]["kl"], FLOOR), color="tab:red", linestyle=":", label="blind")
        axis.set(title=kind, xlabel="rank", xscale="log", yscale="log")
        axis.set_xticks([row["rank"] for row in rows], [str(row["rank"]) for row in rows])
        axis.minorticks_off()

    return _save(figure, panels, "KL to what is promised, nats", path)


def slide(results: Results, path: Path) -> Path:
    """Draws KL of a sliding window, question by question: to what it promises, and to a re-prefill of what is left."""
    sliding = {kind: found for kind, found in results.items() if "unpinned" in found}
    figure, panels = _panels(len(sliding), 5.0)
    for axis, (kind, found) in zip(panels, sliding.items(), strict=True):
        own = found["ways"][WINDOW]
        lines = {
            "to what is promised (remember)": (own["kls"], "tab:blue"),
            "to a re-prefill (forget), first image pinned": (own["forget_kls"], "tab:purple"),
            "to a re-prefill (forget), nothing pinned": (found["unpinned"]["kls"], "tab:brown"),
        }
        for name, (kls, colour) in lines.items():
            axis.plot(np.arange(1, len(kls) + 1), np.maximum(kls, FLOOR), ".-", color=colour, label=name)
        # Room for the legend above all lines.
        axis.set(title=kind, xlabel="question", yscale="log", ylim=(FLOOR / 3, 1e3))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _save(figure, panels, "KL, nats", path, loc="upper left")
