"""The window's suite in the report: its figures, its tables, a few lines of summary."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.rows import Rows
from .figures import COLOURS, NARROW, STYLE, Results, arm_label, family, save
from .window_paper import beside_the_paper, enough
from .wording import number, show

PREFIX = "window."
LEADS = {"lead=0": "no lead", "lead=1": "pinned lead"}


class FigureSpec(NamedTuple):
    """A figure: of which probes, arms and kinds (a panel for each of both), by which metric, in what words."""

    title: str
    probes: Mapping[str, str]
    arms: Sequence[str]
    kinds: Sequence[str]
    metric: str
    unit: str
    across: str


FORGET, REMEMBER = "against re-prefill (forget)", "against the banded model (remember)"
FIGURES = {
    "window_reorder": FigureSpec(
        "Reorder: one patch for every order of K images",
        {"window.reorder": ""},
        ("oracle", "orbit", "transfer", "blind"),
        ("chain", "aggregate", "override"),
        "eta",
        "η",
        "K images in front of the page",
    ),
    "window_slide": FigureSpec(
        "Slide: what survivors need when the oldest legends leave",
        {"window.slide": FORGET, "window.slide.remember": REMEMBER},
        ("keep", "removal", "oracle", "blind", "blind_behind_lead"),
        ("survivor", "aggregate", "evicted", "page"),
        "kl",
        "KL, nats",
        "legends that left",
    ),
    "window_recall": FigureSpec(
        "Recall: the page put back as the window turned over",
        {"window.recall": FORGET, "window.recall.remember": REMEMBER},
        ("oracle", "fresh", "fixed_earlier", "stale", "blind"),
        ("chain", "override"),
        "kl",
        "KL, nats",
        "share of the window that was replaced",
    ),
    "window_drift": FigureSpec(
        "Drift: the stored patch behind legends that changed, and what mends it",
        {"window.drift": ""},
        ("oracle", "rebuilt", "update", "deepest", "deep", "shallow", "stored", "blind"),
        ("chain", "aggregate", "override"),
        "kl",
        "KL, nats",
        "",
    ),
    "window_many": FigureSpec(
        "Many chunks: every image served from the cache and moved",
        {"window.many": ""},
        ("oracle", "kept", "transfer", "blind_fresh_page", "blind"),
        ("chain", "aggregate", "override", "legend", "page"),
        "kl",
        "KL, nats",
        "images in the window (trained with 4)",
    ),
}


def split_arm(arm: str) -> tuple[str, str, str]:
    """Splits "orbit.k=3.lead=0" into the arm, what was varied and the lead: ("orbit", "k=3", "lead=0")."""
    name, _, rest = arm.partition(".")
    varied, _, lead = rest.rpartition(".")
    return name, varied, lead


def window_probes(rows: Rows) -> list[str]:
    """Lists the window suite's probes that were run."""
    return list(dict.fromkeys(probe for probe, _, _ in rows.table if probe.startswith(PREFIX)))


def window_figures(results: Results, out: Path) -> list[Path]:
    """Draws a figure for every window probe that was run, and one of the gate."""
    rows = Rows(results)
    written = []
    for name, drawn in FIGURES.items():
        probes = [probe for probe in drawn.probes if rows.arms(probe)]
        if probes:
            written.append(_panels(rows, drawn, probes, out / f"{name}.png"))

    if rows.arms("window.gate"):
        written.append(_gate(rows, out / "window_gate.png"))
    return written


def _panels(rows: Rows, drawn: FigureSpec, probes: Sequence[str], path: Path) -> Path:
    kinds = [kind for kind in drawn.kinds if kind in rows.kinds(probes[0], drawn.metric)]
    with matplotlib.rc_context(STYLE):
        count = len(probes) * len(kinds)
        figure = Figure(figsize=(NARROW, 1.5 + 2.6 * count), layout="constrained")
        panels = figure.subplots(count, 1, squeeze=False).ravel()

        for panel, (probe, kind) in zip(panels, itertools.product(probes, kinds), strict=True):
            _series(panel, rows, probe, drawn, kind)
            unit = "\n".join(word for word in (drawn.probes[probe], drawn.unit) if word)
            panel.set(title=kind, xlabel=drawn.across, ylabel=unit)

        found: dict[str, Any] = {}
        for panel in panels:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                found.setdefault(label, handle)

        order = [arm_label(arm) for arm in drawn.arms if arm_label(arm) in found]
        handles = [found[label] for label in order]
        figure.legend(handles, order, loc="outside lower center", ncols=2, frameon=False)
        return save(figure, f"{drawn.title}\nround, solid: no lead; square, dashed: pinned lead", path)


