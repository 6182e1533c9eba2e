"""Plan of a prefill: the runs of stored tokens that it reuses, without overlaps, and what each would save and cost.

Segment reuse (proposal, §3.4, §3.5). Runs that stood next to each other in one prompt are one run here, too: the tokens
at their common border have the context that they had.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..backbone import ForwardCosts
from .segment_index import EqualRun, StoredSpan, ids_digest
from .segment_options import ReuseThresholds
from .segmentation import SegmentPrompt

Pieces = tuple[EqualRun, ...]


class PlannedRun(NamedTuple):
    """Tokens start … stop-1 of a prompt that stored spans have.

    Attributes:
      pieces: the equal runs that it consists of, in order and without gaps.
      halo: tokens at each end that are computed from the bottom.
      equal_prefix: whether everything in front of it, too, is as it was where it was stored, exactly computed.
      generation: the largest of its pieces'.
    """

    pieces: Pieces
    halo: int
    equal_prefix: bool
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


def plan_runs(
    prompt: SegmentPrompt,
    found: Sequence[EqualRun],
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
    for pieces in _without_overlaps(_chains(found, stored), first, len(prompt.ids) - 1):
        equal = thresholds.equal_prefix and _same_prefix(prompt, pieces[0], stored)
        equal = equal and all(stored[piece.span].generation == 0 for piece in pieces)
        generation = max(stored[piece.span].generation for piece in pieces)
        run = PlannedRun(pieces, 0 if equal else thresholds.halo, equal, generation)
        begin, end = run.interior
        if end > begin and (not thresholds.worthwhile or _pays(run, thresholds, costs, reuse_layers)):
            planned.append(run)
    return planned


def run_savings(costs: ForwardCosts, start: int, stop: int, reuse_layers: int) -> int:
    """Computes the FLOPs of tokens start … stop-1 in the lowest layers, which are saved where these are reused."""
    tokens = stop - start
    return costs.flops(tokens, start) - costs.flops(tokens, start, reuse_layers)


def run_test_cost(costs: ForwardCosts, run: PlannedRun, thresholds: ReuseThresholds, reuse_layers: int) -> int:
    """Computes the FLOPs of a run's acceptance test, if it passes.

    Probes run through the upper layers once more, with their stored residual, and logits of both are computed. The
    forward of the reference is the halo's own, which is computed in any case.
    """
    if not thresholds.test or run.equal_prefix:
        return 0
    probes, (begin, end) = thresholds.probes, run.interior
    upper = costs.flops(probes, begin - probes, reuse_layers) + costs.flops(probes, end, reuse_layers)
    return upper + 4 * probes * costs.logit


def _pays(run: PlannedRun, thresholds: ReuseThresholds, costs: ForwardCosts, reuse_layers: int) -> bool:
    return run_savings(costs, *run.interior, reuse_layers) > run_test_cost(costs, run, thresholds, reuse_layers)


def _chains(runs: Sequence[EqualRun], stored: Mapping[str, StoredSpan]) -> list[Pieces]:
    """Joins runs that touch here and touched in the prompt that both were computed in."""
    diagonals: dict[tuple[str, int], list[EqualRun]] = {}
    for run in runs:
        span = stored[run.span]
        diagonals.setdefault((span.donor, span.start + run.offset - run.start), []).append(run)

    chains: list[list[EqualRun]] = []
    for _, touching in sorted(diagonals.items()):
        last = None
        for run in sorted(touching):
            if last is not None and run.start < last.stop:
                # A part of what the same span has already given.
                continue
            if last is None or run.start > last.stop:
                chains.append([])
            chains[-1].append(run)
            last = run
    return [tuple(chain) for chain in chains]


def _without_overlaps(chains: Sequence[Pieces], first: int, last: int) -> list[Pieces]:
    """Takes the longest chain (of equals, that with the most similar context), then of each next one what is left.

    Args:
      first, last: tokens outside of first … last-1 are taken.
    """

    def worth(chain: Pieces) -> tuple[int, float, Pieces]:
        context = sum(piece.length * piece.context_similarity for piece in chain)
        return chain[0].start - chain[-1].stop, -context, chain

    free = np.zeros(last, bool)
    free[first:] = True
    taken = []
    for chain in sorted(chains, key=worth):
        start, stop = chain[0].start, min(chain[-1].stop, last)
        edges = np.flatnonzero(np.diff(free[start:stop].astype(np.int8), prepend=0, append=0)) + start
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            taken.append(_cut(chain, begin, end))
            free[begin:end] = False
    return sorted(taken)


def _cut(chain: Pieces, begin: int, end: int) -> Pieces:
    """Cuts a chain to tokens begin … end-1."""
    pieces = []
    for piece in chain:
        start, stop = max(piece.start, begin), min(piece.stop, end)
        if stop > start:
            pieces.append(piece._replace(start=start, stop=stop, offset=piece.offset + start - piece.start))
    return tuple(pieces)


def _same_prefix(prompt: SegmentPrompt, run: EqualRun, stored: Mapping[str, StoredSpan]) -> bool:
    """Returns whether a run stands where it was computed, behind the same tokens."""
    span = stored[run.span]
    begins = run.start - run.offset
    if begins != span.start or ids_digest(prompt.ids[:begins]) != span.prefix:
        return False
    return np.array_equal(prompt.ids[begins : run.start], span.ids[: run.offset])
