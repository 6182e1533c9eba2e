"""Measures a backbone in every mode of reuse, and makes its certificate."""

import dataclasses
import datetime
from typing import NamedTuple

import numpy as np

from kvpatch_jax.plan import Certificate

from ..harness.tables import aligned_table
from ..probes.window.image_sequence import read_behind
from .certification_run import CertificationRun, Step, batch_name
from .plans import measure_plans
from .scores import Scores, recommend, rows_of
from .serving_modes import ModeSet, served_batches, serving_modes
from .window_sources import WindowBatch


class Measurement(NamedTuple):
    """Scores of all windows, and how large these were.

    Attributes:
      scores: answer by answer, by the windows' chunks.
      asked: what was asked, in words.
      tokens: of the largest window.
      spans: the least and the largest span of a chunk besides the lead.
    """

    scores: dict[int, Scores]
    asked: str
    tokens: int
    spans: tuple[int, int]


def measure(run: CertificationRun) -> Measurement:
    """Serves and asks every batch in every mode. Batches that the journal has are not measured again."""
    by_size = {size: Scores() for size in run.source.sizes.chunks}
    asked, tokens, spans = "", 0, set[int]()
    for number, spec in enumerate(run.source.specs):
        part = run.journal.part(batch_name(number))
        if part is None:
            windows = run.source.load(run.backbone, spec, run.folder)
            own, size = score_batch(windows, run.modes, run.step)
            facts = {"asked": windows.questions.description, "tokens": size, "spans": sorted(set(windows.spans))}
            part = run.journal.add(batch_name(number), scores=own.to_json(), **facts)

        # Scores are read back even if just measured, so that a resumed run cannot differ.
        by_size[spec.chunks].add(Scores.from_json(part["scores"]))
        asked, tokens = part["asked"], max(tokens, part["tokens"])
        spans.update(part["spans"])

    # Behind pieces that are served as promised, a patch that is formed now is the stored one.
    for scores in by_size.values() if run.modes.has("fresh") else ():
        for table in (scores.kl, scores.flips):
            for (point, rank, behind, promise), values in list(table.items()):
                if point == "stored" and behind == 0 and rank in run.modes.fresh_ranks:
                    table["fresh", rank, behind, promise] = values

    return Measurement(by_size, asked, tokens, (min(spans), max(spans)))


def score_batch(windows: WindowBatch, modes: ModeSet, step: Step) -> tuple[Scores, int]:
    """Returns the scores of a batch of windows in every mode, and the tokens of one of them."""
    scores, questions, size = Scores(), windows.questions, 0
    for batch in served_batches(windows, modes):
        size = batch.line.size
        tail = questions.behind(batch.line.end)
        promised = read_behind(batch.line, batch.whole, tail)

        for mode in serving_modes(batch, modes):
            served = read_behind(batch.line, mode.cache, tail)
            key = mode.point, mode.rank, mode.behind, mode.promise
            kl, flips = served.divergence_from(promised), promised.predicted != served.predicted
            scores.kl.setdefault(key, []).append(questions.scored(kl)[questions.valid])
            scores.flips.setdefault(key, []).append(questions.scored(flips)[questions.valid])
            step(f"{mode.point} {mode.rank or ''}")

    cluster = questions.of_valid(windows.clusters)
    scores.cluster.append(cluster)
    scores.held_out.append(np.full(len(cluster), windows.held_out))
    return scores, size


def certify(
    run: CertificationRun, model: str, *, level: float, goal: float | None = None, plan_seed: int | None = None
) -> Certificate:
    """Measures and certifies.

    Args:
      model: its name.
      level: of the bounds.
      goal: of the recommended rank, in nats.
      plan_seed: for measuring plans by the certificate too, whose rows are added; None: no plans.
    """
    source = run.source
    by_size, asked, tokens, spans = measure(run)
    scores = [*by_size.values()]
    rows = sorted(rows_of(scores, level), key=lambda row: (row.promise, row.point, row.behind, row.rank))
    certificate = Certificate(
        backbone=run.backbone.fingerprint,
        model=model,
        made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        level=level,
        calibration=source.sizes.fewest[0],
        held_out=source.sizes.fewest[1],
        chunks=source.sizes.most,
        tokens=tokens,
        content=source.content,
        asked=asked,
        disjoint=source.disjoint,
        rows=tuple(rows),
        recommended=recommend(scores, goal, level),
        spans=spans,
        modalities=source.modalities,
    )
    if plan_seed is None:
        return certificate
    return dataclasses.replace(certificate, plans=measure_plans(run, certificate, plan_seed))


RANK_UNITS = {"repair": " %", "survivor": " slides"}
HEAD = ("promise", "way", "others", "rank", "KL, mean", "bound", "held-out within", "η", "flips")


def table(certificate: Certificate) -> str:
    """Returns a certificate as text: a line for each row and for each plan."""
    cells = []
    for row in certificate.rows:
        rank = f"{row.rank}{RANK_UNITS.get(row.point, '')}" if row.rank else "–"
        share = f"{row.coverage:.1%} [{row.coverage_low:.1%}, {row.coverage_high:.1%}]"
        eta = "–" if row.eta is None else f"{row.eta:.3f}"
        losses = [f"{row.kl:.2e}", f"{row.kl_bound:.2e}", share, eta, f"{row.flips:.2%}"]
        cells.append([row.promise, row.point, str(row.behind), rank, *losses])

    lines = [aligned_table(HEAD, cells)]
    for plan in certificate.plans:
        share = f"{plan.coverage:.1%} [{plan.coverage_low:.1%}, {plan.coverage_high:.1%}]"
        lines.append(
            f"{plan.name}: {share} of {plan.answers} held-out answers within {plan.kl:.3g} nats; "
            f"{plan.approximate:.0%} of the chunks approximate"
        )
    return "\n".join(lines)
