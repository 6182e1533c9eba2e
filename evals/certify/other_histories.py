"""Stored prefills of a batch of windows: each piece's KV as it was computed behind pieces of other windows.

The likenesses are those under which a store finds a prefill again (`kvpatch_jax.window.stored_prefill`). "seen": behind
the same lead, and unrelated pieces. "near": behind the same lead, unrelated pieces and the piece that is nearest here.
"mean": the mean of several of those, which share the nearest piece alone. "moved": behind the same pieces in another
order, the nearest in its place.

A history has as many pieces as precede the piece here, unrelated ones being those that were in the window before. Some
pieces have no history of a likeness. The first one, whose nearest is the lead, is served as "seen" then, because behind
the lead alone it would be exact; and what has fewer than two others beside the nearest, which could move, as "near".
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from kvpatch_jax.window import Likeness

from ..probes.window.image_sequence import KV, AgentLoop, Image
from .window_sources import WindowBatch

HISTORIES = 3
"""Histories that a mean is taken over."""
LEAST_MOVED = 4
"""Chunks of the smallest window whose last one can have two others, beside the nearest, in another order."""
REVERSED = 8
"""Pieces farther away than the nearest are reversed in blocks of so many from the front."""


class StoredPieces(NamedTuple):
    """One likeness: phase-free KV of every piece, by its place behind the lead (place 0), and what it is named."""

    likeness: Likeness
    kv: Mapping[int, KV]


def likenesses(size: int) -> tuple[Likeness, ...]:
    """Returns the likenesses that a window of so many chunks is measured in, the least first."""
    return tuple(own for own in reversed(get_args(Likeness)) if own != "moved" or size >= LEAST_MOVED)


def stored_pieces(windows: WindowBatch, room: int) -> list[StoredPieces]:
    """Prefills every piece of a batch behind other histories.

    Args:
      room: tokens that a history is padded to, so that all of them run one program.
    """
    places = range(1, len(windows.pieces) + 1)
    fronts = [_unrelated(windows, room, number) for number in range(HISTORIES)]
    seen, near, mean = dict[int, KV](), dict[int, KV](), dict[int, KV]()
    for place in places:
        piece = windows.pieces[place - 1]
        # At least one unrelated piece: behind the lead alone the first piece would be as promised.
        seen[place] = fronts[0].only(range(1 + max(1, place - 1))).prefill(piece)
        if place == 1:
            near[place] = mean[place] = seen[place]
            continue

        nearest = windows.pieces[place - 2]
        several = []
        for front in fronts:
            history = front.only(range(1 + max(1, place - 2)))
            history.append(nearest)
            several.append(history.prefill(piece))
        near[place], mean[place] = several[0], _mean(several)

    made = [StoredPieces("seen", seen), StoredPieces("near", near), StoredPieces("mean", mean)]
    if len(windows.pieces) >= LEAST_MOVED:
        made.append(StoredPieces("moved", {**near, **_moved(windows, room)}))
    return made


def _unrelated(windows: WindowBatch, room: int, number: int) -> AgentLoop:
    """Returns a window of unrelated pieces, each history's in another order, from another one on."""
    count = max(1, len(windows.pieces) - 1)
    older = windows.older
    first = number * max(1, len(older) // HISTORIES)
    loop = AgentLoop(windows.backbone, room, windows.lead)
    for place in range(count):
        loop.append(older[(first + place) % len(older)])
    return loop


def _moved(windows: WindowBatch, room: int) -> dict[int, KV]:
    """Returns the KV of the pieces whose farther ones can be in another order, behind these."""
    pieces, moved = windows.pieces, dict[int, KV]()
    whole = AgentLoop(windows.backbone, room, windows.lead)
    for place in range(LEAST_MOVED, len(pieces) + 1):
        # Whole blocks are the same for all places behind them, and are prefilled once.
        farther = place - 2
        while len(whole.held) - 1 + REVERSED <= farther:
            first = len(whole.held) - 1
            _append_all(whole, pieces[first : first + REVERSED][::-1])
        history = whole.only(range(len(whole.held)))
        _append_all(history, pieces[len(whole.held) - 1 : farther][::-1])
        history.append(pieces[place - 2])
        moved[place] = history.prefill(pieces[place - 1])
    return moved


def _append_all(loop: AgentLoop, pieces: Sequence[Image]) -> None:
    for piece in pieces:
        loop.append(piece)


def _mean(several: Sequence[KV]) -> KV:
    """Returns the mean of several prefills, in float32, rounded to their type once."""
    mean = {}
    for name, value in several[0].items():
        total = sum(np.asarray(kv[name], np.float32) for kv in several)
        mean[name] = np.asarray(total / np.float32(len(several))).astype(np.asarray(value).dtype)
    return mean
