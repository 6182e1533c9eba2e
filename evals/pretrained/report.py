"""The suite's own pages: table.md, figures, report.html."""

import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report.figures import NARROW
from ..results.intervals import Interval
from ..results.rows import Rows
from ..results.tables import markdown_table
from .plan import TASKS
from .rows import EVERY_ARM

matplotlib.use("Agg")
Results = Mapping[str, Any]
METRICS = {
    "canonical": "canonical kept, %",
    "stored": "stored, % of KV",
    "serving": "served FLOPs, % of re-prefill",
    "kl": "KL, nats",
    "eta": "η",
    "flips": "flips, %",
    "loss_difference": "loss above re-prefill's, nats",
}
PERCENT = ("canonical", "stored", "serving", "flips")
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


def show(interval: Interval, scale: float = 1.0, places: int = 3) -> str:
    """A number with its interval, or a dash."""
    value, low, high = (number * scale for number in interval[:3])
    if not np.isfinite(value):
        return "–"
    return f"{value:.{places}f}" + (f" [{low:.{places}f}, {high:.{places}f}]" if np.isfinite(low) else "")


def verdict(rows: Rows) -> str:
    """What the rows say, in sentences that are made of them."""
    blind = rows.get("text", "blind", "loss_difference")
    if not np.isfinite(blind.value):
        return "Nothing was measured yet."
    loss = rows.get("text", "re-prefill", "loss")
    arms = [
        arm for arm in rows.arms("text") if arm not in ("re-prefill", "blind") and rows.get(EVERY_ARM, arm, "eta").n
    ]
    limited = [arm for arm in arms if rows.get("text", arm, "stored").value <= 0.5]
    best = max(limited or arms, key=lambda arm: rows.get(EVERY_ARM, arm, "eta").value)
    sentences = [
        f"Over {blind.n} passages of text that comes with Python and its packages, blind reuse raises the loss on the "
        f"text's next tokens from {loss.value:.3f} by {show(blind)} nats, {100 * blind.value / loss.value:.1f} % of "
        "it; the paper calls plain text a negative control.",
        f"It changes {show(rows.get('text', 'blind', 'flips'), 100.0, 1)} % of the next tokens that the model would "
        "choose.",
        f"Of the arms that store at most half of the passage's KV, {best} removes most of blind reuse's KL: "
        f"η {show(rows.get(EVERY_ARM, best, 'eta'))} ({counted(rows)}).",
    ]
    return " ".join([*sentences, *_against_few_bits(rows)])


def _against_few_bits(rows: Rows) -> list[str]:
    """The patch beside KV(B|A) itself at four bits, at no more bytes: what stores as much and needs no patch."""
    bits = "kv.bits=4"
    room = rows.get("text", bits, "stored").value
    patches = [arm for arm in rows.arms("text", "patch.") if rows.get("text", arm, "stored").value <= room]
    if not patches:
        return []
    best = max(patches, key=lambda arm: rows.get(EVERY_ARM, arm, "eta").value)
    patch, few = rows.get(EVERY_ARM, best, "eta"), rows.get(EVERY_ARM, bits, "eta")
    word = "about as much as"
    if few.low > patch.high:
        word = "more than"
    if few.high < patch.low:
        word = "less than"
    return [
        f"The conditioned KV itself at four bits ({100 * room:.0f} % of the bytes) removes {word} the best patch of no "
        f"more bytes ({best}): η {show(few)} and {show(patch)}, {counted(rows)}."
    ]


def counted(rows: Rows) -> str:
    """Says how much the rows of all arms rest on; intervals resample documents: "n = 32 passages of 8 documents"."""
    documents = rows.get(EVERY_ARM, "blind", "documents").n
    return f"n = {rows.get(EVERY_ARM, 'blind', 'eta').n} passages of {documents} documents"


