"""What a run leaves beside its rows: a printed table, pictures, report.html, rows.csv, and rows for the pages."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import frame
from .charts import draw_chart
from .config import RunConfig
from .frame import Lookup, aligned_table
from .pages import ROOT, pivot, write_report


def write(config: RunConfig, results: Mapping[str, Any], out: Path, *, publish: bool = False) -> str:
    """Writes everything about a finished run; returns its first table for the terminal.

    Args:
      publish: also write docs/NAME.json.
    """
    lookup = Lookup(results["rows"])
    frame.frame(results["rows"]).to_csv(out / "rows.csv", index=False)
    for chart in config.report.get("charts", ()):
        draw_chart(lookup, chart, out)
    write_report(results, config.report, config.tables, out)
    if publish:
        write_published(results, ROOT / "docs" / f"{config.name}.json")

    shown = [table for table in config.tables if "columns" in table]
    return aligned_table(*pivot(lookup, shown[0])) if shown else f"{len(results['rows'])} rows"


def write_published(results: Mapping[str, Any], path: Path) -> None:
    """Writes the file that pages are filled from: numbers with six digits, a row per line."""
    rows = frame.without_nan(results["rows"], digits=6)
    about = json.dumps({name: results[name] for name in ("config", "environment")}, indent=1)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{about[:-2]},\n "rows": [\n{lines}\n]}}\n')
