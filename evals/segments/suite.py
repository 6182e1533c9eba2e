"""Parts of the suite: retrieval, prompts over a warm store, a cold stream, and stability; finished ones are kept."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvpatch_jax.segment_reuse import SegmentIndexOptions, SegmentPrompt, TenantSegments

from ..results.parts import PlannedPart, finished_parts, measure_parts
from .readers import PromptReader
from .retrieval import measure_retrieval
from .rows import rows_of
from .serving import (
    FullPrefill,
    cold_records,
    common_prefix,
    continuation_record,
    filled_store,
    full_prefill,
    measure,
    run_order,
    stability_record,
)
from .settings import MAIN_SETTING, SegmentsPlan, StoreSpec, settings
from .transcripts import TranscriptPlan, make_transcripts

SIMILARITIES, CONTEXTS = (0.7, 0.8, 0.9), (0.5,)
RUNS = 3
"""Runs of the stability measurement."""


class WarmStores:
    """Stores over the first transcripts, made when they are first used, so that a resumed run makes few."""

    def __init__(self, reader: PromptReader, plan: SegmentsPlan):
        self.reader, self.plan = reader, plan
        self.prompts = prompts_of(reader, plan.serving)
        self._stores: dict[tuple[StoreSpec, int], TenantSegments] = {}

    @functools.cached_property
    def _full(self) -> list[FullPrefill]:
        # Runs of the stability measurement draw from twice as many transcripts as fill one store.
        warm, behind = self.plan.warm, self.plan.warm + self.plan.prompts
        chosen = [*self.prompts[:warm], *self.prompts[behind : behind + warm]]
        return [full_prefill(self.reader, prompt, sorted(self.plan.reuse)) for prompt in chosen]

    def store(self, spec: StoreSpec, run: int = -1) -> TenantSegments:
        """Returns a store; `run` says which transcripts fill it, -1 the first ones."""
        if (spec, run) not in self._stores:
            warm = self.plan.warm
            order = list(range(warm)) if run < 0 else run_order(run, len(self._full), warm)
            others = self.prompts[warm + self.plan.prompts :]
            chosen = [self.prompts[at] if at < warm else others[at - warm] for at in order]
            self._stores[spec, run] = filled_store(self.reader, spec, chosen, [self._full[at] for at in order])
        return self._stores[spec, run]

    @property
    def served(self) -> Sequence[SegmentPrompt]:
        """Prompts that are served over the warm store."""
        return self.prompts[self.plan.warm : self.plan.warm + self.plan.prompts]


def prompts_of(reader: PromptReader, plan: TranscriptPlan) -> list[SegmentPrompt]:
    """Tokenises the transcripts of a plan."""
    return [SegmentPrompt.of_text(made.text, reader.encode) for made in make_transcripts(plan)]


def run(plan: SegmentsPlan, reader: PromptReader, out: Path, most: int = 0) -> dict[str, Any]:
    """Measures the parts that `out` lacks; returns and writes results.json.

    Args:
      most: at most so many parts now; 0 for all, -1 for none: results of what is finished.
    """
    config = {
        "model": reader.name,
        "fingerprint": reader.backbone.fingerprint,
        "plan": json.loads(json.dumps(dataclasses.asdict(plan))),
    }
    stores = WarmStores(reader, plan)
    size = sum(len(prompt.ids) for prompt in stores.served) // plan.prompts
    main = settings(plan.reuse)[0]

    prompts, ablations, stability = [], [], []
    for number in range(plan.prompts):
        prompts.append(PlannedPart(f"prompt {number}", _prompt(stores, number), 7 * size))
    for number in range(plan.ablated):
        passes = 3 * len(settings(plan.reuse))
        ablations.append(PlannedPart(f"ablation {number}", _ablation(stores, number), passes * size))
    for number in range(plan.stable):
        stability.append(PlannedPart(f"stability {number}", _stability(stores, number), 12 * size))
    cold = PlannedPart("cold", lambda _: cold_records(reader, stores.prompts[: plan.cold], main), plan.cold * 4 * size)
    retrieval = PlannedPart("retrieval", _retrieval(reader, plan), 1)

    # Some of each kind first, so that a run that is stopped has something of all.
    half, few = plan.first, max(plan.stable // 2, 1)
    planned = [retrieval, *prompts[:half], ablations[0], cold, *stability[:few]]
    planned += [*ablations[1:], *prompts[half:], *stability[few:]]

    file = out / "parts.jsonl"
    parts = finished_parts(file, config) if most < 0 else measure_parts(file, config, planned, most)
    config |= {"parts_done": len(parts), "parts": len(planned)}
    results = {"config": config, **rows_of(parts, reader.backbone.forward_costs, plan)}
    (out / "results.json").write_text(json.dumps(results, indent=0) + "\n", encoding="utf-8")
    return results


Measuring = Callable[[Sequence[Mapping[str, Any]]], Iterable[Mapping[str, Any]]]


def _retrieval(reader: PromptReader, plan: SegmentsPlan) -> Measuring:
    def measured(_: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        options = SegmentIndexOptions(plan.reuse[0])
        made = make_transcripts(plan.retrieval)
        prompts = prompts_of(reader, plan.retrieval)
        yield {"tokens": [len(prompt.ids) for prompt in prompts]}
        yield from measure_retrieval(prompts, made, options, SIMILARITIES, CONTEXTS)

    return measured


def _prompt(stores: WarmStores, number: int) -> Measuring:
    """Measures one prompt in the main setting, by itself and behind an exact prefix."""

    def measured(finished: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        reader, plan, prompt = stores.reader, stores.plan, stores.served[number]
        full, main = full_prefill(reader, prompt), settings(plan.reuse)[0]
        result, record = measure(reader, prompt, full, stores.store(main.store), main)
        record["whole seconds"] = _seconds(reader, prompt)
        record["continuation"] = continuation_record(reader, full, {MAIN_SETTING: result.cache}, plan.steps)

        prefix = common_prefix(prompt, stores.prompts[: plan.warm])
        behind = measure(reader, prompt, full, stores.store(main.store), main, prefix)[1]
        yield {**record, "common_prefix": prefix, "prompt": number}
        yield {**behind, "setting": "behind an exact prefix", "prompt": number}

    return measured


def _ablation(stores: WarmStores, number: int) -> Measuring:
    """Measures one prompt in every other setting."""

    def measured(finished: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        reader, plan, prompt = stores.reader, stores.plan, stores.served[number]
        full = full_prefill(reader, prompt)
        for setting in settings(plan.reuse)[1:]:
            yield {**measure(reader, prompt, full, stores.store(setting.store), setting)[1], "prompt": number}

    return measured


def _stability(stores: WarmStores, number: int) -> Measuring:
    def measured(finished: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        reader, plan, prompt = stores.reader, stores.plan, stores.served[number]
        main = settings(plan.reuse)[0]
        each = [stores.store(main.store, run) for run in range(RUNS)]
        yield stability_record(reader, prompt, full_prefill(reader, prompt), each, main, plan.steps)

    return measured


def _seconds(reader: PromptReader, prompt: SegmentPrompt) -> float:
    """Measures a whole prefill that is compiled."""
    tokens = reader.backbone.embed(**reader.backbone.prepare([prompt.ids.tolist()]))
    started = time.perf_counter()
    jax.block_until_ready(reader.backbone.prefill(tokens))
    return round(time.perf_counter() - started, 3)
