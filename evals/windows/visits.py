"""Visits: in which order a session is shown its pieces, and what agents prefill for that without this library.

A trace has contexts of `PIECES` pieces each: three sheets and a page. Its first visit shows every piece once, context
by context, and then goes back to contexts that have left the window. The visits after it are made over the same store:
the very same trace, other orders, and a fork at mid-trace.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..loops.costs import PrefixCache, tokens
from ..loops.episodes import PromptPiece, Shown

PIECES = 4
FIRST, SAME, CONTEXTS, SHUFFLED, FORK = "first", "same", "contexts", "pieces", "fork"
OTHER_ORDERS = (CONTEXTS, SHUFFLED, FORK)
"""Visits whose histories the store has not met as a whole."""
REPREFILL, ONE_BY_ONE, BATCHED = "re-prefill of the window", "prefix cache, one leaves", "prefix cache, batched"
KEPT, PLACEHOLDER, MPIC = ", kept over visits", "placeholder in place", "MPIC, 15 % of each chunk"
PLACEHOLDER_TOKENS, MPIC_SHARE = 3, 0.15


class Visit(NamedTuple):
    """One visit.

    Attributes:
      pieces: the number of the piece of every step.
      forked: the step before which the session forks; what comes before is the parent's, and not counted.
    """

    name: str
    pieces: tuple[int, ...]
    forked: int = 0


def draw_visits(contexts: int, window: int, revisits: int, seed: int) -> list[Visit]:
    """Draws the visits of a trace.

    Args:
      window: chunks that stay; not all contexts fit. What a session goes back to is never among them.
      revisits: steps of a visit after every piece was shown once, a multiple of `PIECES`.
    """
    count = contexts * PIECES
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


# ---------------------------------------------------------------------------------------------------- other ways

Pieces = tuple[PromptPiece, ...]
"""What a prompt consists of, after the lead."""


def counted_work(
    visit: Visit,
    sizes: Sequence[int],
    lead: int,
    window: int,
    flops: Callable[[int, int], int],
    caches: dict[str, PrefixCache],
) -> dict[str, tuple[int, int]]:
    """Counts the tokens and FLOPs that other ways of running an agent prefill in a visit.

    A prefix cache is as good as can be: it knows every prefix of the visit, or of all visits. MPIC computes a piece
    once, and the first tokens of every piece of the window at each step.

    Args:
      sizes: tokens of each piece. lead: tokens pinned in front.
      flops: FLOPs of a forward of so many tokens behind so many others.
      caches: prefixes by way, which this adds to; those kept over visits come in as earlier visits left them.
    """
    pieces = [PromptPiece(str(number), Shown(str(number), sizes[number])) for number in visit.pieces]
    slow, batched = _sliding(pieces, window, window), _sliding(pieces, window, 2 * window)
    prompts = {
        ONE_BY_ONE: slow,
        ONE_BY_ONE + KEPT: slow,
        BATCHED: batched,
        BATCHED + KEPT: batched,
        PLACEHOLDER: _with_placeholders(pieces, window),
    }
    steps = {REPREFILL: [_forwards(prompt, prompt, lead) for prompt in slow]}
    for way, shown in prompts.items():
        cache = caches.setdefault(way, PrefixCache()) if way.endswith(KEPT) else PrefixCache()
        steps[way] = [_forwards(prompt, cache.computed(prompt), lead) for prompt in shown]
    # A piece's canonical is computed alone, behind nothing.
    canonicals, steps[MPIC] = caches.setdefault(MPIC, PrefixCache()), []
    for prompt in slow:
        alone = _forwards(prompt[-1:], canonicals.computed(prompt[-1:]), 0)
        first = [(round(MPIC_SHARE * size), behind) for size, behind in _forwards(prompt, prompt, lead)]
        steps[MPIC].append([*alone, *first])

    work: dict[str, tuple[int, int]] = {}
    for way, forwards in steps.items():
        # What a fork's parent computes is not the branch's.
        counted = [*itertools.chain.from_iterable(forwards[visit.forked :])]
        work[way] = sum(size for size, _ in counted), sum(itertools.starmap(flops, counted))
    return work


def _forwards(prompt: Pieces, computed: Pieces, lead: int) -> list[tuple[int, int]]:
    """Lists the forwards of a prompt's last pieces: tokens of each, and of all in front of it."""
    sizes = [piece.shown.tokens for piece in computed]
    behind = itertools.accumulate(sizes, initial=lead + tokens(prompt) - sum(sizes))
    return list(zip(sizes, behind, strict=False))


def _sliding(pieces: Sequence[PromptPiece], low: int, high: int) -> list[Pieces]:
    """Lists the prompt of every step: at most `high` pieces; the oldest leave together, down to `low`."""
    prompts, shown = [], list[PromptPiece]()
    for piece in pieces:
        if len(shown) == high:
            shown = shown[high - low + 1 :]
        shown.append(piece)
        prompts.append(tuple(shown))
    return prompts


def _with_placeholders(pieces: Sequence[PromptPiece], window: int) -> list[Pieces]:
    """Lists the prompt of every step: all pieces but the last `window` are placeholders, where they were."""
    placeholder = PromptPiece("…", Shown("…", PLACEHOLDER_TOKENS))
    prompts = []
    for end in range(1, len(pieces) + 1):
        gone = max(end - window, 0)
        prompts.append((placeholder,) * gone + tuple(pieces[gone:end]))
    return prompts
