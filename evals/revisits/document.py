"""The page docs/experiments/revisits.md, written from a run: `python -m evals.revisits.document out/revisits`.

Keeps the rows that the page shows in docs/revisits.json, and draws the figure. A test compares the page with that file.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.documents import ROOT, block
from ..results.tables import markdown_table
from .figures import draw
from .rows import COUNTS, OTHER, RevisitRows, Row
from .served_visit import POINTS
from .visits import FIRST, SAME, VISITS
from .ways import (
    BEFORE,
    BEFORE_UNCERTIFIED,
    COUNTED_WAYS,
    DEFAULT,
    NO_STORE,
    STORED_WAYS,
    UNCERTIFIED,
    WAYS,
)

PAGE, KEPT, PICTURE = (
    Path("docs/experiments/revisits.md"),
    Path("docs/revisits.json"),
    Path("docs/pictures/revisits.png"),
)
OTHERS_KEPT = (NO_STORE, DEFAULT, UNCERTIFIED)
"""Ways of the models that are not the first of their task."""
DIGITS = 4
Table = tuple[list[str], list[list[str]]]


def tables(results: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Makes all tables of a run, each with its title."""
    rows, found = RevisitRows(results), []
    for window in rows.windows:
        found.append((f"Window of {window}: revisits without a forward, and what they lose", reuse_table(rows, window)))
        found.append((f"Window of {window}: what a step of another order computes", work_table(rows, window)))
    found.append(("How revisits in other orders are served", points_table(rows)))
    found.append(("Right answers in other orders", accuracy_table(rows)))
    found.append(("What the store and the background cost", forming_table(rows)))
    found.append(("All models in other orders", models_table(rows)))
    return [(title, table) for title, table in found if table[1]]


def reuse_table(rows: RevisitRows, window: int) -> Table:
    """Makes the table before and since stored prefills: a line for each task and visit, a column for each way."""
    ways = (BEFORE, BEFORE_UNCERTIFIED, DEFAULT, UNCERTIFIED)
    lines = []
    for task in rows.mains:
        for visit in (name for name in (*VISITS, OTHER) if name != FIRST):
            cells = [_reuse(rows.get(task, window, way, visit)) for way in ways]
            if any(cells):
                lines.append([task, visit, *cells])
    return ["task", "visit", *ways], lines


def _reuse(row: Row | None) -> str:
    """Writes the share of revisits without a forward; KL with its interval and the share of small losses."""
    if row is None or not row.get("revisits"):
        return ""
    hits = f"{row.get('hits', 0) / row['revisits']:.0%}"
    if not row.get("largest kl"):
        return f"{hits}, exact" if row.get("hits") else hits
    return f"{hits}, {_value(row, 'kl')}, {row['within']:.0%} small, {row['flips']:.1%} flip"


def _value(row: Row, name: str) -> str:
    low, high = row.get(f"{name} low"), row.get(f"{name} high")
    missing = any(end is None or math.isnan(end) for end in (low, high))
    return f"{row[name]:.2g}" if missing else f"{row[name]:.2g} [{low:.2g}, {high:.2g}]"


def work_table(rows: RevisitRows, window: int) -> Table:
    """Makes the table of prefilled tokens and GFLOP of a step: a line for each way, a column for each task."""
    lines = []
    for way in (*WAYS, *COUNTED_WAYS):
        found = [rows.get(task, window, way, OTHER) for task in rows.mains]
        if any(found):
            counted = next(row for row in found if row is not None).get("counted")
            lines.append([f"{way} (counted)" if counted else way, *map(_work, found)])
    return ["way", *rows.mains], lines


def _work(row: Row | None) -> str:
    if row is None:
        return ""
    steps = row["steps"]
    return f"{row.get('tokens', 0) / steps:.1f} tokens, {row.get('flops', 0) / steps / 1e9:.2g} GFLOP"


def points_table(rows: RevisitRows) -> Table:
    """Makes the table of hits in other orders by how they were served, all windows together."""
    lines = []
    for task in rows.mains:
        for way in STORED_WAYS:
            found = [row for window in rows.windows if (row := rows.get(task, window, way, OTHER)) is not None]
            total = sum(row.get("revisits", 0) for row in found)
            counts = [sum(row.get(point, 0) for row in found) for point in POINTS]
            if total:
                lines.append([task, way, str(total), *(str(count) if count else "" for count in counts)])
    return ["task", "way", "revisits", *POINTS], lines


