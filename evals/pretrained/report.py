"""The suite's own pages: table.md, figures, report.html."""

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report.figures import NARROW
from ..results.intervals import Interval
from ..results.rows import Rows
from ..results.tables import markdown_table
from .rows import EVERY_ARM

matplotlib.use("Agg")
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
    page = out / "report.html"
    page.write_text(_page(results, verdict(rows), tables, figures), encoding="utf-8")
    return page


# ---------------------------------------------------------------------------------------------------------- sentences


def show(interval: Interval, scale: float = 1.0, places: int = 3) -> str:
    """Formats a number with its interval, or a dash."""
    value, low, high = (number * scale for number in interval[:3])
    if not np.isfinite(value):
        return "–"
    return f"{value:.{places}f}" + (f" [{low:.{places}f}, {high:.{places}f}]" if np.isfinite(low) else "")


def show_metric(interval: Interval, metric: str, *, brief: bool = False) -> str:
    """Formats a figure in its metric's unit; `brief`: without its interval."""
    shown = METRICS.get(metric, MetricFormat(metric))
    if brief:
        interval = interval._replace(low=np.nan, high=np.nan)
    return show(interval, shown.scale, shown.places)


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
    if groups:
        tables["By domain, antecedent and length"] = _groups_table(rows, groups)
    for probe in probes:
        if probe == "greedy" or probe.startswith(("behaviour.", "drift.")) or probe in ("reorder", "slide"):
            tables[probe.replace(".", ": ")] = probe_table(rows, probe)
    return tables


def probe_table(rows: Rows, probe: str) -> Table:
    """Makes the table of a probe: a line per arm, a column per metric that it has, and the number of items."""
    arms = [arm for arm in rows.arms(probe) if any(rows.get(probe, arm, metric).n for metric in METRICS)]
    used = [name for name in METRICS if any(np.isfinite(rows.get(probe, arm, name).value) for arm in arms)]
    lines = []
    for arm in arms:
        intervals = {metric: rows.get(probe, arm, metric) for metric in used}
        cells = [show_metric(interval, metric) for metric, interval in intervals.items()]
        lines.append([arm, *cells, str(max(interval.n for interval in intervals.values()))])
    return ["arm", *(METRICS[name].title for name in used), "n"], lines


def _groups_table(rows: Rows, probes: Sequence[str]) -> Table:
    """Makes the table of groups of passages: blind reuse, and η of the other arms."""
    arms = [arm for arm in rows.arms("text") if rows.get(probes[0], arm, "eta").n and arm != "re-prefill"]
    lines = []
    for probe in probes:
        kl, loss = rows.get(probe, "blind", "kl"), rows.get(probe, "blind", "loss_difference")
        etas = [show(rows.get(probe, arm, "eta"), places=2) for arm in arms[1:]]
        lines.append([probe.removeprefix("text."), str(kl.n), show(kl), show(loss), *etas])
    head = ["passages", "n", "blind: KL", "blind: loss above re-prefill's", *(f"η, {arm}" for arm in arms[1:])]
    return head, lines


# ------------------------------------------------------------------------------------------------------------ figures


def _draw_stored(rows: Rows, path: Path) -> Path | None:
    """Draws η against what is stored for one place of reuse, and against that and the canonical that is kept."""

    def stored(arm: str) -> float:
        return rows.get("text", arm, "stored").value

    panels = {
        "stored for this place, share of the passage's KV": stored,
        "with the canonical kept, share of the passage's KV": lambda arm: (
            stored(arm) + rows.get("text", arm, "canonical").value
        ),
    }
    return _draw_pareto(rows, path, panels)


def _draw_serving(rows: Rows, path: Path) -> Path | None:
    """Draws η against FLOPs of a reuse, with what is paid once shared by 1, 3 and 10 of them."""

    def spent(arm: str, reuses: int) -> float:
        return rows.get("text", arm, "serving").value + rows.get("text", arm, "forming").value / reuses

    label = "FLOPs a reuse, share of re-prefill; reuses: {}"
    return _draw_pareto(rows, path, {label.format(n): lambda arm, n=n: spent(arm, n) for n in (1, 3, 10)})


