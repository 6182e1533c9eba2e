"""Figure of the modalities: what is answered right, and the gap in nats with what patches leave of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..results.rows import Rows
from ..rules import RULES
from .suite import BLIND, REFERENCE, WITHOUT, mean_of
from .task_spec import MODALITIES

matplotlib.use("Agg")
SHOWN: str = RULES.modality["shown_kind"]
PATCHES = tuple(arm for arm in RULES.modality["arms"] if arm.startswith("patch.rank="))
COLOURS = {
    WITHOUT: "lightgrey",
    REFERENCE: "black",
    BLIND: "tab:red",
    **dict(zip(PATCHES, ("#9ecae1", "#4292c6", "#08519c"), strict=True)),
}
LABELS = {WITHOUT: "without the sheets", REFERENCE: "re-prefill", BLIND: "blind reuse"}


def draw(results: Mapping[str, Any], path: Path) -> Path:
    """Draws a group of bars for each modality: accuracy, KL from re-prefill, and the KL of questions of one chunk."""
    models = {row["model"] for row in results["rows"]}
    shown = [modality for modality in MODALITIES if mean_of(modality) in models]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    _bars(left, results, shown, list(COLOURS), f"accuracy.{SHOWN}")
    _bars(middle, results, shown, [BLIND, *PATCHES], f"kl.{SHOWN}")
    _bars(right, results, shown, [BLIND], "kl.page")

    left.set(title=f"{SHOWN} questions answered right", ylim=(0, 1.02))
    middle.set(title=f"{SHOWN} questions: KL from re-prefill, nats")
    right.set(title="page questions: KL, nats", ylim=middle.get_ylim())
    for axis in (left, middle, right):
        axis.set_xticks(range(len(shown)), shown, rotation=20)
        axis.grid(alpha=0.3, axis="y")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)
    return path


def _bars(axis: Any, results: Mapping[str, Any], shown: list[str], arms: list[str], metric: str) -> None:
    """Draws means over training seeds as bars; lines reach from the least seed to the largest."""
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        found = [Rows(results, mean_of(modality)).get(f"modality.{modality}", arm, metric) for modality in shown]
        where = [place + (number - (len(arms) - 1) / 2) * width for place in range(len(shown))]
        ends = [[own.value - own.low for own in found], [own.high - own.value for own in found]]
        axis.bar(
            where,
            [own.value for own in found],
            width,
            yerr=ends,
            color=COLOURS[arm],
            label=LABELS.get(arm, arm.removeprefix("patch.").replace("=", " ")),
            error_kw={"linewidth": 0.8},
        )
