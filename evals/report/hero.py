"""The report's first chart, and accuracy against what an arm costs: stored bytes and serving FLOPs, never their sum."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.dominance import pareto_front
from ..results.headline import seeds_of
from ..results.rows import Rows
from .comparison import VISIBLE
from .figures import COLOURS, KINDS, MARKERS, MULTI_HOP, NAMES, NARROW, STYLE, Results, arm_label, family, save
from .verdict import BY_COUNT, cost, cost_axes, first_arms

HERO_KINDS = {"page": "o", "chain": "s", "aggregate": "D"}
AXES = {
    BY_COUNT[1]: "kept for one antecedent, % of the page's KV",
    BY_COUNT[16]: "kept for each of 16 antecedents, % of the page's KV",
    "serving_flops": "work while serving, % of re-prefilling the page",
    "bytes": "stored or recomputed, % of the page's KV",
}
PARETO = {
    BY_COUNT[1]: "pareto_kept_1",
    BY_COUNT[16]: "pareto_kept_16",
    "serving_flops": "pareto_serving_flops",
    "bytes": "pareto_bytes",
}
"""Names of the figures of accuracy against an axis."""


def hero_figure(results: Results, out: Path) -> list[Path]:
    """Draws accuracy by kind for the arms of the first table: few words, large enough for a telephone."""
    rows, seeds = Rows(results), len(seeds_of(results))
    across = f"accuracy, least to largest of {seeds} seeds" if seeds > 1 else "accuracy, with 95 % interval"
    arms = [arm for arm in first_arms(results) if math.isfinite(rows.get(VISIBLE, arm, "accuracy.chain").value)]
    if not arms:
        return []

    large: dict[Any, Any] = {**STYLE, "font.size": 10.5, "axes.titlesize": 10.5}
    with matplotlib.rc_context(large):
        figure = Figure(figsize=(5.4, 0.52 * len(arms) + 1.3), layout="constrained")
        panel: Axes = figure.subplots()
        for place, arm in enumerate(arms):
            colour = COLOURS.get(family(arm), "#555555")
            for shift, (kind, marker) in zip((-0.22, 0.0, 0.22), HERO_KINDS.items(), strict=True):
                got = rows.get(VISIBLE, arm, f"accuracy.{kind}")
                if math.isfinite(got.value):
                    panel.plot([got.low, got.high], [place + shift] * 2, color=colour, linewidth=2)
                    face = "white" if kind == "page" else colour
                    panel.plot(got.value, place + shift, marker, color=colour, markerfacecolor=face, markersize=6)

        panel.set_yticks(range(len(arms)), [arm_label(arm).replace(", ", ",\n", 1) for arm in arms])
        panel.set(xlim=(-0.02, 1.02), ylim=(len(arms) - 0.45, -0.55), xlabel=across)
        panel.grid(visible=False, axis="y")
        handles = []
        for kind, marker in HERO_KINDS.items():
            face = "white" if kind == "page" else "#555555"
            handles += panel.plot([], [], marker, color="#555555", markerfacecolor=face, label=kind)

        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        return [save(figure, "What each way of reuse gets right", out / "hero.png")]


def pareto_figures(results: Results, out: Path) -> list[Path]:
    """Draws accuracy against axes of cost, one PNG an axis; grey joins what nothing cheaper is as good as."""
    rows = Rows(results)
    return [_pareto(rows, axis, out / f"{PARETO[axis]}.png") for axis in cost_axes(rows) if axis in PARETO]


def _pareto(rows: Rows, axis: str, path: Path) -> Path:
    def price(arm):
        return cost(rows, arm, axis)

    arms = [arm for arm in rows.arms(VISIBLE) if arm != "mask_4d" and math.isfinite(price(arm))]
    families = list(dict.fromkeys(family(arm) for arm in arms if ".rotated_frame" not in arm))
    spare = iter(("#882255", "#999933", "#44AA99", "#AA4499", "#6699CC", "#661100", "#117733", "#888888") * 3)
    colours = {name: COLOURS.get(name) or next(spare) for name in families}
    # Seven shapes to eight colours, so that no two families have both alike.
    markers = dict(zip(families, "X*hdp<>" * 5, strict=False)) | MARKERS | {"patch": "o", "re-prefill": "P"}
    kinds = [kind for kind in MULTI_HOP if kind in rows.kinds(VISIBLE)]

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(NARROW, 3.2 * len(kinds) + 0.11 * len(families)), layout="constrained")
        panels = figure.subplots(len(kinds), 1, squeeze=False, sharey=True)[:, 0]
        for panel, kind in zip(panels, kinds, strict=True):
            drawn: dict[str, float] = {}
            for name in families:
                own = [arm for arm in arms if family(arm) == name and arm.count(".") <= 2 and not _variant(arm)]
                drawn |= {arm: price(arm) for arm in own}
                points = sorted((100 * price(arm), rows.get(VISIBLE, arm, f"accuracy.{kind}")) for arm in own)
                points = [(x, y) for x, y in points if math.isfinite(y.value)]
                for x, y in points:
                    panel.plot([x, x], [y.low, y.high], color=colours[name], linewidth=1, alpha=0.5)
                style: dict[str, Any] = {"color": colours[name], "marker": markers[name], "markersize": 4.5}
                values = [y.value for _, y in points]
                panel.plot([x for x, _ in points], values, linewidth=0.8, label=NAMES.get(name, name), **style)

            front = pareto_front(rows, axis, kind, costs=drawn)
            heights = [rows.get(VISIBLE, arm, f"accuracy.{kind}").value for arm in front]
            line: dict[str, Any] = {"where": "post", "color": "#BBBBBB", "linewidth": 4, "zorder": 0}
            panel.step([100 * price(arm) for arm in front], heights, **line)
            panel.set(title=KINDS[kind], xlabel=AXES[axis], ylim=(0, 1.03))
            panel.set_xscale("symlog", linthresh=1, linscale=0.4)
            panel.set_xlim(-0.2, 170)
            ticks = [0, 1, 3, 10, 30, 100]
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
            panel.set_ylabel("accuracy")

        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        what = "serving work" if axis == "serving_flops" else "stored bytes"
        return save(figure, f"Accuracy against {what}\ngrey: nothing cheaper is as good", path)


def _variant(arm: str) -> bool:
    """Halves of a patch and the like are no points of a family's line; one and the same setting twice is one."""
    return family(arm) == "patch" and not arm.startswith("patch.rank=")