def all_tables(rows: Rows) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Every table by its title: the head, and lines of text."""
    found = {"Every way of reuse": _arms_table(rows, "text")}
    parts = [probe for probe in dict.fromkeys(probe for probe, _, _ in rows.table) if probe.startswith("text.")]
    if parts:
        arms = [arm for arm in rows.arms("text") if rows.get(parts[0], arm, "eta").n and arm != "re-prefill"]
        head = ["passages", "n", "blind: KL", "blind: loss above re-prefill's", *(f"η, {arm}" for arm in arms[1:])]
        lines = []
        for probe in parts:
            get = lambda arm, metric, probe=probe: rows.get(probe, arm, metric)
            first = [probe.removeprefix("text."), str(get("blind", "kl").n)]
            first += [show(get("blind", "kl")), show(get("blind", "loss_difference"))]
            lines.append([*first, *(show(get(arm, "eta"), places=2) for arm in arms[1:])])
        found["By domain, antecedent and length"] = (head, lines)
    if rows.arms("greedy"):
        lines = [
            [
                arm,
                *(show(rows.get("greedy", arm, metric), 100.0, 1) for metric in ("greedy_tokens", "greedy_all")),
                str(rows.get("greedy", arm, "greedy_all").n),
            ]
            for arm in rows.arms("greedy")
        ]
        head = ["arm", "tokens up to the first that differs, %", "continuations that agree whole, %", "n"]
        found["Greedy continuations, against re-prefill's"] = (head, lines)
    for task in TASKS:
        probe = f"behaviour.{task}"
        if rows.arms(probe):
            names = [name for name in ("right", "chosen", "tokens", "agrees") if rows.get(probe, "blind", name).n]
            lines = [
                [
                    arm,
                    *(show(rows.get(probe, arm, name), places=2) for name in names),
                    str(rows.get(probe, arm, "kl").n),
                ]
                for arm in rows.arms(probe)
            ]
            found[f"Behaviour: {task}"] = (["arm", *names, "n"], lines)
    for probe in dict.fromkeys(probe for probe, _, _ in rows.table):
        if probe in ("reorder", "slide") or probe.startswith("drift."):
            found[probe.replace(".", ": ")] = _arms_table(rows, probe)
    return found


def _arms_table(rows: Rows, probe: str) -> tuple[list[str], list[list[str]]]:
    used = [name for name in METRICS if any(np.isfinite(rows.get(probe, arm, name).value) for arm in rows.arms(probe))]
    lines = []
    for arm in rows.arms(probe):
        if not np.isfinite(rows.get(probe, arm, "kl").value):
            continue
        cells = [show(rows.get(probe, arm, name), *((100.0, 1) if name in PERCENT else (1.0, 3))) for name in used]
        lines.append([arm, *cells, str(rows.get(probe, arm, "kl").n)])
    return ["arm", *(METRICS[name] for name in used), "n"], lines


def _stored(rows: Rows, path: Path) -> Path | None:
    """η against what is stored for one place of reuse, and against that and the canonical that is kept."""
    cost = lambda *names: lambda arm: sum(rows.get("text", arm, name).value for name in names)
    panels = {
        "stored for this place, share of the passage's KV": cost("stored"),
        "with the canonical kept, share of the passage's KV": cost("stored", "canonical"),
    }
    return _pareto(rows, path, panels)


def _serving(rows: Rows, path: Path) -> Path | None:
    """η against FLOPs of a reuse, with what is paid once shared by 1, 3 and 10 of them."""
    spent = lambda reuses: (
        lambda arm: rows.get("text", arm, "serving").value + rows.get("text", arm, "forming").value / reuses
    )
    return _pareto(rows, path, {f"FLOPs a reuse, share of re-prefill; reuses: {n}": spent(n) for n in (1, 3, 10)})


def _pareto(rows: Rows, path: Path, panels: Mapping[str, Callable[[str], float]]) -> Path | None:
    arms = [arm for arm in rows.arms("text") if np.isfinite(rows.get("text", arm, "stored").value)]
    if not arms:
        return None
    # Panels one above the other: a telephone shows the figure whole.
    figure = Figure(figsize=(NARROW, 3.1 * len(panels) + 1.6), layout="constrained")
    for place, (axes, (label, cost)) in enumerate(zip(figure.subplots(len(panels), 1), panels.items(), strict=True)):
        for prefix, (name, colour, marker) in FAMILIES.items():
            own = [arm for arm in arms if arm.startswith(prefix)]
            if own:
                points = [rows.get(EVERY_ARM, arm, "eta") for arm in own]
                _points(axes, np.array([cost(arm) for arm in own]), points, colour, marker, name)
        axes.set(xlabel=label, ylim=(-0.05, 1.05))
        axes.grid(alpha=0.3)
        axes.set_ylabel("η: share of blind's KL removed")
        if place == 0:
            handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)
    return path


def _points(
    axes: Axes,
    x: np.ndarray,
    points: Sequence[Interval],
    colour: str,
    marker: str,
    label: str,
) -> None:
    order = np.argsort(x, kind="stable")
    y = np.array([point.value for point in points])[order]
    ends = np.array([[point.value - point.low, point.high - point.value] for point in points])[order].T
    ends = np.maximum(np.nan_to_num(ends), 0)
    look = {"color": colour, "marker": marker, "label": label, "lw": 1, "ms": 5, "capsize": 2}
    axes.errorbar(x[order], y, yerr=ends, **look)


def _depth(rows: Rows, path: Path) -> Path | None:
    return _by_layer(rows, path, "relative_norm", "‖Δ‖ / ‖KV‖")


def _spectra(rows: Rows, path: Path) -> Path | None:
    return _by_layer(rows, path, "e90", "directions with 90 % of ‖Δ‖²")


def _by_layer(rows: Rows, path: Path, metric: str, label: str) -> Path | None:
    """A metric of the deficit by layer, a line per channel."""
    found: dict[str, list[tuple[int, Interval]]] = {}
    for arm in rows.arms("deficit", "layer="):
        layer, channel = arm.removeprefix("layer=").split(".")
        interval = rows.get("deficit", arm, metric)
        if np.isfinite(interval.value):
            found.setdefault(channel, []).append((int(layer), interval))
    if not found:
        return None
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for place, (channel, points) in enumerate(found.items()):
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


FIGURES = {"stored": _stored, "serving": _serving, "depth": _depth, "spectra": _spectra}


def draw_figures(rows: Rows, folder: Path, names: Iterable[str] = tuple(FIGURES), prefix: str = "") -> list[Path]:
    """Draws the figures of these names that the rows have something for, `prefix` before their files' names."""
    drawn = [FIGURES[name](rows, folder / f"{prefix}{name}.png") for name in names]
    return [path for path in drawn if path]


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:auto;padding:1rem;color:#222}
table{border-collapse:collapse;font-size:.85rem}td,th{padding:.25rem .6rem;text-align:left;border-bottom:1px solid #ddd;
white-space:nowrap}td:first-child,th:first-child{position:sticky;left:0;background:#fff}div.wide{overflow-x:auto}
img{max-width:100%}pre{overflow-x:auto}"""


def _page(results: Results, said: str, tables: Mapping[str, Any], figures: Sequence[Path]) -> str:
    """One HTML page that opens offline."""
    config = results["config"]
    licences = "; ".join(f"{package}: {licence}" for package, licence in config["licences"].items())
    note = ""
    if config["parts_done"] < config["parts"]:
        note = f"<p><b>Not finished: {config['parts_done']} of {config['parts']} parts.</b></p>"
    pictures = "".join(
        f'<p><img alt="{path.stem}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></p>'
        for path in figures
    )
    body = "".join(
        f"<details{' open' if place == 0 else ''}><summary><b>{html.escape(title)}</b></summary>{_table(*table)}"
        "</details>"
        for place, (title, table) in enumerate(tables.items())
    )
    settings = html.escape("\n".join(f"{name}: {value}" for name, value in config.items() if name != "documents"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Reuse on real weights</title><style>{_STYLE}</style></head><body>"
        f"<h1>Reuse on real weights: {html.escape(config['model'])}</h1><p>{html.escape(said)}</p>{note}{pictures}"
        f"{body}<p>Intervals: 95 %, whole documents resampled. Stored and served shares: of the passages of the most "
        f"frequent length; arms of a subset of passages say so by their n. Text: {html.escape(licences)}.</p>"
        f"<details><summary>Settings</summary><pre>{settings}</pre></details></body></html>\n"
    )


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = lambda tag, line: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
    body = "".join(f"<tr>{cells('td', line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{cells("th", head)}</tr>{body}</table></div>'
