"""Measures a backbone in every mode of reuse, part by part, and makes its certificate."""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.plan import Certificate

from ..harness.lines import divergence
from ..harness.parts import Part, Record, run_parts
from ..harness.tables import aligned_table
from .mixtures import mixed
from .modes import PROMISES, ModeSet, PromisedBatch, slid_window
from .scores import Scores, plan_row, recommend, rows_of
from .windows import PlannedBatch, WindowSet


@dataclasses.dataclass(frozen=True, eq=False)
class Certification:
    """What is certified, to which level, and (in nats) for which goal.

    Attributes:
      folder: of finished parts. config: what they depend on, the model's name among it.
      seed: of what is mixed.
    """

    windows: WindowSet
    modes: ModeSet
    folder: Path
    config: Mapping[str, Any]
    level: float
    goal: float | None = None
    seed: int = 0

    def certify(self) -> Certificate:
        """Measures what the folder lacks: every mode first, then mixtures of modes on held-out windows."""
        batches = list(self.windows.batches())
        certificate = self._certificate(self._records("windows", self._measure, batches))
        # Mixtures were made by certain numbers, whatever the day.
        name = f"mixtures by {dataclasses.replace(certificate, made='any day').digest}"
        mixtures: dict[tuple[int, float], list[Record]] = {}
        held_out = [planned for planned in batches if planned.held_out]
        for records in self._records(name, functools.partial(self._mix, certificate), held_out):
            for record in records:
                mixtures.setdefault((record["size"], -record["goal"]), []).append(record)
        return dataclasses.replace(certificate, plans=tuple(plan_row(mixtures[key]) for key in sorted(mixtures)))

    def _records(
        self, name: str, measure: Callable[[int, PlannedBatch], Iterable[Record]], batches: Sequence[PlannedBatch]
    ) -> list[list[Record]]:
        parts = []
        for number, planned in enumerate(batches):
            work = float(len(planned.windows) * planned.chunks)
            parts.append(Part(f"{name} {number}", functools.partial(measure, number, planned), work))
        records = run_parts(self.folder, self.config, parts)
        return [records[part.key] for part in parts]

    def _measure(self, number: int, planned: PlannedBatch) -> Iterator[Record]:
        """Serves and asks a batch in every mode: a record of its windows, then one of each mode."""
        windows = self.windows.load(planned)
        questions, kept = windows.questions, slid_window(windows, planned.chunks)
        yield {
            "size": planned.chunks,
            "cluster": questions.of_answers(windows.clusters).tolist(),
            "held_out": planned.held_out,
            "tokens": windows.lead.size + sum(piece.size for piece in windows.pieces),
            "spans": sorted({piece.chunk.span for piece in (*windows.older, *windows.pieces)}),
        }
        for batch in (PromisedBatch(windows, promise, kept) for promise in PROMISES):
            promised = questions.ask(batch.line, batch.whole)
            for mode, cache in batch.modes(self.modes):
                served = questions.ask(batch.line, cache)
                kl, flips = divergence(promised, served), promised.argmax(axis=-1) != served.argmax(axis=-1)
                scored = {"kl": questions.answers(kl).tolist(), "flips": questions.answers(flips).tolist()}
                yield {"mode": list(mode), **scored}

    def _mix(self, certificate: Certificate, number: int, planned: PlannedBatch) -> Iterator[Record]:
        rng = np.random.default_rng([self.seed, 4, number])
        return mixed(self.windows.load(planned), certificate, self.modes.ranks, rng)

    def _certificate(self, parts: Sequence[Sequence[Record]]) -> Certificate:
        """Makes the certificate of all measured modes, without mixtures."""
        source, by_size = self.windows, dict[int, list[Sequence[Record]]]()
        for part in parts:
            by_size.setdefault(part[0]["size"], []).append(part)
        scores = [Scores.of(batches) for batches in by_size.values()]
        shown = [(len(window.pieces), name) for window in source.windows for name in window.pieces]
        values = [source.contents.values[name] for _, name in shown]
        spans = [span for part in parts for span in part[0]["spans"]]
        return Certificate(
            backbone=source.contents.backbone.fingerprint,
            model=self.config["model"],
            made=datetime.datetime.now(datetime.UTC).date().isoformat(),
            level=self.level,
            calibration=source.fewest[0],
            held_out=source.fewest[1],
            chunks=max(by_size),
            tokens=max(part[0]["tokens"] for part in parts),
            content=f"{source.shown}, digest {source.digest}",
            asked=source.asked,
            disjoint=len(set(shown)) == len(shown),
            spans=(min(spans), max(spans)),
            modalities=tuple(sorted({"text" if isinstance(value, Text | list) else "image" for value in values})),
            rows=tuple(rows_of(scores, self.level)),
            recommended=recommend(scores, self.goal, self.level),
        )


def table(certificate: Certificate) -> str:
    """Returns a certificate as text: a line for each row and for each mixture."""
    units, cells = {"repair": " %", "survivor": " slides"}, []
    for row in certificate.rows:
        rank = f"{row.rank}{units.get(row.point, '')}" if row.rank else "–"
        eta = "–" if row.eta is None else f"{row.eta:.3f}"
        losses = [f"{row.kl:.2e}", f"{row.kl_bound:.2e}", _share(row), eta, f"{row.flips:.2%}"]
        cells.append([row.promise, row.point, str(row.behind), rank, *losses])
    head = ("promise", "way", "others", "rank", "KL, mean", "bound", "held-out within", "η", "flips")
    lines = [aligned_table(head, cells)]
    for plan in certificate.plans:
        answers = f"{_share(plan)} of {plan.answers} held-out answers within {plan.kl:.3g} nats"
        lines.append(f"{plan.name}: {answers}; {plan.approximate:.0%} of the chunks approximate")
    return "\n".join(lines)


def _share(row: Any) -> str:
    return f"{row.coverage:.1%} [{row.coverage_low:.1%}, {row.coverage_high:.1%}]"
