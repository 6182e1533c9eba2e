"""Audits of a session's answers, from which an `OnlineCertificate` learns what each way of serving loses.

Where a window is served as promised, an audit is a *trial*: some chunks are served by stored prefills of other windows
on a fork, and the first token of the question asked last is compared. Nobody reads a trial, so it needs no certificate.
Where a window is approximate, an audit runs its approximate pieces again on a fork, and compares in the same way.
"""

import contextlib
import dataclasses
import random
import secrets
from typing import Any, NamedTuple

import numpy as np

from ..errors import CertificateError, PoolError, SessionBusyError
from ..plan import Goal, OnlineCertificate, PatchInventory, plan
from ..utils.background import JobQueue
from ..window import KEEP, UNKNOWN, ServingChoice, StoredPrefills, Way, Ways, Window, arrange, likeness_keys
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
MOST_TRIALS = 200
"""Audits of a way after which it is tried no more often than served answers are audited."""
TRIED_WAYS: Ways = (("near", 0), ("seen", 0))
"""Ways of what trials place."""
MOST_ALIKE = 0.8
"""Share of trials in which a chunk is served by the stored prefill that is most alike."""
STATE_NAME = "online certificate"


class AuditJob(NamedTuple):
    """An answer to audit: a fork of the window that it was given behind, and the question."""

    fork: PieceRegistry
    asked: EmbeddedInput


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
    """

    def __init__(self, registry: PieceRegistry, planner: ReusePlanner, certificate: OnlineCertificate):
        """Starts no thread before the first audit."""
        self._registry, self._planner, self.certificate = registry, planner, certificate
        self.audits = self.skipped = self.failed = 0
        self._random = random.Random(secrets.randbits(64))
        self._flops = 0
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

    def after_answer(self, asked: EmbeddedInput) -> None:
        """Queues an audit of the question asked last, if it is to be audited. The caller holds the session's lock."""
        ways = served_ways(self._registry.window)
        settled = [self._is_settled(way) for way in ways or TRIED_WAYS]
        wanted = not all(settled) or self._random.random() < self.certificate.policy.share

        # Of a piece whose origin nobody knows nothing can be learnt.
        if UNKNOWN in ways or not wanted or self._queue.full or self._too_expensive():
            self.skipped += 1
            return
        try:
            self._queue.add(AuditJob(self._registry.fork(), asked))
        except (PoolError, SessionBusyError):
            self.skipped += 1

    def flush(self) -> None:
        """Waits until all audits so far have ended."""
        self._queue.flush()

    def close(self) -> None:
        """Ends waiting audits, and writes what was learnt to the store. Idempotent."""
        self._queue.close(CLOSING_SECONDS)
        self._save()

    def _is_settled(self, way: Way) -> bool:
        """Returns whether enough is known of a way to audit a share of its answers only."""
        return self.certificate.admitted(*way) is not None or self.certificate.audits(*way) >= MOST_TRIALS

    def _too_expensive(self) -> bool:
        """Returns whether audits have computed more than their share of all FLOPs of the pool."""
        total = self._registry.runtime.executor.ledger.total.flops
        return self._flops > self.certificate.policy.cost * (total - self._flops)

    # ------------------------------------------------------------------------------------------- the auditor's thread

    def _run(self, job: AuditJob) -> None:
        """Runs one audit on its fork, which ends with it."""
        executor = job.fork.runtime.executor
        before = executor.ledger.total.flops
        try:
            self._compare(job)
        except Exception:
            # No room, a pool that was lost, an image that cannot be had again: an audit is nobody's answer.
            self.failed += 1
        finally:
            # Other sessions on the pool may have computed meanwhile: an upper bound of what the audit cost.
            self._flops += executor.ledger.total.flops - before
            job.fork.release()
        if self.audits and self.audits % SAVE_EVERY == 0:
            self._save()

    def _compare(self, job: AuditJob) -> None:
        fork, window = job.fork, job.fork.window
        served = self._first_logits(fork, job.asked)
        approximate = [piece for piece in window.pieces if piece.ways]

        if approximate:
            # As promised, in the least time: what is approximate runs again.
            inventory = PatchInventory.of(None, fork.runtime.backbone)
            promised = plan(window, [piece.entry for piece in window.pieces], Goal(), stored=inventory)
            for piece in approximate:
                fork.provide_tokens(fork.records[piece.entry.id])
            fork.run(promised.window, promised.edits)
            truth, other = self._first_logits(fork, job.asked), served
            ways, count = [*served_ways(window)], len(approximate)
        else:
            ways = self._try(fork)
            if not ways:
                self.skipped += 1
                return
            truth, other, count = served, self._first_logits(fork, job.asked), len(ways)

        kl, _ = compared(truth, other)
        chunks = [(piece.entry.span, piece.entry.modality) for piece in window.pieces[window.lead :]]
        self.certificate.audit(ways, float(kl[0]), others=count - 1, tokens=window.tokens, chunks=chunks)
        self.audits += 1

    def _try(self, fork: PieceRegistry) -> list[Way]:
        """Serves some chunks of a fork by stored prefills of other windows. Returns in which ways."""
        runtime, window = fork.runtime, fork.window
        prefills = StoredPrefills(runtime.store, runtime.backbone.fingerprint, runtime.executor.dtype)
        choices, ways = [KEEP] * len(window.pieces), []
        # How many chunks a trial changes is drawn too, because bounds depend on it.
        odds = self._random.random()
        for index, piece in enumerate(window.pieces):
            if index < window.lead or piece.entry.kind != "chunk":
                continue
            found = []
            for point, key in likeness_keys(window.pieces, index, window.lead).items():
                front = prefills.front_alike(piece.entry.id, key)
                if front not in (None, piece.state.behind):
                    found.append((point, front))
            if found and (not ways or self._random.random() < odds):
                # What is most alike comes first, and is what a plan would choose.
                point, front = found[0] if self._random.random() < MOST_ALIKE else self._random.choice(found)
                choices[index] = ServingChoice("restored", behind=front, likeness=point)
                ways.append((point, 0))

        if ways:
            arranged = arrange(window, [piece.entry for piece in window.pieces])
            fork.run(*arranged.serve(choices))
        return ways

    def _first_logits(self, fork: PieceRegistry, asked: EmbeddedInput) -> np.ndarray:
        """Returns the logits of a question's first token of an answer, [1, V], behind a fork as it is."""
        runtime = fork.runtime
        with runtime.locked():
            out = runtime.executor.prefill(fork.window, asked.tokens, asked.length)
            return np.asarray(out.logits[0], np.float32)[:1]

    def _save(self) -> None:
        """Writes what was learnt beside the chunks, with what others wrote there meanwhile."""
        store: Any = self._registry.runtime.store
        if self.audits and hasattr(store, "put_encoder"):
            # A lost write loses the audits since the last one, no more: each writer's are replaced as a whole.
            merge_stored(self.certificate, store)
            state = np.frombuffer(self.certificate.to_json().encode(), np.uint8)
            store.put_encoder(STATE_NAME, self.certificate.backbone, state)