def _series(panel: Axes, rows: Rows, probe: str, drawn: FigureSpec, kind: str) -> None:
    varied = list(dict.fromkeys(split_arm(arm)[1] for arm in rows.arms(probe) if split_arm(arm)[1]))
    points = [
        (name, lead, place, rows.get(probe, f"{name}.{each}.{lead}", f"{drawn.metric}.{kind}"))
        for name in drawn.arms
        for lead in LEADS
        for place, each in enumerate(varied)
    ]

    for number_, name in enumerate(drawn.arms):
        for lead in LEADS:
            own = [(x, y) for arm, its, x, y in points if (arm, its) == (name, lead) and enough(y)]
            if not own:
                continue

            dashed = lead == "lead=1"
            # Arms stand beside each other, so that equal values do not hide one another.
            shift = 0.08 * (number_ - len(drawn.arms) / 2) + (0.04 if dashed else 0.0)
            at = [x + shift for x, _ in own]
            colour = COLOURS.get(family(name), "#555555")
            style: dict[str, Any] = {"color": colour, "marker": "o" if not dashed else "s", "markersize": 3.5}
            line = {"linestyle": ("--" if dashed else "-") if drawn.across else "", "linewidth": 1.1}
            levels = [max(y.value, FLOOR) for _, y in own] if drawn.metric == "eta" else [y.value for _, y in own]
            panel.plot(at, levels, label=arm_label(name), **line, **style)
            for x, (_, y) in zip(at, own, strict=True):
                if math.isfinite(y.low + y.high) and (drawn.metric != "eta" or y.low > FLOOR):
                    panel.plot([x, x], [y.low, y.high], color=colour, linewidth=0.8, alpha=0.5)

    panel.set_xticks(range(len(varied)), [_tick(each) for each in varied])
    if drawn.metric == "eta":
        panel.set_ylim(FLOOR - 0.05, 1.05)
    else:
        # Nats from a thousandth up to ten in one picture, and 0 too.
        panel.set_yscale("symlog", linthresh=0.01, linscale=0.5)
        panel.set_ylim(0, None)
        panel.set_yticks([0, 0.01, 0.1, 1, 10], ["0", ".01", ".1", "1", "10"])
        panel.minorticks_off()

    if max((len(_tick(each)) for each in varied), default=0) > 6:
        panel.tick_params(axis="x", rotation=60)


FLOOR = -1.0
"""η is drawn down to here; what is worse than that is drawn at the edge."""


def _tick(varied: str) -> str:
    name, _, value = varied.partition("=")
    if name == "turnover":
        return f"{int(value) / 3:.2g}"
    words = {"drop_duplicate": "drop, double", "replaced": f"replace {value}", "distractors": f"+{value} irrelevant"}
    return words.get(name, value or name)


def _gate(rows: Rows, path: Path) -> Path:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(NARROW, 6.2), layout="constrained")
        upper, lower = figure.subplots(2, 1)
        for arm in rows.arms("window.gate"):
            x, y = (rows.get("window.gate", arm, metric) for metric in ("divergence", "stored_kl"))
            if math.isfinite(x.value + y.value):
                (point,) = upper.plot(x.value, y.value, "o", markersize=5, label=_tick(arm))
                upper.plot([x.value] * 2, [y.low, y.high], color=point.get_color(), linewidth=1, alpha=0.5)

        upper.legend(frameon=False, fontsize=8, loc="upper left")
        upper.set(xlabel="divergence of the antecedents", ylabel="KL of the stored patch, nats")
        upper.set_xlim(0, 1.25 * upper.get_xlim()[1])
        settings = rows.settings("window.gate", "coverage=")
        wrong = [rows.get("window.gate", arm, "false_reuse") for _, arm in settings]
        for (x, _), y in zip(settings, wrong, strict=True):
            lower.plot([100 * x] * 2, [100 * y.low, 100 * y.high], color="#D55E00", linewidth=1, alpha=0.6)
        ours = [100 * y.value for y in wrong]
        lower.plot([100 * x for x, _ in settings], ours, "o-", color="#D55E00", markersize=5, label="ours")
        lower.axhspan(24, 47, color="#999999", alpha=0.2, label="paper: 24–47 %")
        lower.set(xlabel="reused, % of cases, lowest divergence first", ylabel="false reuse, %", ylim=(0, 100))
        lower.legend(frameon=False)
        return save(figure, "Gate: does divergence tell when a stored patch may stay?", path)


# ------------------------------------------------------------------------------------------------ tables


