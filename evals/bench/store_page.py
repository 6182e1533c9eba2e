"""Puts a run of the store's suite into the page of benchmarks: `python -m evals.bench.store_page out/bench`.

Reads bench_store.json and bench_store_load.json, as far as they are there, and writes what the page shows of them, the
page's parts between their marks, and the picture.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.documents import block
from .benchmark import Row, rows_table
from .store_load import verdict
from .store_tables import draw, scale_table

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = Path("docs/experiments/benchmarks.md"), Path("docs/pictures/store_scale.png")
KEPT = {"store": Path("docs/store_scale.json"), "store_load": Path("docs/store_load.json")}
MARKS = {"store": "store scale", "store_load": "store load"}
DIGITS = 4
_LEFT_OUT = ("seconds", "metric", "against", "turns")


def summary(result: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Picks what the page shows out of a result: of "store" the rows by number of objects, of "store_load" all rows."""
    rows: list[Row] = []
    for row in result["rows"]:
        if name == "store_load":
            rows.append({key: _rounded(value) for key, value in row.items()})
        elif "place" in row:
            rows.append({key: _rounded(value) for key, value in row.items() if key not in _LEFT_OUT})
    kept: dict[str, Any] = {"config": result["config"], "environment": result["environment"], "rows": rows}
    if name == "store_load":
        kept["counts"] = {head: result["counts"][head] for head in ("calls", "reads", "failures")}
    return kept


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def section(kept: Mapping[str, Any], name: str) -> str:
    """Writes the text between the page's marks."""
    judged = [row for row in kept["rows"] if "passed" in row]
    within = f"{sum(row['passed'] for row in judged)} of {len(judged)} within their bars."
    if name == "store":
        return f"{scale_table(kept['rows'])}\n{within}"
    return f"{verdict(kept)}\n\n{rows_table(judged).rstrip()}"


def write(folder: Path, root: Path = ROOT) -> list[Path]:
    """Puts a run's results into the page, beside what it shows of them. Returns the files that were written."""
    written: list[Path] = []
    for name, file in KEPT.items():
        path = folder / f"bench_{name}.json"
        if not path.exists():
            continue
        kept = summary(json.loads(path.read_text(encoding="utf-8")), name)
        # A line for each row, so that changes can be read.
        lines = ",\n".join(json.dumps(row) for row in kept["rows"])
        head = json.dumps({key: value for key, value in kept.items() if key != "rows"})
        (root / file).write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        (root / PAGE).write_text(block(section(kept, name), root / PAGE, MARKS[name]), encoding="utf-8")
        written += [file, PAGE]
        if name == "store":
            draw(kept, root / PICTURE)
            written.append(PICTURE)
    return written


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
