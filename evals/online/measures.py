"""What a loop shows: when a bound was admitted, what that saved, what audits cost, and how a shift was met."""

from collections.abc import Sequence
from typing import Any

from .loop import AnswerRecord, AuditRecord

PAYING = 200
"""Answers within which a loop is to pay."""
LATE = 50
"""Answers at the end of them that tell what is reached by then."""


def row_of(answers: Sequence[AnswerRecord], audits: Sequence[AuditRecord], shift_at: int, kl: float) -> dict[str, Any]:
    """Computes the numbers of one loop. Shares are None where nothing is counted."""
    first = next((index for index, own in enumerate(answers) if _serves(own, kl)), None)
    before, after = answers[:shift_at], answers[shift_at:]
    paying = answers[: min(PAYING, shift_at)]
    row: dict[str, Any] = {
        "answers": len(answers),
        "shift at": shift_at,
        "admitted after answers": None if first is None else first + 1,
        "admitted after audits": None if first is None else answers[first].audits,
        "bounds": list(before[-1].bounds) if before else [],
        "hits": _hits(paying),
        "hits late": _hits(paying[-LATE:]),
        "hits before shift": _hits(before[-LATE:]),
        "audits": answers[-1].audits,
        "cost": answers[-1].audit_flops / answers[-1].work,
        "largest cost": max(own.audit_flops / own.work for own in answers),
        "GFLOP": sum_of_work(before) / 1e9,
        "served before": _served(before),
        "beyond before": _beyond(before),
        "served after": _served(after),
        "beyond after": _beyond(after),
        "first served after": next((index + 1 for index, own in enumerate(after) if own.approximate), None),
        "withdrawn after answers": None,
        "withdrawn after audits": None,
        "beyond until withdrawn": None,
        "trials": sum(not answers[own.answer].approximate for own in audits),
    }

    if after and before and _serves(before[-1], kl):
        gone = next((index for index, own in enumerate(after) if not _serves(own, kl)), None)
        until = after if gone is None else after[: gone + 1]
        row["beyond until withdrawn"] = _beyond(until)
        if gone is not None:
            end = shift_at + gone + 1
            row["withdrawn after answers"] = gone + 1
            row["withdrawn after audits"] = sum(shift_at <= own.answer < end for own in audits)
    return row


def sum_of_work(answers: Sequence[AnswerRecord]) -> int:
    """Returns FLOPs of everything but audits up to the last of these answers."""
    return answers[-1].work if answers else 0


def _serves(answer: AnswerRecord, kl: float) -> bool:
    return any(bound is not None and bound <= kl for bound in answer.bounds)


def _hits(answers: Sequence[AnswerRecord]) -> list[int]:
    """Counts the revisits that were served without a forward, and all of them."""
    return [sum(own.hit for own in answers), sum(own.seen for own in answers)]


def _served(answers: Sequence[AnswerRecord]) -> int:
    return sum(own.approximate > 0 for own in answers)


def _beyond(answers: Sequence[AnswerRecord]) -> int:
    return sum(own.approximate > 0 and own.kl > own.bound for own in answers)
