"""The tables of docs/experiments/prompt-reuse.md: `python -m evals.prompt_reuse.document out/prompt_reuse [out/bench]`.

Keeps the rows that the page shows in docs/prompt-reuse.json; with a second folder also those of the benchmark
`prompt_reuse`. A test compares the page with that file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report.documents import ROOT, block
from ..results.rows import Rows, rounded_row
from ..results.tables import markdown_table
from .contexts import TASKS
from .recomputed import SIDES, STATIC

PAGE, KEPT = Path("docs/experiments/prompt-reuse.md"), Path("docs/prompt-reuse.json")
Results = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]
BENCHED = ("metric", "model", "prompt", "value", "low", "high", "n", "bar", "sense", "passed", "unit")


def _tasks(results: Results) -> list[str]:
    measured = {row["model"] for row in results["rows"]}
    return [task for task in TASKS if task in measured]


def _percent(interval: Any, interval_too: bool = True) -> str:
    if not interval.n:
        return "–"
    text = f"{100 * interval.value:.3g} %"
    return f"{text} [{100 * interval.low:.3g}, {100 * interval.high:.3g}]" if interval_too else text


def insights_table(results: Results) -> Table:
    """Makes the table of MPIC's insights: one line for each task and image."""
    head = [
        "task, image (tokens)",
        "tokens with more than 1e-3 of the first output token's attention",
        "more than 1.18 of the mean",
        "attention of the first 43 %",
        "of the first 10 %",
        "keys that the first token exceeds",
        "of the 10 % whose keys differ most, among the first 10 %",
        "layers where the first token is among the 4 % that differ most",
        "any other token",
    ]
    metrics = ("above", "above_scaled", "first", "tenth", "rank", "far at the beginning")
    metrics += ("layers of the first token", "layers of the others")
    lines = []
    for task in _tasks(results):
        rows = Rows(results, task)
        for image in ("first image", "last image"):
            tokens = rows.get("insight", image, "tokens")
            values = [_percent(rows.get("insight", image, metric)) for metric in metrics]
            lines.append([f"{task}, {image} ({tokens.value:.0f})", *values])
    paper = ["MPIC, Figures 4, 8, 12 (1176)", "< 5 %", "–", "about 80 %", "–", "> 80 %", "–", "most layers", "few"]
    return head, [paper, *lines]


def sensitivity_table(results: Results) -> Table:
    """Makes the table of S_i(r) beside plain reuse (VLCache, Figure 3)."""
    lines, most = [], 0
    for task in _tasks(results):
        own = [row for row in results["rows"] if row["model"] == task and row["probe"] == "sensitivity"]
        ratios = list(dict.fromkeys(row["arm"].partition(", ")[2] for row in own))
        for ratio in ratios:
            values = [f"{row['value']:.3f}" for row in own if row["arm"].endswith(f", {ratio}")]
            most = max(most, len(values))
            lines.append([task, ratio, *values])
    return ["task", "r", *(f"layer {layer}" for layer in range(most))], lines


def schedules_table(results: Results) -> Table:
    """Makes the table of chain KL: static ratios, dynamic schedules of the same mean, random tokens."""
    head = ["task", "recomputed", "token-layers", "chain KL, nats", "KL minus static's", "schedule by layer"]
    lines = []
    for task in _tasks(results):
        rows = Rows(results, task)
        arms = ["reuse"]
        for ratio in STATIC:
            arms += [f"static {ratio:g}", f"greedy {ratio:g}", f"random {ratio:g}"]
        for arm in [*arms, "MPIC-4"]:
            kl, tokens = rows.get("chain", arm, "kl"), rows.get("chain", arm, "token_layers")
            if not kl.n:
                continue
            difference = rows.get("chain", arm, "kl - static")
            schedule = [
                f"{row['value']:g}"
                for row in results["rows"]
                if (row["model"], row["probe"], row["arm"]) == (task, "schedule", arm) and row["metric"] != "sum"
            ]
            apart = f"{difference.value:+.3g} [{difference.low:+.3g}, {difference.high:+.3g}]" if difference.n else ""
            measured = f"{kl.value:.3g} [{kl.low:.3g}, {kl.high:.3g}]"
            lines.append([task, arm, f"{tokens.value:.0f}", measured, apart, ", ".join(schedule)])
    return head, lines


