"""Prompts served by a `Session`, and how far its answers are from those of a re-prefill."""

import tempfile
from collections.abc import Sequence
from typing import Any

import kvpatch_jax as kvp
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.session import compared, embedded, prefilled_logits
from kvpatch_jax.window import Piece, Window

from .costs import changes, same
from .episodes import PromptPiece

SESSIONS: dict[str, dict[str, Any]] = {
    "exact": {"promise": "forget"},
    "remember": {"promise": "remember", "reuse": "blind", "rank": 0, "audit": 0},
    "patched": {"promise": "remember", "reuse": "patched", "rank": 16, "audit": 0},
}
"""Options of the sessions, by arm.

* exact: every piece is as a re-prefill of the prompt would leave it; what is stored behind the very same pieces serves.
* remember: pieces that stay keep their KV, rotated to their new places, behind what they have not seen, too. Nothing is
  served alone: no canonical is formed, because texts stand in front of every screenshot.
* patched: the same, and screenshots that return are served by patches, or by prefills behind a like neighbour.

No answer is audited: what is measured is reuse itself, and nothing may fall back to a prefill.
"""
PAGES = 160
"""Pages of 16 tokens of a session's pool: one size, so that nothing is compiled for another."""


class SessionReplay:
    """One agent's session, brought from prompt to prompt.

    Attributes:
      session: what serves it. exact: whether each prompt is served as a re-prefill would.
    """

    def __init__(self, backbone: ModelBackbone, arm: str):
        """Opens a session over a store of its own, which leaves with it."""
        options = SESSIONS[arm]
        self.exact = options["promise"] == "forget"
        self.folder = tempfile.TemporaryDirectory(prefix="loops-")
        self.store = kvp.ChunkStore(self.folder.name)
        self.session = kvp.Session(backbone, self.store, lead=0, pages=PAGES, **options)
        self._before: Sequence[PromptPiece] = ()
        self._names: dict[str, str] = {}
        # Forwards of pieces, by the names of the window's entries.
        self._run: list[str] = []
        self.session.runtime.executor.observers.append(self._record)

    def _record(self, window: Window, piece: Piece, *_: Any) -> None:
        self._run.append(piece.id)

    def close(self) -> None:
        """Ends session and store."""
        self.session.close()
        self.store.close()
        self.folder.cleanup()

    def serve(self, pieces: Sequence[PromptPiece]) -> tuple[PromptPiece, ...]:
        """Makes the window show a prompt. Returns the pieces that took a forward."""
        evicted, replaced, entering = changes(self._before, pieces)
        if self.exact and not entering and not same(pieces, self._before[: len(pieces)]):
            # What stays is mended when something enters behind it.
            evicted, entering = (*evicted, pieces[-1]), (pieces[-1],)
            replaced = tuple(piece for piece in replaced if piece.id != pieces[-1].id)
        self._run.clear()
        for piece in evicted:
            self.session.evict(self._names.pop(piece.id))
        for piece in replaced:
            self._names[piece.id] = self.session.replace(self._names[piece.id], piece.shown.item)
        for piece in entering:
            self._names[piece.id] = self.session.add(piece.shown.item)
        # What is stored in the background may serve the next prompt, at any pace of this machine.
        if self.session.runtime.former is not None:
            self.session.runtime.former.flush()
        self._before = pieces
        computed = set(self._run)
        placed = zip(self.session.window.pieces, pieces, strict=True)
        return tuple(piece for entry, piece in placed if entry.id in computed)

    def divergence(self, questions: Sequence[str]) -> tuple[list[float], list[int]]:
        """Computes KL(re-prefill ‖ session) of each question's answer, in nats, and whether its decision differs."""
        audits = [self.session.ask(question, steps=1, audit=True).audit for question in questions]
        return [audit.kl for audit in audits if audit], [audit.flips for audit in audits if audit]


def reordered_divergence(
    backbone: ModelBackbone, pieces: Sequence[PromptPiece], order: Sequence[PromptPiece], questions: Sequence[str]
) -> tuple[list[float], list[int]]:
    """Computes KL(prompt ‖ prompt in another order) of each question's answer in nats, and which decisions differ."""
    if same(order, pieces):
        return [0.0] * len(questions), [0] * len(questions)
    kls, flips = list[float](), list[int]()
    for question in questions:
        asked = embedded(backbone, [kvp.Text(question)])
        kl, flipped = compared(*(_prefilled(backbone, prompt, asked) for prompt in (pieces, order)))
        kls.append(float(kl[0]))
        flips.append(int(flipped[0]))
    return kls, flips


def _prefilled(backbone: ModelBackbone, pieces: Sequence[PromptPiece], asked: Any) -> Any:
    """Computes the logits of an answer's first token by a prefill of a prompt."""
    placed, start = [], 0
    for piece in pieces:
        part = embedded(backbone, [piece.shown.item])
        placed.append((part, start))
        start += part.span
    return prefilled_logits(backbone, placed, asked, start, asked.length, 1)
