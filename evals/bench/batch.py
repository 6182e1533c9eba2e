"""A batch of questions about pairs of documents: answered from patches, blind and by prefills.

What an analyst does with a small model: 20 texts, two questions about each of 20 pairs, `answer_batch` over a store in
which earlier questions about the same pairs left canonicals and patches. It keeps no prefills, which would serve these
pairs exactly and are many times as large. Sides:

* `patched`: as users get it, with audits and what they rule out.
* `blind`: canonicals alone, without audits.
* `exact`: every document that is not the first is prefilled; what all sides are compared with.

Seconds are of the process, because others use the machine too.
"""

import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.batch import BatchReport, read_answers
from kvpatch_jax.errors import ReuseWarning
from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.patching import DEFAULT_SIZE

from ..real_weights import weights_file
from ..texts.dataset import draw_facts
from .benchmark import Benchmark, BenchOptions, Sides, timed
from .shapes import random_ids, tiny_config

SIDES: Mapping[str, Mapping[str, Any]] = {
    "patched": {"reuse": "patched"},
    "blind": {"reuse": "blind", "audit": 0},
    "exact": {"reuse": "exact"},
}
STEPS = 8


class Questions(NamedTuple):
    """Fronts of two documents each, and items that ask about them."""

    fronts: list[list[Any]]
    items: list[dict[str, Any]]


class PatchesAlone:
    """A store of canonicals and patches, which keeps no prefills."""

    def __init__(self, store: kvp.ChunkStore):
        for name in ("get", "put", "get_patches", "put_patches", "contains", "patch_count"):
            setattr(self, name, getattr(store, name))


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the batch, on a real model, or quickly on a random one with token ids for documents."""
    if options.quick:
        make = functools.partial(random_backbone, tiny_config("Qwen2ForCausalLM"), options.seed)
        ids = [random_ids(12, options.seed + number) for number in range(4)]
        fronts: list[list[Any]] = [[ids[0], ids[1]], [ids[2], ids[3]], [ids[1], ids[0]]]
        items = [{"front": front, "question": random_ids(4, options.seed + 9), "steps": 2} for front in fronts]
        prepare = functools.partial(batch, make, Questions(fronts, items))
        yield Benchmark("batch.answers", "tiny decoder", prepare)
        return

    def smollm2() -> ModelBackbone:
        return load(weights_file("smollm2"), dtype="float32")

    prepare = functools.partial(batch, smollm2, questions(options.seed))
    yield Benchmark("batch.answers", "SmolLM2-135M, 20 documents, 40 questions", prepare, large=True)


def questions(seed: int, documents: int = 20, people: int = 5) -> Questions:
    """Draws texts about people, and two questions about each of as many pairs, whose orders vary."""
    rng = np.random.default_rng(seed)
    drawn = [draw_facts(rng, people) for _ in range(documents)]
    texts = [{"text": facts.front + facts.chunk} for facts in drawn]
    fronts, items = list[list[Any]](), list[dict[str, Any]]()
    for first in range(documents):
        second = (first + rng.integers(1, documents)) % documents
        fronts.append([texts[first], texts[second]])
        for place in (first, second):
            _, prompt, _ = drawn[place].asked[rng.integers(people)]
            items.append({"front": fronts[-1], "question": {"text": f"\n{prompt}"}, "steps": STEPS})
    return Questions(fronts, items)


def warm(backbone: ModelBackbone, store: Any, fronts: list[list[Any]]) -> None:
    """Leaves canonicals, and patches of every document behind the one in front of it, in a store."""
    for front in fronts:
        with kvp.Session(backbone, store, lead=0, rank=DEFAULT_SIZE) as session:
            for document in front:
                session.add(document, kind="chunk")
    for document in {str(document): document for front in fronts for document in front}.values():
        with kvp.Session(backbone, store, lead=0) as session:
            session.add(document, kind="chunk")


def batch(make: Callable[[], ModelBackbone], asked: Questions) -> Sides:
    """Warms a store and prepares the sides."""
    backbone, folder = make(), tempfile.TemporaryDirectory(prefix="batch-")
    path, store = Path(folder.name), kvp.ChunkStore(Path(folder.name) / "store")
    patches: Any = PatchesAlone(store)
    warm(backbone, patches, asked.fronts)
    reports, answers, warned = dict[str, BatchReport](), dict[str, list[Any]](), dict[str, str]()

    def run(side: str) -> None:
        out = path / f"{side}.jsonl"
        out.unlink(missing_ok=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ReuseWarning)
            reports[side] = kvp.answer_batch(backbone, patches, asked.items, out=out, **SIDES[side])
        warned[side] = "; ".join(str(warning.message) for warning in caught)
        answers[side] = [line.get("ids") for line in read_answers(out)]

    def check() -> dict[str, float]:
        """Compiles; a side that leaves a question open is wrong."""
        for side in SIDES:
            run(side)
            print(f"{side}: {reports[side]}", *filter(None, [warned[side]]), sep="\n  ")
        return {side: 2.0 * reports[side].failed for side in SIDES}

    def figures() -> dict[tuple[str, str], list[float]]:
        values = dict[tuple[str, str], list[float]]()
        for side, report in reports.items():
            same = [ours == theirs for ours, theirs in zip(answers[side], answers["exact"], strict=True)]
            values[side, "same answers"] = [float(np.mean(same))]
            values[side, "tokens"] = [float(report.tokens)]
            values[side, "prefix cache"] = [float(report.prefix_cache)]
            if report.audits.answers:
                values[side, "audits"] = [float(report.audits.answers)]
                values[side, "KL"], values[side, "blind KL"] = [report.audits.kl], [report.audits.blind_kl]
        store.close()
        folder.cleanup()
        return values

    calls = {side: timed(functools.partial(run, side), clock=time.process_time) for side in SIDES}
    return Sides(calls, check, figures=figures)
