"""The suite's own pages: table.md, figures, report.html."""

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from ..harness.frame import Rows
from ..harness.intervals import Interval
from ..harness.tables import markdown_table
from ..report.figures import NARROW
from ..report.page import picture, template
from .rows import EVERY_ARM

Results = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]
"""A table's head and lines, as text."""


class MetricFormat(NamedTuple):
    """A metric's name in tables, and its unit: a factor and the number of places."""

    title: str
    scale: float = 1.0
    places: int = 3


METRICS = {
    "canonical": MetricFormat("canonical kept, %", 100.0, 1),
    "stored": MetricFormat("stored beside it, %", 100.0, 1),
    "serving": MetricFormat("FLOPs of a reuse, %", 100.0, 1),
    "forming": MetricFormat("FLOPs once, %", 100.0, 1),
    "eta": MetricFormat("η"),
    "kl": MetricFormat("KL, nats"),
    "flips": MetricFormat("flips, %", 100.0, 1),
    "loss": MetricFormat("cross-entropy, nats a token"),
    "loss_difference": MetricFormat("loss above re-prefill's"),
    "greedy_tokens": MetricFormat("tokens up to the first that differs, %", 100.0, 1),
    "greedy_all": MetricFormat("continuations that agree whole, %", 100.0, 1),
    "right": MetricFormat("right", places=2),
    "chosen": MetricFormat("chosen", places=2),
    "tokens": MetricFormat("tokens right", places=2),
    "agrees": MetricFormat("answer of re-prefill", places=2),
}
FAMILIES = {
    "patch.rank=": ("patch", "C0", "o"),
    "first_k": ("first-k", "C1", "s"),
    "cacheblend": ("CacheBlend-style", "C2", "^"),
    "kvshare": ("KVShare-style", "C8", "<"),
    "vlcache": ("VLCache-style", "C9", ">"),
    "query_aware": ("query-aware tokens", "C3", "D"),
    "oracle_delta": ("oracle Δ tokens", "C4", "v"),
    "prophetkv": ("ProphetKV-style", "#8c6d31", "d"),
    "random": ("random tokens", "C5", "x"),
    "kv.svd": ("conditioned KV, truncated SVD", "#393b79", "p"),
    "shadowkv": ("ShadowKV-style low-rank keys", "#ad494a", "h"),
    "pooled": ("deficit in a shared basis", "#7b4173", "X"),
    "residual": ("layers run again from the residual", "#000000", "1"),
    "kv.bits=": ("conditioned KV at few bits", "C6", "P"),
    "patch.int8": ("patch, int8", "C7", "*"),
}
"""Names, colours and markers of the arms in figures, by how their names begin."""


def write_report(results: Results, out: Path) -> Path:
    """Writes table.md, figures/ and report.html; returns the last."""
    rows = Rows(results)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    figures = draw_figures(rows, out / "figures")
    tables = all_tables(rows)
    text = [f"## {title}\n\n{markdown_table(head, lines)}" for title, (head, lines) in tables.items()]
    (out / "table.md").write_text("\n\n".join([verdict(rows), *text]) + "\n", encoding="utf-8")

    config = results["config"]
    page = template("pretrained.html.j2").render(
        config=config,
        verdict=verdict(rows),
        pictures=[picture(path) for path in figures],
        tables=tables,
        settings={name: value for name, value in config.items() if name != "documents"},
    )
    (out / "report.html").write_text(page, encoding="utf-8")
    return out / "report.html"


# ---------------------------------------------------------------------------------------------------------- sentences


def show(interval: Interval, scale: float = 1.0, places: int = 3) -> str:
    """Formats a number with its interval, or a dash."""
    value, low, high = (number * scale for number in interval[:3])
    if not np.isfinite(value):
        return "–"
    return f"{value:.{places}f}" + (f" [{low:.{places}f}, {high:.{places}f}]" if np.isfinite(low) else "")


