"""Visits: in which order a session is shown its pieces, and what agents prefill for that without this library.

A trace has contexts of `PIECES` pieces each: three sheets and a page, or a document in four chunks. Its first visit
shows every piece once, context by context, and then goes back to contexts that have left the window. The visits after
it are made over the same store: the very same trace, other orders, and a fork at mid-trace.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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

Prompt = tuple[str, ...]
"""Names of what a prompt consists of, after the lead."""
Run = Callable[[int, int], int]
"""FLOPs of a forward of so many tokens behind so many others."""


def counted_work(
    visit: Visit, tokens: Sequence[int], lead: int, window: int, run: Run, caches: dict[str, set[Prompt]]
) -> dict[str, tuple[int, int]]:
    """Counts the tokens and FLOPs that other ways of running an agent prefill in a visit.

    A prefix cache is as good as can be: it knows every prefix of the visit, or of all visits. MPIC computes a piece
    once, and the first tokens of every piece of the window at each step.

    Args:
      tokens: of each piece. lead: tokens pinned in front.
      caches: prefixes by way, which this adds to; those kept over visits come in as earlier visits left them.
    """
    slow, batched = list(_sliding(visit, window, window)), list(_sliding(visit, window, 2 * window))
    prompts = {
        REPREFILL: slow,
        ONE_BY_ONE: slow,
        ONE_BY_ONE + KEPT: slow,
        BATCHED: batched,
        BATCHED + KEPT: batched,
        PLACEHOLDER: list(_with_placeholders(visit, window)),
    }
    sizes = {str(number): count for number, count in enumerate(tokens)} | {"…": PLACEHOLDER_TOKENS}
    work: dict[str, tuple[int, int]] = {}
    for way, shown in prompts.items():
        seen = caches.setdefault(way, set()) if way.endswith(KEPT) else set()
        work[way] = _prefixed(shown, visit.forked, sizes, lead, run, None if way == REPREFILL else seen)
    work[MPIC] = _mpic(slow, visit.forked, sizes, lead, run, caches.setdefault(MPIC, set()))
    return work


def _prefixed(
    shown: Sequence[Prompt], forked: int, sizes: dict[str, int], lead: int, run: Run, seen: set[Prompt] | None
) -> tuple[int, int]:
    """Counts what prompts compute behind their longest known prefix; None: nothing is known."""
    computed = flops = 0
    for step, prompt in enumerate(shown):
        behind = lead
        for end in range(1, len(prompt) + 1):
            size = sizes[prompt[end - 1]]
            if seen is None or prompt[:end] not in seen:
                # A fork's parent fills the cache; what it computes is not the branch's.
                computed += size if step >= forked else 0
                flops += run(size, behind) if step >= forked else 0
                if seen is not None:
                    seen.add(prompt[:end])
            behind += size
    return computed, flops


def _mpic(
    shown: Sequence[Prompt], forked: int, sizes: dict[str, int], lead: int, run: Run, seen: set[Prompt]
) -> tuple[int, int]:
    computed = flops = 0
    for step, prompt in enumerate(shown):
        work = []
        if prompt[-1:] not in seen:
            seen.add(prompt[-1:])
            work.append((sizes[prompt[-1]], 0))
        behind = lead
        for piece in prompt:
            work.append((round(MPIC_SHARE * sizes[piece]), behind))
            behind += sizes[piece]
        if step >= forked:
            computed += sum(count for count, _ in work)
            flops += sum(run(count, place) for count, place in work)
    return computed, flops


def _sliding(visit: Visit, low: int, high: int) -> Iterator[Prompt]:
    """Yields the prompt of every step: at most `high` pieces; the oldest leave together, down to `low`."""
    pieces: list[str] = []
    for piece in visit.pieces:
        if len(pieces) == high:
            pieces = pieces[high - low + 1 :]
        pieces.append(str(piece))
        yield tuple(pieces)


def _with_placeholders(visit: Visit, window: int) -> Iterator[Prompt]:
    """Yields the prompt of every step: all pieces but the last `window` are placeholders, where they were."""
    for step in range(len(visit.pieces)):
        gone = max(step + 1 - window, 0)
        yield ("…",) * gone + tuple(str(piece) for piece in visit.pieces[gone : step + 1])
