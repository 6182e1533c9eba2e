"""Figures of a run: each function takes the results dictionary and a directory, and returns the PNGs it wrote.

What a run did not measure is left out: a function whose probe is missing writes nothing and returns [].
"""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..harness.frame import VISIBLE, Rows
from ..harness.intervals import Interval

Results = Mapping[str, Any]

KINDS = {
    "page": "page: one hop, page alone",
    "legend": "legend: one hop, legend alone",
    "chain": "chain: two hops",
    "aggregate": "aggregate: many hops",
    "override": "override: order decides",
    "survivor": "survivor: fact of a legend that stayed",
    "evicted": "evicted: fact of the legend that left",
}
MULTI_HOP = ("chain", "aggregate")
SETTINGS = {
    "repair.visible": "question sees legends and page",
    "repair.evicted": "legends evicted before the question",
}
NAMES = {
    "blind": "blind reuse",
    "answer": "right answer",
    "first_k": "first-k",
    "cacheblend": "CacheBlend-style",
    "oracle_delta": "oracle Δ",
    "mask_4d": "4-D mask control",
    "deepest_half": "deepest half",
    "k_only": "keys only",
    "v_only": "values only",
    "ckv_only": "latent only",
    "kpe_only": "rotary key only",
    "rotated_frame": "rotated frame",
    "transfer": "transfer (other order's patch)",
    "orbit": "orbit patch",
    "exact": "exact (own patch)",
    "keep": "keep as is",
    "removal": "removal patch",
    "stale": "stale patch",
    "fresh": "fresh patch",
    "oracle_update": "oracle update",
    "stored": "stored patch",
    "rebuilt": "rebuilt patch",
    "update": "updated patch",
    "deep": "upper layers from a quarter",
    "deepest": "upper layers from the first",
    "shallow": "lowest quarter recomputed",
    "fixed_earlier": "fixed earlier context",
    "kept": "kept survivors",
    "blind_behind_lead": "blind, formed behind the lead",
    "blind_fresh_page": "blind, page prefilled",
    "query_attention": "query attention",
    "prophetkv": "ProphetKV-style",
    "prcr": "PRCR-style",
    "random_tokens": "random tokens",
    "residual": "run again from",
    "quantised": "conditioned KV",
    "svd": "conditioned KV truncated",
    "shadowkv": "ShadowKV-style",
    "keys_alone": "keys alone",
    "int8": "8 bits",
    "int4": "factors in 4 bits",
    "k4v4g32": "canonical in 4 bits",
    "k6v6g32": "canonical in 6 bits",
    "pooled": "pooled basis",
    "class_mean": "class mean (diagnostic)",
}
# Okabe and Ito's palette: told apart by colour-blind readers and in grey.
COLOURS = {
    "re-prefill": "#222222",
    "blind": "#D55E00",
    "patch": "#0072B2",
    "rotated_frame": "#56B4E9",
    "first_k": "#E69F00",
    "cacheblend": "#CC79A7",
    "oracle_delta": "#009E73",
    "mask_4d": "#777777",
    "transfer": "#56B4E9",
    "orbit": "#0072B2",
    "exact": "#009E73",
    "keep": "#E69F00",
    "removal": "#0072B2",
    "stale": "#E69F00",
    "fresh": "#0072B2",
    "oracle": "#009E73",
    "stored": "#E69F00",
    "rebuilt": "#0072B2",
    "update": "#56B4E9",
    "deep": "#CC79A7",
    "deepest": "#882255",
    "shallow": "#999933",
    "fixed_earlier": "#CC79A7",
    "kept": "#E69F00",
    "blind_behind_lead": "#CC79A7",
    "blind_fresh_page": "#CC79A7",
}
MARKERS = {"first_k": "s", "cacheblend": "^", "oracle_delta": "D", "blind": "v", "re-prefill": "o"}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#333333",
}
KL_FLOOR = 1e-7
NARROW = 4.3
"""Inches: a figure that is no wider can be read whole on a telephone. Panels stand one above the other."""
FEW_ARMS = 6
LETTERS = 11.0
"""Of a title, in an inch."""


def arm_label(arm: str) -> str:
    """Puts an arm's name in words: "patch.deepest_half.rank=16" → "patch, deepest half, rank 16"."""
    words = []
    for part in re.split(r"\.(?=[A-Za-z])", arm):
        name, _, value = part.partition("=")
        if name == "budget":
            words.append(f"{100 * float(value):.0f} % of tokens")
        elif name == "bytes_of_rank":
            words.append(f"bytes of rank {value}")
        elif name == "bits" and words:
            words[-1] += f" in {value} bits"
        elif name == "layer" and words:
            words[-1] += f" layer {value}"
        else:
            words.append(f"{NAMES.get(name, name)} {value}".strip())

    return ", ".join(words)


