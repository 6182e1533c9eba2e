"""Ways of serving that repair nothing, or everything: what every repair lies between."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone
from ..core import split_transition, to_engine
from ..errors import InputError
from .recomputation import LayerSet, all_tokens, begin, new_text_alone, repair_everywhere, run_layers
from .repair_budget import NUMBER_BYTES, RepairBudget, fraction_to_count, kv_bytes
from .repaired import RepairBytes, Repaired, counted, input_bytes, untouched, with_flops
from .spliced_cache import SplicedCache, check_splice, required, with_front, write_slots

NOTHING, ALL = RepairBudget(tokens=0), RepairBudget(share=1.0)


@counted
def blind(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = NOTHING) -> Repaired:
    """Returns the cache as it was spliced; new text of a prompt is computed over it.

    Full reuse, as MPIC (section 2.2) and Prompt Cache call it, in one forward.
    """
    check_splice(backbone.layout, splice, hybrid=True)
    counts = RepairBudget.of(budget).counts(backbone.layout, splice.cached_count, "blind")
    if any(counts):
        raise InputError(f"blind.budget: got {budget}; expected 0")

    return new_text_alone(backbone, splice)


@counted
def full_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = ALL) -> Repaired:
    """Recomputes everything, with nothing kept: the tower, what precedes the chunk, and the chunk.

    `splice.front` and `splice.tower_flops` say how much that is; where they are not given, it is the chunk alone. Of a
    hybrid model everything is prefilled, from `splice.front` on.
    """
    repaired = _reprefill(backbone, splice, budget, "full_reprefill", RepairBytes())
    return dataclasses.replace(repaired, tower_flops=splice.tower_flops)


@counted
def encoder_cached_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = ALL) -> Repaired:
    """Recomputes everything in the decoder, from image features that were kept ("w/o ViT" in VLCache, Table 1)."""
    tokens = splice.cached_count + (0 if splice.front is None else splice.front.embeddings.shape[1])
    inputs = input_bytes(splice) * tokens
    return _reprefill(backbone, splice, budget, "encoder_cached_reprefill", RepairBytes(inputs=inputs, moved=inputs))


@counted
def prefix_caching(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = ALL) -> Repaired:
    """Recomputes all tokens behind the longest cached prefix.

    Of a whole prompt, the prefix is its first chunk, if the prompt begins with it. Of one chunk behind others, it is
    what precedes the chunk, whose KV is then right and counts in no cost.
    """
    _check_all(backbone, splice, budget, "prefix_caching")
    first, last = splice.parts[0] if splice.chunks is not None else (0, 0)
    prefix = last if first == 0 else 0
    index = all_tokens(splice, np.arange(prefix, splice.slots.shape[1]))
    size = kv_bytes(backbone.layout, prefix)
    repaired = repair_everywhere(backbone, splice, index, RepairBytes(canonical=size, moved=size))
    return dataclasses.replace(repaired, tower_flops=splice.tower_flops)


def reprefill_flops(backbone: Backbone, splice: SplicedCache) -> float:
    """Counts the FLOPs of running one row's tokens again where they are, as `Repaired.flops` does; none are run.

    Of a hybrid model, which runs no single tokens, those of a prefill behind what precedes the chunk.
    """
    if backbone.layout.parts:
        return backbone.forward_costs.flops(splice.slots.shape[1], int(splice.slots[0, 0]))
    nothing = dataclasses.replace(untouched(backbone.layout, splice), bytes=RepairBytes())
    everything = all_tokens(splice, np.arange(splice.slots.shape[1]))

    def serve(splice: SplicedCache) -> Repaired:
        return repair_everywhere(backbone, splice, everything, RepairBytes())

    return with_flops(nothing, serve, splice, backbone, "reprefill").flops


@counted
def layer_reprefill(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = 1.0, *, boundary: int | None = None
) -> Repaired:
    """Recomputes the deep layers of all tokens in context, from the residual that entered the lowest of them alone.

    Layers below keep the canonical's KV; of the layers above no KV is kept, but the residual. Kamera App. C.3, Table 8
    ("layer re-prefill"). A share is of the layers, the deepest ones, rounded half up; 0 returns the blind cache.

    Args:
      splice: of one chunk, with `hidden` at the boundary layer.
      boundary: the lowest layer that is run again, in place of the budget's.

    Raises:
      InputError: the boundary is no layer.
    """
    layout = backbone.layout
    check_splice(layout, splice)
    share = RepairBudget.of(budget).share
    if share is None or splice.chunks is not None:
        found = f"{budget} and chunks {splice.chunks}"
        raise InputError(f"layer_reprefill: got {found}; expected a share of the layers, and a splice of one chunk")
    if boundary is None:
        boundary = layout.layers - fraction_to_count(share, layout.layers)
    if not 0 <= boundary <= layout.layers:
        raise InputError(f"layer_reprefill.boundary: got {boundary}; expected 0 to {layout.layers}")
    if boundary == layout.layers:
        return untouched(layout, splice)

    residual = splice.tokens.embeddings
    if boundary:
        residuals = required(splice, "hidden", "layer_reprefill", f"the residual entering layer {boundary}")
        if boundary not in residuals:
            raise InputError(
                f"layer_reprefill.hidden: got layers {sorted(residuals)}; expected one of layer {boundary}"
            )
        residual = residuals[boundary]

    run = begin(layout.layers, splice)._replace(residual=residual)
    everything = all_tokens(splice, np.arange(splice.slots.shape[1]))
    run = run_layers(backbone, splice, run, LayerSet(boundary, layout.layers, everything))
    lower = kv_bytes(layout, splice.cached_count) // layout.layers * boundary
    # Embeddings come with what layers take of them deeper; a residual has taken it.
    unit = input_bytes(splice) if boundary == 0 else NUMBER_BYTES * residual.shape[-1]
    inputs = unit * splice.cached_count
    return Repaired(run.cache, run.chosen, RepairBytes(canonical=lower, inputs=inputs, moved=lower + inputs))


def _check_all(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, method: str, hybrid: bool = False
) -> None:
    check_splice(backbone.layout, splice, hybrid=hybrid)
    budget = RepairBudget.of(budget)
    if budget.share != 1.0 and budget.tokens != splice.cached_count:
        raise InputError(f"{method}.budget: got {budget}; expected all tokens, RepairBudget(share=1.0)")


def _reprefill(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, method: str, bytes: RepairBytes
) -> Repaired:
    """Recomputes all tokens, those in front of them too where the splice has them."""
    layout = backbone.layout
    _check_all(backbone, splice, budget, method, hybrid=bool(layout.parts))
    if layout.parts:
        return _prefilled(backbone, splice, method, bytes)
    extended = splice if splice.front is None else with_front(splice, splice.front)
    everything = all_tokens(extended, np.arange(extended.slots.shape[1]))
    repaired = repair_everywhere(backbone, extended, everything, bytes)
    # What precedes the chunk counts in no token-layer.
    return dataclasses.replace(repaired, chosen=repaired.chosen[:, :, -splice.slots.shape[1] :])


def _prefilled(backbone: Backbone, splice: SplicedCache, method: str, bytes: RepairBytes) -> Repaired:
    """Prefills a hybrid's sequence from its first token, as the cache has one transition of all tokens."""
    front = required(splice, "front", method, "the tokens in front of a hybrid model's chunk, in the first slots")
    extended, layout = with_front(splice, front), backbone.layout
    kv = dict(to_engine(layout, backbone.prefill(extended.tokens).kv, extended.tokens.positions, 0))
    values, transition = split_transition(kv)
    cache = {name: splice.cache[name] for name in values}
    cache = write_slots(cache, extended.slots, values, jnp.ones(extended.slots.shape, bool))
    chosen = jnp.ones((layout.layers, *splice.slots.shape), bool)
    return Repaired({**cache, **(transition or {})}, chosen, bytes)
