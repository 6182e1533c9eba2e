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
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.intervals import Interval
from ..results.rows import Rows

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
    "re-prefill": "re-prefill",
    "blind": "blind reuse",
    "answer": "right answer",
    "patch": "patch",
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
    "oracle": "oracle",
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


def accuracy_figures(results: Results, out: Path) -> list[Path]:
    """Draws the accuracy of every arm, one panel per question kind, one PNG per visibility setting."""
    rows = Rows(results)
    written = []
    for probe, setting in SETTINGS.items():
        arms = [arm for arm in rows.arms(probe) if _worth_drawing(arm) and _has(rows, probe, [arm], "accuracy")]
        if arms:
            title = f"Accuracy by repair, {setting} · bars: 95 % intervals"
            path = out / f"accuracy_{probe.split('.')[1]}.png"
            written.append(_dot_panels(rows, probe, sorted(arms, key=_arm_order), title, path))

    return written


def reorder_figure(results: Results, out: Path) -> list[Path]:
    """Draws accuracy after the legends are reordered: another order's patch, one orbit patch, the order's own."""
    order = ("re-prefill", "exact", "orbit", "transfer", "blind")
    return _small_probe(results, "reorder", order, "Reorder: one patch for every order of the legends", out)


def slide_figure(results: Results, out: Path) -> list[Path]:
    """Draws accuracy after the oldest chunk left: survivors kept as they are, with a removal patch, or blind."""
    order = ("re-prefill", "removal", "keep", "blind")
    return _small_probe(results, "slide", order, "Slide: the chunks that stay when the oldest leaves", out)


def _small_probe(results: Results, probe: str, order: Sequence[str], title: str, out: Path) -> list[Path]:
    rows = Rows(results)
    arms = [arm for arm in order if _has(rows, probe, [arm], "accuracy")]
    return [_dot_panels(rows, probe, arms, f"{title} · bars: 95 % intervals", out / f"{probe}.png")] if arms else []


def _has(rows: Rows, probe: str, arms: Sequence[str], metric: str) -> bool:
    kinds = rows.kinds(probe, metric)
    return any(math.isfinite(rows.get(probe, arm, f"{metric}.{kind}").value) for arm in arms for kind in kinds)


def _worth_drawing(arm: str) -> bool:
    return not (".rotated_frame" in arm or arm.endswith(("budget=0.1", "budget=0.25")))


def _arm_order(arm: str) -> tuple[int, float]:
    place = list(COLOURS).index(family(arm)) if family(arm) in COLOURS else len(COLOURS)
    variant = 50.0 if arm.count("=") and not re.match(r"(patch\.rank|\w+\.budget)=", arm) else 0.0
    return place, variant + float(arm.rpartition("=")[2]) if "=" in arm else 0.0


def _dot_panels(rows: Rows, probe: str, arms: Sequence[str], title: str, path: Path) -> Path:
    """Horizontal dots with interval bars: arms down, one panel per question kind, re-prefill as a vertical line.

    Panels of few arms stand one above the other; of more side by side, in a figure that is wider than a telephone.
    """
    kinds = [kind for kind in rows.kinds(probe) if any(rows.get(probe, arm, f"accuracy.{kind}").n for arm in arms)]
    height, few = 0.24 * len(arms) + 1.2, len(arms) <= FEW_ARMS
    size = (NARROW, height * len(kinds)) if few else (2.1 + 2.0 * len(kinds), height)

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        shape = (len(kinds), 1) if few else (1, len(kinds))
        panels = figure.subplots(*shape, sharey=True, squeeze=False).ravel()

        for panel, kind in zip(panels, kinds, strict=True):
            reference = rows.get(probe, "re-prefill", f"accuracy.{kind}").value
            if math.isfinite(reference):
                panel.axvline(reference, color="#222222", linewidth=0.8, linestyle=(0, (4, 3)))

            for place, arm in enumerate(arms):
                colour = COLOURS.get(family(arm), "#555555")
                got = rows.get(probe, arm, f"accuracy.{kind}")
                panel.plot([got.low, got.high], [place, place], color=colour, linewidth=1.8, solid_capstyle="butt")
                panel.plot([got.value], [place], MARKERS.get(family(arm), "o"), color=colour, markersize=3.6)

            panel.set(title=_wrapped(KINDS.get(kind, kind)), xlabel="accuracy", xlim=(-0.03, 1.03))
            panel.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            panel.grid(visible=False, axis="y")

        panels[0].set_yticks(range(len(arms)), [arm_label(arm) for arm in arms])
        panels[0].set_ylim(len(arms) - 0.4, -0.6)
        return save(figure, title, path)


def _wrapped(label: str) -> str:
    first, _, rest = label.partition(": ")
    return f"{first}:\n{textwrap.fill(rest, 26)}" if rest else f"{label}\n"


def rank_figure(results: Results, out: Path) -> list[Path]:
    """Draws KL against the patch's rank, one panel per kind of question that needs both images."""
    rows, probe = Rows(results), "repair.visible"
    ranks = rows.settings(probe, "patch.rank=")
    kinds = [kind for kind in (*MULTI_HOP, "override") if kind in rows.kinds(probe, "kl")]
    if not ranks or not kinds:
        return []

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(NARROW, 3.0 * len(kinds)), layout="constrained")
        panels = figure.subplots(len(kinds), 1, squeeze=False, sharey=True)[:, 0]
        for panel, kind in zip(panels, kinds, strict=True):
            _kl_by_rank(panel, rows, probe, kind)
            panel.set_ylabel("KL(re-prefill ‖ arm), nats")
        return [save(figure, "What rank it takes", out / "rank.png")]


