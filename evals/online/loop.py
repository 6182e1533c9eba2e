"""One loop: a session with a certificate that learns, beside a session that reuses nothing, over the same traffic."""

import tempfile
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.plan import Goal, OnlineCertificate, Way
from kvpatch_jax.session import embedded
from kvpatch_jax.session.logit_comparison import compared
from kvpatch_jax.window import Likeness

from .traffic import Traffic

WAYS: tuple[Likeness, ...] = get_args(Likeness)


class AuditRecord(NamedTuple):
    """One audit: after how many answers, of which ways, of how many approximate chunks, and the loss in nats."""

    answer: int
    ways: tuple[str, ...]
    count: int
    kl: float


class AnswerRecord(NamedTuple):
    """One answer.

    Attributes:
      seen: whether the chunk before it had been read earlier. hit: whether it was placed without a forward.
      approximate: approximate chunks of the window.
      kl: KL(promised ‖ served) of the first token, in nats, against the session that reuses nothing.
      bound: the largest bound by which a chunk was served since the window was last as promised; 0 of such a window.
      audits, audit_flops: so far.
      work: FLOPs of everything else so far.
      bounds: what is admitted after it of each of `WAYS`, or None.
    """

    seen: bool
    hit: bool
    approximate: int
    kl: float
    bound: float
    audits: int
    audit_flops: int
    work: int
    bounds: tuple[float | None, ...]


class RecordingCertificate(OnlineCertificate):
    """An online certificate that keeps a list of its audits."""

    def __init__(self, backbone: str):
        super().__init__(backbone)
        self.answer = 0
        self.records: list[AuditRecord] = []
        self._recording = threading.Lock()

    def audit(self, ways: Sequence[Way], kl: float, *, others: int = 0, **window: Any) -> None:
        """Records the audit, and adds its evidence."""
        super().audit(ways, kl, others=others, **window)
        with self._recording:
            points = tuple(dict.fromkeys(point for point, _ in ways))
            self.records.append(AuditRecord(self.answer, points, others + 1, float(kl)))


def run(backbone: Any, traffic: Traffic, kl: float) -> tuple[list[AnswerRecord], list[AuditRecord]]:
    """Runs a loop with this goal, in nats. Returns a record of each answer and of each audit."""
    certificate = RecordingCertificate(backbone.fingerprint)
    answers: list[AnswerRecord] = []
    read: set[int] = set()
    promised = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        kvp.ChunkStore(folder) as store,
        kvp.Session(
            backbone, store, keep=traffic.keep, lead=traffic.lead, certificate=certificate, goal=Goal(kl=kl)
        ) as session,
        kvp.Session(backbone, None, keep=traffic.keep, lead=traffic.lead) as plain,
    ):
        for number, step in enumerate(traffic.steps):
            before, proved = session.stats(), [certificate.admitted(way) for way in WAYS]
            for own in (session, plain):
                if step.begins:
                    own.slide(0)
                own.add(traffic.chunks[step.chunk], kind="chunk")

            certificate.answer = number
            asked = embedded(backbone, [step.question])
            loss, _ = compared(_first_logits(plain, asked), _first_logits(session, asked))
            # The agent asks, which is what is audited, in the background.
            str(session.ask(step.question, steps=1))

            stats, pieces = session.stats(), session.window.pieces
            approximate = sum(piece.fidelity == "approximate" for piece in pieces)
            # A bound that was withdrawn still is what chunks of the window were served by.
            within = [bound for bound in proved if bound is not None and bound <= kl]
            promised = max([promised, *within]) if approximate else 0.0
            answers.append(
                AnswerRecord(
                    seen=step.chunk in read,
                    hit=stats.hits > before.hits,
                    approximate=approximate,
                    kl=float(loss[0]),
                    bound=promised,
                    audits=stats.audits,
                    audit_flops=stats.audit_flops,
                    work=session.runtime.executor.ledger.total.flops - stats.audit_flops,
                    bounds=tuple(certificate.admitted(way) for way in WAYS),
                )
            )
            read.add(step.chunk)
    return answers, certificate.records


def _first_logits(session: kvp.Session, asked: Any) -> np.ndarray:
    """Returns the logits of a question's first token of an answer, past the ledger: the agent does not compute them."""
    executor = session.runtime.executor
    with session.runtime.locked():
        tokens, length = executor.question(session.window, asked.tokens, asked.length)
        last = np.full((1, 1), length - 1, np.int32)
        out = session.backbone.prefill(tokens, executor.context(session.window), logits=last)
        return np.asarray(out.logits[0], np.float32)[:1]
