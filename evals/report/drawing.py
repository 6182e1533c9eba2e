"""All figures of the main job: its first chart, accuracy against what an arm costs, and those of `figures`.

Costs are stored bytes and serving FLOPs, never their sum.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..harness.frame import VISIBLE, Rows
from ..results.dominance import pareto_front
from ..results.headline import headline_results, seeds_of
from .figures import (
    COLOURS,
    KINDS,
    MARKERS,
    MULTI_HOP,
    NAMES,
    STYLE,
    Results,
    accuracy_figures,
    arm_label,
    deficit_figure,
    draw_bars,
    family,
    rank_figure,
    recall_figure,
    reorder_figure,
    save,
    slide_figure,
    stacked,
)
from .verdict import BY_COUNT, cost, cost_axes, first_arms

HERO_KINDS = {"page": "o", "chain": "s", "aggregate": "D"}
AXES = {
    BY_COUNT[1]: "kept for one antecedent, % of the page's KV",
    BY_COUNT[16]: "kept for each of 16 antecedents, % of the page's KV",
    "serving_flops": "work while serving, % of re-prefilling the page",
}
PARETO = {
    BY_COUNT[1]: "pareto_kept_1",
    BY_COUNT[16]: "pareto_kept_16",
    "serving_flops": "pareto_serving_flops",
}
"""Names of the figures of accuracy against an axis."""
SPARE_COLOURS = ("#882255", "#999933", "#44AA99", "#AA4499", "#6699CC", "#661100", "#117733", "#888888")


def draw_all(results: Results, out: Path) -> list[Path]:
    """Draws every figure the results allow, in the order a report shows them. `out` is made if missing."""
    written = [*hero_figure(headline_results(results) or results, out), *pareto_figures(results, out)]
    for draw in (rank_figure, accuracy_figures, reorder_figure, slide_figure, recall_figure, deficit_figure):
        written += draw(results, out)
    return written


def hero_figure(results: Results, out: Path) -> list[Path]:
    """Draws accuracy by kind for the arms of the first table: few words, large enough for a telephone."""
    rows, seeds = Rows(results), len(seeds_of(results))
    across = f"accuracy, least to largest of {seeds} seeds" if seeds > 1 else "accuracy, with 95 % interval"
    arms = [arm for arm in first_arms(results) if math.isfinite(rows.accuracy(arm, "chain").value)]
    if not arms:
        return []

    large: dict[Any, Any] = {**STYLE, "font.size": 10.5, "axes.titlesize": 10.5}
    with matplotlib.rc_context(large):
        figure = Figure(figsize=(5.4, 0.52 * len(arms) + 1.3), layout="constrained")
        panel: Axes = figure.subplots()
        for place, arm in enumerate(arms):
            colour = COLOURS.get(family(arm), "#555555")
            for shift, (kind, marker) in zip((-0.22, 0.0, 0.22), HERO_KINDS.items(), strict=True):
                got = rows.accuracy(arm, kind)
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
    """Draws one axis: a line per family of arms, a panel per kind of question that needs both images."""
    prices = {arm: cost(rows, arm, axis) for arm in rows.arms(VISIBLE) if arm != "mask_4d"}
    prices = {arm: price for arm, price in prices.items() if math.isfinite(price)}
    # Halves of a patch and the like are no points of a family's line; nor is one and the same setting twice.
    drawn: dict[str, list[str]] = {family(arm): [] for arm in prices if ".rotated_frame" not in arm}
    for arm in prices:
        variant = family(arm) == "patch" and not arm.startswith("patch.rank=")
        if family(arm) in drawn and arm.count(".") <= 2 and not variant:
            drawn[family(arm)].append(arm)

    spare = iter(SPARE_COLOURS * 3)
    colours = {name: COLOURS.get(name) or next(spare) for name in drawn}
    # Seven shapes to eight colours, so that no two families have both alike.
    markers = dict(zip(drawn, "X*hdp<>" * 5, strict=False)) | MARKERS | {"patch": "o", "re-prefill": "P"}
    costs = {arm: prices[arm] for arm in itertools.chain.from_iterable(drawn.values())}
    kinds = [kind for kind in MULTI_HOP if kind in rows.kinds(VISIBLE)]

    with matplotlib.rc_context(STYLE):
        figure, panels = stacked(len(kinds), 3.2, 0.11 * len(drawn))
        for panel, kind in zip(panels, kinds, strict=True):
            for name, arms in drawn.items():
                points = sorted((100 * prices[arm], rows.accuracy(arm, kind)) for arm in arms)
                points = [(x, y) for x, y in points if math.isfinite(y.value)]
                x, levels = [x for x, _ in points], [y.value for _, y in points]
                draw_bars(panel, x, [y for _, y in points], colours[name], alpha=0.5)
                style: dict[str, Any] = {"color": colours[name], "marker": markers[name], "markersize": 4.5}
                panel.plot(x, levels, linewidth=0.8, label=NAMES.get(name, name), **style)

            front = pareto_front(rows, axis, kind, costs=costs)
            heights = [rows.accuracy(arm, kind).value for arm in front]
            line: dict[str, Any] = {"where": "post", "color": "#BBBBBB", "linewidth": 4, "zorder": 0}
            panel.step([100 * prices[arm] for arm in front], heights, **line)
            panel.set(title=KINDS[kind], xlabel=AXES[axis], ylim=(0, 1.03))
            # Logarithmic above 1 %, so that patches of all ranks are told apart, and 0 has a place.
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
