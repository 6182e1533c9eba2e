"""Audits of a session's answers, from which an `OnlineCertificate` learns what each way of serving loses.

Where a window is served as promised, an audit is a *trial*: some chunks are served by stored prefills of other windows
on a fork, and the first token of the question asked last is compared. Nobody reads a trial, so it needs no certificate.
Where a window is approximate, an audit runs its approximate pieces again on a fork, and compares in the same way.
"""

import contextlib
import dataclasses
import random
import secrets
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Float

from ..core import AnyArray
from ..errors import CertificateError, PoolError, SessionBusyError
from ..plan import DEFAULT_KL, Goal, OnlineCertificate, PatchInventory, plan
from ..utils.background import JobQueue
from ..window import KEEP, UNKNOWN, Likeness, ServingChoice, StoredPrefills, Way, Window, arrange, likeness_keys
from .logit_comparison import compared
from .piece_registry import PieceRegistry
from .reuse_planner import ReusePlanner
from .session_input import EmbeddedInput

PENDING = 2
"""Audits that may wait. Each holds a fork, whose pages the pool cannot give to others."""
CLOSING_SECONDS = 30.0
"""How long audits that have begun are waited for when a session is closed."""
SAVE_EVERY = 8
"""Audits between two writes of the certificate to the store."""
MOST_ALIKE = 0.8
"""Share of trials of the way that is most alike, where several need audits."""
LIKENESSES: tuple[Likeness, ...] = get_args(Likeness)
"""Ways that trials serve chunks in, the most alike first."""
STATE_NAME = "online certificate"


class AuditJob(NamedTuple):
    """An answer to audit: a fork of the window that it was given behind, and the question.

    `logits` are those that the answer began from, [1,V], if they are known. `flops` is what the audit may take, and
    `sampled` says whether it is one of the policy's share.
    """

    fork: PieceRegistry
    asked: EmbeddedInput
    logits: Float[AnyArray, "1 V"] | None
    flops: int
    sampled: bool


def served_ways(window: Window) -> list[Way]:
    """Returns the distinct ways in which the pieces of a window differ from what it promises."""
    return sorted({way for piece in window.pieces for way in piece.ways})


def merge_stored(certificate: OnlineCertificate, store: Any) -> None:
    """Adds the audits that a store has from other sessions of the same weights. What is no certificate is ignored."""
    if hasattr(store, "get_encoder"):
        saved = store.get_encoder(STATE_NAME, certificate.backbone)
        if saved is not None and saved.dtype == np.uint8:
            # Whoever writes to the store may have written anything there.
            with contextlib.suppress(CertificateError):
                certificate.merge(saved.tobytes())


