"""Visits: in which order a session is shown its pieces.

A trace has contexts of `PIECES` pieces each (three legends and a page, or a document in four chunks). Its first visit
shows every piece once, context by context, and then goes back to contexts that have left the window. The visits after
it are made over the same store: the very same trace, other orders, and a fork at mid-trace.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

PIECES = 4
"""Pieces of a context."""
FIRST, SAME, CONTEXTS, SHUFFLED, FORK = (
    "first",
    "same trace",
    "contexts in another order",
    "pieces in another order",
    "fork",
)
VISITS = (FIRST, SAME, CONTEXTS, SHUFFLED, FORK)
OTHER_ORDERS = (CONTEXTS, SHUFFLED, FORK)
"""Visits whose histories the store has not met as a whole."""


class Visit(NamedTuple):
    """One visit.

    Attributes:
      name: one of `VISITS`.
      pieces: the number of the piece of every step.
      forked: the step before which the session forks; what comes before is the parent's, and not counted.
    """

    name: str
    pieces: tuple[int, ...]
    forked: int = 0


def draw_visits(contexts: int, window: int, revisits: int, seed: int) -> list[Visit]:
    """Draws the visits of a trace.

    Args:
      contexts: of the trace; they must not all fit in a window.
      window: chunks that stay. What a session goes back to is never among them.
      revisits: steps of a visit after every piece was shown once, a multiple of `PIECES`.

    Raises:
      ValueError: the window holds all pieces, or no whole number of contexts is revisited.
    """
    count = contexts * PIECES
    if count <= window:
        raise ValueError(
            f"contexts: got {contexts} of {PIECES} pieces; expected more pieces than the window's {window}"
        )
    if revisits % PIECES:
        raise ValueError(f"revisits: got {revisits}; expected a multiple of {PIECES}")

    first = _by_context(random.Random(f"{seed} first"), range(contexts), window, revisits)

    draw = random.Random(f"{seed} contexts")
    permuted = draw.sample(range(contexts), contexts)
    # Of two contexts there is one other order.
    if contexts > 1 and permuted == list(range(contexts)):
        permuted.reverse()
    by_context = _by_context(draw, permuted, window, revisits)

    draw = random.Random(f"{seed} pieces")
    shuffled = draw.sample(range(count), count)
    for _ in range(revisits):
        shuffled.append(draw.choice(_absent(range(count), shuffled, window)))

    # The branch goes back to what its parent goes back to, in another order.
    draw, branch, left = random.Random(f"{seed} fork"), first[:count], first[count:]
    for _ in range(revisits):
        piece = draw.choice(_absent(left, branch, window) or _absent(range(count), branch, window))
        if piece in left:
            left.remove(piece)
        branch.append(piece)

    return [
        Visit(FIRST, tuple(first)),
        Visit(SAME, tuple(first)),
        Visit(CONTEXTS, tuple(by_context)),
        Visit(SHUFFLED, tuple(shuffled)),
        Visit(FORK, tuple(branch), forked=count),
    ]


def _by_context(draw: random.Random, order: Sequence[int], window: int, revisits: int) -> list[int]:
    """Lists every context once in an order, then contexts that have left the window."""
    pieces: list[int] = []
    for context in order:
        pieces += range(context * PIECES, (context + 1) * PIECES)
    for _ in range(revisits // PIECES):
        shown = {piece // PIECES for piece in pieces[-window:]}
        # A window that begins within a context shows all contexts where there are few: then the oldest comes back.
        absent = [context for context in order if context not in shown] or [pieces[-window] // PIECES]
        context = draw.choice(absent)
        pieces += range(context * PIECES, (context + 1) * PIECES)
    return pieces


def _absent(pieces: Sequence[int], before: Sequence[int], window: int) -> list[int]:
    return [piece for piece in pieces if piece not in before[-window:]]
