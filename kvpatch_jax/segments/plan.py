"""Plan of a prefill: the stored runs that it reuses, without overlaps, where they save more than their test costs.

Segment reuse (proposal, §3.4, §3.5). Runs that are adjacent here and in the prompt that they were computed in form one
run: the tokens at their common border have the context that they had there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..backbone import ForwardCosts
from .index import EqualRun, StoredSpan, ids_digest
from .options import ReuseThresholds
from .text import SegmentPrompt

Pieces = tuple[EqualRun, ...]


class PlannedRun(NamedTuple):
    """Tokens of a prompt that stored spans have.

    Attributes:
      pieces: the equal runs that it consists of, in order and without gaps.
      halo: tokens at each end that are computed from the bottom.
      generation: reuses behind KV that is computed after this run, which is one of them. 0: the run's KV is exact,
        because it was computed exactly behind the same tokens; it needs neither halo nor test.
    """

    pieces: Pieces
    halo: int
    generation: int

    @property
    def start(self) -> int:
        """First token."""
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        """Token after the last."""
        return self.pieces[-1].stop

    @property
    def interior(self) -> tuple[int, int]:
        """First token that is reused, and the one after the last."""
        return self.start + self.halo, self.stop - self.halo

    @property
    def exact(self) -> bool:
        """Whether its KV is what a prefill computes."""
        return self.generation == 0


def plan_runs(
    prompt: SegmentPrompt,
    runs: Sequence[EqualRun],
    stored: Mapping[str, StoredSpan],
    thresholds: ReuseThresholds,
    costs: ForwardCosts,
    reuse_layers: int,
    first: int = 0,
) -> list[PlannedRun]:
    """Chooses among overlapping runs those that reuse most tokens, joins neighbours, and drops what does not pay.

    The last token of a prompt is never reused: its logits are those that are asked for.

    Args:
      first: tokens in front that are cached already.
    """
    planned = []
    for pieces in _without_overlaps(_chains(runs, stored), first, len(prompt.ids) - 1):
        generation = max(stored[piece.span].generation for piece in pieces)
        exact = generation == 0 and _same_prefix(prompt, pieces[0], stored[pieces[0].span])
        run = PlannedRun(pieces, 0 if exact else thresholds.halo, 0 if exact else generation + 1)
        begin, end = run.interior
        if end <= begin:
            continue

        # The lower layers of the interior, against probes in the upper layers and logits of both sides. The forward of
        # the reference is the halo's own.
        saved = costs.flops(end - begin, begin) - costs.flops(end - begin, begin, reuse_layers)
        probes = 0 if exact else thresholds.probes
        upper = costs.flops(probes, begin - probes, reuse_layers) + costs.flops(probes, end, reuse_layers)
        if saved > upper + 4 * probes * costs.logit:
            planned.append(run)
    return planned


def _chains(runs: Sequence[EqualRun], stored: Mapping[str, StoredSpan]) -> list[Pieces]:
    """Joins runs that are adjacent here and in the prompt that they were computed in."""
    diagonals: dict[tuple[str, int], list[EqualRun]] = {}
    for run in runs:
        span = stored[run.span]
        diagonals.setdefault((span.donor, span.start + run.offset - run.start), []).append(run)

    chains: list[list[EqualRun]] = []
    for _, touching in sorted(diagonals.items()):
        stop = None
        for run in sorted(touching):
            # A run that begins inside the last one is a part of what the same span gave.
            if stop is None or run.start > stop:
                chains.append([])
            if stop is None or run.start >= stop:
                chains[-1].append(run)
                stop = run.stop
    return [tuple(chain) for chain in chains]


def _without_overlaps(chains: Sequence[Pieces], first: int, last: int) -> list[Pieces]:
    """Picks the longest chain in tokens first … last-1, ties by context similarity, and repeats on the rest."""

    def rank(chain: Pieces) -> tuple[int, float, Pieces]:
        context = sum(piece.length * piece.context_similarity for piece in chain)
        return chain[0].start - chain[-1].stop, -context, chain

    free = np.zeros(last, bool)
    free[first:] = True
    picked = []
    for chain in sorted(chains, key=rank):
        start, stop = chain[0].start, min(chain[-1].stop, last)
        edges = np.flatnonzero(np.diff(free[start:stop].astype(np.int8), prepend=0, append=0)) + start
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            picked.append(_cut(chain, begin, end))
            free[begin:end] = False
    return sorted(picked)


def _cut(chain: Pieces, begin: int, end: int) -> Pieces:
    """Cuts a chain to tokens begin … end-1."""
    pieces = []
    for piece in chain:
        start, stop = max(piece.start, begin), min(piece.stop, end)
        if stop > start:
            pieces.append(piece._replace(start=start, stop=stop, offset=piece.offset + start - piece.start))
    return tuple(pieces)


def _same_prefix(prompt: SegmentPrompt, run: EqualRun, span: StoredSpan) -> bool:
    """Returns whether a run follows the same tokens as where it was computed."""
    begin = run.start - run.offset
    same = begin == span.start and ids_digest(prompt.ids[:begin]) == span.prefix
    return same and np.array_equal(prompt.ids[begin : run.start], span.ids[: run.offset])