def verdict(rows: Rows) -> str:
    """Summarises the rows in sentences."""
    blind = rows.get("text", "blind", "loss_difference")
    if not np.isfinite(blind.value):
        return "Nothing was measured yet."

    loss = rows.get("text", "re-prefill", "loss")
    measured = [arm for arm in rows.arms("text") if rows.get(EVERY_ARM, arm, "eta").n]
    arms = [arm for arm in measured if arm not in ("re-prefill", "blind")]
    limited = [arm for arm in arms if rows.get("text", arm, "stored").value <= 0.5]
    best = best_arm(rows, limited or arms)
    sentences = [
        f"Over {blind.n} passages of text that comes with Python and its packages, blind reuse raises the loss on the "
        f"text's next tokens from {loss.value:.3f} by {show(blind)} nats, {100 * blind.value / loss.value:.1f} % of "
        "it; the paper calls plain text a negative control.",
        f"It changes {show(rows.get('text', 'blind', 'flips'), 100.0, 1)} % of the model's next tokens.",
        f"Of the arms that store at most half of the passage's KV, {best} removes most of blind reuse's KL: "
        f"η {show(rows.get(EVERY_ARM, best, 'eta'))} ({counted(rows)}).",
    ]

    # The patch beside KV(B|A) itself at four bits: what stores as much and needs no patch.
    bits = "kv.bits=4"
    room = rows.get("text", bits, "stored").value
    patches = [arm for arm in rows.arms("text", "patch.") if rows.get("text", arm, "stored").value <= room]

    if patches:
        best = best_arm(rows, patches)
        patch, few = rows.get(EVERY_ARM, best, "eta"), rows.get(EVERY_ARM, bits, "eta")
        word = "more than" if few.low > patch.high else "less than" if few.high < patch.low else "about as much as"
        sentences.append(
            f"The conditioned KV itself at four bits ({100 * room:.0f} % of the bytes) removes {word} the best patch "
            f"of no more bytes ({best}): η {show(few)} and {show(patch)}."
        )

    return " ".join(sentences)


def best_arm(rows: Rows, arms: Sequence[str]) -> str:
    """Returns the arm that removes most of blind reuse's KL."""
    return max(arms, key=lambda arm: rows.get(EVERY_ARM, arm, "eta").value)


def counted(rows: Rows) -> str:
    """Counts what the rows of all arms rest on; intervals resample documents: "n = 32 passages of 8 documents"."""
    documents = rows.get(EVERY_ARM, "blind", "documents").n
    return f"n = {rows.get(EVERY_ARM, 'blind', 'eta').n} passages of {documents} documents"


# ------------------------------------------------------------------------------------------------------------- tables


def all_tables(rows: Rows) -> dict[str, Table]:
    """Makes every table by its title."""
    probes = list(dict.fromkeys(probe for probe, _, _ in rows.table))
    tables = {"Every arm": probe_table(rows, "text")}
    groups = [probe for probe in probes if probe.startswith("text.")]

    # Groups of passages: blind reuse, and η of the other arms.
    if groups:
        arms = [arm for arm in rows.arms("text") if rows.get(groups[0], arm, "eta").n and arm != "re-prefill"]
        lines = []
        for probe in groups:
            kl, loss = rows.get(probe, "blind", "kl"), rows.get(probe, "blind", "loss_difference")
            etas = [show(rows.get(probe, arm, "eta"), places=2) for arm in arms[1:]]
            lines.append([probe.removeprefix("text."), str(kl.n), show(kl), show(loss), *etas])
        head = ["passages", "n", "blind: KL", "blind: loss above re-prefill's", *(f"η, {arm}" for arm in arms[1:])]
        tables["By domain, antecedent and length"] = head, lines

    for probe in probes:
        if probe == "greedy" or probe.startswith(("behaviour.", "drift.")) or probe in ("reorder", "slide"):
            tables[probe.replace(".", ": ")] = probe_table(rows, probe)
    return tables


def probe_table(rows: Rows, probe: str) -> Table:
    """Makes the table of a probe: a line per arm, a column per metric that it has, and the number of items."""
    used, lines = [name for name in METRICS if rows.measured(probe, rows.arms(probe), name)], []
    for arm in rows.arms(probe):
        counts = [rows.get(probe, arm, metric).n for metric in used]
        if any(counts):
            lines.append([arm, *cells(rows, probe, arm, used), str(max(counts))])
    return ["arm", *titles(used), "n"], lines


def titles(metrics: Iterable[str]) -> list[str]:
    """Lists what metrics are called in tables."""
    return [METRICS[metric].title for metric in metrics]


