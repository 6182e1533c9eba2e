"""What is measured of an operation, as records of a part and as rows."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..harness import metrics
from ..harness.datasets import Questions
from ..harness.frame import Row
from ..harness.methods import REFERENCE
from ..harness.metrics import ProbeRecords
from ..harness.parts import Record


class Measured(NamedTuple):
    """Answers to the same questions over the caches that an operation leaves.

    Attributes:
      probe: the operation with its setting, "slide.gone=1".
      kinds: names of the kinds of question.
      questions: those asked.
      answers: by arm, those of a re-prefill first.
      costs: of arms, by metric.
    """

    probe: str
    kinds: tuple[str, ...]
    questions: Questions
    answers: Mapping[str, Any]
    costs: Mapping[str, Mapping[str, float]] = {}


def records_of(measured: Measured, model: str, clusters: np.ndarray) -> Iterator[Record]:
    """Makes a record of each arm, the reference's with what was asked.

    Args:
      clusters: number of each context [B].
    """
    questions, reference = measured.questions, measured.answers[REFERENCE]
    valid = questions.valid
    for arm, answers in measured.answers.items():
        record = metrics.answer_record(arm, answers, reference, valid)
        record |= {"probe": measured.probe, "model": model, "costs": dict(measured.costs.get(arm, {}))}
        if arm == REFERENCE:
            record["kinds"] = list(measured.kinds)
            record["kind"] = questions.kind[valid].tolist()
            record["cluster"] = (clusters[:, None] + 0 * valid)[valid].tolist()
            record["answer"] = questions.answer[valid].tolist()
        yield record


def rows_of(dataset: str, parts: Mapping[str, Iterable[Record]], names: tuple[str, ...]) -> list[Row]:
    """Makes the rows of finished parts: probes "<data set>.<operation>.<setting>", every model by itself.

    Args:
      names: metrics, some of `metrics.PER_KIND`.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for records in parts.values():
        for record in records:
            groups.setdefault((record["probe"], record["model"]), []).append(record)
    rows: list[Row] = []
    for (probe, model), records in groups.items():
        kinds = records[0]["kinds"]
        rows += ProbeRecords(records, kinds).rows(f"{dataset}.{probe}", model, names)
    return rows
