"""Stored prefills of a batch of windows: each piece's KV as it was computed behind pieces of other windows.

The likenesses are those under which a store finds a prefill again (`kvpatch_jax.window.stored_prefill`). "near":
behind the same lead, unrelated pieces and the piece that is nearest here. "mean": the mean of several of those, which
share the nearest piece alone.

A history has as many pieces as precede the piece here, unrelated ones being those that were in the window before. The
first piece, whose nearest is the lead, has no such history: behind the lead alone it would be exact. It is served as it
was computed behind the lead and an unrelated piece.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from kvpatch_jax.window import Likeness

from ..probes.window.image_sequence import KV, AgentLoop
from .window_sources import WindowBatch

HISTORIES = 3
"""Histories that a mean is taken over."""


LIKENESSES: tuple[Likeness, ...] = tuple(reversed(get_args(Likeness)))
"""The likenesses that windows are measured in, the least first."""


class StoredPieces(NamedTuple):
    """One likeness: phase-free KV of every piece, by its place behind the lead (place 0), and what it is named."""

    likeness: Likeness
    kv: Mapping[int, KV]


def stored_pieces(windows: WindowBatch, room: int) -> list[StoredPieces]:
    """Prefills every piece of a batch behind other histories.

    Args:
      room: tokens that a history is padded to, so that all of them run one program.
    """
    places = range(1, len(windows.pieces) + 1)
    fronts = [_unrelated(windows, room, number) for number in range(HISTORIES)]
    near, mean = dict[int, KV](), dict[int, KV]()
    for place in places:
        piece = windows.pieces[place - 1]
        if place == 1:
            near[place] = mean[place] = fronts[0].only(range(2)).prefill(piece)
            continue

        nearest = windows.pieces[place - 2]
        several = []
        for front in fronts:
            history = front.only(range(1 + max(1, place - 2)))
            history.append(nearest)
            several.append(history.prefill(piece))
        near[place], mean[place] = several[0], _mean(several)

    return [StoredPieces("near", near), StoredPieces("mean", mean)]


def _unrelated(windows: WindowBatch, room: int, number: int) -> AgentLoop:
    """Returns a window of unrelated pieces, each history's in another order, from another one on."""
    count = max(1, len(windows.pieces) - 1)
    older = windows.older
    first = number * max(1, len(older) // HISTORIES)
    loop = AgentLoop(windows.backbone, room, windows.lead)
    for place in range(count):
        loop.append(older[(first + place) % len(older)])
    return loop


def _mean(several: Sequence[KV]) -> KV:
    """Returns the mean of several prefills, in float32, rounded to their type once."""
    mean = {}
    for name, value in several[0].items():
        total = sum(np.asarray(kv[name], np.float32) for kv in several)
        mean[name] = np.asarray(total / np.float32(len(several))).astype(np.asarray(value).dtype)
    return mean
