"""What the arms of a probe answered, item by item."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ..results import intervals
from ..results.rows import Row, measured_row
from ..small_task import KINDS, VOCABULARY, Questions
from ..small_task.scenes import Answers


class ProbeItems:
    """The items of one probe: question by question, every arm's prediction and KL from the reference arm."""

    def __init__(self, label: str, reference: str, blind: str):
        self.label, self.reference, self.blind = label, reference, blind
        self.fixed: dict[str, list[np.ndarray]] = {name: [] for name in ("kind", "cluster", "answer")}
        self.predicted: dict[str, list[np.ndarray]] = {}
        self.divergence: dict[str, list[np.ndarray]] = {}
        self.kinds: tuple[str, ...] = KINDS

    def add(
        self, questions: Questions, clusters: np.ndarray, arms: Mapping[str, Answers], kind: np.ndarray | None = None
    ) -> None:
        """One batch: the questions, each context's cluster number [B], and every arm's answers."""
        keep = questions.valid
        self.fixed["kind"].append((questions.kind if kind is None else kind)[keep])
        self.fixed["cluster"].append(np.broadcast_to(clusters[:, None], keep.shape)[keep])
        self.fixed["answer"].append(questions.answer[keep])
        for name, answers in arms.items():
            self.predicted.setdefault(name, []).append(answers.predicted[keep])
            self.divergence.setdefault(name, []).append(answers.divergence_from(arms[self.reference])[keep])

    def column(self, name: str) -> np.ndarray:
        """One of kind, cluster, answer over all batches."""
        return np.concatenate(self.fixed[name])

    def arm(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Predicted token ids and KL over all batches."""
        return np.concatenate(self.predicted[name]), np.concatenate(self.divergence[name])


class ResultsTable:
    """All sheets of one backbone, and rows that are not about items."""

    def __init__(self, model: str):
        self.model = model
        self.sheets: dict[tuple[str, str], ProbeItems] = {}
        self.plain: list[Row] = []
        self.maxima: dict[tuple[str, str, str], tuple[float, int]] = {}
        self.samples: dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]] = {}

    def sheet(self, probe: str, part: str = "", reference: str = "re-prefill", blind: str = "blind") -> ProbeItems:
        """The sheet of a probe (or of one part of it, with a reference of its own), made at first use."""
        return self.sheets.setdefault((probe, part), ProbeItems(probe, reference, blind))

    def row(self, probe: str, arm: str, metric: str, interval: intervals.Interval) -> None:
        """Add one row that is not derived from items."""
        self.plain.append(measured_row(probe, self.model, arm, metric, interval))

    def value(self, probe: str, arm: str, metric: str, value: float, n: int) -> None:
        """Add one number without an interval."""
        self.row(probe, arm, metric, intervals.Interval(value, value, value, n))

    def largest(self, probe: str, arm: str, metric: str, value: float, n: int) -> None:
        """One batch of a number of which the largest counts; its row is the maximum over all batches."""
        before, count = self.maxima.get((probe, arm, metric), (value, 0))
        self.maxima[probe, arm, metric] = (max(before, value), count + n)

    def sample(self, probe: str, arm: str, metric: str, values: np.ndarray, clusters: np.ndarray) -> None:
        """Add one batch of a number measured per context; its row is the mean over all batches."""
        self.samples.setdefault((probe, arm, metric), []).append((np.asarray(values, float), np.asarray(clusters)))

    def rows(self) -> list[Row]:
        """Every row, long-form."""
        rows = [row for sheet in self.sheets.values() for row in self._rows_of(sheet)]
        for (probe, arm, metric), batches in self.samples.items():
            values, clusters = (np.concatenate(columns) for columns in zip(*batches, strict=True))
            rows.append(measured_row(probe, self.model, arm, metric, intervals.mean(values, clusters)))
        for (probe, arm, metric), (value, n) in self.maxima.items():
            rows.append(measured_row(probe, self.model, arm, metric, intervals.Interval(value, value, value, n)))
        return rows + self.plain

    def _rows_of(self, sheet: ProbeItems) -> Iterator[Row]:
        kind, cluster, answer = (sheet.column(name) for name in ("kind", "cluster", "answer"))
        reference, blind = sheet.arm(sheet.reference), sheet.arm(sheet.blind)
        for number, name in enumerate(sheet.kinds):
            here = kind == number
            if not here.any():
                continue
            cut = lambda pair, here=here: (pair[0][here], pair[1][here])
            for arm in sheet.predicted:
                metrics = _metrics(cut(sheet.arm(arm)), cut(reference), cut(blind), answer[here], cluster[here])
                for metric, interval in metrics.items():
                    yield measured_row(sheet.label, self.model, arm, f"{metric}.{name}", interval)

    def write_items(self, path: Path) -> None:
        """One JSON line per probe and question: context, kind, answer, and per arm [prediction, KL in nats]."""
        with path.open("a", encoding="utf-8") as file:
            for sheet in self.sheets.values():
                arms = {name: sheet.arm(name) for name in sheet.predicted}
                columns = [sheet.column(name) for name in ("cluster", "kind", "answer")]
                for index, (cluster, kind, answer) in enumerate(zip(*columns, strict=True)):
                    said = {
                        name: [VOCABULARY.names[int(tokens[index])], float(f"{divergence[index]:.3g}")]
                        for name, (tokens, divergence) in arms.items()
                    }
                    line = {
                        "probe": sheet.label,
                        "model": self.model,
                        "context": int(cluster),
                        "kind": sheet.kinds[int(kind)],
                        "answer": VOCABULARY.names[int(answer)],
                        "arms": said,
                    }
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _metrics(arm, reference, blind, answer: np.ndarray, cluster: np.ndarray) -> dict[str, intervals.Interval]:
    right, reference_right = (pair[0] == answer for pair in (arm, reference))
    return {
        "accuracy": intervals.mean(right.astype(float), cluster),
        "difference": intervals.paired_difference(right.astype(float), reference_right.astype(float), cluster),
        "kl": intervals.mean(arm[1], cluster),
        "eta": intervals.eta(arm[1], blind[1], cluster),
        "flip_recover": intervals.flip_recover(reference[0], blind[0], arm[0], cluster),
    }
