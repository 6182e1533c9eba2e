"""Data sets whose arms are ways of serving a window: batches of contexts, each answered under every arm."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..harness import metrics
from ..harness.datasets import QuestionTable, Run
from ..harness.frame import Row
from ..harness.methods import REFERENCE
from ..harness.metrics import ProbeRecords
from ..harness.parts import Part, Record
from ..harness.runner import part_key


class Measured(NamedTuple):
    """Answers to the same questions over the caches that the arms leave.

    Attributes:
      probe: what was done with its setting, "slide.gone=1".
      kinds: names of the kinds of question.
      questions: those asked.
      answers: by arm, those of a re-prefill first.
      clusters: number of each context [B].
      costs: of arms, by metric.
    """

    probe: str
    kinds: Sequence[str]
    questions: QuestionTable
    answers: Mapping[str, Any]
    clusters: np.ndarray
    costs: Mapping[str, Mapping[str, float]] = {}

    def records(self, model: str) -> Iterator[Record]:
        """Makes a record of each arm, the reference's with what was asked."""
        reference, valid = self.answers[REFERENCE], self.questions.valid
        for arm, answers in self.answers.items():
            record = metrics.answer_record(arm, answers, reference, valid)
            record |= {"probe": self.probe, "model": model, "costs": dict(self.costs.get(arm, {}))}
            if arm == REFERENCE:
                record["kinds"] = list(self.kinds)
                record |= self.questions.columns(self.clusters)
            yield record


class WindowDataset:
    """Batches of contexts that are measured in a way of their own; see `harness.datasets.RecordedDataset`.

    Args:
      name: in rows, "<name>.<probe>". probes: its settings, of which `default` are measured where none are named.
      metrics: some of `metrics.PER_KIND`.
      measure: measures a batch: run, path of a model, probe, number and size of the batch.
    """

    def __init__(
        self,
        name: str,
        probes: Sequence[str],
        metrics: Sequence[str],
        measure: Callable[[Run, str, str, int, int], Iterable[Measured]],
        default: int = 1,
    ):
        self.name, self.probes, self.metrics, self.default = name, tuple(probes), tuple(metrics), default
        self._measure = measure

    def parts(self, run: Run) -> list[Part]:
        """Lists all parts; the probes of a batch follow one another, so that its images are drawn once.

        Raises:
          InputError: an unknown probe.
        """
        probes, parts = run.probes_of(self, self.default), []
        for number, size in run.batches:
            for model in run.models:
                for probe in probes:
                    measure = functools.partial(self.records, run, model, probe, number, size)
                    parts.append(Part(part_key(self, probe, model, number), measure, float(size)))
        return parts

    def records(self, run: Run, model: str, probe: str, number: int, size: int) -> Iterator[Record]:
        """Yields the records of one batch."""
        for measured in self._measure(run, run.models[model], probe, number, size):
            yield from measured.records(model)

    def rows(self, records: Mapping[str, Iterable[Record]]) -> list[Row]:
        """Makes the rows of finished parts."""
        return rows_of(self.name, records, self.metrics)


def rows_of(dataset: str, parts: Mapping[str, Iterable[Record]], names: Sequence[str]) -> list[Row]:
    """Makes the rows of finished parts: probes "<data set>.<probe>.<setting>", every model by itself.

    Args:
      names: metrics, some of `metrics.PER_KIND`.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for records in parts.values():
        for record in records:
            groups.setdefault((record["probe"], record["model"]), []).append(record)
    rows: list[Row] = []
    for (probe, model), records in groups.items():
        rows += ProbeRecords(records, records[0]["kinds"]).rows(f"{dataset}.{probe}", model, names)
    return rows
