"""Many seeds of a certificate on losses that real loops measured: simulated traffic, measured losses, the very code.

A real loop of a language model takes minutes. Here only who is audited and what is served is simulated: every loss is
drawn from those of real loops, of audits for audits and of served answers for answers, and goes through
`OnlineCertificate`. An *enemy* draws from the same losses, but misses at a given rate.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvpatch_jax.plan import OnlineCertificate

from .loop import AnswerRecord, AuditRecord

WAY = "mean", 0
"""What loops over texts admit."""
ANSWERS = 1000
"""Answers of a simulated loop, all of which could be served in the way."""


class Losses(NamedTuple):
    """Measured losses: (approximate chunks, nats) of each trial, and of each approximate answer that was served."""

    trials: tuple[tuple[int, float], ...]
    served: tuple[tuple[int, float], ...]


class SimulatedLoop(NamedTuple):
    """One simulated loop.

    Attributes:
      admitted: after how many audits the bound was admitted first; None: never.
      served, beyond: answers served in the way, and those of them that lost more than the bound.
      withdrawals: how often the bound was withdrawn.
    """

    admitted: int | None
    served: int
    beyond: int
    withdrawals: int


def losses_of(answers: Sequence[AnswerRecord], audits: Sequence[AuditRecord], first: int, end: int) -> Losses:
    """Collects the losses of `WAY` alone from audits of these answers of a loop, and of all that were approximate."""
    trials, served = [], []
    for audit in audits:
        if first <= audit.answer < end and audit.ways == (WAY[0],) and not answers[audit.answer].approximate:
            trials.append((audit.count, audit.kl))
    for answer in answers[first:end]:
        if answer.approximate:
            served.append((answer.approximate, answer.kl))
    return Losses(tuple(trials), tuple(served))


def simulate(losses: Losses, bound: float, audited: float, seed: int, rate: float | None = None) -> SimulatedLoop:
    """Simulates a loop in which a goal of `bound` nats is wanted.

    Args:
      losses: of real loops.
      audited: share of the approximate answers that are audited.
      rate: the share of losses beyond the bound; None: as measured.
    """
    draw = random.Random(seed)
    certificate = OnlineCertificate("simulated")
    admitted, served, beyond, withdrawals, audits, was = None, 0, 0, 0, 0, False
    for _ in range(ANSWERS):
        proved = certificate.admitted(*WAY)
        serves = proved is not None and proved <= bound
        withdrawals += was and not serves
        was = serves

        # Before a bound is admitted, every answer is a trial; from then on some of those that are served are audited.
        pool = losses.served if serves and losses.served else losses.trials
        if rate is not None:
            miss = draw.random() < rate
            pool = [own for own in pool if (own[1] > bound) == miss] or [own for own in losses.trials if own[1] > bound]
        count, loss = draw.choice(pool)
        if serves:
            admitted = audits if admitted is None else admitted
            served, beyond = served + 1, beyond + (loss > (proved or 0.0))
            if draw.random() >= audited:
                continue
        certificate.audit([WAY], loss, others=count - 1)
        audits += 1
    return SimulatedLoop(admitted, served, beyond, withdrawals)