def sides_table(results: Results) -> Table:
    """Makes the table of errors after recomputing earlier or later tokens (VLCache, Figures 2 and 5)."""
    head = [
        "task",
        "recomputed",
        "KV error, first third",
        "middle",
        "last",
        "error behind the images",
        "chain KL, nats",
    ]
    lines = []
    for task in _tasks(results):
        rows = Rows(results, task)
        for arm in ("reuse", *(f"{side} {share:.0%}" for share in SIDES for side in ("first", "last"))):
            residual, kl = rows.get("side", arm, "residual"), rows.get("side", arm, "kl")
            if not residual.n:
                continue
            thirds = [
                f"{rows.get('side', arm, f'kv, {third} third').value:.3f}" for third in ("first", "middle", "last")
            ]
            behind = f"{residual.value:.3g} [{residual.low:.3g}, {residual.high:.3g}]"
            lines.append([task, arm, *thirds, behind, f"{kl.value:.3g} [{kl.low:.3g}, {kl.high:.3g}]"])
    return head, lines


def costs_table(results: Results, kind: str) -> Table:
    """Makes a table of the benchmark: shares of FLOPs or ratios of seconds, a line for each model and prompt.

    Args:
      kind: "FLOPs" or "seconds".
    """
    rows = [row for row in results.get("bench", []) if kind in row["metric"]]
    names = {row["metric"]: row["metric"].partition(" of ")[2].partition(" / ")[0] for row in rows}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    bars = {}
    for row in rows:
        spread = f" [{row['low']:.2f}, {row['high']:.2f}]" if row.get("n", 1) > 1 else ""
        failed = "" if row.get("passed", True) else ", beyond"
        value = f"{row['value']:.3f}" if kind == "FLOPs" else f"{row['value']:.2f}"
        cells.setdefault((row["model"], row["prompt"]), {})[row["metric"]] = value + spread + failed
        if "bar" in row:
            bars[row["metric"]] = f" ({row['sense']} {row['bar']:g})"

    head = ["model", "prompt", *(names[metric] + bars.get(metric, "") for metric in names)]
    return head, [[*labels, *(own.get(metric, "–") for metric in names)] for labels, own in cells.items()]


def summary(results: Results, bench: Results | None, before: Results | None = None) -> dict[str, Any]:
    """Picks what the page shows; of the benchmark the rows kept before, where it was not run again."""
    config = {name: results["config"][name] for name in ("model", "plan", "parts_done", "parts")}
    benched = [] if before is None else before.get("bench", [])
    if bench is not None:
        benched = [{name: row[name] for name in BENCHED if name in row} for row in bench["rows"]]
    return {"config": config, "rows": [rounded_row(row) for row in results["rows"]], "bench": benched}


def section(kept: Results) -> dict[str, str]:
    """Writes the texts between the page's marks, by mark."""
    return {
        "insights": markdown_table(*insights_table(kept)),
        "sensitivity": markdown_table(*sensitivity_table(kept)),
        "schedules": markdown_table(*schedules_table(kept)),
        "sides": markdown_table(*sides_table(kept)),
        "flops": markdown_table(*costs_table(kept, "FLOPs")),
        "seconds": markdown_table(*costs_table(kept, "seconds")),
    }


def write(folder: Path, bench: Path | None = None, root: Path = ROOT) -> None:
    """Puts a run into the page and docs/prompt-reuse.json."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    benched = None
    if bench is not None:
        benched = json.loads((bench / "bench_prompt_reuse.json").read_text(encoding="utf-8"))
    before = json.loads((root / KEPT).read_text(encoding="utf-8")) if (root / KEPT).exists() else None
    kept = summary(results, benched, before)
    (root / KEPT).write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
    for mark, text in section(kept).items():
        (root / PAGE).write_text(block(text, root / PAGE, mark), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
