"""Rows of a measurement, and the files that it leaves. They do not depend on shards or kills."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..harness import frame, intervals
from ..harness.charts import draw_chart
from ..harness.environment import environment
from ..harness.frame import Lookup, Row, measured_row
from ..harness.intervals import UNDEFINED, Interval
from ..harness.methods import BLIND, REFERENCE
from ..harness.metrics import DAMAGE
from ..harness.pages import cell, label, pivot, write_report
from ..harness.parts import Record
from ..harness.tables import aligned_table, markdown_table
from .items import Refusal

PROBE, ALL = "measure", "all"
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")
COLUMNS = (
    {"head": "score", "metric": "accuracy", "form": "three±"},
    {"head": "less re-prefill's", "metric": "difference", "form": "three±"},
    {"head": "KL, nats", "metric": "kl", "form": "nats±"},
    {"head": "other answers", "metric": "flips", "form": "share±"},
    {"head": "η", "metric": "eta", "form": "two±"},
    {"head": "gap closed", "metric": "closed", "form": "two±"},
)
COSTS = (
    {"head": "kept, N = 1", "metric": "kept.antecedents=1", "form": "share"},
    {"head": "N = 16", "metric": "kept.antecedents=16", "form": "share"},
    {"head": "serving FLOPs", "metric": "serving_flops", "form": "share"},
    {"head": "once before", "metric": "forming_flops", "form": "share"},
)
NOTES = (
    "Intervals resample clusters: with fewer than 20 they are a first look.",
    "η is the share of blind reuse's KL that an arm removes, gap closed the share of the lost score that it brings "
    "back; both only where blind reuse loses something that can be told from 0.",
    "Kept bytes are shares of the pieces' KV in 16 bits, for each of N contexts that a piece is met in; FLOPs are "
    "shares of re-prefilling them, those once before spent when an arm's form is made.",
)


def rows_of(records: Sequence[Record], model: str) -> list[Row]:
    """Makes rows of all items and, where there are several, of each kind of item; intervals resample clusters."""
    kinds = {ALL: records}
    names = sorted({record["kind"] for record in records})
    for name in names if len(names) > 1 else ():
        kinds[name or "without a kind"] = [record for record in records if record["kind"] == name]
    arms = list(dict.fromkeys(arm for record in records for arm in record["arms"]))
    rows = []
    for kind, items in kinds.items():
        for arm in arms:
            for metric, interval in _metrics(items, arm):
                rows.append(measured_row(PROBE, model, arm, f"{metric}.{kind}", interval))
    for arm in arms:
        items = [record for record in records if arm in record["costs"]]
        cluster = np.array([record["cluster"] for record in items])
        for metric in items[0]["costs"][arm] if items else ():
            values = np.array([record["costs"][arm][metric] for record in items])
            rows.append(measured_row(PROBE, model, arm, metric, intervals.mean(values, cluster)))
    return rows


def _metrics(records: Sequence[Record], arm: str) -> Iterator[tuple[str, Interval]]:
    """Yields an arm's metrics over the items that it, re-prefill and blind reuse answered."""
    names = (REFERENCE, BLIND, arm)
    answered = [record for record in records if all("score" in record["arms"].get(name, {}) for name in names)]
    if not answered:
        return
    cluster = np.array([record["cluster"] for record in answered])

    def column(name: str, metric: str) -> np.ndarray:
        return np.array([float(record["arms"][name][metric]) for record in answered])

    score, reference, blind = (column(name, "score") for name in (arm, REFERENCE, BLIND))
    yield "accuracy", intervals.mean(score, cluster)
    yield "difference", intervals.paired_difference(score, reference, cluster)
    yield "kl", intervals.mean(column(arm, "kl"), cluster)
    yield "kl_first", intervals.mean(column(arm, "kl_first"), cluster)
    yield "flips", intervals.mean(1 - column(arm, "agrees"), cluster)
    lost = intervals.mean(column(BLIND, "kl"), cluster)
    harmed = lost.value >= DAMAGE and (math.isnan(lost.low) or lost.low > 0)
    yield "eta", intervals.eta(column(arm, "kl"), column(BLIND, "kl"), cluster) if harmed else UNDEFINED
    gap = intervals.paired_difference(reference, blind, cluster)
    clear = gap.low > 0 or gap.high < 0
    yield "closed", intervals.ratio(score - blind, reference - blind, cluster) if clear else UNDEFINED


