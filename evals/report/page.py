"""The report of a run: one HTML page that opens offline. Its text and markup are in `report.html.j2`."""

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from ..results.rows import COLUMNS, Rows
from .comparison import SINGLE_HOP, VISIBLE, compare
from .figures import DEFICIT_METRICS, Results, arm_label
from .summary import summary_lines
from .window import FIGURES as WINDOW_FIGURES
from .window import window_tables
from .window_paper import beside_the_paper
from .wording import show

PROBES = (VISIBLE, "repair.evicted", "reorder", "slide", "recall", "mask", "deficit")
FIGURES = {VISIBLE: ("example", "accuracy_visible", "rank_and_bytes"), "repair.evicted": ("accuracy_evicted",)}
"""The figures of a probe, by name; by default the one named after it."""


class Picture(NamedTuple):
    """A PNG as the page embeds it: a caption for readers who do not see it, and its bytes in base64."""

    caption: str
    data: str


class ProbeTable(NamedTuple):
    """A probe's table: the metrics shown, a line per arm with each metric's (value, interval), items by kind."""

    metrics: list[str]
    lines: list[tuple[str, list[tuple[str, str]]]]
    questions: str


def write_report(results: Results, figures: Sequence[Path], out: Path, notes: Sequence[str]) -> Path:
    """Writes `out`, one HTML file that opens offline (figures embedded, no script), and returns its path.

    Args:
      results: {"config", "environment", "rows"}.
      figures: PNGs; each goes to the section its name belongs to, the rest to the end.
      out: the file to write ("…/report.html"); its folder is made if missing.
      notes: plain sentences shown under "Notes".

    Raises:
      ValueError: a row lacks a column.
    """
    for row in results.get("rows", []):
        if missing := [column for column in COLUMNS if column not in row]:
            raise ValueError(f"results row {dict(row)} lacks {missing}")
    rows, config = Rows(results), dict(results.get("config", {}))

    left = {path.stem: path for path in figures}
    pictures: dict[str, list[Picture]] = {}
    for probe in PROBES:
        pictures[probe] = [_picture(left.pop(stem)) for stem in FIGURES.get(probe, (probe,)) if stem in left]

    window = [_picture(left.pop(stem)) for stem in (*WINDOW_FIGURES, "window_gate") if stem in left]

    # The main model's tables stand in sections of their own; those of the others (the control) behind each other.
    tables = {model: {probe: probe_table(Rows(results, model), probe) for probe in PROBES} for model in rows.models}
    main = tables.pop(rows.model, dict.fromkeys(PROBES))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("report.html.j2").render(
        model=rows.model,
        summary=[line.strip() for line in summary_lines(results)],
        pictures=pictures,
        tables=main,
        controls=tables,
        window_pictures=window,
        window_tables=window_tables(rows),
        window_claims=beside_the_paper(results),
        claims=compare(results),
        other_pictures=[_picture(path) for path in left.values()],
        notes=notes,
        command=config.get("command", "python -m evals.run"),
        settings=config,
        environment=results.get("environment", {}),
        is_table=lambda value: isinstance(value, Mapping),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def _picture(path: Path) -> Picture:
    return Picture(path.stem.replace("_", " "), base64.b64encode(path.read_bytes()).decode())


def probe_table(rows: Rows, probe: str) -> ProbeTable | None:
    """Makes a probe's table: arms down; accuracies, then KL, η and flips of the multi-hop kinds across.

    Metrics that no arm has are left out. None where the probe was not run.
    """
    names = {f"accuracy.{kind}": f"accuracy, {kind}" for kind in rows.kinds(probe)}
    several_hops = {"kl": "KL", "eta": "η", "flip_recover": "flip-recover", "orbit_minus_exact": "orbit minus exact"}
    for metric, name in several_hops.items():
        names |= {f"{metric}.{kind}": f"{name}, {kind}" for kind in rows.kinds(probe) if kind not in SINGLE_HOP}
    names |= {"relative_order_effect": "‖Δπ − Δid‖ / ‖Δid‖", "bytes": "share of KV bytes", **DEFICIT_METRICS}
    names["probability_difference"] = "largest difference in probability"
    names["kv_difference"] = "largest difference in KV"

    arms = rows.arms(probe)
    used = [metric for metric in names if any(math.isfinite(rows.get(probe, arm, metric).value) for arm in arms)]
    if not used:
        return None

    lines = []
    for arm in arms:
        label = arm.removeprefix("layer=").replace(".", ", ") if probe == "deficit" else arm_label(arm)
        cells = []
        for metric in used:
            value, _, interval = show(rows.get(probe, arm, metric)).partition(" ")
            cells.append((value, interval))
        lines.append((label, cells))

    counts = []
    for kind in rows.kinds(probe):
        most = max(rows.get(probe, arm, f"accuracy.{kind}").n for arm in arms)
        if most:
            counts.append(f"{kind} {most}")
    return ProbeTable([names[metric] for metric in used], lines, ", ".join(counts))
