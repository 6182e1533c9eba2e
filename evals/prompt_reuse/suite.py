"""The suite: for each task the insights, sensitivities on a proxy set, and schedules on other contexts. Parts are kept.

Every part is a batch of contexts of one task; the proxy set is one part, which later ones read its schedules from.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from models import ModelBackbone, load

from ..datasets import RecordedDataset
from ..results import intervals
from ..results.parts import PlannedPart
from ..results.rows import Row, as_row
from ..trained import shipped
from . import insights, recomputed
from .contexts import TASKS, ImagePrompts, load_prompts

Record = dict[str, Any]
ATTENTION = insights.AttentionInsights._fields
INSIGHTS = ("far at the beginning", "layers of the first token", "layers of the others")
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")


@dataclasses.dataclass(frozen=True)
class PromptReusePlan:
    """Sizes of the suite.

    Attributes:
      tasks: names of `TASKS`.
      proxies: contexts of the proxy set (VLCache's D has 40). contexts: those that schedules are tried on.
      batch: contexts at a time.
      proxy_seed, seed: of both.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    proxies: int = 40
    contexts: int = 64
    batch: int = 8
    proxy_seed: int = 20261127
    seed: int = 20261128


FULL = PromptReusePlan()
QUICK = PromptReusePlan(tasks=("sheets",), proxies=2, contexts=4, batch=2)


def load_backbone(task: str) -> ModelBackbone:
    """Loads the instance of a task."""
    return load(shipped(TASKS[task][1]), dtype="float32")


def dataset(plan: PromptReusePlan, loader: Callable[[str], ModelBackbone] = load_backbone) -> RecordedDataset:
    """Describes all parts. A backbone is loaded when its first part is measured."""
    backbones: dict[str, ModelBackbone] = {}

    def prompts_of(task: str, seed: int, number: int) -> ImagePrompts:
        if task not in backbones:
            backbones[task] = loader(task)
        return load_prompts(task, backbones[task], seed, number, plan.batch)

    parts = []
    for task in plan.tasks:
        parts.append(PlannedPart(_proxy_part(task), _measure_proxies(plan, task, prompts_of)))
        for number in range(plan.contexts // plan.batch):
            parts.append(PlannedPart(f"{task}, {number}", _measure_contexts(plan, task, number, prompts_of)))
    config = {"model": ", ".join(TASKS[task][1] for task in plan.tasks), "plan": dataclasses.asdict(plan)}
    # All proxies first, which are the dearest.
    parts.sort(key=lambda part: part.name not in map(_proxy_part, plan.tasks))
    return RecordedDataset(config, parts, lambda finished: rows_of(finished, plan), PACKAGES)


PromptsOf = Callable[[str, int, int], ImagePrompts]
Measure = Callable[[Sequence[Mapping[str, Any]]], Iterable[Record]]


def _proxy_part(task: str) -> str:
    return f"{task}, proxies"


def _measure_proxies(plan: PromptReusePlan, task: str, prompts_of: PromptsOf) -> Measure:
    def measure(_: Sequence[Mapping[str, Any]]) -> Iterable[Record]:
        proxies = [prompts_of(task, plan.proxy_seed, number) for number in range(plan.proxies // plan.batch)]
        ratios = recomputed.menu_of([end - begin for begin, end in proxies[0].parts])
        sensitivity = recomputed.sensitivity_of(proxies, ratios)
        schedules = {}
        for name, (schedule, total) in recomputed.allocations(sensitivity, ratios).items():
            schedules[name] = {"schedule": list(schedule), "sum": total}
        yield {
            "task": task,
            "ratios": [0.0, *ratios],
            "sensitivity": np.round(sensitivity, 7).tolist(),
            "schedules": schedules,
        }

    return measure


def _measure_contexts(plan: PromptReusePlan, task: str, number: int, prompts_of: PromptsOf) -> Measure:
    def measure(finished: Sequence[Mapping[str, Any]]) -> Iterable[Record]:
        (proxies,) = [part for part in finished if part["part"] == _proxy_part(task)]
        schedules = {
            name: tuple(own["schedule"])
            for name, own in proxies["records"][0]["schedules"].items()
            if name.startswith("greedy")
        }
        prompts = prompts_of(task, plan.seed, number)
        for probe, records in (
            ("insight", insights.insight_records(prompts)),
            ("side", recomputed.side_records(prompts)),
            ("schedule", recomputed.schedule_records(prompts, schedules)),
        ):
            for record in records:
                yield {"task": task, "probe": probe} | record

    return measure


# -------------------------------------------------------------------------------------------------------------- rows


def rows_of(finished: Sequence[Mapping[str, Any]], plan: PromptReusePlan) -> list[Row]:
    """Makes rows of finished parts, with intervals over contexts."""
    rows: list[Row] = []
    records = [record for part in finished for record in part["records"]]
    for task in plan.tasks:
        own = [record for record in records if record["task"] == task]
        rows += _proxy_rows(task, [record for record in own if "sensitivity" in record])
        rows += _insight_rows(task, [record for record in own if record.get("probe") == "insight"])
        rows += _side_rows(task, [record for record in own if record.get("probe") == "side"])
        rows += _schedule_rows(task, [record for record in own if record.get("probe") == "schedule"])
    return rows


def _proxy_rows(task: str, records: Sequence[Record]) -> list[Row]:
    rows = []
    for record in records:
        ratios = record["ratios"]
        for layer, line in enumerate(record["sensitivity"]):
            for ratio, value in zip(ratios[1:], line[1:], strict=True):
                # Beside reuse, whose loss is the same in every layer's row.
                rows.append(as_row("sensitivity", task, f"layer {layer}, {ratio:g}", "of reuse", value / line[0]))
        for name, found in record["schedules"].items():
            for layer, ratio in enumerate(found["schedule"]):
                rows.append(as_row("schedule", task, name, f"layer {layer}", ratio))
            rows.append(as_row("schedule", task, name, "sum", found["sum"]))
    return rows


def _insight_rows(task: str, records: Sequence[Record]) -> list[Row]:
    rows = []
    for image in dict.fromkeys(record["image"] for record in records):
        own = [record for record in records if record["image"] == image]
        clusters = np.array([record["cluster"] for record in own])
        rows.append(as_row("insight", task, image, "tokens", float(own[0]["tokens"])))
        for metric in (*ATTENTION, *INSIGHTS):
            values = np.array([np.mean(record[metric]) for record in own])
            rows.append(as_row("insight", task, image, metric, intervals.mean(values, clusters)))
    return rows


def _side_rows(task: str, records: Sequence[Record]) -> list[Row]:
    rows = []
    for arm in dict.fromkeys(record["arm"] for record in records):
        own = [record for record in records if record["arm"] == arm]
        clusters = np.array([record["cluster"] for record in own])
        for third, name in enumerate(("first third", "middle third", "last third")):
            values = np.array([record["kv"][third] for record in own])
            rows.append(as_row("side", task, arm, f"kv, {name}", intervals.mean(values, clusters)))
        for metric in ("residual", "kl"):
            known = np.array([record[metric] is not None for record in own])
            values = np.array([record[metric] for record in own if record[metric] is not None])
            rows.append(as_row("side", task, arm, metric, intervals.mean(values, clusters[known])))
    return rows


def _schedule_rows(task: str, records: Sequence[Record]) -> list[Row]:
    rows, found = [], {}
    for arm in dict.fromkeys(record["arm"] for record in records):
        own = [record for record in records if record["arm"] == arm]
        kl = np.concatenate([np.asarray(record["kl"], np.float64) for record in own])
        clusters = np.concatenate([np.asarray(record["cluster"]) for record in own])
        found[arm] = kl, clusters
        rows.append(as_row("chain", task, arm, "kl", intervals.mean(kl, clusters)))
        rows.append(as_row("chain", task, arm, "token_layers", own[0]["token_layers"]))
    for ratio in recomputed.STATIC:
        for name in (f"greedy {ratio:g}", f"random {ratio:g}"):
            if name in found:
                static, clusters = found[f"static {ratio:g}"]
                difference = intervals.paired_difference(found[name][0], static, clusters)
                rows.append(as_row("chain", task, name, "kl - static", difference))
    return rows
