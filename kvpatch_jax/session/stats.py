"""Counters of a session, and how they are printed."""

import collections
import dataclasses
from collections.abc import Mapping

from ..window import FormerStats

Counters = collections.Counter[str]
"""Counts so far, by the field of `Stats`."""


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
      bytes, flops: of all edits of the window, as in the ledger; questions are not included.
      fidelity: the number of pieces by fidelity: "exact", "survivor", "approximate".
      tokens_held: in the window.
      pages, free_pages: of the pool.
      canonical_bytes: of the canonicals that are held for pieces, as they are kept: of encoded ones, codes and scales.
      transition_bytes: of a hybrid model's transitions in the pool's memory, of pieces and composed; 0 of other models.
      formed: counts of the patches that were formed in the background, or None.
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
    fidelity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens_held: int = 0
    pages: int = 0
    free_pages: int = 0
    canonical_bytes: int = 0
    transition_bytes: int = 0
    formed: FormerStats | None = None

    def __str__(self) -> str:
        served = ", ".join(f"{count} {word}" for word, count in self.fidelity.items()) or "empty"
        lines = [
            f"window    {self.tokens_held} tokens, {served}; {self.free_pages} of {self.pages} pages free",
            f"pieces    {self.added} new, {self.recalled} recalled, {self.left} left, {self.rotated} rotations"
            + (f", {self.placeholders} placeholders" if self.placeholders else ""),
            f"forwards  {self.forwards} of pieces ({self.tokens} tokens), {self.questions} of questions ({self.asked} "
            "asked)",
            f"reuse     {self.hits} hits, {self.misses} misses, {self.stale} stale, {self.encoded} encoded earlier",
            f"moved     {self.bytes / 2**20:.2f} MiB, {self.flops / 1e9:.3f} GFLOP",
        ]
        if self.transition_bytes:
            lines.append(f"states    {self.transition_bytes / 2**20:.2f} MiB of transitions, of pieces and composed")
        if self.formed is not None:
            formed = self.formed
            lines.append(f"formed    {formed.patches} patches, {formed.canonicals} canonicals, {formed.failed} failed")
        return "\n".join(lines)
