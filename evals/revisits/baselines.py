"""Tokens and FLOPs that agents prefill without this library. Questions and the lead are left out, as everywhere.

A prefix cache is as good as one can be: it knows every prefix that was ever computed, "unbounded" in this visit, or
"kept over visits" as our store is, in all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .visits import Visit
from .ways import BATCHED, KEPT_OVER_VISITS, ONE_BY_ONE, PLACEHOLDER, REPREFILL, UNBOUNDED

PLACEHOLDER_TOKENS = 3
"""Of the text that takes the place of an old image."""
Prompt = tuple[str, ...]
"""Names of what a prompt consists of, after the lead."""
Prefixes = set[Prompt]


class PrefilledWork(NamedTuple):
    """What a baseline prefilled in a visit."""

    tokens: int
    flops: int


def baselines(
    visit: Visit,
    tokens: Sequence[int],
    lead: int,
    window: int,
    run: Callable[[int, int], int],
    caches: dict[str, Prefixes],
) -> dict[str, PrefilledWork]:
    """Counts what every baseline prefills in a visit.

    Args:
      tokens: of each piece.
      lead: tokens pinned in front.
      run: FLOPs of a forward of so many tokens behind so many others.
      caches: prefixes by way, which this adds to; those kept over visits come in as earlier visits left them.
    """
    one, batched = list(_sliding(visit, window, window)), list(_sliding(visit, window, 2 * window))
    prompts = {
        REPREFILL: one,
        ONE_BY_ONE + UNBOUNDED: one,
        ONE_BY_ONE + KEPT_OVER_VISITS: one,
        BATCHED + UNBOUNDED: batched,
        BATCHED + KEPT_OVER_VISITS: batched,
        PLACEHOLDER: list(_with_placeholders(visit, window)),
    }
    sizes = {str(number): count for number, count in enumerate(tokens)} | {"…": PLACEHOLDER_TOKENS}
    work = {}
    for way, shown in prompts.items():
        seen = caches.setdefault(way, set()) if way.endswith(KEPT_OVER_VISITS) else set()
        computed = flops = 0
        for step, prompt in enumerate(shown):
            # A fork's parent has filled the cache; what it computed is not the branch's.
            counted, behind = step >= visit.forked, lead
            for end in range(1, len(prompt) + 1):
                size = sizes[prompt[end - 1]]
                if way == REPREFILL or prompt[:end] not in seen:
                    computed += size if counted else 0
                    flops += run(size, behind) if counted else 0
                    seen.add(prompt[:end])
                behind += size
        work[way] = PrefilledWork(computed, flops)
    return work


def _sliding(visit: Visit, low: int, high: int) -> Iterator[Prompt]:
    """Yields the prompt of every step: at most `high` pieces; the oldest leave together, down to `low`."""
    held: list[str] = []
    for piece in visit.pieces:
        if len(held) == high:
            held = held[high - low + 1 :]
        held.append(str(piece))
        yield tuple(held)


def _with_placeholders(visit: Visit, window: int) -> Iterator[Prompt]:
    """Yields the prompt of every step: all pieces but the last `window` are placeholders, where they were."""
    for step in range(len(visit.pieces)):
        gone = max(step + 1 - window, 0)
        yield ("…",) * gone + tuple(str(piece) for piece in visit.pieces[gone : step + 1])