def accuracy_table(rows: RevisitRows) -> Table:
    """Makes the table of right answers (of texts: next tokens) in other orders, by task and window."""
    places = [(task, window) for task in rows.mains for window in rows.windows]
    places = [place for place in places if rows.get(*place, NO_STORE, OTHER) is not None]
    lines = []
    for way in WAYS:
        found = [rows.get(task, window, way, OTHER) for task, window in places]
        if any(found):
            cells = ["" if row is None or "accuracy" not in row else f"{row['accuracy']:.0%}" for row in found]
            lines.append([way, *cells])
    return ["way", *(f"{task}, {window}" for task, window in places)], lines


def forming_table(rows: RevisitRows) -> Table:
    """Makes the table of what is written, read and formed, per step over all visits of all windows."""
    lines = []
    for task in rows.mains:
        for way in STORED_WAYS:
            found = [rows.get(task, window, way, visit) for window in rows.windows for visit in VISITS]
            present = [row for row in found if row is not None]
            steps = sum(row["steps"] for row in present)
            if not steps:
                continue

            def each(name: str, present: Sequence[Row] = present, steps: int = steps) -> float:
                return sum(row.get(name, 0) for row in present) / steps

            lines.append(
                [
                    task,
                    way,
                    f"{each('written') / 1024:.0f}",
                    f"{each('read') / 1024:.0f}",
                    f"{1000 * each('formed seconds'):.1f}",
                    f"{each('formed flops') / 1e6:.3g}",
                ]
            )
    return [
        "task",
        "way",
        "KiB written",
        "KiB read",
        "ms in the background",
        "MFLOP in the background",
    ], lines


def models_table(rows: RevisitRows) -> Table:
    """Makes the table of all models: other orders, default and uncertified, by window."""
    lines = []
    for model, task in rows.models:
        for window in rows.windows:
            exact = rows.get(task, window, DEFAULT, OTHER, model)
            near = rows.get(task, window, UNCERTIFIED, OTHER, model)
            truth = rows.get(task, window, NO_STORE, OTHER, model)
            if exact is None or near is None or truth is None:
                continue
            right = [f"{row['accuracy']:.0%}" if "accuracy" in row else "–" for row in (truth, near)]
            lines.append([model, task, str(window), _reuse(exact), _reuse(near), " → ".join(right)])
    return ["model", "task", "window", DEFAULT, UNCERTIFIED, "right answers, no store → uncertified"], lines


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json. What is 0 is left out of counts."""
    rows, kept = RevisitRows(results), []
    for row in results["rows"]:
        main = rows.mains[row["task"]] == row["model"]
        if main or (row["way"] in OTHERS_KEPT and row["visit"] in (SAME, OTHER)):
            kept.append(
                {name: _rounded(value) for name, value in row.items() if value or name not in (*COUNTS, *POINTS)}
            )
    config = {name: results["config"][name] for name in ("plan", "parts_done")}
    return {"config": config, "cpu_seconds": round(results["cpu_seconds"]), "rows": kept}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def section(kept: Mapping[str, Any]) -> str:
    """Writes the text between the page's marks."""
    traces, minutes = kept["config"]["parts_done"], kept["cpu_seconds"] / 60
    parts = [f"{traces} traces, {minutes:.0f} CPU minutes."]
    for title, table in tables(kept):
        parts += [f"**{title}**", markdown_table(*table)]
    return "\n\n".join(parts)


def write(folder: Path, root: Path = ROOT, show: Callable[[str], None] = print) -> None:
    """Puts a run into the page and docs/revisits.json, and draws the figure."""
    kept = summary(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    # A line for each row, so that changes can be read.
    lines = ",\n".join(json.dumps(row) for row in kept["rows"])
    head = json.dumps({name: value for name, value in kept.items() if name != "rows"})
    (root / KEPT).write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    (root / PAGE).write_text(block(section(kept), root / PAGE, "revisits"), encoding="utf-8")
    draw(RevisitRows(kept), root / PICTURE)
    show(f"{PAGE}, {KEPT}, {PICTURE}")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
