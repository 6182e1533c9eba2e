"""The report of a run: one HTML page that opens offline. Its text and markup are in `report.html.j2`."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from ..harness.frame import COLUMNS, VISIBLE, Rows
from ..results.headline import headline_arms, headline_results
from .comparison import SINGLE_HOP, compare
from .drawing import PARETO
from .figures import DEFICIT_METRICS, MULTI_HOP, Results, arm_label
from .summary import summary_lines
from .table import ProbeTable
from .verdict import COSTS, ROWS, cost, cost_axes, first_arms, shower, verdict
from .window import FIGURES as WINDOW_FIGURES
from .window import window_tables
from .window_paper import beside_the_paper
from .wording import share

PROBES = (VISIBLE, "repair.evicted", "reorder", "slide", "recall", "mask", "deficit")
FIGURES = {
    VISIBLE: (*PARETO.values(), "rank"),
    "repair.evicted": (),
}
"""The figures of a probe, by name; by default the one named after it."""
FOLDED = {VISIBLE: ("accuracy_visible",), "repair.evicted": ("accuracy_evicted",)}
"""Those that lie with the table of all arms."""
SHOWN_FIRST = tuple(f"accuracy.{kind}" for kind in MULTI_HOP)
SMALLEST_TEXT = 0.56
"""CSS pixels per pixel of a figure, at least: letters of 9 points at 150 dots an inch are then 10 CSS pixels high."""


class Picture(NamedTuple):
    """A PNG as the page embeds it: a caption, its bytes in base64, the least width in CSS pixels to read it at."""

    caption: str
    data: str
    least: int


def write_report(results: Results, figures: Sequence[Path], out: Path, notes: Sequence[str]) -> Path:
    """Writes `out`, one HTML file that opens offline (figures embedded, no script), and returns its path.

    Args:
      results: {"config", "environment", "rows"}.
      figures: PNGs; each goes to the section its name belongs to, the rest to the end.
      out: the file to write ("…/report.html"); its folder is made if missing.
      notes: plain sentences shown as caveats, in front of all tables.

    Raises:
      ValueError: a row lacks a column.
    """
    for row in results.get("rows", []):
        if missing := [column for column in COLUMNS if column not in row]:
            raise ValueError(f"results row: got {dict(row)}; expected the columns {missing} too")

    rows, config = Rows(results), dict(results.get("config", {}))

    # Each figure goes to the section that it belongs to; what is left stands at the end.
    left = {path.stem: path for path in figures}

    def take(*stems: str) -> list[Picture]:
        return [picture(left.pop(stem)) for stem in stems if stem in left]

    hero, example = take("hero"), take("example")
    pictures = {probe: take(*FIGURES.get(probe, (probe,))) for probe in PROBES}
    folded = {probe: take(*FOLDED.get(probe, ())) for probe in PROBES}
    window = take(*WINDOW_FIGURES)

    # The main model's tables stand in sections of their own; those of the others (the control) behind each other. A
    # short table has few arms and measures; there is no whole one beside it where it shows all there is.
    tables: dict[str, dict[str, Any]] = {model: {} for model in rows.models}
    for model, of_model in tables.items():
        for probe in PROBES:
            whole = probe_table(Rows(results, model), probe)
            short = probe_table(Rows(results, model), probe, short_arms(results, model, probe), few=True) or whole
            of_model[probe] = whole and {"short": short, "whole": None if short == whole else whole}
    main = tables.pop(rows.model, dict.fromkeys(PROBES))

    # Findings that come out differently stand first, those that were not measured last.
    order = ("differs", "undecided", "same direction", "not measured")
    claims = sorted(compare(results), key=lambda claim: order.index(claim.verdict))
    # What is read first is the mean over training seeds, where they were run.
    mean = headline_results(results)

    text = template("report.html.j2").render(
        model=rows.model,
        verdict=verdict(mean or results),
        seeds=None if mean is None else mean["config"]["seeds"],
        seeds_table=None if mean is None else probe_table(Rows(mean), VISIBLE, headline_arms(mean), few=True),
        summary=[line.strip() for line in summary_lines(results)],
        hero=hero,
        example=example,
        pictures=pictures,
        folded=folded,
        tables=main,
        controls=tables,
        window_pictures=window,
        window_tables=window_tables(rows),
        window_claims=beside_the_paper(results),
        claims=claims[:ROWS],
        more_claims=claims[ROWS:],
        other_pictures=[picture(path) for path in left.values()],
        notes=notes,
        command=config.get("command", "python -m evals.run"),
        settings=config,
        environment=results.get("environment", {}),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def template(name: str) -> jinja2.Template:
    """Reads a template of this folder; whatever a page is given is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)