class WindowTable(NamedTuple):
    """One window probe as the report shows it: its name, metrics across, a line per arm of (value, interval).

    questions: on how many of each kind an arm rests, from and to.
    """

    probe: str
    metrics: list[str]
    lines: list[tuple[str, list[tuple[str, str]]]]
    questions: str


SHOWN = ("accuracy", "kl", "eta", "flips")


def window_tables(rows: Rows) -> list[WindowTable]:
    """Makes a table of every window probe: all arms, accuracy, KL, η and flips by kind, paired differences."""
    return [_table(rows, probe) for probe in window_probes(rows)]


def _table(rows: Rows, probe: str) -> WindowTable:
    every = list(dict.fromkeys(metric for where, _, metric in rows.table if where == probe))
    kept = [metric for metric in every if metric.split(".")[0] in SHOWN or "_minus_" in metric or "." not in metric]
    lines = []

    for arm in rows.arms(probe):
        found = [rows.get(probe, arm, metric) for metric in kept]
        cells = [(show(got) if enough(got) else "–").partition(" ") for got in found]
        name, varied, lead = split_arm(arm)
        words = [arm_label(name), varied.replace("=", " "), LEADS.get(lead, lead)]
        lines.append((", ".join(word for word in words if word), [(value, rest) for value, _, rest in cells]))

    counts = []
    for kind in rows.kinds(probe):
        each = [got.n for got in (rows.get(probe, arm, f"accuracy.{kind}") for arm in rows.arms(probe)) if got.n]
        span = {min(each), max(each)} if each else set()
        counts.append(f"{kind} " + " to ".join(str(n) for n in sorted(span)))

    metrics = [metric.replace(".", ", ") for metric in kept]
    return WindowTable(probe.removeprefix(PREFIX), metrics, lines, ", ".join(counts))


def window_lines(results: Results) -> list[str]:
    """Says what the window's suite found, a line per probe, for the terminal and the head of the report."""
    rows = Rows(results)
    lines = []

    def say(title: str, probe: str, metric: str, arms: Mapping[str, str]) -> None:
        got = {word: rows.get(probe, arm, metric) for word, arm in arms.items()}
        if any(math.isfinite(interval.value) for interval in got.values()):
            lines.append(f"{title}: " + ", ".join(f"{word} {number(x.value)}" for word, x in got.items()) + ".")

    for count in (3, 4, 6):
        arms = {name: f"{name}.k={count}.lead=0" for name in ("oracle", "orbit", "transfer")}
        for kind in ("chain", "override"):
            say(f"Window, reorder of {count} (η, {kind})", "window.reorder", f"eta.{kind}", arms)

    for kind in ("survivor", "aggregate", "evicted"):
        arms = {
            f"{word}{' behind a lead' if lead else ''}": f"{arm}.gone=1.lead={lead}"
            for lead in (0, 1)
            for word, arm in {"kept": "keep", "blind": "blind"}.items()
        }
        say(f"Window, slide (KL to re-prefill, {kind})", "window.slide", f"kl.{kind}", arms)

    say(
        "Window, slide (KL to the banded model, aggregate)",
        "window.slide.remember",
        "kl.aggregate",
        {"kept": "keep.gone=1.lead=0", "kept behind a lead": "keep.gone=1.lead=1"},
    )
    for name in ("stale", "fixed_earlier", "fresh"):
        arms = {f"{turnover}/3": f"{name}.turnover={turnover}.lead=1" for turnover in range(4)}
        say(f"Window, recall, {arm_label(name)} (η by turnover, chain)", "window.recall", "eta.chain", arms)

    arms = {name: f"{name}.replaced=1.lead=0" for name in ("stored", "update", "rebuilt")}
    say("Window, drift, one replaced (η, chain)", "window.drift", "eta.chain", arms)
    arms = {arm_label(name): f"{name}.replaced=3.lead=0" for name in ("stored", "oracle_update", "deep", "deepest")}
    say("Window, drift, all replaced (η, chain)", "window.drift", "eta.chain", arms)
    for count in (8, 16, 32):
        arms = {name: f"{name}.chunks={count}.lead=0" for name in ("oracle", "kept", "transfer", "blind")}
        say(f"Window, {count} images all from the cache (flips, chain)", "window.many", "flips.chain", arms)

    said = [x.verdict for x in beside_the_paper(results)]
    if said:
        counts = ", ".join(f"{said.count(word)} {word}" for word in ("within", "differs", "undecided"))
        lines.append(f"Window, beside the paper's figures: {counts}.")
    return lines