def family(arm: str) -> str:
    """Finds what decides an arm's colour: its method, or "rotated_frame" for that variant of the patch."""
    return "rotated_frame" if ".rotated_frame" in arm else re.split(r"[.=, ]", arm)[0]


def stacked(count: int, height: float, extra: float = 0.0, *, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    """Makes a figure of panels one above the other, each `height` inches high, as wide as a telephone shows."""
    figure = Figure(figsize=(NARROW, height * count + extra), layout="constrained")
    return figure, list(figure.subplots(count, 1, squeeze=False, sharey=sharey)[:, 0])


def draw_bars(
    panel: Axes, x: Sequence[float | int], points: Sequence[Interval], colour: Any, alpha: float = 0.6
) -> None:
    """Draws the intervals of points as vertical bars."""
    for place, point in zip(x, points, strict=True):
        panel.plot([place, place], [point.low, point.high], color=colour, linewidth=1, alpha=alpha)


def accuracy_figures(results: Results, out: Path) -> list[Path]:
    """Draws the accuracy of every arm, one panel per question kind, one PNG per visibility setting."""
    rows, written = Rows(results), []
    for probe, setting in SETTINGS.items():
        # Twins of the patch and budgets between the others would fill the figure without saying more.
        arms = [arm for arm in rows.arms(probe) if ".rotated_frame" not in arm]
        arms = [arm for arm in arms if not arm.endswith(("budget=0.1", "budget=0.25"))]
        title = f"Accuracy by repair, {setting} · bars: 95 % intervals"
        path = out / f"accuracy_{probe.split('.')[1]}.png"
        written += _dot_panels(rows, probe, sorted(arms, key=_arm_order), title, path)
    return written


def reorder_figure(results: Results, out: Path) -> list[Path]:
    """Draws accuracy after the legends are reordered: another order's patch, one orbit patch, the order's own."""
    order = ("re-prefill", "exact", "orbit", "transfer", "blind")
    title = "Reorder: one patch for every order of the legends · bars: 95 % intervals"
    return _dot_panels(Rows(results), "reorder", order, title, out / "reorder.png")


def slide_figure(results: Results, out: Path) -> list[Path]:
    """Draws accuracy after the oldest chunk left: survivors kept as they are, with a removal patch, or blind."""
    order = ("re-prefill", "removal", "keep", "blind")
    title = "Slide: the chunks that stay when the oldest leaves · bars: 95 % intervals"
    return _dot_panels(Rows(results), "slide", order, title, out / "slide.png")


def _arm_order(arm: str) -> tuple[int, float]:
    # By method, then variants of it behind the method itself, then by setting.
    place = list(COLOURS).index(family(arm)) if family(arm) in COLOURS else len(COLOURS)
    variant = 50.0 if arm.count("=") and not re.match(r"(patch\.rank|\w+\.budget)=", arm) else 0.0
    return place, variant + float(arm.rpartition("=")[2]) if "=" in arm else 0.0


def _dot_panels(rows: Rows, probe: str, arms: Sequence[str], title: str, path: Path) -> list[Path]:
    """Draws horizontal dots with interval bars: arms down, one panel per question kind, re-prefill as a vertical line.

    Panels of few arms stand one above the other; of more side by side, in a figure that is wider than a telephone. Arms
    that were not measured are left out; returns [] where none was.
    """
    metrics = {kind: f"accuracy.{kind}" for kind in rows.kinds(probe)}
    arms = [arm for arm in arms if rows.measured(probe, [arm], *metrics.values())]
    kinds = [kind for kind, metric in metrics.items() if rows.measured(probe, arms, metric)]
    if not arms:
        return []

    height = 0.24 * len(arms) + 1.2
    with matplotlib.rc_context(STYLE):
        if len(arms) <= FEW_ARMS:
            figure, panels = stacked(len(kinds), height)
        else:
            figure = Figure(figsize=(2.1 + 2.0 * len(kinds), height), layout="constrained")
            panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]

        for panel, kind in zip(panels, kinds, strict=True):
            reference = rows.accuracy("re-prefill", kind, probe).value
            if math.isfinite(reference):
                panel.axvline(reference, color="#222222", linewidth=0.8, linestyle=(0, (4, 3)))

            for place, arm in enumerate(arms):
                colour = COLOURS.get(family(arm), "#555555")
                got = rows.accuracy(arm, kind, probe)
                panel.plot([got.low, got.high], [place, place], color=colour, linewidth=1.8, solid_capstyle="butt")
                panel.plot([got.value], [place], MARKERS.get(family(arm), "o"), color=colour, markersize=3.6)

            panel.set(title=_wrapped(KINDS.get(kind, kind)), xlabel="accuracy", xlim=(-0.03, 1.03))
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.grid(visible=False, axis="y")

        panels[0].set_yticks(range(len(arms)), [arm_label(arm) for arm in arms])
        panels[0].set_ylim(len(arms) - 0.4, -0.6)
        return [save(figure, title, path)]