def cells(rows: Rows, probe: str, arm: str, metrics: Iterable[str], brief: Container[str] = ()) -> list[str]:
    """Formats an arm's metrics in their units; those of `brief` without their intervals."""
    shown = []
    for metric in metrics:
        interval, unit = rows.get(probe, arm, metric), METRICS[metric]
        if metric in brief:
            interval = interval._replace(low=np.nan, high=np.nan)
        shown.append(show(interval, unit.scale, unit.places))
    return shown


# ------------------------------------------------------------------------------------------------------------ figures


def draw_figures(rows: Rows, folder: Path, names: Iterable[str] = (), prefix: str = "") -> list[Path]:
    """Draws the figures of these names, or all, that the rows have something for; `prefix` begins their files' names.

    "stored": η against what is stored for one place of reuse, and against that and the canonical that is kept.
    "serving": η against FLOPs of a reuse, with what is paid once shared by 1, 3 and 10 of them. "depth", "spectra": the
    deficit by layer.
    """

    def cost(arm: str, **weights: float) -> float:
        return sum(weight * rows.get("text", arm, metric).value for metric, weight in weights.items())

    label = "FLOPs a reuse, share of re-prefill; reuses: {}"
    panels = {
        "stored": {
            "stored for this place, share of the passage's KV": {"stored": 1.0},
            "with the canonical kept, share of the passage's KV": {"stored": 1.0, "canonical": 1.0},
        },
        "serving": {label.format(n): {"serving": 1.0, "forming": 1 / n} for n in (1, 3, 10)},
    }
    by_layer = {
        "depth": ("relative_norm", "‖Δ‖ / ‖KV‖"),
        "spectra": ("e90", "directions with 90 % of ‖Δ‖²"),
    }

    drawn = []
    for name in names or (*panels, *by_layer):
        path = folder / f"{prefix}{name}.png"
        if name in panels:
            costs = {title: functools.partial(cost, **weights) for title, weights in panels[name].items()}
            drawn += _draw_pareto(rows, path, costs)
        else:
            drawn += _draw_by_layer(rows, path, *by_layer[name])
    return drawn


def _draw_pareto(rows: Rows, path: Path, panels: Mapping[str, Callable[[str], float]]) -> list[Path]:
    """Draws η of every arm against its cost, a panel per cost; returns what was drawn."""
    arms = [arm for arm in rows.arms("text") if np.isfinite(rows.get("text", arm, "stored").value)]
    if not arms:
        return []

    # Panels one above the other: a telephone shows the figure whole.
    figure = Figure(figsize=(NARROW, 3.1 * len(panels) + 1.6), layout="constrained")
    for axes, (label, cost) in zip(figure.subplots(len(panels), 1), panels.items(), strict=True):
        for prefix, (title, colour, marker) in FAMILIES.items():
            family = sorted([arm for arm in arms if arm.startswith(prefix)], key=cost)
            if not family:
                continue
            points = [rows.get(EVERY_ARM, arm, "eta") for arm in family]
            ends = np.array([[point.value - point.low, point.high - point.value] for point in points]).T
            look = {"color": colour, "marker": marker, "label": title, "lw": 1, "ms": 5, "capsize": 2}
            # An arm of one document has no interval; no bar is drawn for it.
            bars = np.maximum(np.nan_to_num(ends), 0)
            axes.errorbar([cost(arm) for arm in family], [point.value for point in points], yerr=bars, **look)

        axes.set(xlabel=label, ylim=(-0.05, 1.05), ylabel="η: share of blind's KL removed")
        axes.grid(alpha=0.3)

    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    return [path]


def _draw_by_layer(rows: Rows, path: Path, metric: str, label: str) -> list[Path]:
    """Draws a metric of the deficit by layer, a line per channel; returns what was drawn."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for arm in rows.arms("deficit", "layer="):
        layer, channel = arm.removeprefix("layer=").split(".")
        interval = rows.get("deficit", arm, metric)
        if np.isfinite(interval.value):
            lines.setdefault(channel, []).append((int(layer), interval))
    if not lines:
        return []

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for place, (channel, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        layers = [layer for layer, _ in points]
        value, low, high, _ = np.array([interval for _, interval in points]).T
        axes.plot(layers, value, color=f"C{place}", label=channel)
        axes.fill_between(layers, low, high, color=f"C{place}", alpha=0.2)

    axes.set(xlabel="layer", ylabel=label)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return [path]
