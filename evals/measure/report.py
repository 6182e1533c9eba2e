"""Rows of a measurement, and the files that it leaves. They do not depend on shards or kills."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..harness import frame, intervals, report
from ..harness.config import RunConfig, read_config
from ..harness.environment import environment
from ..harness.frame import Lookup, Row, measured_row
from ..harness.intervals import UNDEFINED, Interval
from ..harness.methods import BLIND, REFERENCE
from ..harness.metrics import DAMAGE
from ..harness.parts import Record
from .items import Refusal

PROBE, ALL = "measure", "all"
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")
LAYOUT = Path(__file__).with_name("report.toml")


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
    """Writes answers.jsonl, results.json, rows.csv and report.html; returns a table for the terminal.

    Args:
      records: of all items, in the plan's order. left_out: what was not read.
      command: that measured, without what says how the work was shared.
    """
    measured = [record for record in records if "refused" not in record]
    lines = [f"{refusal.where}: {refusal.reason}" for refusal in left_out]
    lines += [f"{record['where']}: {record['refused']}" for record in records if "refused" in record]
    unserved = {
        arm: answer["failed"] for record in measured for arm, answer in record["arms"].items() if "failed" in answer
    }
    machine = environment(PACKAGES)
    # How busy the machine was is no result.
    machine.pop("load")
    title = f"What reuse costs {config['model']} on {config['data']}"
    about = {"title": title, "left_out": lines, "unserved": unserved, "command": command, "items": len(measured)}
    rows = rows_of(measured, config["model"])
    results = frame.write_rows({"config": {**config, **about}, "environment": machine, "rows": rows}, out)
    answers = [json.dumps(record, ensure_ascii=False) + "\n" for record in measured]
    (out / "answers.jsonl").write_text("".join(answers), encoding="utf-8")
    return report.write(layout(Lookup(results["rows"]), config["model"], lines), results, out)


def layout(lookup: Lookup, model: str, left_out: Sequence[str]) -> RunConfig:
    """Lays out the report: the sentence, charts and tables of report.toml for the arms and kinds that were measured."""
    shown, place = read_config(str(LAYOUT)), {"probe": PROBE, "model": model}
    answers, costs = (table["columns"] for table in shown.tables)
    arms = lookup.values("arm", place)
    kinds = [metric.removeprefix("accuracy.") for metric in lookup.values("metric", place) if "accuracy." in metric]
    tables = []
    for kind in kinds:
        columns = [{**column, "metric": f"{column['metric']}.{kind}"} for column in answers]
        title = f"{kind}, {lookup.get(**place, arm=REFERENCE, metric=f'accuracy.{kind}').n} items"
        tables.append({**place, "title": title, "columns": [*columns, *(costs if kind == ALL else ())]})

    lines = dict[str, list[str]]()
    for arm in arms:
        if arm != REFERENCE:
            lines.setdefault(arm.partition(".")[0], []).append(arm)
    about = {
        "sentence": f"{{% set here = {json.dumps(place)} %}}{shown.report['sentence']}" if kinds else "",
        "notes": [*shown.report["notes"], *(f"Left out: {line}" for line in left_out)],
        "charts": [{**chart, **place, "lines": lines} for chart in shown.report["charts"]],
    }
    return dataclasses.replace(shown, report={**shown.report, **about}, tables=tuple(tables))