def _wrapped(label: str) -> str:
    first, _, rest = label.partition(": ")
    return f"{first}:\n{textwrap.fill(rest, 26)}" if rest else f"{label}\n"


def rank_figure(results: Results, out: Path) -> list[Path]:
    """Draws KL against the patch's rank, one panel per kind of question that needs both images."""
    rows = Rows(results)
    ranks = [int(rank) for rank, _ in rows.settings(VISIBLE, "patch.rank=")]
    kinds = [kind for kind in (*MULTI_HOP, "override") if kind in rows.kinds(VISIBLE, "kl")]
    if not ranks or not kinds:
        return []

    with matplotlib.rc_context(STYLE):
        figure, panels = stacked(len(kinds), 3.0)
        for panel, kind in zip(panels, kinds, strict=True):
            _kl_by_rank(panel, rows, kind)
            panel.set(xscale="log", yscale="log", title=KINDS[kind], xlabel="patch rank")
            panel.set_xticks(ranks, [str(rank) for rank in ranks])
            panel.minorticks_off()
            panel.set_ylabel("KL(re-prefill ‖ arm), nats")
        return [save(figure, "What rank it takes", out / "rank.png")]


def _kl_by_rank(panel: Axes, rows: Rows, kind: str) -> None:
    """Draws the KL of patches formed before and after the rotation, and that of blind reuse as a line."""
    # The label stands above the line that lies higher, below the other one.
    above = {"xytext": (7, 5), "ha": "left", "va": "bottom"}
    below = {"xytext": (-7, -5), "ha": "right", "va": "top"}
    for prefix, name, label, place in (
        ("patch.rotated_frame.rank=", "rotated_frame", "patch formed\nafter rotation", above),
        ("patch.rank=", "patch", "patch", below),
    ):
        points = [(rank, rows.get(VISIBLE, arm, f"kl.{kind}")) for rank, arm in rows.settings(VISIBLE, prefix)]
        points = [(rank, got) for rank, got in points if math.isfinite(got.value)]
        if points:
            ranks, colour = [rank for rank, _ in points], COLOURS[name]
            # A logarithmic axis has no 0, and a patch of full rank has a KL of 0.
            ends = np.maximum([(got.low, got.value, got.high) for _, got in points], KL_FLOOR)
            low, level, high = ends.T.tolist()
            panel.fill_between(ranks, low, high, color=colour, alpha=0.15, linewidth=0)
            panel.plot(ranks, level, "o-", color=colour, markersize=4)
            middle = (len(points) - 1) // 2
            panel.annotate(label, (ranks[middle], level[middle]), textcoords="offset points", color=colour, **place)

    blind = rows.get(VISIBLE, "blind", f"kl.{kind}").value
    if math.isfinite(blind):
        blind = max(blind, KL_FLOOR)
        panel.axhline(blind, color=COLOURS["blind"], linestyle=(0, (4, 3)), linewidth=1)
        across = panel.get_yaxis_transform()
        panel.text(0.98, blind, "blind reuse", color=COLOURS["blind"], transform=across, ha="right", va="bottom")


def _label_right(panel: Axes, labels: Sequence[tuple[str, str, float]], gap: float = 0.075) -> None:
    """Names beside the right edge at their own heights, pushed apart where they would overlap."""
    ordered = sorted(labels, key=lambda label: label[2])
    low, high = panel.get_ylim()
    heights: list[float] = []
    for _, _, level in ordered:
        height = (level - low) / (high - low)
        heights.append(max(height, heights[-1] + gap) if heights else height)

    # From below, each at least a gap above the last; then, from above, pushed back below the top.
    excess = max(0.0, heights[-1] - 0.98) if heights else 0.0
    for number in range(len(heights) - 1, -1, -1):
        ceiling = heights[number + 1] - gap if number + 1 < len(heights) else heights[number] - excess
        heights[number] = min(heights[number], ceiling)

    for (text, colour, _), height in zip(ordered, heights, strict=True):
        panel.annotate(text, (1.02, height), xycoords="axes fraction", color=colour, va="center", annotation_clip=False)


