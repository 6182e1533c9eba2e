"""The page docs/experiments/revisits.md, written from a run: `python -m evals.revisits.document out/revisits`.

Keeps the rows that the page shows in docs/revisits.json, and draws the figure. A test compares the page with that file.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..harness.tables import markdown_table
from ..report.documents import ROOT, block
from .figures import draw
from .rows import COUNTS, OTHER, RevisitRows, Row
from .served_visit import POINTS
from .visits import SAME
from .ways import COUNTED_WAYS, DEFAULT, NO_STORE, UNCERTIFIED, WAYS

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
    rows = RevisitRows(results)
    found = [("Revisits without a forward, and what they lose", reuse_table(rows))]
    window = rows.windows[len(rows.windows) // 2]
    found.append((f"Window of {window}: what a step of another order computes", work_table(rows, window)))
    found.append(("Right answers in other orders", accuracy_table(rows)))
    return [(title, table) for title, table in found if table[1]]


def reuse_table(rows: RevisitRows) -> Table:
    """Makes the table of reuse: a line for each task and window, a column for each visit and way."""
    columns = [(visit, way) for visit in (SAME, OTHER) for way in (DEFAULT, UNCERTIFIED)]
    lines = []
    for task in rows.mains:
        for window in rows.windows:
            cells = [_reuse(rows.get(task, window, way, visit)) for visit, way in columns]
            if any(cells):
                lines.append([task, str(window), *cells])
    return ["task", "window", *(f"{visit}, {way}" for visit, way in columns)], lines


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
