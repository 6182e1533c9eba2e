"""The tables and the figure of docs/experiments/measure.md, written from runs.

    python -m evals.measure.document documentation=out/smollm2 pages=out/reading_pages episodes=out/episodes/measured

Keeps the rows that the page shows in docs/measure.json, and writes the tables between the page's marks and the figure
from them; what no folder is given of stays as it was kept. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from kvpatch_jax.errors import InputError

from ..report.documents import ROOT, block
from ..results.rows import Rows, measured_row, rounded_row
from ..results.tables import markdown_table
from .arms import REFERENCE
from .report import AXES, COLUMNS, COSTS, show
from .rows import ALL, PROBE
from .trajectories.replayed import REFERENCE as REPREFILL
from .trajectories.report import STEPS, WayRow, kinds_of, rows_of

matplotlib.use("Agg")

PAGE, KEPT = Path("docs/experiments/measure.md"), Path("docs/measure.json")
PICTURE = Path("docs/pictures/measure.png")
MEASURED = ("documentation", "pages")
"""Runs of `evals.measure`."""
EPISODES = "episodes"
"""The run of `evals.measure.trajectories`."""
SHOWN = ("accuracy", "difference", "kl", "flips")
TITLES = {"documentation": "SmolLM2, documentation", "pages": "SmolLM2, rendered pages", EPISODES: "sheets, episodes"}
Kept = dict[str, Any]
Table = tuple[list[str], list[list[str]]]


def kept_of(name: str, folder: Path) -> Kept:
    """Reads of a run what the page shows: {"command", "rows"}.

    Raises:
      InputError: a name of no run. OSError: a file that is not there.
    """
    if name == EPISODES:
        records = [json.loads(line) for line in (folder / STEPS).read_text(encoding="utf-8").splitlines()]
        rows = []
        for kind in (ALL, *kinds_of(records)):
            for way in rows_of([own for own in records if kind in (ALL, own.get("kind"))]):
                for metric, interval in way._asdict().items():
                    if metric != "way":
                        rows.append(measured_row(EPISODES, "sheets", way.way, f"{metric}.{kind}", interval))
        return {"rows": [rounded_row(row) for row in rows]}
    if name not in MEASURED:
        raise InputError(f"document: got {name!r:.80}; expected NAME=FOLDER, NAME {', '.join((*MEASURED, EPISODES))}")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    wanted = {*AXES} | {"accuracy", *(f"{metric}.{ALL}" for metric in SHOWN)}
    rows = [own for own in results["rows"] if own["metric"] in wanted or own["metric"].startswith("accuracy.")]
    return {"rows": [rounded_row(row) for row in rows]}


def measured_table(kept: Kept) -> Table:
    """Makes the table of all arms of a measurement; kinds have a column of their scores each."""
    rows = Rows(kept)
    kinds = [row["metric"].partition(".")[2] for row in kept["rows"] if row["metric"].startswith("accuracy.")]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind != ALL]
    titles = [COLUMNS[name][0] for name in SHOWN]
    head = ["arm", *titles[:2], *kinds, *titles[2:], *(COSTS[axis] for axis in AXES)]
    lines = []
    for arm in rows.arms(PROBE):
        cells = [show(rows.get(PROBE, arm, f"{name}.{ALL}"), *COLUMNS[name][1:]) for name in SHOWN]
        # Of re-prefill itself nothing differs.
        cells = [cells[0], "", "", ""] if arm == REFERENCE else cells
        scores = [f"{rows.get(PROBE, arm, f'accuracy.{kind}').value:.3f}" for kind in kinds]
        costs = [f"{100 * rows.get(PROBE, arm, axis).value:.{place}f}" for place, axis in enumerate(AXES)]
        lines.append([arm, *cells[:2], *scores, *cells[2:], *costs])
    return head, lines


def episode_table(kept: Kept) -> Table:
    """Makes the table of all ways of a replay: tokens and KL of all steps, and the score of each kind."""
    rows = Rows(kept)
    metrics = [row["metric"] for row in kept["rows"] if row["metric"].startswith("score.")]
    kinds = [kind for kind in dict.fromkeys(metric.partition(".")[2] for metric in metrics) if kind != ALL]
    counts = [rows.get(EPISODES, REPREFILL, f"score.{kind}").n for kind in kinds]
    named = [f"{kind}, {count}" for kind, count in zip(kinds, counts, strict=True)]
    head = ["way", "score", "less re-prefill's", *named, "KL of the first token", "tokens a step", "% of re-prefill's"]
    lines = []
    for way in rows.arms(EPISODES):
        own = {metric: rows.get(EPISODES, way, f"{metric}.{ALL}") for metric in WayRow._fields[1:]}
        scores = [show(rows.get(EPISODES, way, f"score.{kind}")) for kind in kinds]
        lines.append(
            [way, show(own["score"]), show(own["difference"]) if way != REPREFILL else "", *scores,
             show(own["kl"], 1.0, 4) if way != REPREFILL else "", f"{own['tokens'].value:.0f}",
             f"{100 * own['share'].value:.1f}"]
        )  # fmt: skip
    return head, lines


def section(name: str, kept: Kept) -> str:
    """Writes what stands between the marks of a run."""
    return markdown_table(*(episode_table(kept) if name == EPISODES else measured_table(kept)))


def draw(kept: Mapping[str, Kept], path: Path) -> None:
    """Draws KL and score against what is kept and worked: a column for each run; of episodes, tokens computed."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(2, 3, squeeze=False)
    for column, name in enumerate((*MEASURED, EPISODES)):
        rows, probe = Rows(kept[name]), EPISODES if name == EPISODES else PROBE
        score = f"score.{ALL}" if name == EPISODES else f"accuracy.{ALL}"
        costs = (f"share.{ALL}",) * 2 if name == EPISODES else AXES
        labels = ("tokens, % of re-prefill's",) * 2 if name == EPISODES else tuple(COSTS[axis] for axis in AXES)
        for number, arm in enumerate(rows.arms(probe)):
            look = {"color": f"C{number % 10}", "marker": "osD^v<>phX*P"[number % 12], "ms": 6, "lw": 1, "capsize": 2}
            for place, metric in enumerate((f"kl.{ALL}", score)):
                if place == 0 and arm == REFERENCE:
                    continue
                point, cost = rows.get(probe, arm, metric), 100 * rows.get(probe, arm, costs[place]).value
                ends = np.nan_to_num([[point.value - point.low], [point.high - point.value]])
                panels[place][column].errorbar(
                    [cost], [max(point.value, 1e-4) if place == 0 else point.value], yerr=np.maximum(ends, 0),
                    ls="none", label=arm, **look,
                )  # fmt: skip
        for place in range(2):
            panel = panels[place][column]
            panel.set_xlabel(labels[place])
            panel.set_xscale("symlog", linthresh=1, linscale=0.4) if labels[place] == COSTS[AXES[1]] else None
            panel.grid(alpha=0.3)
        panels[0][column].set_yscale("log")
        panels[0][column].set_title(TITLES[name])
        panels[1][column].legend(fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    panels[0][0].set_ylabel("KL from re-prefill, nats (below 1e-4: 1e-4)")
    panels[1][0].set_ylabel("score")
    figure.savefig(path, dpi=90, metadata={"Software": None})


def write(kept: Mapping[str, Kept], root: Path = ROOT) -> None:
    """Puts kept rows into the page and docs/measure.json, and draws the figure."""
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    for name, own in kept.items():
        (root / PAGE).write_text(block(section(name, own), root / PAGE, name), encoding="utf-8")
    draw(kept, root / PICTURE)


def main(arguments: Sequence[str]) -> None:
    """Writes the page from folders of runs, and from the rows that are kept."""
    kept = json.loads((ROOT / KEPT).read_text(encoding="utf-8")) if (ROOT / KEPT).exists() else {}
    for argument in arguments[1:]:
        name, _, folder = argument.partition("=")
        kept[name] = kept_of(name, Path(folder))
    write(kept)


if __name__ == "__main__":
    main(sys.argv)
