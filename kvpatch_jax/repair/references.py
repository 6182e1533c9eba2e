"""Ways of serving that repair nothing, or everything: what every repair lies between."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone
from ..core import split_transition, to_engine
from ..errors import InputError
from .recomputation import Recompute, new_text_alone, recompute_everything
from .repair_budget import ALL, NOTHING, NUMBER_BYTES, RepairBudget, kv_bytes
from .repaired import RepairBytes, Repaired, flops_counter, input_bytes, method, untouched
from .spliced_cache import SplicedCache, check_rows, required, with_front, write_slots


@method(hybrid=True)
def blind(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = NOTHING) -> Repaired:
    """Returns the cache as it was spliced; new text of a prompt is computed over it.

    Full reuse, as MPIC (section 2.2) and Prompt Cache call it, in one forward.
    """
    expect_nothing(backbone, splice, budget)
    return new_text_alone(backbone, splice)


@method(hybrid=True)
def full_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = ALL) -> Repaired:
    """Recomputes everything in the decoder, with nothing kept: what precedes the chunk (`splice.front`), and the chunk.

    FLOPs of encoding images again are not counted. A hybrid model is prefilled from its first token.
    """
    return _reprefill(backbone, splice, budget, RepairBytes())


@method(hybrid=True)
def encoder_cached_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = ALL) -> Repaired:
    """Recomputes everything from image features that were kept ("w/o ViT" in VLCache, Table 1)."""
    tokens = splice.cached_count + (0 if splice.front is None else splice.front.embeddings.shape[1])
    inputs = input_bytes(splice) * tokens
    return _reprefill(backbone, splice, budget, RepairBytes(inputs=inputs, moved=inputs))


def _reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget, bytes: RepairBytes) -> Repaired:
    """Recomputes all tokens, and what precedes them where the splice has it."""
    _expect_all(splice, budget)
    layout = backbone.layout
    if not layout.parts:
        check_rows(layout)
        extended = splice if splice.front is None else with_front(splice, splice.front)
        repaired = recompute_everything(backbone, extended, bytes)
        # What precedes the chunk counts in no token-layer.
        return dataclasses.replace(repaired, chosen=repaired.chosen[:, :, -splice.slots.shape[1] :])

    # The cache of a hybrid has one transition of all tokens: prefill from the first one.
    extended = with_front(splice, required(splice, "front"))
    kv = dict(to_engine(layout, backbone.prefill(extended.tokens).kv, extended.tokens.positions, 0))
    values, transition = split_transition(kv)
    cache = {name: splice.cache[name] for name in values}
    cache = write_slots(cache, extended.slots, values, jnp.ones(extended.slots.shape, bool))
    chosen = jnp.ones((layout.layers, *splice.slots.shape), bool)
    return Repaired({**cache, **(transition or {})}, chosen, bytes)


@method()
def prefix_caching(backbone: Backbone, splice: SplicedCache, budget: RepairBudget = ALL) -> Repaired:
    """Recomputes all tokens behind the longest cached prefix.

    Of a whole prompt, the prefix is its first chunk, if the prompt begins with it. Of one chunk behind others, it is
    what precedes the chunk, whose KV is then right and counts in no cost.
    """
    _expect_all(splice, budget)
    first, last = splice.parts[0] if splice.chunks is not None else (0, 0)
    prefix = last if first == 0 else 0
    run, size = Recompute(backbone, splice), kv_bytes(backbone.layout, prefix)
    run.run(0, backbone.layout.layers, np.arange(prefix, splice.slots.shape[1]))
    return run.repaired(RepairBytes(canonical=size, moved=size))


def reprefill_flops(backbone: Backbone, splice: SplicedCache) -> float:
    """Counts the FLOPs of running one row's tokens again where they are, as `Repaired.flops` does; none are run.

    Of a hybrid model, which runs no single tokens, those of a prefill behind what precedes the chunk.
    """
    if backbone.layout.parts:
        return backbone.forward_costs.flops(splice.slots.shape[1], int(splice.slots[0, 0]))

    def serve(splice: SplicedCache) -> Repaired:
        return recompute_everything(backbone, splice, RepairBytes())

    return flops_counter(backbone, splice, "reprefill", serve)() / len(splice.slots)


@method()
def layer_reprefill(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget = ALL, *, boundary: int | None = None
) -> Repaired:
    """Recomputes the deep layers of all tokens in context, from the residual that entered the lowest of them alone.

    Layers below keep the canonical's KV; of the layers above no KV is kept, but the residual. Kamera App. C.3, Table 8
    ("layer re-prefill"). A share is of the layers, the deepest ones, rounded half up; 0 returns the blind cache.

    Args:
      splice: of one chunk, with `hidden` at the boundary layer.
      boundary: the lowest layer that is run again, in place of the budget's.
    """
    layout, (_, T) = backbone.layout, splice.slots.shape
    if budget.share is None or splice.chunks is not None:
        got = f"{budget} and chunks {splice.chunks}"
        raise InputError(f"layer_reprefill: got {got}; expected a share of the layers, and a splice of one chunk")
    if boundary is None:
        boundary = layout.layers - budget.count(layout, layout.layers)
    if not 0 <= boundary <= layout.layers:
        raise InputError(f"layer_reprefill.boundary: got {boundary}; expected 0 to {layout.layers}")
    if boundary == layout.layers:
        return untouched(layout, splice)

    run, unit = Recompute(backbone, splice), input_bytes(splice)
    if boundary:
        residuals = required(splice, "hidden")
        if boundary not in residuals:
            raise InputError(f"splice.hidden: got layers {sorted(residuals)}; expected one of layer {boundary}")
        # Embeddings come with what layers take of them deeper; a residual has taken it.
        run.residual, unit = residuals[boundary], NUMBER_BYTES * residuals[boundary].shape[-1]
    run.run(boundary, layout.layers, np.arange(T))
    lower, inputs = kv_bytes(layout, T) // layout.layers * boundary, unit * T
    return run.repaired(RepairBytes(canonical=lower, inputs=inputs, moved=lower + inputs))


def expect_nothing(backbone: Backbone, splice: SplicedCache, budget: RepairBudget) -> None:
    """Raises InputError for a budget of any tokens."""
    if budget.count(backbone.layout, splice.cached_count):
        raise InputError(f"budget: got {budget}; expected 0")


def _expect_all(splice: SplicedCache, budget: RepairBudget) -> None:
    if budget.share != 1.0 and budget.tokens != splice.cached_count:
        raise InputError(f"budget: got {budget}; expected all tokens, RepairBudget(share=1.0)")
