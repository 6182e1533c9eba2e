"""KV of a chunk formed behind a history, and what is answered where it is served behind its true antecedents.

Everything in front is exact; only the chunk's KV comes from the history, whole or as a store keeps it, and is moved to
its place. Between forwards arrays lie on the host, and contexts are padded to one size, so that few programs compile.
Axis letters: B contexts, T tokens, S keys, L layers, K KV heads, H head width.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp

from ..arms.reused_page import leading
from ..probes.window.image_sequence import KV, Image, ImageSequence, filled, joined, on_host, read_behind
from ..small_task.scenes import Answers
from .contexts import ToleranceBatch
from .histories import (
    ALONE,
    APPROXIMATE,
    CANONICAL,
    EXACT,
    LEAD,
    MEANS,
    OWN,
    PATCHED,
    SUM,
    TRUTH,
    History,
    HistoryPiece,
    histories,
)

PATCHED_RANK = 16
"""Of antecedents that are served with a patch."""
WHOLE, STORED, CORRECTED = "whole", "stored", "corrected"
"""Forms: the history's KV; the canonical with a patch of the history's deficit, as a store keeps it; the history's KV
with a patch that was formed on it for the truth."""


class HistoryKV:
    """Phase-free KV of a batch's pieces and chunk behind any history; each prefix of a history is prefilled once."""

    def __init__(self, batch: ToleranceBatch):
        self.batch = batch
        self._known: dict[tuple[History, HistoryPiece | None], KV] = {}
        whole = ImageSequence(batch.backbone, [batch.lead, *batch.pieces, batch.chunk])
        self._room = whole.size

    def image(self, piece: HistoryPiece | None) -> Image:
        """Finds a piece; the chunk for None."""
        if piece is None:
            return self.batch.chunk
        return (self.batch.pieces if piece.source == OWN else self.batch.others)[piece.place]

    def line(self, history: History, piece: HistoryPiece | None = None) -> ImageSequence:
        """Lays out the lead, a history and what follows it."""
        images = [self.batch.lead, *map(self.image, history), self.image(piece)]
        return ImageSequence(self.batch.backbone, images)

    def conditioned(self, history: History | None, piece: HistoryPiece | None = None) -> KV:
        """Computes phase-free KV of a piece, or of the chunk, behind the lead and a history; None: alone."""
        if history is None:
            return self.image(piece).canonical
        if piece is not None:
            # How a piece is served does not change what it is behind its own history.
            piece = piece._replace(served=EXACT)
        if (history, piece) not in self._known:
            self._known[history, piece] = self._prefilled(history, piece)
        return self._known[history, piece]

    def _prefilled(self, history: History, piece: HistoryPiece | None) -> KV:
        line, image = self.line(history, piece), self.image(piece)
        front = self.front(history)
        rows, size = len(self.batch.clusters), image.size
        seen = np.arange(self._room) < line.size - size
        mask = np.concatenate([np.broadcast_to(seen, (size, self._room)), np.tri(size, dtype=bool)], axis=1)
        context = {name: jnp.asarray(filled(value, self._room, 2)) for name, value in front.items()}
        tokens = image.tokens.shift(line.starts[-1])
        mask = np.broadcast_to(mask, (rows, 1, *mask.shape))
        return on_host(dict(self.batch.backbone.prefill(tokens, context, mask).kv))

    def front(self, history: History) -> KV:
        """Joins the lead and a history in the engine frame, each piece as it was served."""
        line = self.line(history)
        parts = [line.serve(0)]
        for place, piece in enumerate(history):
            before = history[:place]
            if piece.served == CANONICAL:
                parts.append(line.serve(place + 1))
            elif piece.served == PATCHED:
                # Its patch is the one that belongs there: formed behind antecedents that were exact.
                exact = tuple(other._replace(served=EXACT) for other in before)
                patch = formed(self.image(piece), self.conditioned(exact, piece), PATCHED_RANK)
                parts.append(line.serve(place + 1, patch))
            else:
                parts.append(line.serve(place + 1, base=self.conditioned(before, piece), base_antecedent=["history"]))
        return joined(parts)


def formed(image: Image, conditioned: KV, rank: int) -> kvp.Patch:
    """Forms the patch of an image's deficit on its canonical."""
    return kvp.form_patch(image.chunk, conditioned, _most(image, rank), ["history"], method="exact", dense=False)


def corrected(image: Image, truth: KV, base: KV, rank: int) -> kvp.Patch:
    """Forms the patch of an image's true deficit on KV of another history."""
    return kvp.removal_patch(image.chunk, truth, base, _most(image, rank), ["truth"], ["history"], method="exact")


def _most(image: Image, rank: int) -> int:
    return min(rank, image.size, *(channel.features for channel in image.chunk.layout.channels))


def kv_by_kind(source: HistoryKV) -> dict[str, KV]:
    """Computes the chunk's KV of every kind of history, then of the means."""
    count = len(source.batch.pieces)
    by_kind = {kind: source.conditioned(history) for kind, history in histories(count).items()}
    for name, kinds in MEANS.items():
        parts = [by_kind[kind] for kind in kinds if kind in by_kind]
        by_kind[name] = {channel: np.mean([part[channel] for part in parts], axis=0) for channel in parts[0]}

    # What patches of single antecedents would come to, if one were added for each.
    alone = by_kind[LEAD]
    singles = [source.conditioned((HistoryPiece(OWN, place),)) for place in range(count)]
    by_kind[SUM] = {channel: sum(own[channel] for own in singles) - (count - 1) * alone[channel] for channel in alone}
    return by_kind


def answers_of(batch: ToleranceBatch, ranks: Sequence[int] = ()) -> Iterator[tuple[str, str, Answers]]:
    """Answers over the chunk's KV of every kind and form: (kind, form, answers), the whole KV of the truth first.

    Args:
      ranks: of the patches; without, KV is served whole alone.
    """
    source = HistoryKV(batch)
    by_kind = kv_by_kind(source)
    truth, chunk = by_kind[TRUTH], batch.chunk
    own = tuple(HistoryPiece(OWN, place) for place in range(len(batch.pieces)))
    line, place = source.line(own), len(batch.pieces) + 1
    front = source.front(own)
    tail = batch.questions.behind(line.end)

    def ask(patch: kvp.Patch | None, base: Mapping[str, Any] | None) -> Answers:
        held = {} if base is None else {"base": base, "base_antecedent": ["history"]}
        return read_behind(line, joined([front, line.serve(place, patch, **held)]), tail)

    for kind, kv in by_kind.items():
        yield kind, WHOLE, ask(None, None if kind == ALONE else kv)
        if not ranks or kind in APPROXIMATE:
            continue

        # One factorisation a form: smaller ranks are its leading factors.
        stored = None if kind == ALONE else formed(chunk, kv, max(ranks))
        mended = None if kind in (TRUTH, ALONE) else corrected(chunk, truth, kv, max(ranks))
        for rank in ranks:
            if stored is not None:
                yield kind, f"{STORED}, rank {rank}", ask(leading(stored, rank), None)
            if mended is not None:
                yield kind, f"{CORRECTED}, rank {rank}", ask(leading(mended, rank), kv)
