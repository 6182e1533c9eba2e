"""What a measurement leaves: answers.jsonl, results.json, table.md, figures and report.html.

Nothing in them depends on when, in how many processes or after how many kills it was measured.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from kvpatch_jax.utils.atomic_files import replace

from ..datasets import RecordedDataset
from ..harness.environment import environment
from ..harness.frame import Rows, without_nan
from ..harness.intervals import Interval
from ..harness.tables import markdown_table
from ..report.figures import NARROW
from ..report.page import picture, template
from ..results.dominance import pareto_front
from .arms import BLIND, REFERENCE
from .items import Refusal
from .rows import ALL, PROBE, arms_in, by_kind, records_in

matplotlib.use("Agg")
COLUMNS = {
    "accuracy": ("score", 1.0, 3),
    "difference": ("less re-prefill's", 1.0, 3),
    "closed": ("gap closed", 1.0, 2),
    "kl": ("KL, nats a token", 1.0, 3),
    "kl_first": ("KL of the first token", 1.0, 3),
    "eta": ("η", 1.0, 3),
    "flips": ("other answers, %", 100.0, 1),
    "flips_first": ("other first tokens, %", 100.0, 1),
}
"""What is measured of a kind of item: title, factor and places in tables."""
COSTS = {
    "stored_bytes.antecedents=1": "kept, % of the KV",
    "stored_bytes.antecedents=16": "kept for each of 16 contexts, %",
    "serving_flops": "work while serving, %",
    "forming_flops": "work once before, %",
}
"""Columns of costs; shares of the pieces' KV at 16 bits, and of re-prefilling them."""
AXES = ("stored_bytes.antecedents=1", "serving_flops")
EXAMPLES = 12
FEW = 20
"""Below so many clusters an interval is itself uncertain."""
ANSWERS = "answers.jsonl"


def write_results(
    dataset: RecordedDataset,
    finished: Sequence[Mapping[str, Any]],
    out: Path,
    left_out: Sequence[Refusal],
    unserved: Sequence[str],
) -> str:
    """Writes all files of a measurement; returns the verdict.

    Args:
      finished: every part. left_out: what readers and vocabulary refused. unserved: arms that the model cannot serve.
    """
    records = records_in(finished)
    described = environment(dataset.packages)
    # How busy the machine was is no result.
    described.pop("load")
    refused = [Refusal(record["where"], record["refused"]) for record in records if "refused" in record]
    results = {
        "config": {**dataset.config, "unserved_arms": list(unserved)},
        "environment": described,
        "left_out": [{"where": own.where, "reason": own.reason} for own in (*left_out, *refused)],
        "rows": without_nan(dataset.rows(finished)),
    }
    rows = Rows(results)
    said = verdict(rows, records)
    (out / "figures").mkdir(exist_ok=True)
    figures = draw_figures(rows, out / "figures")
    tables = all_tables(rows, records)
    text = [f"## {title}\n\n{markdown_table(head, lines)}" for title, (head, lines) in tables.items()]
    page = template("measure.html.j2").render(
        config=results["config"],
        verdict=said,
        pictures=[picture(path) for path in figures],
        tables=tables,
        examples=examples(records),
        left_out=results["left_out"],
        environment=described,
    )

    # Each file is replaced whole: two shards that end together write the same.
    for name, content in (
        (ANSWERS, "".join(json.dumps(line) + "\n" for line in answer_lines(records))),
        ("results.json", json.dumps(results, indent=1) + "\n"),
        ("table.md", "\n\n".join([said, *text]) + "\n"),
        ("report.html", page),
    ):
        replace(out / name, content.encode())
    return said


