"""Measures a backbone in every mode of reuse, part by part, and makes its certificate."""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax import Text
from kvpatch_jax.plan import Certificate

from ..harness.frame import aligned_table
from ..harness.lines import divergence
from ..harness.parts import Part, Record, run_parts
from .mixtures import mixed
from .modes import PROMISES, ModeSet, PromisedBatch, slid_window
from .scores import Scores, plan_row, recommend, rows_of
from .windows import PlannedBatch, WindowSet


def certify(
    windows: WindowSet,
    modes: ModeSet,
    folder: Path,
    config: Mapping[str, Any],
    level: float,
    goal: float | None = None,
) -> Certificate:
    """Measures what a folder lacks: every mode first, then mixtures of modes on held-out windows; and certifies.

    Args:
      folder: of finished parts. config: what they depend on, the model's name among it.
      level: of the bounds. goal: of the recommended rank, in nats.
    """

    def finished(name: str, measure: Callable[[PlannedBatch], Iterable[Record]], held_out: bool) -> list[list[Record]]:
        parts = []
        for planned in windows.batches():
            if planned.held_out or not held_out:
                key = f"{name}, {'held out' if planned.held_out else 'calibration'} {planned.number}"
                work = float(len(planned.windows) * planned.chunks)
                parts.append(Part(key, functools.partial(measure, planned), work))
        records = run_parts(folder, config, parts)
        return [records[part.key] for part in parts]

    measured = finished("windows", functools.partial(measure_batch, windows, modes), held_out=False)
    certificate = certificate_of(windows, measured, config["model"], level, goal)
    # Mixtures were made by certain numbers, whatever the day.
    name = f"mixtures by {dataclasses.replace(certificate, made='any day').digest}"
    mixtures: dict[tuple[int, float], list[Record]] = {}
    for records in finished(name, functools.partial(mixed, windows, certificate, modes.ranks), held_out=True):
        for record in records:
            mixtures.setdefault((record["size"], -record["goal"]), []).append(record)
    return dataclasses.replace(certificate, plans=tuple(plan_row(mixtures[key]) for key in sorted(mixtures)))


def measure_batch(source: WindowSet, modes: ModeSet, planned: PlannedBatch) -> Iterator[Record]:
    """Serves and asks a batch in every mode: a record of its windows, then one of each mode."""
    windows = source.load(planned)
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
        for mode, cache in batch.modes(modes):
            served = questions.ask(batch.line, cache)
            kl, flips = divergence(promised, served), promised.argmax(axis=-1) != served.argmax(axis=-1)
            scored = {"kl": questions.answers(kl).tolist(), "flips": questions.answers(flips).tolist()}
            yield {"mode": list(mode), **scored}


def certificate_of(
    source: WindowSet, parts: Sequence[Sequence[Record]], model: str, level: float, goal: float | None
) -> Certificate:
    """Makes the certificate of all measured modes, without mixtures."""
    by_size = dict[int, list[Sequence[Record]]]()
    for part in parts:
        by_size.setdefault(part[0]["size"], []).append(part)
    scores = [Scores.of(batches) for batches in by_size.values()]
    shown = [(len(window.pieces), name) for window in source.windows for name in window.pieces]
    values = [source.contents.values[name] for _, name in shown]
    spans = [span for part in parts for span in part[0]["spans"]]
    return Certificate(
        backbone=source.contents.backbone.fingerprint,
        model=model,
        made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        level=level,
        calibration=source.fewest[0],
        held_out=source.fewest[1],
        chunks=max(by_size),
        tokens=max(part[0]["tokens"] for part in parts),
        content=f"{source.shown}, digest {source.digest}",
        asked=source.asked,
        disjoint=len(set(shown)) == len(shown),
        spans=(min(spans), max(spans)),
        modalities=tuple(sorted({"text" if isinstance(value, Text | list) else "image" for value in values})),
        rows=tuple(rows_of(scores, level)),
        recommended=recommend(scores, goal, level),
    )


def table(certificate: Certificate) -> str:
    """Returns a certificate as text: a line for each row and for each mixture."""
    names = ("promise", "point", "behind", "rank", "kl", "kl_bound", "coverage", "coverage_low", "eta", "flips")
    cells = []
    for row in certificate.rows:
        values = [getattr(row, name) for name in names]
        cells.append([f"{value:.3g}" if isinstance(value, float) else str(value) for value in values])
    lines = [aligned_table(names, cells)]
    for plan in certificate.plans:
        within = f"{plan.coverage:.1%} [{plan.coverage_low:.1%}, {plan.coverage_high:.1%}] of {plan.answers} answers"
        lines.append(f"{plan.name}: {within} within; {plan.approximate:.0%} of the chunks approximate")
    return "\n".join(lines)
