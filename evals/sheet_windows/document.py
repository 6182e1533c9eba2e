"""The window's tables of docs/experiments/hybrids.md, from a run: `python -m evals.sheet_windows.document FOLDER`.

Keeps the rows that the page shows in docs/sheet_windows.json; a test compares the page with them.
"""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.frame import Rows, rounded_row
from ..harness.intervals import Interval
from ..harness.tables import aligned_table, markdown_table
from ..report.documents import ROOT, block
from .suite import mean_of

PAGE, KEPT, MARK = Path("docs/experiments/hybrids.md"), Path("docs/sheet_windows.json"), "windows"
SHOWN = {
    "reorder": ("chain", "override", "aggregate"),
    "slide": ("survivor", "evicted"),
    "recall": ("chain", "override"),
}
"""The kinds of question in each operation's table; of the first also the KL."""
TITLES = {
    "reorder": "**Reorder**, all orders of three sheets in front of the page",
    "slide": "**Slide**, sheets leaving (gone) and all else moving up",
    "recall": "**Recall**, the page coming back behind sheets of which some were replaced (turnover)",
}
SETTINGS = {"recall": ("turnover=1", "turnover=3")}
"""The settings that the page shows, of operations that have more of them."""
MODELS = {"sheets_qwen3_vl": "Qwen3-VL", "sheets_qwen3_5": "Qwen3.5", "sheets": "Qwen2.5-VL"}
Table = tuple[list[str], list[list[str]]]


def models_of(results: Mapping[str, Any]) -> dict[str, tuple[Rows, int]]:
    """Finds by kind of instances its rows, the mean of several seeds or those of one, and how many were measured."""
    measured, found = {row["model"] for row in results["rows"]}, {}
    kinds: Mapping[str, str] = {name: kind for name, kind in results["config"]["kinds"].items() if name in measured}
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in kinds if kinds[name] == kind]
        rows = Rows(results, mean_of(kind) if len(names) > 1 else names[0])
        found[kind] = rows, len(names)
    return found


def operation_table(results: Mapping[str, Any], operation: str, shown: Sequence[str] = ()) -> Table:
    """Makes the table of one operation: a line per setting and arm, columns by model and kind of question.

    Args:
      shown: the settings that have lines; none for all.
    """
    models, probe, kinds = models_of(results), f"sheet_windows.{operation}", SHOWN[operation]
    head, arms = ["arm"], dict[str, None]()
    for kind, (rows, _) in models.items():
        title = MODELS.get(kind, kind)
        head += [f"{title}: {name}" for name in kinds] + [f"KL, {kinds[0]}"]
        arms |= dict.fromkeys(rows.arms(probe))

    # An arm that only one model has (rows_only) stands behind those of its setting.
    settings = list(dict.fromkeys(_setting(arm) for arm in arms))
    ordered = sorted(arms, key=lambda arm: settings.index(_setting(arm)))
    ordered = [arm for arm in ordered if not shown or _setting(arm) in shown]
    lines = []
    for arm in ordered:
        line = [f"`{arm}`"]
        for rows, seeds in models.values():
            line += [_spread(rows.get(probe, arm, f"accuracy.{kind}"), seeds) for kind in kinds]
            line.append(_nats(rows.get(probe, arm, f"kl.{kinds[0]}")))
        lines.append(line)
    return head, lines


def section(kept: Mapping[str, Any]) -> str:
    """Writes the text between the page's marks."""
    config, counted = kept["config"], []
    for kind, (_, seeds) in models_of(kept).items():
        counted.append(f"{MODELS.get(kind, kind)}: {seeds} training seed{'s' if seeds > 1 else ''}")
    head = (
        f"{config['contexts']} contexts of 4 chunks, the same for every instance; {'; '.join(counted)}. Means over "
        "seeds, the least and the largest in brackets (of one seed: its 95 % interval over contexts). KL from "
        "re-prefill, in nats a question."
    )
    parts = [textwrap.fill(head, 118)]
    for operation, title in TITLES.items():
        table = operation_table(kept, operation, SETTINGS.get(operation, ()))
        parts.append(f"{title}.\n\n{markdown_table(*table)}")
    return "\n\n".join(parts)


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Picks what the page shows out of results.json."""
    names = ("model", "kinds", "seed", "contexts", "parts_done", "parts")
    shown = {
        f"{metric}.{kind}" for kinds in SHOWN.values() for kind in (*kinds, "page") for metric in ("accuracy", "kl")
    }
    rows = [rounded_row(row) for row in results["rows"] if row["metric"] in shown]
    return {"config": {name: results["config"][name] for name in names}, "rows": rows}


def printed(results: Mapping[str, Any]) -> str:
    """Writes what the program prints of a run."""
    tables = []
    for operation in SHOWN:
        tables += [operation, aligned_table(*operation_table(results, operation)), ""]
    return "\n".join(tables)


def write(kept: Mapping[str, Any], root: Path = ROOT) -> None:
    """Puts kept rows into the page and docs/sheet_windows.json."""
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    (root / PAGE).write_text(block(section(kept), root / PAGE, MARK), encoding="utf-8")


def _setting(arm: str) -> str:
    """Returns the setting behind an arm's name, "gone=1" of "keep.gone=1"; "" where there is one setting alone."""
    last = arm.rpartition(".")[2]
    return last if "=" in last else ""


def _spread(found: Interval, seeds: int) -> str:
    if not found.n or found.value != found.value:
        return "–"
    ends = f"({found.low:.3f} to {found.high:.3f})" if seeds > 1 else f"[{found.low:.3f}, {found.high:.3f}]"
    return f"{found.value:.3f} {ends}"


def _nats(found: Interval) -> str:
    return f"{found.value:.2g}" if found.n and found.value == found.value else "–"


if __name__ == "__main__":
    write(summary(json.loads((Path(sys.argv[1]) / "results.json").read_text(encoding="utf-8"))))
