"""The window's suite in the report: its figures, its tables, a few lines of summary."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes

from ..harness.frame import Rows
from .figures import COLOURS, STYLE, Results, arm_label, family, save, stacked
from .table import ProbeTable
from .window_paper import beside_the_paper, enough
from .wording import measured_line, show

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


def window_figures(results: Results, out: Path) -> list[Path]:
    """Draws a figure for every window probe that was run."""
    rows = Rows(results)
    written = []
    for name, drawn in FIGURES.items():
        probes = [probe for probe in drawn.probes if rows.arms(probe)]
        if probes:
            written.append(_panels(rows, drawn, probes, out / f"{name}.png"))
    return written


def _panels(rows: Rows, drawn: FigureSpec, probes: Sequence[str], path: Path) -> Path:
    kinds = [kind for kind in drawn.kinds if kind in rows.kinds(probes[0], drawn.metric)]
    with matplotlib.rc_context(STYLE):
        figure, panels = stacked(len(probes) * len(kinds), 2.6, 1.5, sharey=False)
        for panel, (probe, kind) in zip(panels, itertools.product(probes, kinds), strict=True):
            _series(panel, rows, probe, drawn, kind)
            unit = "\n".join(word for word in (drawn.probes[probe], drawn.unit) if word)
            panel.set(title=kind, xlabel=drawn.across, ylabel=unit)

        # One legend for all panels: a panel lacks the arms that were not measured for its kind.
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
    for number_, (name, lead) in enumerate(itertools.product(drawn.arms, LEADS)):
        got = [rows.get(probe, f"{name}.{setting}.{lead}", f"{drawn.metric}.{kind}") for setting in varied]
        points = [(x, point) for x, point in enumerate(got) if enough(point)]
        if not points:
            continue

        # Arms stand beside each other, so that equal values do not hide one another.
        dashed = lead == "lead=1"
        shift = 0.08 * (number_ // len(LEADS) - len(drawn.arms) / 2) + (0.04 if dashed else 0.0)
        colour = COLOURS.get(family(name), "#555555")
        line: dict[str, Any] = {"color": colour, "marker": "s" if dashed else "o", "markersize": 3.5, "linewidth": 1.1}
        line["linestyle"] = ("--" if dashed else "-") if drawn.across else ""
        floor = FLOOR if drawn.metric == "eta" else -math.inf
        levels = [max(point.value, floor) for _, point in points]
        panel.plot([x + shift for x, _ in points], levels, label=arm_label(name), **line)

        # A bar that begins below the floor would run out of the panel.
        for x, point in points:
            if math.isfinite(point.low + point.high) and point.low > floor:
                panel.plot([x + shift] * 2, [point.low, point.high], color=colour, linewidth=0.8, alpha=0.5)

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


# ------------------------------------------------------------------------------------------------ tables


SHOWN = ("accuracy", "kl", "eta", "flips")


def window_tables(rows: Rows) -> list[ProbeTable]:
    """Makes a table of every window probe: all arms, accuracy, KL, η and flips by kind, paired differences."""
    probes = dict.fromkeys(probe for probe, _, _ in rows.table if probe.startswith(PREFIX))
    return [_table(rows, probe) for probe in probes]


def _table(rows: Rows, probe: str) -> ProbeTable:
    """Makes the table of a probe; its questions are counted from the least to the most that an arm rests on."""
    every = list(dict.fromkeys(metric for where, _, metric in rows.table if where == probe))
    kept = [metric for metric in every if metric.split(".")[0] in SHOWN or "_minus_" in metric or "." not in metric]
    lines, counts = [], []

    for arm in rows.arms(probe):
        found = [rows.get(probe, arm, metric) for metric in kept]
        cells = [(show(got) if enough(got) else "–").partition(" ")[::2] for got in found]
        name, varied, lead = split_arm(arm)
        words = [arm_label(name), varied.replace("=", " "), LEADS.get(lead, lead)]
        lines.append((", ".join(word for word in words if word), cells))

    for kind in rows.kinds(probe):
        asked = {rows.accuracy(arm, kind, probe).n for arm in rows.arms(probe)} - {0}
        span = sorted({min(asked), max(asked)}) if asked else []
        counts.append(f"{kind} " + " to ".join(map(str, span)))

    metrics = [metric.replace(".", ", ") for metric in kept]
    return ProbeTable(metrics, lines, ", ".join(counts), probe.removeprefix(PREFIX))


def window_lines(results: Results) -> list[str]:
    """Says what the window's suite found, a line per probe, for the terminal and the head of the report."""
    rows, lines = Rows(results), []

    def say(title: str, probe: str, metric: str, arms: Mapping[str, str]) -> None:
        lines.extend(measured_line(rows, f"Window, {title}", f"window.{probe}", metric, arms))

    for count in (3, 4, 6):
        arms = {name: f"{name}.k={count}.lead=0" for name in ("oracle", "orbit", "transfer")}
        for kind in ("chain", "override"):
            say(f"reorder of {count} (η, {kind})", "reorder", f"eta.{kind}", arms)

    keep = {"kept": "keep.gone=1.lead=0", "kept behind a lead": "keep.gone=1.lead=1"}
    for kind in ("survivor", "aggregate", "evicted"):
        arms = {}
        for name, arm in keep.items():
            arms |= {name: arm, name.replace("kept", "blind"): arm.replace("keep", "blind")}
        say(f"slide (KL to re-prefill, {kind})", "slide", f"kl.{kind}", arms)
    say("slide (KL to the banded model, aggregate)", "slide.remember", "kl.aggregate", keep)

    for name in ("stale", "fixed_earlier", "fresh"):
        arms = {f"{turnover}/3": f"{name}.turnover={turnover}.lead=1" for turnover in range(4)}
        say(f"recall, {arm_label(name)} (η by turnover, chain)", "recall", "eta.chain", arms)

    arms = {name: f"{name}.replaced=1.lead=0" for name in ("stored", "update", "rebuilt")}
    say("drift, one replaced (η, chain)", "drift", "eta.chain", arms)
    arms = {arm_label(name): f"{name}.replaced=3.lead=0" for name in ("stored", "oracle_update", "deep", "deepest")}
    say("drift, all replaced (η, chain)", "drift", "eta.chain", arms)
    for count in (8, 16, 32):
        arms = {name: f"{name}.chunks={count}.lead=0" for name in ("oracle", "kept", "transfer", "blind")}
        say(f"{count} images all from the cache (flips, chain)", "many", "flips.chain", arms)

    verdicts = [beside.verdict for beside in beside_the_paper(results)]
    if verdicts:
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("within", "differs", "undecided"))
        lines.append(f"Window, beside the paper's figures: {counts}.")
    return lines
