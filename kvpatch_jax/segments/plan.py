"""Plan of a prefill: the stored runs that it reuses, without overlaps, where they save more than their test costs.

Segment reuse (proposal, §3.4, §3.5). Runs that are adjacent here and in the prompt that they were computed in form one
run: the tokens at their common border have the context that they had there.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..backbone import ForwardCosts
from ..errors import ConfigError
from ..utils.kinds import is_whole
from .index import LEAST_SIMILARITY, EqualRun, StoredSpan, ids_digest
from .text import SegmentPrompt

Pieces = tuple[EqualRun, ...]


@dataclasses.dataclass(frozen=True)
class ReuseThresholds:
    """Thresholds of retrieval and of the acceptance test.

    Attributes:
      segment: τ_seg, the least estimated Jaccard similarity of a segment and a stored one.
      context: τ_ctx, the same of their left contexts. The proposal gives no value. At 0 contexts only rank candidates,
        and the test decides.
      halo: h, tokens at each end of a run that are computed from the bottom.
      probes: tokens of each halo that are tested, those nearest the interior; 0: no test. The proposal tests all h,
        which costs more than short segments save.
      epsilon: ε, the largest KL(computed ‖ stored) of a probe that passes, in nats.
      failing: ρ, the share of a run's probes that may fail.

    Raises:
      ConfigError: a threshold out of range.
    """

    segment: float = 0.7
    context: float = 0.0
    halo: int = 8
    probes: int = 2
    epsilon: float = 0.1
    failing: float = 0.0

    def __post_init__(self) -> None:
        shares = LEAST_SIMILARITY <= self.segment <= 1 and 0 <= self.context <= 1 and 0 <= self.failing <= 1
        counts = is_whole(self.probes, 0) and is_whole(self.halo, self.probes)
        if not (shares and counts and 0 <= self.epsilon < math.inf):
            expected = f"segment of {LEAST_SIMILARITY} to 1, shares of 0 to 1, finite nats, and at most `halo` probes"
            raise ConfigError(f"thresholds: got {self}; expected {expected}")


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
    def interior(self) -> tuple[int, int]:
        """First token that is reused, and the one after the last."""
        return self.pieces[0].start + self.halo, self.pieces[-1].stop - self.halo


def plan_runs(
    prompt: SegmentPrompt,
    runs: Sequence[EqualRun],
    stored: Mapping[str, StoredSpan],
    thresholds: ReuseThresholds,
    costs: ForwardCosts,
    reuse_layers: int,
) -> list[PlannedRun]:
    """Chooses among overlapping runs those that reuse most tokens, joins neighbours, and drops what does not pay.

    The last token of a prompt is never reused: its logits are those that are asked for.
    """
    planned = []
    for pieces in _without_overlaps(_chains(runs, stored), len(prompt.ids) - 1):
        # Whether the first piece follows the same tokens as where it was computed.
        first, span = pieces[0], stored[pieces[0].span]
        same = first.start - first.offset == span.start and ids_digest(prompt.ids[: span.start]) == span.prefix
        same = same and np.array_equal(prompt.ids[span.start : first.start], span.ids[: first.offset])
        generation = max(stored[piece.span].generation for piece in pieces)
        exact = same and generation == 0
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
        stop = -1
        for run in sorted(touching):
            # A run that begins inside the last one is a part of what the same span gave.
            if run.start >= stop:
                if run.start > stop:
                    chains.append([])
                chains[-1].append(run)
                stop = run.stop
    return [tuple(chain) for chain in chains]


def _without_overlaps(chains: Sequence[Pieces], last: int) -> list[Pieces]:
    """Picks the longest chain in tokens 0 … last-1, ties by context similarity, and repeats on the rest."""

    def rank(chain: Pieces) -> tuple[int, float, Pieces]:
        context = sum((piece.stop - piece.start) * piece.context_similarity for piece in chain)
        return chain[0].start - chain[-1].stop, -context, chain

    free, picked = np.ones(last, bool), []
    for chain in sorted(chains, key=rank):
        start, stop = chain[0].start, min(chain[-1].stop, last)
        edges = np.flatnonzero(np.diff(free[start:stop].astype(np.int8), prepend=0, append=0)) + start
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            inside = [piece for piece in chain if piece.start < end and piece.stop > begin]
            picked.append(tuple(piece.cut(begin, end) for piece in inside))
            free[begin:end] = False
    return sorted(picked)
