"""The suite of repairs as a data set: a part per backbone and batch of contexts, kept when it is done."""

import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError, RankError
from kvpatch_jax.repair import (
    RATIOS,
    Repaired,
    encoder_cached_reprefill,
    greedy_schedule,
    logit_error,
    recomputed_sensitivity,
)
from models import ModelBackbone, load

from .. import small_task
from ..datasets import RecordedDataset
from ..harness import intervals
from ..harness.frame import Row, measured_row
from ..harness.parts import PlannedPart
from ..probes.results_table import ProbeItems
from ..small_task import scenes
from ..small_task.reader import EVICTED, VISIBLE, SceneReader
from ..trained import shipped
from .arms import SERVED_BYTES, SHARES, STORED, repair_arms
from .pages import RepairPages, question_logits

Record = dict[str, Any]
PROBES = (VISIBLE, EVICTED)
QUESTIONS = {"page": 2, "legend": 2, "chain": 4, "aggregate": 3, "override": 1}
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")
COSTS = ("flops", "stored_bytes", "moved_bytes", "token_layers")
REFERENCE, PATCH = "re-prefill", "patched"
DIGITS = 4
"""Significant digits of an answer's KL in the file of parts."""
PROXY_RATIOS = 5
"""Ratios, about, that sensitivities are measured at: each compiles a program for every layer."""
PROXY_BATCH = 10_000
"""Number of the scene that VLCache's schedules are fitted on; no scene that is measured has it."""


@dataclasses.dataclass(frozen=True)
class RepairPlan:
    """How much is measured: contexts of each backbone, how many at once, and contexts of the proxy set."""

    contexts: int = 64
    batch: int = 16
    proxies: int = 8


FULL, QUICK = RepairPlan(), RepairPlan(contexts=8, batch=8, proxies=4)


