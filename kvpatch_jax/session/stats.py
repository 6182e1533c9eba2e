"""What a session did, counted, and printed."""

import collections
import dataclasses
from collections.abc import Mapping

from ..window import Drop, Edits, FormerStats, Ledger, Prefill, Recompute, Rotate, Window


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a session did so far.

    Attributes:
      added, recalled, left: things that came in for the first time, came back, and left.
      asked: questions.
      forwards: over pieces: what was prefilled. questions: forwards over questions. tokens: those that were prefilled.
      hits: chunks that had been seen before (here, or by whoever filled the store) and were placed without a forward.
      misses: chunks that came back and were prefilled again.
      encoded: images whose tower did not run, for the store had its output.
      stale: chunks that came back while the store had patches of them, none of which was formed behind what stands in
        front of them now.
      turned: pieces that stayed and moved: rotations.
      bytes, flops: of everything that was executed for the window, as the ledger counts them; questions apart.
      fidelity: how many pieces of the window are served exactly, as survivors, approximately.
      tokens_held, pages, free_pages: of the window, and of the pool.
      formed: what was formed behind the back, or None.
    """

    added: int = 0
    recalled: int = 0
    left: int = 0
    asked: int = 0
    forwards: int = 0
    questions: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    encoded: int = 0
    stale: int = 0
    turned: int = 0
    bytes: int = 0
    flops: int = 0
    fidelity: Mapping[str, int] = dataclasses.field(default_factory=dict)
    tokens_held: int = 0
    pages: int = 0
    free_pages: int = 0
    formed: FormerStats | None = None

    def __str__(self) -> str:
        served = ", ".join(f"{count} {word}" for word, count in self.fidelity.items()) or "empty"
        lines = [
            f"window    {self.tokens_held} tokens, {served}; {self.free_pages} of {self.pages} pages free",
            f"came      {self.added} new, {self.recalled} came back, {self.left} left, {self.turned} turned where they "
            "stayed",
            f"forwards  {self.forwards} of pieces ({self.tokens} tokens), {self.questions} of questions ({self.asked} "
            "asked)",
            f"reuse     {self.hits} hits, {self.misses} misses, {self.stale} stale, {self.encoded} encoded before",
            f"moved     {self.bytes / 2**20:.2f} MiB, {self.flops / 1e9:.3f} GFLOP",
        ]
        if self.formed is not None:
            formed = self.formed
            lines.append(f"formed    {formed.patches} patches, {formed.canonicals} canonicals, {formed.failed} failed")
        return "\n".join(lines)


class SessionCounters:
    """Counts as they grow."""

    def __init__(self) -> None:
        self.words: collections.Counter[str] = collections.Counter()

    def add(self, word: str, number: int = 1) -> None:
        """Counts something."""
        self.words[word] += number

    def executed(self, ledger: Ledger, window: Window, edits: Edits) -> None:
        """Counts a run of the edits that led to a window."""
        self.add("bytes", ledger.total.bytes)
        self.add("flops", ledger.total.flops)
        for edit in edits:
            if isinstance(edit, Prefill | Recompute):
                self.add("forwards")
                self.add("tokens", window.piece(edit.id).entry.tokens)
            elif isinstance(edit, Rotate):
                self.add("turned")
            elif isinstance(edit, Drop):
                self.add("left")
