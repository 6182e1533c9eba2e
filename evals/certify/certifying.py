"""Measures a backbone in every way of reuse and makes its certificate."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvpatch_jax.plan import Certificate, CertifiedLoss, CertifiedPlan
from models import ModelBackbone

from ..probes.window.image_sequence import read_behind
from ..results.tables import aligned_table
from ..small_task.scenes import Answers
from .asking import scored
from .journal import Journal
from .scores import Scores, recommend, rows_of
from .ways import RANKS, fresh_ranks, stages, ways
from .windows import Source, Windows


class Measured(NamedTuple):
    """What was said behind all windows, and how large these were.

    Attributes:
      scores: answer by answer. asked: what was asked, in words.
      tokens: of the largest window. spans: the least and the largest span of a chunk beside the lead.
    """

    scores: Scores
    asked: str
    tokens: int
    spans: tuple[int, int]


Step = Callable[[str], None]
"""Is told of each way that was read."""


def measure(
    backbone: ModelBackbone,
    source: Source,
    folder: Path,
    step: Step,
    ranks: Sequence[int] = RANKS,
    journal: Journal | None = None,
) -> Measured:
    """Serves and asks every batch in every way.

    Args:
      journal: what was measured before is taken from it, and what is measured now goes into it.
    """
    scores, asked, tokens = Scores.none(), "", 0
    spans: set[int] = set()
    journal = Journal() if journal is None else journal
    for number, planned in enumerate(source.planned):
        part = journal.part(batch_name(number))
        if part is None or "spans" not in part:  # which an older program did not write
            own, windows = Scores.none(), source.load(backbone, planned, folder)
            size = take(own, windows, tuple(ranks), step)
            told = {"asked": windows.asked.what, "tokens": size, "spans": sorted(set(windows.spans))}
            part = journal.add(batch_name(number), scores=own.to_json(), **told)
        scores.add(Scores.from_json(part["scores"]))
        asked, tokens = part["asked"], max(tokens, part["tokens"])
        spans.update(part["spans"])
    # Behind chunks that are served as promised, a patch that is formed now is the stored one.
    for table in (scores.kl, scores.flips):
        for (point, rank, behind, promise), values in list(table.items()):
            if point == "stored" and behind == 0 and rank in fresh_ranks(tuple(ranks)):
                table["fresh", rank, behind, promise] = values
    return Measured(scores, asked, tokens, (min(spans), max(spans)))


def batch_name(number: int) -> str:
    """What a journal calls a batch of windows."""
    return f"windows {number}"


def take(scores: Scores, windows: Windows, ranks: tuple[int, ...], step: Step) -> int:
    """Adds what is said of a batch of windows; returns the tokens of one of them."""
    asked, size = windows.asked, 0
    for stage in stages(windows):
        tail, size = asked.behind(stage.line.end), stage.line.size
        promised = read_behind(stage.line, stage.whole, tail)
        for way in ways(stage, ranks):
            served = read_behind(stage.line, way.cache, tail)
            key = way.point, way.rank, way.behind, way.promise
            for table, values in ((scores.kl, divergence(promised, served)), (scores.flips, flips(promised, served))):
                table.setdefault(key, []).append(scored(values, asked)[asked.valid])
            step(f"{way.point} {way.rank or ''}")
    cluster = np.repeat(windows.clusters[:, None], asked.valid.shape[1], axis=1)[asked.valid]
    scores.cluster.append(cluster)
    scores.held_out.append(np.full(len(cluster), windows.held_out))
    return size


def divergence(promised: Answers, served: Answers) -> np.ndarray:
    """KL(promised ‖ served) at every scored token, [B, P], in nats; below 0 by rounding at most."""
    return served.divergence_from(promised)


def flips(promised: Answers, served: Answers) -> np.ndarray:
    """Whether another token became the likeliest, [B, P]."""
    return promised.predicted != served.predicted


def certify(
    backbone: ModelBackbone,
    name: str,
    source: Source,
    folder: Path,
    step: Step,
    *,
    level: float,
    goal: float | None = None,
    ranks: Sequence[int] = RANKS,
    plans: Callable[[Certificate], tuple[CertifiedPlan, ...]] | None = None,
    journal: Journal | None = None,
) -> Certificate:
    """Measures and certifies.

    Args:
      name: of the model. folder: for files. level: of the bounds. goal: of the recommended rank, in nats.
      plans: measures plans by the certificate, whose rows are added. journal: as `measure` takes it.
    """
    scores, asked, tokens, spans = measure(backbone, source, folder, step, ranks, journal)
    made = Certificate(
        backbone=backbone.fingerprint,
        model=name,
        made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        level=level,
        calibration=source.windows[0],
        held_out=source.windows[1],
        chunks=source.chunks,
        tokens=tokens,
        content=source.content,
        asked=asked,
        disjoint=source.disjoint,
        rows=tuple(sorted(rows_of(scores, level), key=lambda row: (row.promise, row.point, row.behind, row.rank))),
        recommended=recommend(scores, goal, level),
        spans=spans,
        modalities=(source.modality,),
    )
    return made if plans is None else dataclasses.replace(made, plans=plans(made))


HEAD = ("promise", "way", "others", "rank", "KL, mean", "bound", "held-out within", "η", "flips")


def table(certificate: Certificate) -> str:
    """A certificate as text: a line for each way, and for plans."""
    lines = [_line(row) for row in certificate.rows]
    said = [aligned_table(HEAD, lines)]
    for plan in certificate.plans:
        share = f"{plan.coverage:.1%} [{plan.coverage_low:.1%}, {plan.coverage_high:.1%}]"
        said.append(
            f"{plan.name}: {share} of {plan.answers} held-out answers within {plan.kl:.3g} nats; "
            f"{plan.approximate:.0%} of the chunks approximate"
        )
    return "\n".join(said)


def _line(row: CertifiedLoss) -> list[str]:
    eta = "–" if row.eta is None else f"{row.eta:.3f}"
    share = f"{row.coverage:.1%} [{row.coverage_low:.1%}, {row.coverage_high:.1%}]"
    rank = f"{row.rank} %" if row.point == "repair" else str(row.rank or "–")
    others = str(row.behind)
    return [
        row.promise,
        row.point,
        others,
        rank,
        f"{row.kl:.2e}",
        f"{row.kl_bound:.2e}",
        share,
        eta,
        f"{row.flips:.2%}",
    ]
