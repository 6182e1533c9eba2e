"""The loss guard: which approximate answers are audited, what audits measured, and the kinds of reuse they rule out."""

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ReuseWarning
from ..plan import Goal, ReuseKind, approximate_kinds
from ..window import Window

FIRST = 3
"""Audits at the beginning, and those that decide about a kind."""
FLOOR = 0.1
"""Share of the goal below which it does not matter whether reuse is worse than blind reuse."""


class Audit(NamedTuple):
    """One answer beside the same answer behind other windows.

    Attributes:
      kl: KL(promised ‖ served) of the next token, the mean over the answer, in nats. Promised is a prefill in the place
        of everything that is approximate: a re-prefill of the window, apart from survivors that remember.
      flips, tokens: tokens whose likeliest differs, of how many.
      blind: KL and flips of the same window whose approximate chunks are served by their canonicals alone; None where
        there are none, or nothing else was served.
      prefix_cache: tokens of the window that a prefix cache would have computed, with a KL of 0.
      forwards: of pieces and questions that the audit took.
    """

    kl: float
    flips: int
    tokens: int
    blind: tuple[float, int] | None
    prefix_cache: int
    forwards: int


@dataclasses.dataclass(frozen=True)
class AuditStats:
    """Sums over audits.

    Attributes:
      answers: audited.
      kl: mean over them of KL(promised ‖ served), in nats per token.
      flips, tokens: tokens whose likeliest differs, of how many.
      compared: the audits that have blind reuse beside them.
      served_kl, blind_kl, blind_flips: over those: the means, and the flips of blind reuse.
      prefix_cache: tokens that a prefix cache would have computed, with a KL of 0.
      forwards: of pieces and questions, by the audits.
      skipped: audits that found no room, or failed.
      ruled_out: what is no longer served approximately, each with the reason.
    """

    answers: int = 0
    kl: float = 0.0
    flips: int = 0
    tokens: int = 0
    compared: int = 0
    served_kl: float = 0.0
    blind_kl: float = 0.0
    blind_flips: int = 0
    prefix_cache: int = 0
    forwards: int = 0
    skipped: int = 0
    ruled_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def plus(self, audit: Audit) -> "AuditStats":
        """Returns the sums with another audit."""
        changes = {name: getattr(self, name) + getattr(audit, name) for name in ("flips", "tokens", "forwards")}
        changes["prefix_cache"] = self.prefix_cache + audit.prefix_cache
        changes["kl"] = (self.kl * self.answers + audit.kl) / (self.answers + 1)
        if audit.blind is not None:
            count = self.compared + 1
            changes |= {"compared": count, "blind_flips": self.blind_flips + audit.blind[1]}
            changes["served_kl"] = (self.served_kl * self.compared + audit.kl) / count
            changes["blind_kl"] = (self.blind_kl * self.compared + audit.blind[0]) / count
        return dataclasses.replace(self, answers=self.answers + 1, **changes)

    def __str__(self) -> str:
        text = f"{self.answers} answer{'s' * (self.answers != 1)} audited"
        if self.answers:
            text += f": KL {self.kl:.2g}, {self.flips} of {self.tokens} tokens flipped"
        if self.compared:
            text += f"; blind reuse of {self.compared}: KL {self.blind_kl:.2g}, {self.blind_flips} flipped"
        if self.answers:
            text += f"; a prefix cache: KL 0, {self.prefix_cache} tokens computed"
        if self.skipped:
            text += f"; {self.skipped} audits skipped"
        return text + "".join(f"; {kind} ruled out" for kind in self.ruled_out)


class Guard:
    """Guard of all sessions of a runtime that have the same goal and share of audits.

    It rules a kind of reuse out, with one warning, when the mean KL of its audits exceeds the goal (fewer than three
    count as three, so that a lone bad answer has to lose as much as those), or after three audits that of blind reuse,
    unless it is below a tenth of the goal. An audit counts for every kind in its window.

    Attributes:
      goal: what answers may lose.
      share: of the approximate answers that are audited after the first three.
      ruled_out: kinds that serve nothing approximately any more. Replaced, never changed.
    """

    def __init__(self, goal: Goal, share: float):
        self.goal, self.share = goal, share
        self.ruled_out: frozenset[ReuseKind] = frozenset()
        self._answers, self._begun, self._skipped = 0, 0, 0
        self._total, self._kinds = AuditStats(), dict[ReuseKind, AuditStats]()
        self._reasons = dict[str, str]()
        self._lock = threading.Lock()

    @property
    def stats(self) -> AuditStats:
        """Sums over all audits so far."""
        with self._lock:
            return dataclasses.replace(self._total, skipped=self._skipped, ruled_out=dict(self._reasons))

    def begin(self, window: Window) -> bool:
        """Counts an answer behind a window. Returns whether it is to be audited; then `end` or `skip` follows."""
        if not self.share or self.goal.reuse == "exact" or window.as_promised:
            return False
        with self._lock:
            self._answers += 1
            sampled = int(self._answers * self.share) > int((self._answers - 1) * self.share)
            audited = sampled or self._begun < FIRST
            self._begun += audited
            return audited

    def skip(self, failed: bool = True) -> None:
        """Takes back an audit that failed, or whose answer was not read to its end."""
        with self._lock:
            self._begun -= 1
            self._skipped += failed

    def end(self, window: Window, audit: Audit) -> None:
        """Counts an audit, and rules out kinds that lose too much; warns of each once."""
        messages = list[str]()
        with self._lock:
            self._total = self._total.plus(audit)
            for kind in approximate_kinds(window):
                stats = self._kinds[kind] = self._kinds.get(kind, AuditStats()).plus(audit)
                reason = None if kind in self.ruled_out else self._reason(stats)
                if reason is not None:
                    self.ruled_out |= {kind}
                    self._reasons[str(kind)] = reason
                    messages.append(f"reuse: {kind} {reason}; they are prefilled from now on")
        for message in messages:
            warnings.warn(message, ReuseWarning, stacklevel=2)

    def _reason(self, stats: AuditStats) -> str | None:
        """Says why a kind with these audits is ruled out; None if it is not."""
        bound = self.goal.kl
        lose = f"lose {stats.kl:.2g} nats a token in {stats.answers} audited answers"
        lose += f" ({stats.flips} of {stats.tokens} tokens flipped)"
        blind = f"blind reuse {stats.blind_kl:.2g}" if stats.compared else "blind reuse was not measured"
        if stats.kl * stats.answers > bound * max(stats.answers, FIRST):
            return f"{lose}, more than {bound:g} ({blind})"
        worse = stats.compared >= FIRST and stats.served_kl > max(stats.blind_kl, FLOOR * bound)
        return f"{lose}, more than {blind}" if worse else None