def answer_lines(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists a line for each item and arm, and one for each item that was left out."""
    lines = []
    for record in records:
        named = {name: record[name] for name in ("item", "cluster", "kind")}
        if "refused" in record:
            lines.append({**named, "refused": record["refused"]})
            continue
        lines += [{**named, "arm": arm, **answer} for arm, answer in record["arms"].items()]
    return lines


# ----------------------------------------------------------------------------------------------------------- sentences


def show(interval: Interval, scale: float = 1.0, places: int = 3) -> str:
    """Formats a number with its interval, or a dash."""
    value, low, high = (number * scale for number in interval[:3])
    if not math.isfinite(value):
        return "–"
    return f"{value:.{places}f}" + (f" [{low:.{places}f}, {high:.{places}f}]" if math.isfinite(low) else "")


def verdict(rows: Rows, records: Sequence[Mapping[str, Any]]) -> str:
    """Answers in sentences what reuse costs here."""
    measured = [record for record in records if "refused" not in record]
    if not measured:
        return f"Nothing was measured: all {len(records)} items were left out."

    def got(arm: str, metric: str) -> Interval:
        return rows.get(PROBE, arm, f"{metric}.{ALL}")

    clusters = len({record["cluster"] for record in measured})
    difference = got(BLIND, "difference")
    told = "is" if difference.low > 0 or difference.high < 0 else "cannot be told from 0, at"
    sentences = [
        f"{rows.model} scores {show(got(REFERENCE, 'accuracy'))} on {len(measured)} items of {clusters} clusters where "
        f"every context is computed anew, and {show(got(BLIND, 'accuracy'))} where its pieces are reused blind: the "
        f"difference {told} {show(difference)}.",
        f"Blind reuse changes {show(got(BLIND, 'flips'), 100.0, 1)} % of the answers, and moves them by "
        f"{show(got(BLIND, 'kl'))} nats a token.",
    ]

    exact = {arm for record in measured for arm, own in record["arms"].items() if arm not in (REFERENCE, BLIND)}
    mending = [arm for arm in rows.arms(PROBE) if arm in exact and got(arm, "kl").value > 0]
    if mending and math.isfinite(got(BLIND, "eta").value):
        best = max(mending, key=lambda arm: got(arm, "eta").value)
        work, kept = (100 * rows.get(PROBE, best, axis).value for axis in reversed(AXES))
        once = 100 * rows.get(PROBE, best, "forming_flops").value
        sentences.append(
            f"Of the arms that are not exact, {best} is nearest to re-prefill: it removes {show(got(best, 'eta'))} of "
            f"blind reuse's KL, keeps {kept:.0f} % of the KV for a context, and takes {work:.0f} % of re-prefill's "
            f"work at every reuse and {once:.0f} % of it once before."
        )
    elif mending:
        sentences.append("Blind reuse loses too little here to tell what mends it.")
    if clusters < FEW:
        sentences.append(f"With {clusters} clusters the intervals are a first look: measure {FEW} or more.")
    return " ".join(sentences)


# -------------------------------------------------------------------------------------------------- tables and examples


def all_tables(rows: Rows, records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Makes the table of all items, and one for each kind."""
    measured = [record for record in records if "refused" not in record]
    tables = {}
    for kind, of_kind in by_kind(measured).items():
        used = [name for name in COLUMNS if rows.measured(PROBE, rows.arms(PROBE), f"{name}.{kind}")]
        lines = []
        for arm in arms_in(measured):
            cells = []
            for name in used:
                _, scale, places = COLUMNS[name]
                cells.append(show(rows.get(PROBE, arm, f"{name}.{kind}"), scale, places))
            costs = [f"{100 * rows.get(PROBE, arm, metric).value:.1f}" for metric in COSTS] if kind == ALL else []
            lines.append([arm, *cells, *costs, str(rows.get(PROBE, arm, f"accuracy.{kind}").n)])
        head = ["arm", *(COLUMNS[name][0] for name in used), *(COSTS.values() if kind == ALL else ()), "n"]
        tables["All items" if kind == ALL else f"{kind} ({len(of_kind)} items)"] = head, lines
    return tables


def examples(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chooses items to look at: those that blind reuse answers otherwise than re-prefill first, one of a cluster."""
    measured = [record for record in records if BLIND in record.get("arms", {})]

    def moved(record: Mapping[str, Any]) -> tuple[bool, float]:
        blind = record["arms"][BLIND]
        return blind.get("agrees", True), -blind.get("kl", 0.0)

    chosen, seen = [], set()
    for record in sorted(measured, key=moved):
        if record["cluster"] not in seen and len(chosen) < EXAMPLES:
            seen.add(record["cluster"])
            said = [
                (arm, own.get("said", own.get("failed", "")), own.get("score")) for arm, own in record["arms"].items()
            ]
            chosen.append({**record, "said": said})
    return chosen


# ------------------------------------------------------------------------------------------------------------- figures


def draw_figures(rows: Rows, folder: Path) -> list[Path]:
    """Draws score and KL against stored bytes and against work, a panel each; grey joins what nothing cheaper beats."""
    arms = [arm for arm in rows.arms(PROBE) if math.isfinite(rows.get(PROBE, arm, f"accuracy.{ALL}").value)]
    if not arms:
        return []
    figure = Figure(figsize=(NARROW, 10.5), layout="constrained")
    panels = figure.subplots(4, 1)
    for place, (metric, axis) in enumerate([(m, a) for m in ("accuracy", "kl") for a in AXES]):
        panel = panels[place]
        for number, arm in enumerate(arms):
            cost, point = 100 * rows.get(PROBE, arm, axis).value, rows.get(PROBE, arm, f"{metric}.{ALL}")
            ends = np.nan_to_num([[point.value - point.low], [point.high - point.value]])
            look = {"color": f"C{number % 10}", "marker": "osD^v<>phX*P"[number % 12], "ms": 5, "capsize": 2, "lw": 1}
            panel.errorbar([cost], [point.value], yerr=np.maximum(ends, 0), ls="none", label=arm, **look)
        if metric == "accuracy":
            front = pareto_front(rows, axis, ALL, PROBE)
            costs = [100 * rows.get(PROBE, arm, axis).value for arm in front]
            heights = [rows.accuracy(arm, ALL, PROBE).value for arm in front]
            panel.step(costs, heights, where="post", color="#BBBBBB", linewidth=4, zorder=0)
        panel.set(xlabel=COSTS[axis], ylabel={"accuracy": "score", "kl": "KL from re-prefill, nats"}[metric])
        panel.set_xscale("symlog", linthresh=1, linscale=0.4)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    path = folder / "pareto.png"
    # Without the version and date of what drew it.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return [path]
