"""What the arms of a probe answered, item by item, and the rows that are made of it."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..harness import intervals
from ..harness.frame import Row, measured_row
from ..small_task import KINDS, VOCABULARY

if TYPE_CHECKING:
    from ..datasets import AskedQuestions, ScoredAnswers

PER_ITEM = ("accuracy", "difference", "kl", "eta", "flip_recover")
"""What is measured of an arm and a kind of question: rows "<metric>.<kind>"."""
DAMAGE = 1e-3
"""Nats per question that blind reuse must lose for η to mean something: below, it would be a quotient of rounding."""


class ProbeItems:
    """The items of one probe, question by question: what was asked, and every arm's prediction and KL.

    Attributes:
      label: the probe's name in rows and items.
      reference, blind: the arms that KL, η and flips are measured against.
      kinds: names of the kinds of question, by number.
    """

    def __init__(self, label: str, reference: str, blind: str):
        self.label, self.reference, self.blind = label, reference, blind
        self.kinds: tuple[str, ...] = KINDS
        # Batch by batch, only questions that can be answered: [items] each.
        self.asked: dict[str, list[np.ndarray]] = {"kind": [], "cluster": [], "answer": []}
        self.predicted: dict[str, list[np.ndarray]] = {}
        self.divergence: dict[str, list[np.ndarray]] = {}

    def add(
        self,
        questions: "AskedQuestions",
        clusters: np.ndarray,
        arms: "Mapping[str, ScoredAnswers]",
        kind: np.ndarray | None = None,
    ) -> None:
        """Adds one batch.

        Args:
          questions: those asked, [B, Q].
          clusters: each context's number, [B].
          arms: what every arm answered, the reference among them.
          kind: numbers of kinds [B, Q] in place of the questions' own.
        """
        keep = questions.valid
        self.asked["kind"].append((questions.kind if kind is None else kind)[keep])
        self.asked["cluster"].append(np.broadcast_to(clusters[:, None], keep.shape)[keep])
        self.asked["answer"].append(questions.answer[keep])
        for name, answers in arms.items():
            self.predicted.setdefault(name, []).append(answers.predicted[keep])
            self.divergence.setdefault(name, []).append(answers.divergence_from(arms[self.reference])[keep])

    def column(self, name: str) -> np.ndarray:
        """Reads one of kind, cluster, answer over all batches, [items]."""
        return np.concatenate(self.asked[name])

    def by_kind(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the kinds of question that were asked, each with which items are of it, bool [items]."""
        numbers = self.column("kind")
        for number, name in enumerate(self.kinds):
            of_kind = numbers == number
            if of_kind.any():
                yield name, of_kind

    def arm(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Reads an arm's predicted token ids and its KL from the reference in nats, over all batches, [items] each."""
        return np.concatenate(self.predicted[name]), np.concatenate(self.divergence[name])

    def metrics(self, arm: str, here: np.ndarray, wanted: Collection[str] = PER_ITEM) -> dict[str, intervals.Interval]:
        """Estimates accuracy, its difference from the reference, KL, η and flips of an arm over some items.

        η and flips are against the blind arm, which need not be there where they are not wanted.
        """
        cluster, answer = self.column("cluster")[here], self.column("answer")[here]
        predicted, divergence = (values[here] for values in self.arm(arm))
        right = (predicted == answer).astype(float)
        found = {"accuracy": intervals.mean(right, cluster), "kl": intervals.mean(divergence, cluster)}
        if set(wanted) <= found.keys():
            return found

        blind_predicted, blind_divergence = (values[here] for values in self.arm(self.blind))
        reference_predicted = self.arm(self.reference)[0][here]

        # Where blind reuse loses next to nothing, η would be a quotient of roundings.
        harmed = len(blind_divergence) > 0 and blind_divergence.mean() >= DAMAGE
        eta = intervals.eta(divergence, blind_divergence, cluster) if harmed else intervals.UNDEFINED
        reference_right = (reference_predicted == answer).astype(float)
        return {
            **found,
            "difference": intervals.paired_difference(right, reference_right, cluster),
            "eta": eta._replace(n=len(divergence)),
            "flip_recover": intervals.flip_recover(reference_predicted, blind_predicted, predicted, cluster),
        }

    def rows(self, model: str, wanted: Collection[str] = PER_ITEM) -> Iterator[Row]:
        """Yields a row for each kind of question, arm and metric; arguments as of `metrics`."""
        for kind, here in self.by_kind():
            for arm in self.predicted:
                for metric, interval in self.metrics(arm, here, wanted).items():
                    yield measured_row(self.label, model, arm, f"{metric}.{kind}", interval)

    def paired(self, first: str, second: str) -> Iterator[tuple[str, str, intervals.Interval]]:
        """Yields kind, metric and the first arm's KL and accuracy minus the second's, question by question."""
        cluster, answer = self.column("cluster"), self.column("answer")
        (said, kl), (other_said, other_kl) = self.arm(first), self.arm(second)
        right, other_right = (said == answer).astype(float), (other_said == answer).astype(float)
        for kind, here in self.by_kind():
            yield kind, "kl", intervals.paired_difference(kl[here], other_kl[here], cluster[here])
            yield kind, "accuracy", intervals.paired_difference(right[here], other_right[here], cluster[here])

    def lines(self) -> Iterator[dict[str, object]]:
        """Yields every question: context, kind, right answer, and per arm [prediction, KL]."""
        arms = {name: self.arm(name) for name in self.predicted}
        columns = [self.column(name) for name in ("cluster", "kind", "answer")]
        for index, (cluster, kind, answer) in enumerate(zip(*columns, strict=True)):
            said = {}
            for name, (predicted, divergence) in arms.items():
                said[name] = [VOCABULARY.names[int(predicted[index])], float(f"{divergence[index]:.3g}")]
            yield {
                "context": int(cluster),
                "kind": self.kinds[int(kind)],
                "answer": VOCABULARY.names[int(answer)],
                "arms": said,
            }


class ResultsTable:
    """What one backbone's probes found: the items of every probe, and numbers that are not about items.

    Attributes:
      model: the backbone's name.
      probes: items by (probe, part).
      plain: finished rows.
      costs: what arms cost, by (probe, arm, metric); the last batch counts.
      maxima: the largest value so far and how many contexts it rests on, by (probe, arm, metric).
      samples: batches of values per context with their clusters, likewise.
    """

    def __init__(self, model: str, metrics: Collection[str] = PER_ITEM):
        """`metrics`: of every arm and kind of question."""
        self.model, self.metrics = model, metrics
        self.costs: dict[tuple[str, str, str], intervals.Interval] = {}
        self.probes: dict[tuple[str, str], ProbeItems] = {}
        self.plain: list[Row] = []
        self.maxima: dict[tuple[str, str, str], tuple[float, int]] = {}
        self.samples: dict[tuple[str, str, str], list[tuple[np.ndarray, np.ndarray]]] = {}

    def items(self, probe: str, part: str = "", reference: str = "re-prefill", blind: str = "blind") -> ProbeItems:
        """Finds the items of a probe, or of one part of it with a reference of its own; made at first use."""
        return self.probes.setdefault((probe, part), ProbeItems(probe, reference, blind))

    def row(self, probe: str, arm: str, metric: str, interval: intervals.Interval) -> None:
        """Adds one row that is not derived from items."""
        self.plain.append(measured_row(probe, self.model, arm, metric, interval))

    def cost(self, probe: str, arm: str, shares: Mapping[str, float], n: int) -> None:
        """Notes what an arm costs, measured on `n` contexts. All batches have the same shapes, so that one speaks."""
        for metric, share in shares.items():
            self.costs[probe, arm, metric] = intervals.Interval(share, share, share, n)

    def value(self, probe: str, arm: str, metric: str, value: float, n: int) -> None:
        """Adds one number without an interval."""
        self.row(probe, arm, metric, intervals.Interval(value, value, value, n))

    def largest(self, probe: str, arm: str, metric: str, value: float, n: int) -> None:
        """Adds one batch of a number of which the largest counts; its row is the maximum over all batches."""
        before, count = self.maxima.get((probe, arm, metric), (value, 0))
        self.maxima[probe, arm, metric] = (max(before, value), count + n)

    def sample(self, probe: str, arm: str, metric: str, values: np.ndarray, clusters: np.ndarray) -> None:
        """Adds one batch of a number measured per context [B]; its row is the mean over all batches."""
        self.samples.setdefault((probe, arm, metric), []).append((np.asarray(values, float), np.asarray(clusters)))

    def take(self, other: "ResultsTable") -> None:
        """Adds the items, samples and maxima of another table of the same model, as if they had been measured here.

        Its finished rows are left out: of what is the same in every batch, the first one's count.
        """
        for (probe, part), items in other.probes.items():
            own = self.items(probe, part, items.reference, items.blind)
            own.kinds = items.kinds
            for column in ("asked", "predicted", "divergence"):
                for name, batches in getattr(items, column).items():
                    getattr(own, column).setdefault(name, []).extend(batches)

        # Samples of both are pooled; of a maximum only the larger counts.
        for name, batches in other.samples.items():
            self.samples.setdefault(name, []).extend(batches)
        for name, (value, count) in other.maxima.items():
            self.largest(*name, value, count)

    def rows(self) -> list[Row]:
        """Makes every row, long-form; what is undefined is NaN."""
        rows = [row for items in self.probes.values() for row in items.rows(self.model, self.metrics)]
        rows += [measured_row(*key[:1], self.model, *key[1:], share) for key, share in self.costs.items()]
        for (probe, arm, metric), batches in self.samples.items():
            values, clusters = (np.concatenate(columns) for columns in zip(*batches, strict=True))
            rows.append(measured_row(probe, self.model, arm, metric, intervals.mean(values, clusters)))

        for (probe, arm, metric), (value, n) in self.maxima.items():
            rows.append(measured_row(probe, self.model, arm, metric, intervals.Interval(value, value, value, n)))
        return rows + self.plain

    def write_items(self, path: Path) -> None:
        """Appends one JSON line per probe and question to a file."""
        with path.open("a", encoding="utf-8") as file:
            for items in self.probes.values():
                for line in items.lines():
                    line = {"probe": items.label, "model": self.model, **line}
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")