def picture(path: Path) -> Picture:
    """Embeds a PNG."""
    data = path.read_bytes()
    # A PNG begins with its signature and the header chunk, which opens with the width.
    width = int.from_bytes(data[16:20], "big")
    caption = path.stem.replace("_", " ")
    least = 0 if path.stem == "hero" else round(SMALLEST_TEXT * width)
    return Picture(caption, base64.b64encode(data).decode(), least)


def short_arms(results: Results, model: str, probe: str) -> list[str]:
    """Chooses the arms of a probe's short table, six where no more have to be there."""
    rows = Rows(results, model)
    arms = rows.arms(probe)
    if probe == VISIBLE:
        return first_arms(results, model=model)
    if probe == "repair.evicted":
        shown = [arm for arm in first_arms(results, model=model) if arm in arms]
        return [*shown, *(arm for arm in arms if arm not in shown)][: max(ROWS, len(shown))]
    if probe == "recall":
        turnovers = [turnover for turnover, _ in rows.settings(probe, "stale.turnover=")]
        last = turnovers[-1] if turnovers else 0.0
        between = [arm for turnover, arm in rows.settings(probe, "stale.turnover=") if 0 < turnover < last]
        return [*(arm for arm in arms if arm.endswith(f"={last:g}")), *between][:ROWS]
    return arms[-ROWS:] if probe == "deficit" else arms[:ROWS]


def probe_table(rows: Rows, probe: str, arms: Sequence[str] | None = None, *, few: bool = False) -> ProbeTable | None:
    """Makes a probe's table: arms down; costs, accuracies, then KL, η and flips of the multi-hop kinds across.

    Metrics that no arm has are left out. None where the probe was not run.

    Args:
      arms: the arms to show; by default all.
      few: of the kinds' measures only accuracies, and KL of chain questions.
    """
    names = {f"accuracy.{kind}": f"accuracy, {kind}" for kind in rows.kinds(probe)}
    several_hops = {"kl": "KL", "eta": "η", "flip_recover": "flip-recover", "orbit_minus_exact": "orbit minus exact"}
    kinds = [kind for kind in rows.kinds(probe) if kind not in SINGLE_HOP]
    for metric, name in several_hops.items():
        names |= {f"{metric}.{kind}": f"{name}, {kind}" for kind in kinds}

    # A short table has accuracies, of the kinds that need both images first, and two measures of how far answers move.
    if few:
        names = dict(sorted(names.items(), key=lambda item: item[0].rpartition(".")[2] not in MULTI_HOP))
        shown = ("kl.chain", "kl.survivor")
        names = {metric: name for metric, name in names.items() if metric.startswith("accuracy.") or metric in shown}

    names |= {"relative_order_effect": "‖Δπ − Δid‖ / ‖Δid‖", **DEFICIT_METRICS}
    names["probability_difference"] = "largest difference in probability"
    names["kv_difference"] = "largest difference in KV"

    arms = rows.arms(probe) if arms is None else arms
    used = [metric for metric in names if rows.measured(probe, arms, metric)]
    if not used:
        return None

    costs, show, lines = cost_axes(rows) if probe.startswith("repair.") else [], shower(rows.results), []
    # What is lost and mended stands in front of costs: a telephone shows three columns or four.
    first = len([metric for metric in used if metric in SHOWN_FIRST]) if few else 0

    for arm in arms:
        label = arm.removeprefix("layer=").replace(".", ", ") if probe == "deficit" else arm_label(arm)
        cells = [tuple(show(rows.get(probe, arm, metric)).partition(" ")[::2]) for metric in used]
        cells[first:first] = [(share(cost(rows, arm, axis)), "") for axis in costs]
        lines.append((label, cells))

    counts = []
    for kind in rows.kinds(probe):
        most = max(rows.accuracy(arm, kind, probe).n for arm in arms)
        if most:
            counts.append(f"{kind} {most}")

    heads = [names[metric] for metric in used]
    heads[first:first] = [COSTS[axis].replace(" = ", "\u00a0=\u00a0") for axis in costs]
    return ProbeTable(heads, lines, ", ".join(counts))