def recall_figure(results: Results, out: Path) -> list[Path]:
    """Draws recall of an evicted chunk: a stale against a fresh patch as more of the legends were replaced."""
    rows, probe = Rows(results), "recall"
    turnovers = [turnover for turnover, _ in rows.settings(probe, "stale.turnover=")]
    kinds = [kind for kind in MULTI_HOP if kind in rows.kinds(probe)]
    if not kinds or not turnovers:
        return []

    with matplotlib.rc_context(STYLE):
        figure, panels = stacked(len(kinds), 2.8)
        for panel, kind in zip(panels, kinds, strict=True):
            ends = []
            for name in ("re-prefill", "fresh", "stale", "blind"):
                settings, colour = rows.settings(probe, f"{name}.turnover="), COLOURS[name]
                x, points = (
                    [turnover for turnover, _ in settings],
                    [rows.accuracy(arm, kind, probe) for _, arm in settings],
                )
                if points:
                    levels = [point.value for point in points]
                    draw_bars(panel, x, points, colour)
                    panel.plot(x, levels, color=colour, marker=MARKERS.get(name, "o"), markersize=4, linewidth=1.4)
                    ends.append((NAMES.get(name, name), colour, levels[-1]))

            panel.set(title=KINDS[kind], xlabel="legends replaced since eviction", ylim=(0, 1.03))
            panel.set_xticks(turnovers)
            panel.set_ylabel("accuracy")
            _label_right(panel, [end for end in ends if math.isfinite(end[2])])

        return [save(figure, "Recall: a chunk put back after eviction", out / "recall.png")]


DEFICIT_METRICS = {
    "relative_norm": "‖Δ‖ / ‖canonical‖",
    "e90": "directions with 90 % of ‖Δ‖²",
    "token_share_90": "share of tokens with 90 % of ‖Δ‖²",
    "e90_rotated": "directions with 90 %, rotated keys",
    "head_share_90": "share of heads with 90 % of ‖Δ‖²",
    "head_share_max": "largest head's share of ‖Δ‖²",
    "class_mean_share": "share of ‖Δ‖² explained by class means",
}


def deficit_table(rows: Rows, metric: str) -> dict[str, list[tuple[int, Interval]]]:
    """Reads a metric of the deficit by channel: (layer, statistic), layers ascending; undefined layers left out."""
    table: dict[str, list[tuple[int, Interval]]] = {}
    for arm in rows.arms("deficit", "layer="):
        layer, _, channel = arm.removeprefix("layer=").partition(".")
        got = rows.get("deficit", arm, metric)
        if math.isfinite(got.value):
            table.setdefault(channel, []).append((int(layer), got))
    return {channel: sorted(points) for channel, points in table.items()}


def deficit_figure(results: Results, out: Path) -> list[Path]:
    """Draws what conditioning adds, by layer and channel: its size, its rank, its spread over tokens and heads."""
    rows = Rows(results)
    tables = {metric: table for metric in DEFICIT_METRICS if (table := deficit_table(rows, metric))}
    if not tables:
        return []

    colours = {"k": "#0072B2", "v": "#D55E00", "ckv": "#009E73", "kpe": "#CC79A7"}
    with matplotlib.rc_context(STYLE):
        figure, panels = stacked(len(tables), 2.4, sharey=False)
        for panel, (metric, table) in zip(panels, tables.items(), strict=True):
            ends = []
            for channel, points in table.items():
                colour, layers = colours.get(channel, "#555555"), [layer for layer, _ in points]
                levels = [point.value for _, point in points]
                ends.append((channel, colour, levels[-1]))
                draw_bars(panel, layers, [point for _, point in points], colour)
                marker = "o" if channel in ("k", "kpe") else "s"
                panel.plot(layers, levels, color=colour, marker=marker, markersize=4)

            panel.set(title=_wrapped(DEFICIT_METRICS[metric]), xlabel="layer")
            panel.set_ylim(0, 1.03 if "_share_" in metric else None)
            panel.locator_params("x", integer=True)
            _label_right(panel, ends)

        return [save(figure, "The deficit Δ = KV(page | legends) − KV(page alone)", out / "deficit.png")]


def save(figure: Figure, title: str, path: Path) -> Path:
    """Writes a figure under a title as a PNG, making its folder. The title is broken where the figure ends."""
    # Matplotlib lets a long title run out of the figure.
    letters = int(LETTERS * figure.get_figwidth())
    title = "\n".join(textwrap.fill(line, letters) for line in title.splitlines())
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    return path
