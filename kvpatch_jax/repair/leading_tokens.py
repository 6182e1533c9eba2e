"""Repairs that recompute the first tokens of every chunk: EPIC and MPIC, attention sinks, VLCache's schedules."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ..backbone import Backbone
from ..errors import InputError
from .recomputation import Recompute, padded_count, recompute_bytes
from .repair_budget import NOTHING, RepairBudget
from .repaired import Repaired, method, untouched
from .spliced_cache import SplicedCache

SINK_TOKENS = 4
"""Tokens that StreamingLLM (Xiao et al. 2024) keeps as attention sinks."""


@method()
def first_k(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Recomputes the first tokens of every chunk in context, at every layer.

    A chunk that is prefilled alone has its attention sink there. Source: EPIC (Hu et al. 2025, LegoLink) and its
    multimodal form MPIC-k (Zhao et al. 2025, section 4.2): k tokens at the beginning of each image, and all new text,
    in one forward.

    Args:
      budget: `tokens` is k, of each chunk (shorter ones are recomputed whole); a share is of each chunk.
    """
    return recompute_first(backbone, splice, first_counts(backbone, splice, budget))


@method()
def attention_sink(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = NOTHING) -> Repaired:
    """Recomputes the first 4 tokens of every chunk in context, whatever the budget.

    A chunk that was prefilled alone made sinks of them, which they are no longer behind other chunks. Source:
    StreamingLLM's number of sinks (Xiao et al. 2024); Kamera Table 5 compares with "a uniform attention sink".
    """
    smallest = min(last - first for first, last in splice.parts)
    return recompute_first(backbone, splice, [[min(SINK_TOKENS, smallest)]] * len(splice.parts))


@method()
def vlcache(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget,
    *,
    schedules: Mapping[float, Sequence[float]] | None = None,
) -> Repaired:
    """Recomputes the first tokens of every chunk in context, with a share for each layer.

    Tokens that a layer does not need are dropped below it: regions of computation are contiguous, and shrink with
    depth. Source: VLCache (Qin et al. 2025, section 4), with a schedule its dynamic ratio (`best_schedule` computes
    it), with one share its static ratio. As there, ⌊share · T⌋ tokens of a chunk of T.

    Args:
      schedules: shares by layer, not increasing with depth, in place of a share of all layers, by that share.
    """
    layers, share = backbone.layout.layers, budget.share
    if schedules is not None and share not in schedules:
        raise InputError(f"vlcache.budget: got {budget}; expected a share of {sorted(schedules)}")
    if share is None:
        return recompute_first(backbone, splice, first_counts(backbone, splice, budget))
    shares = (share,) * layers if schedules is None else tuple(schedules[share])
    if len(shares) != layers or any(upper > lower for lower, upper in itertools.pairwise((1.0, *shares, 0.0))):
        raise InputError(
            f"vlcache.schedules: got {list(shares)}; expected {layers} shares, none larger than the one below it"
        )
    # A product such as .29 · 100 lies just below the integer that is meant.
    by_chunk = [[int(share * (last - first) + 1e-9) for share in shares] for first, last in splice.parts]
    return recompute_first(backbone, splice, by_chunk)


def recompute_first(backbone: Backbone, splice: SplicedCache, by_chunk: Sequence[Sequence[int]]) -> Repaired:
    """Recomputes the first tokens of every chunk, and all new text; what a layer does not need is dropped below it.

    Args:
      by_chunk: number of tokens for each chunk and layer, not increasing with depth; one number is for all layers.
    """
    layers, T = backbone.layout.layers, splice.slots.shape[1]
    # How many layers need each token: all of them new text.
    depth = np.where(splice.new_text(), layers, 0)
    for (first, last), counts in zip(splice.parts, by_chunk, strict=True):
        counts = np.broadcast_to(np.asarray(counts), (layers,))
        depth[first:last] = (counts[:, None] > np.arange(last - first)).sum(0)
    counts = (depth > np.arange(layers)[:, None]).sum(1).tolist()
    if counts[0] == 0:
        return untouched(backbone.layout, splice)

    order, run = np.argsort(-depth, kind="stable"), Recompute(backbone, splice)
    # Layers whose padded number is the same run in one program.
    for size, group in itertools.groupby(enumerate(counts), lambda item: padded_count(item[1], T)):
        numbers = dict(group)
        if size:
            run.run(min(numbers), max(numbers) + 1, order[: numbers[min(numbers)]], tuple(numbers.values()))
    cached = [count - int(splice.new_text().sum()) for count in counts]
    return run.repaired(recompute_bytes(backbone.layout, splice, cached, inputs=cached[0]))


def first_counts(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> list[list[int]]:
    """Computes the tokens of each chunk: its share, of a prompt at most k tokens, or bytes by its length."""
    counts = []
    for first, last in splice.parts:
        size, amount = last - first, budget
        if budget.tokens is not None and splice.chunks is not None:
            amount = RepairBudget(tokens=min(budget.tokens, size))
        if budget.kv_bytes is not None:
            amount = RepairBudget(kv_bytes=budget.kv_bytes * size // splice.cached_count)
        counts.append([amount.count(backbone.layout, size)])
    return counts