def _kl_by_rank(panel: Axes, rows: Rows, probe: str, kind: str) -> None:
    # A logarithmic axis has no 0, and a patch of full rank has a KL of 0.
    def floored(number):
        return max(number, KL_FLOOR)

    for prefix, name in (("patch.rotated_frame.rank=", "rotated_frame"), ("patch.rank=", "patch")):
        points = [(x, rows.get(probe, arm, f"kl.{kind}")) for x, arm in rows.settings(probe, prefix)]
        points = [(x, y) for x, y in points if math.isfinite(y.value)]
        if points:
            ranks = [x for x, _ in points]
            panel.fill_between(
                ranks,
                [floored(y.low) for _, y in points],
                [floored(y.high) for _, y in points],
                color=COLOURS[name],
                alpha=0.15,
                linewidth=0,
            )
            panel.plot(ranks, [floored(y.value) for _, y in points], "o-", color=COLOURS[name], markersize=4)
            label = "patch" if name == "patch" else "patch formed\nafter rotation"
            middle = (len(points) - 1) // 2
            above = name != "patch"
            panel.annotate(
                label,
                (ranks[middle], floored(points[middle][1].value)),
                xytext=(7, 5) if above else (-7, -5),
                textcoords="offset points",
                ha="left" if above else "right",
                va="bottom" if above else "top",
                color=COLOURS[name],
            )

    blind = rows.get(probe, "blind", f"kl.{kind}").value
    if math.isfinite(blind):
        panel.axhline(floored(blind), color=COLOURS["blind"], linestyle=(0, (4, 3)), linewidth=1)
        place: dict[str, Any] = dict(transform=panel.get_yaxis_transform(), ha="right", va="bottom")
        panel.text(0.98, floored(blind), "blind reuse", color=COLOURS["blind"], **place)

    panel.set(xscale="log", yscale="log", title=KINDS[kind], xlabel="patch rank")
    ticks = [int(x) for x, _ in rows.settings(probe, "patch.rank=")]
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()


def byte_share(rows: Rows, probe: str, arm: str) -> float:
    """Finds the share of the chunk's KV bytes an arm stores or recomputes, 0…1.

    The arm's own "bytes" row where there is one; else its token budget (a token is its share of the bytes), or the
    bytes of the patch whose rank the arm is matched to.
    """
    own = rows.get(probe, arm, "bytes").value
    name, _, setting = arm.rpartition("=")
    if math.isfinite(own) or not setting:
        return own
    if name.endswith(".budget"):
        return float(setting)
    return rows.get(probe, f"patch.rank={setting}", "bytes").value if name.endswith(".bytes_of_rank") else math.nan


def _line(panel: Axes, x: Sequence[float], points: Sequence[Interval], name: str) -> None:
    colour = COLOURS.get(name, "#555555")
    for where, point in zip(x, points, strict=True):
        panel.plot([where, where], [point.low, point.high], color=colour, linewidth=1, alpha=0.6)
    marker = MARKERS.get(name, "o")
    panel.plot(x, [point.value for point in points], color=colour, marker=marker, markersize=4, linewidth=1.4)


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
    names = ("re-prefill", "fresh", "stale", "blind")
    kinds = [kind for kind in MULTI_HOP if kind in rows.kinds(probe)]
    if not kinds or not rows.settings(probe, "stale.turnover="):
        return []

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(NARROW, 2.8 * len(kinds)), layout="constrained")
        panels = figure.subplots(len(kinds), 1, squeeze=False, sharey=True)[:, 0]
        for panel, kind in zip(panels, kinds, strict=True):
            ends = []
            for name in names:
                settings = rows.settings(probe, f"{name}.turnover=")
                points = [(x, rows.get(probe, arm, f"accuracy.{kind}")) for x, arm in settings]
                if points:
                    _line(panel, [x for x, _ in points], [y for _, y in points], name)
                    ends.append((NAMES[name], COLOURS[name], points[-1][1].value))

            panel.set(title=KINDS[kind], xlabel="legends replaced since eviction", ylim=(0, 1.03))
            panel.set_xticks([x for x, _ in rows.settings(probe, "stale.turnover=")])
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
        figure = Figure(figsize=(NARROW, 2.4 * len(tables)), layout="constrained")
        panels = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
        for panel, (metric, table) in zip(panels, tables.items(), strict=True):
            ends = []
            for channel, points in table.items():
                colour, layers = colours.get(channel, "#555555"), [layer for layer, _ in points]
                ends.append((channel, colour, points[-1][1].value))
                for layer, point in points:
                    panel.plot([layer, layer], [point.low, point.high], color=colour, linewidth=1, alpha=0.6)
                marker = "o" if channel in ("k", "kpe") else "s"
                panel.plot(layers, [point.value for _, point in points], color=colour, marker=marker, markersize=4)

            panel.set(title=_wrapped(DEFICIT_METRICS[metric]), xlabel="layer")
            panel.set_ylim(0, 1.03 if "_share_" in metric else None)
            panel.xaxis.get_major_locator().set_params(integer=True)
            _label_right(panel, ends)

        return [save(figure, "The deficit Δ = KV(page | legends) − KV(page alone)", out / "deficit.png")]


def save(figure: Figure, title: str, path: Path) -> Path:
    """Writes a figure under a title as a PNG, making its folder. The title is broken where the figure ends."""
    letters = int(LETTERS * figure.get_figwidth())
    title = "\n".join(textwrap.fill(line, letters) for line in title.splitlines())
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    return path
