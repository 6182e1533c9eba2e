"""Repairs that recompute the first tokens of every chunk: EPIC and MPIC, attention sinks, VLCache's schedules."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone
from ..core import fold, to_engine, transition_of
from ..errors import InputError
from .recomputation import all_tokens, repair_by_layer
from .repair_budget import RepairBudget, kv_bytes
from .repaired import Repaired, blind_bytes, counted, engine_written, input_bytes, recompute_bytes, untouched
from .spliced_cache import SplicedCache, check_splice, required

SINK_TOKENS = 4
"""Tokens that StreamingLLM (Xiao et al. 2024) keeps as attention sinks."""


@counted
def first_k(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Recomputes the first tokens of every chunk in context, at every layer.

    A chunk that is prefilled alone has its attention sink there. Source: EPIC (Hu et al. 2025, LegoLink) and its
    multimodal form MPIC-k (Zhao et al. 2025, section 4.2): k tokens at the beginning of each image, and all new text,
    in one forward.

    Of a hybrid model the first tokens of one chunk run behind what precedes it, and the others stay as they are
    behind the first ones alone, with a transition of their own, which is kept beside the canonical's.

    Args:
      budget: `tokens` is k, of each chunk (shorter ones are recomputed whole); a share is of each chunk.

    Returns:
      The repaired cache, the tokens rewritten [L,B,T], and the last token's logits if it is new text.
    """
    if backbone.layout.parts:
        return _first_of_hybrid(backbone, splice, RepairBudget.of(budget))
    return _first(backbone, splice, RepairBudget.of(budget), "first_k")


def _first_of_hybrid(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> Repaired:
    """Runs the first tokens of a hybrid's chunk in context, and composes what the others leave alone behind them."""
    layout, tokens = backbone.layout, splice.slots.shape[1]
    check_splice(layout, splice, hybrid=True)
    count = budget.count(layout, tokens, "first_k")
    if splice.chunks is not None or splice.length is not None:
        raise InputError("first_k: got chunks or padding of a hybrid model; expected one whole chunk")
    if count == 0:
        return untouched(layout, splice)
    before = required(splice, "before", "first_k", "the transition of what precedes the chunk")

    # The canonical in two pieces: the rest is prefilled behind the first tokens alone.
    alone = splice.tokens._replace(positions=splice.tokens.positions - splice.tokens.positions.min(1, keepdims=True))
    first, rest = alone.take(0, count), alone.take(count, tokens)
    ahead = dict(to_engine(layout, backbone.prefill(first).kv, first.positions, 0))
    stay = backbone.prefill(rest, ahead).kv if count < tokens else None

    begin = int(splice.slots[0, 0])
    rows = {channel.name: splice.cache[channel.name][:, :, :begin] for channel in layout.token_channels}
    moved = splice.tokens.take(0, count)
    again = dict(to_engine(layout, backbone.prefill(moved, {**rows, **before}).kv, moved.positions, 0))
    pieces = [again]
    if stay is not None:
        pieces.append(dict(to_engine(layout, stay, splice.tokens.take(count, tokens).positions, 0)))
    values = {name: jnp.concatenate([piece[name] for piece in pieces], axis=2) for name in rows}
    values |= fold([transition_of(piece) for piece in pieces])
    transition = kv_bytes(layout, 0) if stay is not None else 0
    inputs, bytes = input_bytes(splice) * count + transition, blind_bytes(layout, splice)
    bytes = bytes._replace(inputs=inputs, moved=bytes.moved + inputs - kv_bytes(layout, count))
    chosen = jnp.broadcast_to(np.arange(tokens) < count, (layout.layers, *splice.slots.shape))
    return dataclasses.replace(engine_written(layout, splice, values, bytes), chosen=chosen)


@counted
def attention_sink(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = 0.0) -> Repaired:
    """Recomputes the first 4 tokens of every chunk in context, whatever the budget.

    A chunk that was prefilled alone made sinks of them, which they are no longer behind other chunks. Source:
    StreamingLLM's number of sinks (Xiao et al. 2024); Kamera Table 5 compares with "a uniform attention sink".
    """
    check_splice(backbone.layout, splice)
    RepairBudget.of(budget)
    smallest = min(last - first for first, last in splice.parts)
    return _first(backbone, splice, RepairBudget(tokens=min(SINK_TOKENS, smallest)), "attention_sink")


@counted
def vlcache(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    schedules: Mapping[float, Sequence[float]] | None = None,
) -> Repaired:
    """Recomputes the first tokens of every chunk in context, with a share for each layer.

    Tokens that a layer does not need are dropped below it: regions of computation are contiguous, and shrink with
    depth. Source: VLCache (Qin et al. 2025, section 4), with a schedule its dynamic ratio (`greedy_schedule` computes
    it), with one share its static ratio. As there, ⌊share · T⌋ tokens of a chunk of T.

    Args:
      schedules: shares by layer in place of a share of all layers, by that share; None: none.

    Raises:
      InputError: there are schedules, and none of the budget's share.
    """
    budget = RepairBudget.of(budget)
    if schedules is not None:
        if budget.share is None or budget.share not in schedules:
            raise InputError(f"vlcache.budget: got {budget}; expected a share of {sorted(schedules)}")
        budget = RepairBudget(by_layer=tuple(schedules[budget.share]))
    return _first(backbone, splice, budget, "vlcache", floor=True)


def _first(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget, method: str, floor: bool = False
) -> Repaired:
    """Recomputes the first tokens of every chunk, as many as the budget says at each layer, and all new text."""
    layout, layers = backbone.layout, backbone.layout.layers
    check_splice(layout, splice)
    by_chunk = [_chunk_counts(backbone, splice, budget, last - first, method, floor) for first, last in splice.parts]
    new = np.flatnonzero(splice.new_text())
    cached = tuple(sum(column) for column in zip(*by_chunk, strict=True))
    counts = tuple(len(new) + count for count in cached)
    if counts[0] == 0:
        return untouched(layout, splice)

    # Tokens in the order in which layers drop them: new text never, and of chunks the later ones first.
    ranked = [(layers, int(token)) for token in new]
    for (first, last), by_layer in zip(splice.parts, by_chunk, strict=True):
        for token in range(first, min(last, first + by_layer[0])):
            ranked.append((sum(count > token - first for count in by_layer), token))
    ranked.sort(key=lambda item: (-item[0], item[1]))
    order = np.array([token for _, token in ranked], np.int32)
    bytes = recompute_bytes(layout, splice, cached, inputs=cached[0])
    return repair_by_layer(backbone, splice, all_tokens(splice, order), counts, bytes)


def _chunk_counts(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget, size: int, method: str, floor: bool
) -> tuple[int, ...]:
    """Computes one chunk's tokens at each layer: its share, of a prompt at most k tokens, or bytes by its length."""
    if budget.tokens is not None and splice.chunks is not None:
        budget = RepairBudget(tokens=min(budget.tokens, size))
    if budget.kv_bytes is not None:
        budget = RepairBudget(kv_bytes=budget.kv_bytes * size // splice.cached_count)
    counts = budget.counts(backbone.layout, size, method)
    shares = budget.by_layer if budget.by_layer is not None else (budget.share,) * len(counts)
    if not floor or shares[0] is None:
        return counts
    # A product such as .29 · 100 lies just below the integer that is meant.
    return tuple(int(share * size + 1e-9) for share in shares if share is not None)