def dataset(names: Sequence[str], seed: int, plan: RepairPlan) -> RecordedDataset:
    """Describes the parts of all backbones asked for."""
    loaded = functools.lru_cache(maxsize=1)(lambda name: load(shipped(name), dtype="float32"))
    parts = []
    for name in names:
        fit = functools.lru_cache(maxsize=1)(lambda name=name: fitted_schedules(loaded(name), seed, plan.proxies))
        for number in range(plan.contexts // plan.batch):

            def measure(_: Any, name: str = name, number: int = number, fit: Any = fit) -> Iterator[Record]:
                return records_of(loaded(name), name, seed, number, plan.batch, fit())

            parts.append(PlannedPart(f"{name}, batch {number}", measure, 0))

    config = {
        "model": ", ".join(names),
        "fingerprints": {name: load(shipped(name), dtype="float32").fingerprint for name in names},
        "plan": dataclasses.asdict(plan),
        "seed": seed,
        "questions": QUESTIONS,
    }
    return RecordedDataset(config, parts, rows_of, PACKAGES)


def reader_of(backbone: ModelBackbone, seed: int, number: int, batch: int, folder: Path) -> SceneReader:
    """Draws a scene and its questions, and reuses its page."""
    scene, rng = scenes.scene_at(backbone, seed, number, folder, batch)
    return SceneReader(scene, small_task.ask(scene.contexts, rng, QUESTIONS))


def fitted_schedules(backbone: ModelBackbone, seed: int, proxies: int) -> dict[float, tuple[float, ...]]:
    """Fits VLCache's shares by layer on contexts that nothing is measured on, by the mean share of each budget.

    Source: VLCache, equations 5 to 9: logit error of the answers, greedy allocation. Its ratios end at .3, so that
    budgets above are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        reader = reader_of(backbone, seed, PROXY_BATCH, proxies, Path(folder))
        splice = RepairPages(reader).splice
        expected = question_logits(reader, reader.page.reference)
        tokens, layers = reader.page.page.tokens, backbone.layout.layers
        # Of the paper's ratios only those that differ in whole tokens of this page.
        counted = {int(ratio * tokens + 1e-9): ratio for ratio in reversed(RATIOS)}
        ratios = sorted(ratio for count, ratio in counted.items() if count)
        ratios = [0.0, *ratios[:: max(1, len(ratios) // PROXY_RATIOS)]]

        def loss(_: int, cache: Any) -> float:
            return logit_error(expected, question_logits(reader, cache))

        found = recomputed_sensitivity(backbone, [splice], ratios, loss)

    schedules = {}
    for share in SHARES:
        if share <= max(RATIOS):
            schedules[share] = greedy_schedule(found, ratios, share * layers)
    return schedules


def records_of(
    backbone: ModelBackbone,
    name: str,
    seed: int,
    number: int,
    batch: int,
    schedules: Mapping[float, Sequence[float]],
) -> Iterator[Record]:
    """Measures every arm on one batch: predictions and KL of all its questions, and what the arm costs."""
    with tempfile.TemporaryDirectory() as folder:
        reader = reader_of(backbone, seed, number, batch, Path(folder))
        pages = RepairPages(reader)
        tokens = reader.page.page.tokens
        kv_numbers = tokens * backbone.layout.bytes_per_token(np.int8)
        whole = encoder_cached_reprefill(backbone, pages.splice.replace(front=None), 1.0)
        page_flops, layers = whole.flops, backbone.layout.layers
        clusters = number * batch + np.arange(batch)

        reference = {probe: reader.read(reader.page.reference, probe) for probe in PROBES}
        for probe in PROBES:
            keep = reader.asked(probe).valid
            yield {
                "backbone": name,
                "probe": probe,
                "arm": REFERENCE,
                "kind": reader.questions.kind[keep].tolist(),
                "cluster": np.broadcast_to(clusters[:, None], keep.shape)[keep].tolist(),
                "answer": reader.questions.answer[keep].tolist(),
                "predicted": reference[probe].predicted[keep].tolist(),
                "kl": [0.0] * int(keep.sum()),
            }

        for arm in repair_arms(kv_numbers, layers, schedules):
            kv_bytes = kv_numbers * (SERVED_BYTES if arm.method == "quantised" else 4)
            repaired = None
            for probe in PROBES:
                if repaired is None or arm.asks:
                    try:
                        repaired = arm.repair(backbone, pages.asked(probe) if arm.asks else pages.splice, arm.budget)
                    except (RankError, InputError):
                        # A form of which nothing fits so few bytes; any other arm must run.
                        if arm.method not in STORED:
                            raise
                        break
                answers = (pages.read_asked if arm.asks else pages.read)(repaired, probe)
                keep = reader.asked(probe).valid
                kl = answers.divergence_from(reference[probe])[keep]
                yield {
                    "backbone": name,
                    "probe": probe,
                    "arm": arm.name,
                    "predicted": answers.predicted[keep].tolist(),
                    "kl": [float(f"{value:.{DIGITS}g}") for value in kl],
                    "costs": shares_of(repaired, page_flops, kv_bytes, layers * tokens),
                }


def shares_of(repaired: Repaired, page_flops: float, kv_bytes: int, token_layers: int) -> dict[str, float]:
    """Computes an arm's costs as shares of re-prefilling the page from kept features, and of its KV's bytes.

    Stored bytes are those of one antecedent and, once, of the canonical and of the inputs that are kept.
    """
    bytes = repaired.bytes
    return {
        "flops": repaired.flops / page_flops,
        "stored_bytes": bytes.per_antecedent(1) / kv_bytes,
        "moved_bytes": bytes.moved / kv_bytes,
        "token_layers": float(np.mean(np.asarray(repaired.token_layers))) / token_layers,
    }


def rows_of(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes the rows of all finished parts: answers by kind, costs, and the patch against others at equal bytes."""
    records = [record for part in finished for record in part["records"]]
    rows: list[Row] = []
    for backbone in dict.fromkeys(record["backbone"] for record in records):
        for probe in PROBES:
            own = [record for record in records if (record["backbone"], record["probe"]) == (backbone, probe)]
            rows += _probe_rows(backbone, probe, own) if own else ()
    return rows


def _probe_rows(backbone: str, probe: str, records: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields the rows of one backbone and probe."""
    items, costs = items_of(probe, records), {}
    for record in records:
        costs.setdefault(record["arm"], record.get("costs", {}))

    for kind, here in items.by_kind():
        for arm in items.predicted:
            for metric, interval in items.metrics(arm, here).items():
                yield measured_row(probe, backbone, arm, f"{metric}.{kind}", interval)
    for arm, shares in costs.items():
        for metric, share in shares.items():
            yield measured_row(probe, backbone, arm, metric, intervals.Interval(share, share, share, 1))

    # The same questions, the same draws: negative where the patch is nearer to re-prefill.
    for arm in items.predicted:
        method, _, share = arm.partition(".budget=")
        patch = f"{PATCH}.budget={share}"
        if share and method != PATCH and patch in items.predicted:
            for kind, metric, interval in items.paired(patch, arm):
                yield measured_row(probe, backbone, arm, f"patch_minus.{metric}.{kind}", interval)


def items_of(probe: str, records: Sequence[Mapping[str, Any]]) -> ProbeItems:
    """Collects the answers of all batches; arms that some batch lacks are left out."""
    items = ProbeItems(probe, REFERENCE, "blind")
    batches = sum(record["arm"] == REFERENCE for record in records)
    for record in records:
        if record["arm"] == REFERENCE:
            for column in ("kind", "cluster", "answer"):
                items.asked[column].append(np.asarray(record[column]))
        items.predicted.setdefault(record["arm"], []).append(np.asarray(record["predicted"]))
        items.divergence.setdefault(record["arm"], []).append(np.asarray(record["kl"], float))

    for arm in [arm for arm, found in items.predicted.items() if len(found) != batches]:
        del items.predicted[arm], items.divergence[arm]
    return items
