"""Counts of a session: what was computed, what was reused, and what others would have computed."""

import collections
import dataclasses
from collections.abc import Mapping

from ..cache import prefilled
from ..window import FormerStats, Step, Window, total
from .guard import AuditStats

Counters = collections.Counter[str]
"""Counts so far, by the field of `Stats`."""
MOST_STEPS = 256
"""Steps that a session remembers, the last ones."""
MOST_PREFIXES = 1 << 14
"""Prefixes of earlier windows that the counted prefix cache holds, the last ones."""


@dataclasses.dataclass(frozen=True)
class StepStats:
    """What one call did to a window, in tokens.

    Attributes:
      op: "add", "recall", "slide" …
      computed: by forwards of pieces.
      reused: by method: "kept" where they were, "rotated", "restored", "leading", "patch", "bare".
      reprefill: what a prefill of the whole window would have computed.
      prefix_cache: what a prefix cache that held every earlier window would have.
      bytes, flops: of KV that moved and of forwards and rotations.
    """

    op: str
    computed: int
    reused: Mapping[str, int]
    reprefill: int
    prefix_cache: int
    bytes: int
    flops: int


class StepCounter:
    """Counter of a session's steps."""

    def __init__(self) -> None:
        self.steps: collections.deque[StepStats] = collections.deque(maxlen=MOST_STEPS)
        self._prefixes: collections.OrderedDict[str, None] = collections.OrderedDict()

    def add(self, op: str, before: Window, window: Window, step: Step) -> StepStats:
        """Counts a step that led from one window to the next."""
        starts = {piece.made: piece.start for piece in before.pieces}
        reused = Counters()
        for piece in window.pieces:
            if piece.made in starts and piece.id in before:
                reused["kept" if starts[piece.made] == piece.start else "rotated"] += piece.entry.tokens
            elif piece.method != "prefill":
                reused[piece.method] += piece.entry.tokens
        # A prefix cache hits as long as contents are those of an earlier window, from the front.
        prefixes = prefilled(piece.entry.key for piece in window.pieces)
        missed = next((index for index, prefix in enumerate(prefixes) if prefix not in self._prefixes), len(prefixes))
        for prefix in prefixes:
            self._prefixes[prefix] = None
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)
        uncached = sum(piece.entry.tokens for piece in window.pieces[missed:])
        (computed, _, _), (_, nbytes, flops) = total(step, "prefill"), total(step)
        self.steps.append(StepStats(op, computed, dict(reused), window.tokens, uncached, nbytes, flops))
        return self.steps[-1]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of what a session did so far.

    Attributes:
      added, recalled, left: pieces that entered for the first time, that came back, that left.
      placeholders: texts that took the place of chunks that left.
      asked: questions.
      forwards: prefills of pieces.
      questions: forwards of questions.
      tokens: prefilled tokens of pieces.
      hits: chunks seen before (here, or by another writer of the store) that were placed without a forward.
      misses: chunks seen before that were prefilled again.
      encoded: images whose tower did not run, because the store had its output.
      stale: misses for which the store had patches, but none for the current antecedent.
      rotated: rotations of pieces that stayed.
      bytes, flops: of all changes of the window; questions are not included.
      reprefill, prefix_cache: tokens that a re-prefill at every step, and a prefix cache, would have computed.
      steps: the last steps one by one.
      fidelity: the number of pieces by fidelity: "exact", "survivor", "approximate".
      tokens_held: in the window.
      pages, free_pages: of the pool.
      canonical_bytes: of the canonicals that are held for pieces, as they are kept: of encoded ones, codes and scales.
      state_bytes: of a hybrid model's transitions beside the pool, of pieces and composed; 0 of other models.
      audits: sums over the audits of approximate answers, of all sessions of the runtime with the same goal.
      formed: counts of what was stored and formed in the background, or None.
    """

    added: int = 0
    recalled: int = 0
    left: int = 0
    placeholders: int = 0
    asked: int = 0
    forwards: int = 0
    questions: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    encoded: int = 0
    stale: int = 0
    rotated: int = 0
    bytes: int = 0
    flops: int = 0
    reprefill: int = 0
    prefix_cache: int = 0
    steps: tuple[StepStats, ...] = ()
    fidelity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens_held: int = 0
    pages: int = 0
    free_pages: int = 0
    canonical_bytes: int = 0
    state_bytes: int = 0
    audits: AuditStats = dataclasses.field(default_factory=AuditStats)
    formed: FormerStats | None = None

    def __str__(self) -> str:
        served = ", ".join(f"{count} {word}" for word, count in self.fidelity.items()) or "empty"
        placeholders = f", {self.placeholders} placeholders" if self.placeholders else ""
        lines = [
            f"window    {self.tokens_held} tokens, {served}; {self.free_pages} of {self.pages} pages free",
            f"pieces    {self.added} new, {self.recalled} recalled, {self.left} left, {self.rotated} rotations"
            + placeholders,
            f"forwards  {self.forwards} of pieces, {self.questions} of questions ({self.asked} asked)",
            f"tokens    {self.tokens} computed; a prefix cache {self.prefix_cache}, a re-prefill {self.reprefill}",
            f"reuse     {self.hits} hits, {self.misses} misses, {self.stale} stale, {self.encoded} encoded earlier",
            f"moved     {self.bytes / 2**20:.2f} MiB, {self.flops / 1e9:.3f} GFLOP",
        ]
        if self.state_bytes:
            lines.append(f"states    {self.state_bytes / 2**20:.2f} MiB of transitions, of pieces and composed")
        if self.audits.answers or self.audits.skipped:
            lines.append(f"audits    {self.audits}")
        if self.formed is not None:
            formed = self.formed
            lines.append(f"formed    {formed.patches} patches, {formed.canonicals} canonicals, {formed.failed} failed")
        return "\n".join(lines)