class AnswerAuditor:
    """Auditor of one session's answers. Audits run in the background; an error in one is counted and forgotten.

    Attributes:
      certificate: learns from the audits.
      audits, skipped, failed: how many answers were compared; were not, for their cost or for nothing to compare; or
        could not be.
      flops: what audits took, exactly.
    """

    def __init__(self, registry: PieceRegistry, planner: ReusePlanner, certificate: OnlineCertificate):
        """Starts no thread before the first audit."""
        self._registry, self._planner, self.certificate = registry, planner, certificate
        self.audits = self.skipped = self.failed = 0
        self.flops = 0
        goal = registry.config.goal
        self._kl = DEFAULT_KL if goal is None or goal.kl is None else float(goal.kl)
        self._random = random.Random(secrets.randbits(64))
        self._counted = 0
        self._queue = JobQueue(self._run, PENDING, "auditor", drop=lambda job: job.fork.release())

    @classmethod
    def of(cls, registry: PieceRegistry, planner: ReusePlanner) -> "AnswerAuditor | None":
        """Returns the auditor of a session with an online certificate, which it is given if it asked for one."""
        certificate, runtime = registry.config.certificate, registry.runtime
        if certificate == "online":
            certificate = OnlineCertificate(runtime.backbone.fingerprint, writer=secrets.token_hex(8))
            merge_stored(certificate, runtime.store)
            registry.config = dataclasses.replace(registry.config, certificate=certificate)
        return cls(registry, planner, certificate) if isinstance(certificate, OnlineCertificate) else None

    def after_answer(self, asked: EmbeddedInput, logits: Float[AnyArray, "1 V"] | None = None) -> None:
        """Queues an audit of the question asked last, if it is to be audited. The caller holds the session's lock.

        Args:
          logits: those of the answer's first token. None: an audit computes them again.
        """
        window = self._registry.window
        ways, approximate = served_ways(window), [piece for piece in window.pieces if piece.ways]
        question = window.costs.run(asked.length, window.tokens) + window.costs.forward.logit
        self._count_work(question)

        audited = ways or [(point, 0) for point in LIKENESSES]
        sampled = self._random.random() < self.certificate.policy.share
        # What is new is tried while the window is as promised: the truth is there, and nothing of it is served before.
        chunks = [
            index for index in range(window.lead, len(window.pieces)) if window.pieces[index].entry.kind == "chunk"
        ]
        new = not approximate and any(self._is_new(window, point, chunks) for point in LIKENESSES)
        wanted = new or sampled or any(self.certificate.needs_audits(*way, self._kl) for way in audited)

        # The question behind what is compared, and what is approximate once more.
        again = [window.costs.run(piece.entry.tokens, window.behind(piece.entry.id)) for piece in approximate]
        flops = (2 if logits is None else 1) * question + sum(again)

        # Of a piece whose origin nobody knows nothing can be learnt.
        if UNKNOWN in ways or not wanted or self._queue.full or not self.certificate.affords(flops):
            self.skipped += 1
            return
        try:
            if self._queue.add(AuditJob(self._registry.fork(), asked, logits, flops, sampled)):
                # Until it has ended, an audit counts as what it may take.
                self.certificate.count_flops(audits=flops)
        except (PoolError, SessionBusyError):
            self.skipped += 1

    def flush(self) -> None:
        """Waits until all audits so far have ended."""
        self._queue.flush()

    def close(self) -> None:
        """Ends waiting audits, and writes what was learnt to the store. Idempotent."""
        self._count_work()
        self._queue.close(CLOSING_SECONDS)
        self._save()

    def _count_work(self, question: int = 0) -> None:
        """Counts the session's edits so far, and the forward of a question; not the tokens that it decoded."""
        edits = self._registry.counters["flops"]
        self.certificate.count_flops(work=edits - self._counted + question)
        self._counted = edits

    # ------------------------------------------------------------------------------------------- the auditor's thread

    def _run(self, job: AuditJob) -> None:
        """Runs one audit on its fork, which ends with it."""
        try:
            self._compare(job)
        except Exception:
            # No room, a pool that was lost, an image that cannot be had again: an audit is nobody's answer.
            self.failed += 1
        finally:
            # Exactly its own: other sessions may compute on the pool meanwhile.
            flops = job.fork.counters["flops"] + job.fork.counters["audit_flops"]
            self.certificate.count_flops(audits=flops - job.flops)
            self.flops += flops
            counters = self._registry.counters
            counters["audits"], counters["audit_flops"] = self.audits, self.flops
            job.fork.release()
        if self.audits and self.audits % SAVE_EVERY == 0:
            self._save()

    def _compare(self, job: AuditJob) -> None:
        fork, window = job.fork, job.fork.window
        approximate = [piece for piece in window.pieces if piece.ways]

        if approximate:
            # As promised, in the least time: what is approximate runs again.
            other = self._served_logits(job)
            inventory = PatchInventory.of(None, fork.runtime.backbone)
            promised = plan(window, [piece.entry for piece in window.pieces], Goal(), stored=inventory)
            for piece in approximate:
                fork.provide_tokens(fork.records[piece.entry.id])
            fork.run(promised.window, promised.edits)
            truth = self._first_logits(fork, job.asked)
            ways, count = [*served_ways(window)], len(approximate)
            tried = []
        else:
            trial = self._choose_trial(fork, job.sampled)
            if trial is None:
                self.skipped += 1
                return
            point, choices = trial
            truth = self._served_logits(job)
            arranged = arrange(window, [piece.entry for piece in window.pieces])
            fork.run(*arranged.serve(choices))
            other = self._first_logits(fork, job.asked)
            ways, count = [(point, 0)], sum(choice != KEEP for choice in choices)
            served = zip(window.pieces, choices, strict=True)
            tried = [piece.entry.id for piece, choice in served if choice != KEEP]

        kl, _ = compared(truth, other)
        chunks = [(piece.entry.span, piece.entry.modality) for piece in window.pieces[window.lead :]]
        size = {"tokens": window.tokens, "chunks": chunks}
        self.certificate.audit(ways, float(kl[0]), others=count - 1, **size, tried=tried)
        self.audits += 1

    def _choose_trial(self, fork: PieceRegistry, sampled: bool) -> tuple[Likeness, list[ServingChoice]] | None:
        """Chooses a way to try, and how each piece of a fork is served then: so, wherever a plan would.

        Nothing is computed. None where nothing is stored, or nothing that needs audits, unless this one is sampled.
        """
        runtime, window = fork.runtime, fork.window
        prefills = StoredPrefills(runtime.store, runtime.backbone.fingerprint, runtime.executor.dtype)
        alike: dict[Likeness, dict[int, str]] = {}
        for index, piece in enumerate(window.pieces):
            if index < window.lead or piece.entry.kind != "chunk":
                continue
            keys = likeness_keys(window.pieces, index, window.lead)
            for point, front in prefills.alike(piece.entry.id, keys).items():
                if front != piece.state.behind:
                    alike.setdefault(point, {})[index] = front

        # The most alike first. One way at a time: the loss of a worse one must not count against a better one.
        points: list[Likeness] = [point for point in LIKENESSES if point in alike]
        needed: list[Likeness] = []
        for point in points:
            # Of a way that is served, what is new is tried.
            new = self._is_new(window, point, alike[point])
            if new or self.certificate.needs_audits(point, 0, self._kl):
                needed.append(point)
        points = needed or (points if sampled else [])
        if not points:
            return None
        point = points[0] if self._random.random() < MOST_ALIKE else self._random.choice(points)

        # A plan takes what is most alike: only the other chunks are served in a lesser way, if there are any.
        better = set[int]().union(*(alike.get(other, {}) for other in LIKENESSES[: LIKENESSES.index(point)]))
        fronts = {index: front for index, front in alike[point].items() if index not in better}
        choices = [KEEP] * len(window.pieces)
        for index, front in (fronts or alike[point]).items():
            choices[index] = ServingChoice("restored", behind=front, likeness=point)
        return point, choices

    def _is_new(self, window: Window, point: Likeness, indices: Iterable[int]) -> bool:
        """Returns whether some of these chunks would be served so now, had an audit tried them."""
        bound = self.certificate.admitted(point)
        if bound is None or bound > self._kl:
            return False
        return not all(self.certificate.covers(point, window.pieces[index].entry.id) for index in indices)

    def _served_logits(self, job: AuditJob) -> np.ndarray:
        """Returns the logits that the audited answer began from."""
        if job.logits is not None:
            return np.asarray(job.logits, np.float32)
        return self._first_logits(job.fork, job.asked)

    def _first_logits(self, fork: PieceRegistry, asked: EmbeddedInput) -> np.ndarray:
        """Returns the logits of a question's first token of an answer, [1, V], behind a fork as it is."""
        runtime = fork.runtime
        with runtime.locked():
            before = runtime.executor.ledger.total.flops
            out = runtime.executor.prefill(fork.window, asked.tokens, asked.length)
            fork.counters["audit_flops"] += runtime.executor.ledger.total.flops - before
            return np.asarray(out.logits[0], np.float32)[:1]

    def _save(self) -> None:
        """Writes what was learnt beside the chunks, with what others wrote there meanwhile."""
        store: Any = self._registry.runtime.store
        if (self.audits or self._counted) and hasattr(store, "put_encoder"):
            # A lost write loses the audits since the last one, no more: each writer's are replaced as a whole. Without
            # any, what was computed still counts: it pays for the audits of later sessions.
            merge_stored(self.certificate, store)
            state = np.frombuffer(self.certificate.to_json().encode(), np.uint8)
            store.put_encoder(STATE_NAME, self.certificate.backbone, state)