def _draw_pareto(rows: Rows, path: Path, panels: Mapping[str, Callable[[str], float]]) -> Path | None:
    arms = [arm for arm in rows.arms("text") if np.isfinite(rows.get("text", arm, "stored").value)]
    if not arms:
        return None

    # Panels one above the other: a telephone shows the figure whole.
    figure = Figure(figsize=(NARROW, 3.1 * len(panels) + 1.6), layout="constrained")
    for place, (axes, (label, cost)) in enumerate(zip(figure.subplots(len(panels), 1), panels.items(), strict=True)):
        for prefix, style in FAMILIES.items():
            family = [arm for arm in arms if arm.startswith(prefix)]
            if family:
                points = [rows.get(EVERY_ARM, arm, "eta") for arm in family]
                _draw_points(axes, np.array([cost(arm) for arm in family]), points, style)

        axes.set(xlabel=label, ylim=(-0.05, 1.05))
        axes.grid(alpha=0.3)
        axes.set_ylabel("η: share of blind's KL removed")
        if place == 0:
            handles, names = axes.get_legend_handles_labels()

    figure.legend(handles, names, fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    return path


def _draw_points(axes: Axes, x: np.ndarray, points: Sequence[Interval], style: tuple[str, str, str]) -> None:
    label, colour, marker = style
    order = np.argsort(x, kind="stable")
    y = np.array([point.value for point in points])[order]
    ends = np.array([[point.value - point.low, point.high - point.value] for point in points])[order].T
    ends = np.maximum(np.nan_to_num(ends), 0)
    look = {"color": colour, "marker": marker, "label": label, "lw": 1, "ms": 5, "capsize": 2}
    axes.errorbar(x[order], y, yerr=ends, **look)


def _draw_depth(rows: Rows, path: Path) -> Path | None:
    return _draw_by_layer(rows, path, "relative_norm", "‖Δ‖ / ‖KV‖")


def _draw_spectra(rows: Rows, path: Path) -> Path | None:
    return _draw_by_layer(rows, path, "e90", "directions with 90 % of ‖Δ‖²")


def _draw_by_layer(rows: Rows, path: Path, metric: str, label: str) -> Path | None:
    """Draws a metric of the deficit by layer, a line per channel."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for arm in rows.arms("deficit", "layer="):
        layer, channel = arm.removeprefix("layer=").split(".")
        interval = rows.get("deficit", arm, metric)
        if np.isfinite(interval.value):
            lines.setdefault(channel, []).append((int(layer), interval))

    if not lines:
        return None

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for place, (channel, points) in enumerate(lines.items()):
        points.sort(key=lambda point: point[0])
        layers = [layer for layer, _ in points]
        axes.plot(layers, [point.value for _, point in points], color=f"C{place}", label=channel)
        low, high = [point.low for _, point in points], [point.high for _, point in points]
        axes.fill_between(layers, low, high, color=f"C{place}", alpha=0.2)

    axes.set(xlabel="layer", ylabel=label)
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path


FIGURES = {"stored": _draw_stored, "serving": _draw_serving, "depth": _draw_depth, "spectra": _draw_spectra}


def draw_figures(rows: Rows, folder: Path, names: Iterable[str] = tuple(FIGURES), prefix: str = "") -> list[Path]:
    """Draws the figures of these names that the rows have something for, `prefix` before their files' names."""
    drawn = [FIGURES[name](rows, folder / f"{prefix}{name}.png") for name in names]
    return [path for path in drawn if path]


# --------------------------------------------------------------------------------------------------------------- page

_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:auto;padding:1rem;color:#222}
table{border-collapse:collapse;font-size:.85rem}td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #ddd;
white-space:nowrap}td:first-child,th:first-child{position:sticky;left:0;background:#fff}div.wide{overflow-x:auto}
img{max-width:100%}pre{overflow-x:auto}"""


def _page(results: Results, summary: str, tables: Mapping[str, Table], figures: Sequence[Path]) -> str:
    """Formats one HTML page that opens offline."""
    config = results["config"]
    licences = "; ".join(f"{package}: {licence}" for package, licence in config["licences"].items())
    note = ""
    if config["parts_done"] < config["parts"]:
        note = f"<p><b>Not finished: {config['parts_done']} of {config['parts']} parts.</b></p>"
    pictures = ""
    for path in figures:
        data = base64.b64encode(path.read_bytes()).decode()
        pictures += f'<p><img alt="{path.stem}" src="data:image/png;base64,{data}"></p>'

    body = ""
    for place, (title, table) in enumerate(tables.items()):
        shown = " open" if place == 0 else ""
        body += f"<details{shown}><summary><b>{html.escape(title)}</b></summary>{_html_table(*table)}</details>"

    settings = html.escape("\n".join(f"{name}: {value}" for name, value in config.items() if name != "documents"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Reuse on real weights</title><style>{_STYLE}</style></head><body>"
        f"<h1>Reuse on real weights: {html.escape(config['model'])}</h1><p>{html.escape(summary)}</p>{note}{pictures}"
        f"{body}<p>Intervals: 95 %, whole documents resampled. Stored and served shares are of the passages of the "
        "most frequent length; arms that were measured on fewer passages have a smaller n. "
        f"Text: {html.escape(licences)}.</p>"
        f"<details><summary>Settings</summary><pre>{settings}</pre></details></body></html>\n"
    )


def _html_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in lines]
    body = "".join(f"<tr>{line}</tr>" for line in cells)
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f'<div class="wide"><table><tr>{heads}</tr>{body}</table></div>'
