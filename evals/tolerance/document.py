"""The tables of docs/experiments/tolerance.md, written from a run: `python -m evals.tolerance.document out/tolerance`.

Keeps the rows that the page shows in docs/tolerance.json, and draws its figure from them; without a folder it draws the
figure alone. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..harness.frame import Rows, rounded_row
from ..harness.tables import markdown_table
from ..report.documents import ROOT, block
from .contexts import TASKS
from .figures import draw
from .histories import ALONE, KINDS, MEANS, SUM, TRUTH

PAGE, KEPT = Path("docs/experiments/tolerance.md"), Path("docs/tolerance.json")
PICTURE = Path("docs/pictures/tolerance.png")
METRICS = ("kl", "within", "eta", "bound", "coverage", "coverage elsewhere")
BOUNDED = ("far differ", "mean, same nearest", ALONE)
"""Kinds of history whose bounds the page shows."""


def main_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Makes the table of KV served whole: mean KL of an answer, and the share of answers within .05 nats."""
    probes = list(dict.fromkeys(row["probe"] for row in results["rows"] if "front=" in row["probe"]))
    lines = []
    for kind in (*KINDS, *MEANS, SUM):
        if kind == TRUTH:
            continue
        line = [kind]
        for probe in probes:
            rows = Rows(results, TASKS[probe.partition(".")[0]].backbone)
            kl, within = rows.get(probe, kind, "kl"), rows.get(probe, kind, "within")
            line.append("–" if not kl.n else f"{kl.value:.2g}, {within.value:.0%}")
        lines.append(line)
    return ["KV formed behind", *(probe.replace(".front=", ", ") for probe in probes)], lines


def bounds_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Makes the table of conformal bounds, with their coverage on held-out contexts and on another task's."""
    lines = []
    for task, spec in TASKS.items():
        rows = Rows(results, spec.backbone)
        for kind in BOUNDED:
            bound, own = rows.get(task, kind, "bound"), rows.get(task, kind, "coverage")
            other = rows.get(task, kind, "coverage elsewhere")
            if bound.n:
                covered = f"{own.value:.0%} [{own.low:.0%}, {own.high:.0%}]" if own.n else "–"
                elsewhere = f"{other.value:.0%} on {spec.other}" if other.n else "–"
                lines.append([task, kind, f"{bound.value:.2g}", covered, elsewhere])
    return [
        "task",
        "KV formed behind",
        "bound, nats",
        "held-out answers within",
        "another task's answers within",
    ], lines


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    # Patches are in the run's own file: the page shows KV that is served whole.
    rows = [row for row in results["rows"] if row["metric"] in METRICS and ";" not in row["arm"]]
    config = {name: results["config"][name] for name in ("model", "plan", "parts_done", "parts")}
    return {"config": config, "rows": [rounded_row(row) for row in rows]}


def section(kept: Mapping[str, Any]) -> str:
    """Writes the text between the page's marks."""
    return f"{markdown_table(*main_table(kept))}\n\n{markdown_table(*bounds_table(kept))}"


def write(folder: Path, root: Path = ROOT) -> None:
    """Puts a run into the page and docs/tolerance.json."""
    kept = summary(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    (root / PAGE).write_text(block(section(kept), root / PAGE, "tolerance"), encoding="utf-8")
    write_figure(root)


def write_figure(root: Path = ROOT) -> None:
    """Draws the page's figure of docs/tolerance.json."""
    draw(json.loads((root / KEPT).read_text(encoding="utf-8")), root / PICTURE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
    else:
        write_figure()