def write(
    out: Path, records: Sequence[Record], config: Mapping[str, Any], left_out: Sequence[Refusal], command: str
) -> str:
    """Writes answers.jsonl, results.json, rows.csv, table.md and report.html; returns a table for the terminal.

    Args:
      records: of all items, in the plan's order. left_out: what readers and vocabulary refused.
      command: that measured, without what says how the work was shared.
    """
    measured = [record for record in records if "refused" not in record]
    model, rows = str(config["model"]), frame.without_nan(rows_of(measured, str(config["model"])))
    lines = [f"{refusal.where}: {refusal.reason}" for refusal in left_out]
    lines += [f"{record['where']}: {record['refused']}" for record in records if "refused" in record]
    failed = {
        (arm, answer["failed"]) for record in measured for arm, answer in record["arms"].items() if "failed" in answer
    }
    machine = environment(PACKAGES)
    # How busy the machine was is no result.
    machine.pop("load")
    about = {
        **{
            "title": f"What reuse costs {model} on {config['data']}",
            "left_out": lines,
            "unserved": dict(sorted(failed)),
        },
        **{"command": command, "items": len(measured)},
    }
    results = frame.write_rows({"config": {**config, **about}, "environment": machine, "rows": rows}, out)
    frame.frame(rows).to_csv(out / "rows.csv", index=False)
    answers = [json.dumps(record, ensure_ascii=False) + "\n" for record in measured]
    (out / "answers.jsonl").write_text("".join(answers), encoding="utf-8")

    lookup, tables, place = Lookup(rows), [], {"probe": PROBE, "model": model}
    kinds = [row["metric"].partition(".")[2] for row in rows if row["metric"].startswith("accuracy.")]
    for kind in dict.fromkeys(kinds):
        columns = [{**column, "metric": f"{column['metric']}.{kind}"} for column in COLUMNS]
        columns += COSTS if kind == ALL else ()
        title = f"{kind}, {lookup.get(**place, arm=REFERENCE, metric=f'accuracy.{kind}').n} items"
        tables.append({**place, "corner": "arm", "title": title, "columns": columns})
    report: dict[str, Any] = {"notes": [*NOTES, *(f"Left out: {line}" for line in lines)], "pictures": []}
    for metric, words in (("accuracy.all", "Score"), ("kl.all", "KL from re-prefill, nats")) if rows else ():
        chart = {"file": f"{metric}.png", "title": words, "x": "kept.antecedents=1", "y": metric, "y_label": words}
        arms = lookup.values("arm", place)
        methods = {label(arm.partition(".")[0]): [other for other in arms if other.split(".")[0] == arm.split(".")[0]]
                   for arm in arms if arm != REFERENCE}  # fmt: skip
        draw_chart(lookup, {**place, **chart, "x_label": "kept, share of the KV", "lines": methods}, out)
        report["pictures"].append((f"{metric}.png", f"{words} against what is kept for one context."))
    if rows:
        words = {}
        for name, arm, metric, form in (
            ("right", REFERENCE, "accuracy", "three"),
            ("blind", BLIND, "accuracy", "three"),
            ("lost", BLIND, "difference", "three±"),
            ("kl", BLIND, "kl", "nats±"),
        ):
            words[name] = cell(lookup.get(**place, arm=arm, metric=f"{metric}.{ALL}"), form)
        report["sentence"] = (
            "Re-prefill scores {right} on {items} items, pieces reused blind {blind}: a difference of {lost}, at a KL "
            "of {kl} nats a token."
        ).format(items=len(measured), **words)
    write_report(results, report, tables, out)
    pivots = [(table["title"], *pivot(lookup, table)) for table in tables]
    text = "\n\n".join(f"**{title}**\n\n{markdown_table(head, body)}" for title, head, body in pivots)
    (out / "table.md").write_text("\n\n".join([text, *(f"- {note}" for note in report["notes"])]) + "\n", "utf-8")
    return aligned_table(*pivots[0][1:]) if pivots else "nothing was measured"
