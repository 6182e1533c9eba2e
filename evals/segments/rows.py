"""Rows of the suite's results, from the records of its parts: rates with intervals over prompts, and means."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.segment_reuse import ReuseThresholds, break_even_tokens

from ..results import intervals
from .settings import MAIN_SETTING, SegmentsPlan, settings

Record = Mapping[str, Any]
LENGTHS = (17, 32, 48, 64, 96, 128)
"""Edges of the classes of runs by length; the first is the shortest run that two halos of 8 leave a token of."""
EPSILON, STRICTER = ReuseThresholds().epsilon, (0.1, 0.05, 0.03, 0.02, 0.01)
"""The promised loss in nats, by which every setting is judged, and what tests may allow to keep it."""
CATEGORIES = ("bottom", "upper", "test", "discarded")


def rows_of(parts: Sequence[Record], costs: ForwardCosts, plan: SegmentsPlan) -> dict[str, Any]:
    """Makes all rows of the parts that are finished."""
    by_name = {part["part"]: part["records"] for part in parts}
    kinds = ("prompt ", "ablation ")
    served = [record for name, records in by_name.items() if name.startswith(kinds) for record in records]
    stable = [record for name, records in by_name.items() if name.startswith("stability") for record in records]
    order = [setting.name for setting in settings(plan.reuse)]
    main = [record for record in served if record["setting"] == MAIN_SETTING]
    compared = {record["prompt"] for record in served if record["setting"] == order[-1]}

    found: dict[str, Any] = {"retrieval": retrieval_rows(by_name.get("retrieval", [])), "settings": []}
    if main:
        found["settings"].append({"setting": "main, all prompts", **setting_row(main)})
        for name in order:
            own = [record for record in served if record["setting"] == name and record["prompt"] in compared]
            if own:
                found["settings"].append({"setting": name, **setting_row(own)})
        found["baselines"] = baseline_rows(main, served, costs)
        found["lengths"] = length_rows(served, order)
        found["stricter"] = stricter_rows(main)
        found["continuations"] = continuation_row(main)
    found["cold"] = [cold_row(number, record) for number, record in enumerate(by_name.get("cold", []))]
    found["stability"] = {
        name: round(float(np.mean([record[name] for record in stable])), 4) for name in ("served", "whole") if stable
    }
    found["break_even"] = break_even_rows(costs, plan)
    return found


def retrieval_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Counts recalled repeats by thresholds, kind and edit."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records[1:]:
        thresholds = (record["segment"], record["context"])
        groups.setdefault((*thresholds, "all", "all"), []).append(record)
        groups.setdefault((*thresholds, record["kind"], record["edit"]), []).append(record)
    rows = []
    for (segment, context, kind, edit), own in groups.items():
        clusters = np.array([record["transcript"] for record in own])
        recall = intervals.mean(np.array([record["recalled"] for record in own]), clusters)
        rows.append(
            {
                "segment": segment,
                "context": context,
                "kind": kind,
                "edit": edit,
                "recall": _shown(recall),
                "recalled": sum(record["recalled"] for record in own),
                "repeats": len(own),
                "milliseconds": round(1000 * statistics.median(record["seconds"] for record in own), 1),
                "spans": max(record["spans"] for record in own),
            }
        )
    return rows


def setting_row(records: Sequence[Record]) -> dict[str, Any]:
    """Makes the row of one setting over its prompts: FLOPs, acceptance, precision and losses."""
    clusters = np.arange(len(records))
    tried = [(at, run) for at, record in enumerate(records) for run in record["decisions"] if not run["equal_prefix"]]
    accepted = [(at, run) for at, run in tried if run["accepted"]]
    within = np.array([run["kl"] <= EPSILON for _, run in accepted])
    whole = np.array([record["whole"] for record in records], float)
    row: dict[str, Any] = {
        "prompts": len(records),
        "tried": len(tried),
        "accepted": len(accepted),
        "left": sum(run["rejected_at"] == "left" for _, run in tried),
        "right": sum(run["rejected_at"] == "right" for _, run in tried),
        "within": int(within.sum()),
        "precision": _shown(intervals.mean(within, np.array([at for at, _ in accepted]))) if accepted else None,
        "run kl": _percentiles([run["kl"] for _, run in accepted]),
        "prompt kl": _percentiles([record["kl"] for record in records]),
        "prompts within": sum(record["kl"] <= EPSILON for record in records),
        "flips": sum(record["flipped"] for record in records),
        "reused": round(sum(record["reused"] for record in records) / sum(record["tokens"] for record in records), 4),
        "saved": _shown(intervals.ratio(np.array([_saved(record) for record in records]), whole, clusters)),
        "seconds": round(statistics.median(record["seconds"] for record in records), 3),
    }
    for name in CATEGORIES:
        row[name] = round(float(sum(record["flops"][name] for record in records) / whole.sum()), 4)
    if "whole seconds" in records[0]:
        row["whole seconds"] = round(statistics.median(record["whole seconds"] for record in records), 3)
    return row


def baseline_rows(main: Sequence[Record], served: Sequence[Record], costs: ForwardCosts) -> list[dict[str, Any]]:
    """Makes rows of no reuse, exact-prefix caching, segments, and segments behind an exact prefix, on equal prompts."""
    behind = [record for record in served if record["setting"] == "behind an exact prefix"]
    arms = {
        "no reuse": [0.0] * len(main),
        "exact prefix": [float(costs.flops(record["common_prefix"])) for record in main],
        "segments": [_saved(record) for record in main],
        "segments behind an exact prefix": [_saved(record) + costs.flops(record["prefix"]) for record in behind],
    }
    clusters = np.arange(len(main))
    whole = np.array([record["whole"] for record in main], float)
    return [
        {"arm": name, "saved": _shown(intervals.ratio(np.array(saved), whole, clusters))}
        for name, saved in arms.items()
    ]


def length_rows(served: Sequence[Record], order: Sequence[str]) -> list[dict[str, Any]]:
    """Makes rows of runs by their length, where every run is tried: what they save net of tests and rejections."""
    name = "every run, whatever it saves"
    if name not in order:
        return []
    rows = []
    records = [record for record in served if record["setting"] == name]
    for low, high in zip(LENGTHS, (*LENGTHS[1:], 1 << 30), strict=True):
        gains = []
        for record in records:
            tested = [run for run in record["decisions"] if not run["equal_prefix"]]
            # The test's FLOPs of a prompt, shared among its runs by the borders that were tested.
            borders = sum(1 if run["rejected_at"] == "left" else 2 for run in tested)
            for run in tested:
                share = (1 if run["rejected_at"] == "left" else 2) / borders
                discarded = record["flops"]["discarded"] / max(sum(r["rejected_at"] == "right" for r in tested), 1)
                net = (run["saves"] if run["accepted"] else 0.0) - share * record["flops"]["test"]
                net -= discarded if run["rejected_at"] == "right" else 0.0
                if low <= run["length"] < high:
                    gains.append((net, run["accepted"], run["saves"]))
        if gains:
            net, accepted, saves = (np.array(column, float) for column in zip(*gains, strict=True))
            rows.append(
                {
                    "from": low,
                    "to": high if high < 1 << 30 else None,
                    "runs": len(gains),
                    "accepted": int(accepted.sum()),
                    "saves": round(float(saves.mean() / 1e9), 3),
                    "net": round(float(net.mean() / 1e9), 3),
                }
            )
    return rows


def stricter_rows(main: Sequence[Record]) -> list[dict[str, Any]]:
    """Makes rows of tests with a smaller ε than the promised one, of the runs that the main setting accepted.

    A run counts as accepted where all its probes are within the smaller ε. What else its prompt reuses stays.
    """
    rows = []
    runs = [(at, run) for at, record in enumerate(main) for run in record["decisions"]]
    runs = [(at, run) for at, run in runs if run["accepted"] and not run["equal_prefix"]]
    for tested in STRICTER:
        passed = [(at, run["kl"] <= EPSILON) for at, run in runs if max(run["probes"]) <= tested]
        if passed:
            clusters, within = np.array([at for at, _ in passed]), np.array([good for _, good in passed])
            share = _shown(intervals.mean(within, clusters))
            rows.append({"tested": tested, "accepted": len(passed), "within": int(within.sum()), "precision": share})
    return rows


def continuation_row(main: Sequence[Record]) -> dict[str, Any]:
    """Counts continuations whose tool-call line equals the one after a whole prefill, and those that are calls."""
    found = [record["continuation"] for record in main]
    return {
        "prompts": len(found),
        "equal": sum(record[MAIN_SETTING]["equal"] for record in found),
        "valid": sum(record[MAIN_SETTING]["valid"] for record in found),
        "whole valid": sum(record["whole"]["valid"] for record in found),
        "distance": round(float(np.mean([record[MAIN_SETTING]["distance"] for record in found])), 4),
    }


def cold_row(number: int, record: Record) -> dict[str, Any]:
    """Makes the row of one prompt of the cold stream."""
    runs = [run for run in record["decisions"] if not run["equal_prefix"]]
    return {
        "prompt": number,
        "saved": round(_saved(record) / record["whole"], 4),
        "accepted": sum(run["accepted"] for run in runs),
        "tried": len(runs),
        "beyond": sum(run["kl"] is not None and run["kl"] > EPSILON for run in runs),
        "generation": max((run["generation"] for run in runs if run["accepted"]), default=0),
        "kl": record["kl"],
        "bytes": record["bytes"],
    }


def break_even_rows(costs: ForwardCosts, plan: SegmentsPlan) -> list[dict[str, Any]]:
    """Computes the shortest run that saves more than its test costs, 300 tokens into a prompt, if it passes."""
    main, rows = ReuseThresholds(), []
    variants = {f"h = {main.halo}, {main.probes} probes": main, "h = 4": dataclasses.replace(main, halo=4)}
    variants |= {
        "h = 16": dataclasses.replace(main, halo=16),
        "all h probed": dataclasses.replace(main, probes=main.halo),
    }
    for name, thresholds in variants.items():
        tokens = {str(layers): break_even_tokens(costs, thresholds, layers, 300) for layers in sorted(plan.reuse)}
        rows.append({"test": name, "tokens": tokens})
    return rows


def _saved(record: Record) -> float:
    return float(record["flops"]["full"] - sum(record["flops"][name] for name in CATEGORIES))


def _shown(interval: intervals.Interval) -> list[float | None]:
    """Rounds a value with its interval; None where there is none."""
    return [None if np.isnan(value) else round(float(value), 4) for value in interval[:3]]


def _percentiles(values: Iterable[float]) -> list[float] | None:
    """Returns the median, the 95th percentile and the largest of values; None of no values."""
    found = np.array(list(values), float)
    return [float(f"{value:.3g}") for value in np.percentile(found, [50, 95, 100])] if len(found) else None
