"""Ways of serving that repair nothing, or everything: what every repair lies between."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..backbone import Backbone, Tokens
from ..errors import InputError
from .recomputation import repair_everywhere
from .repair_budget import RepairBudget, fraction_to_count
from .spliced_cache import (
    RepairBytes,
    Repaired,
    SplicedCache,
    blind_bytes,
    check_splice,
    counted,
    input_bytes,
    live_tokens,
    required,
    token_layer_bytes,
    untouched,
)

NOTHING, ALL = RepairBudget(tokens=0), RepairBudget(share=1.0)


@counted
def blind(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = NOTHING) -> Repaired:
    """Returns the cache as it was spliced; new text of a prompt is computed over it.

    Full reuse, as MPIC (section 2.2) and Prompt Cache call it, in one forward.

    Raises:
      InputError: the budget is not 0. ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    check_splice(backbone.layout, splice)
    counts = RepairBudget.of(budget).counts(backbone.layout, splice.cached_count, 1, "blind")
    if any(counts):
        raise InputError(f"blind.budget: got {budget}; expected 0")

    return new_text_alone(backbone, splice)


@counted
def full_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = ALL) -> Repaired:
    """Recomputes everything, with nothing kept: the tower, what precedes the chunk, and the chunk.

    `splice.front` and `splice.tower_flops` say how much that is; where they are not given, it is the chunk alone.

    Raises:
      InputError: the budget is not all tokens. ShapeError, LayoutError, DtypeError: the splice does not match.
    """
    repaired = _reprefill(backbone, splice, budget, "full_reprefill", RepairBytes())
    return dataclasses.replace(repaired, tower_flops=splice.tower_flops)


@counted
def encoder_cached_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = ALL) -> Repaired:
    """Recomputes everything in the decoder, from image features that were kept ("w/o ViT" in VLCache, Table 1).

    Raises:
      InputError: the budget is not all tokens. ShapeError, LayoutError, DtypeError: the splice does not match.
    """
    tokens = splice.cached_count + (0 if splice.front is None else splice.front.embeddings.shape[1])
    kept = input_bytes(splice) * tokens
    return _reprefill(backbone, splice, budget, "encoder_cached_reprefill", RepairBytes(inputs=kept, moved=kept))


@counted
def prefix_caching(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float = ALL) -> Repaired:
    """Recomputes all tokens behind the longest cached prefix.

    Of a whole prompt, the prefix is its first chunk, if the prompt begins with it. Of one chunk behind others, it is
    what precedes the chunk, whose KV is then right and counts in no cost.

    Raises:
      InputError: the budget is not all tokens. ShapeError, LayoutError, DtypeError: the splice does not match.
    """
    _check_all(backbone, splice, budget, "prefix_caching")
    first, last = splice.parts[0] if splice.chunks is not None else (0, 0)
    kept = last if first == 0 else 0
    index = all_tokens(splice, np.arange(kept, splice.slots.shape[1]))
    unit = token_layer_bytes(backbone.layout, splice) * backbone.layout.layers * kept
    repaired = repair_everywhere(backbone, splice, index, RepairBytes(canonical=unit, moved=unit))
    return dataclasses.replace(repaired, tower_flops=splice.tower_flops)


@counted
def layer_reprefill(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float) -> Repaired:
    """Recomputes the deep layers of all tokens in context, from the residual that entered the lowest of them alone.

    Layers below keep the canonical's KV; of the layers above no KV is kept, but the residual. Kamera App. C.3, Table 8
    ("layer re-prefill"). A share is of the layers, the deepest ones, rounded half up; 0 returns the blind cache.

    Args:
      splice: of one chunk, with `hidden` at the boundary layer.

    Raises:
      InputError: the budget is no share, the splice is a whole prompt, or has no residual at the boundary. ShapeError,
        LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout = backbone.layout
    check_splice(layout, splice)
    share = RepairBudget.of(budget).share
    if share is None or splice.chunks is not None:
        found = f"{budget} and chunks {splice.chunks}"
        raise InputError(f"layer_reprefill: got {found}; expected a share of the layers, and a splice of one chunk")
    boundary = layout.layers - fraction_to_count(share, layout.layers)
    if boundary == layout.layers:
        return untouched(layout, splice)

    residual = splice.tokens.embeddings
    if boundary:
        kept = required(splice, "hidden", "layer_reprefill", f"the residual entering layer {boundary}")
        if boundary not in kept:
            raise InputError(f"layer_reprefill.hidden: got layers {sorted(kept)}; expected one of layer {boundary}")
        residual = kept[boundary]

    live = live_tokens(splice)
    chosen = jnp.broadcast_to(
        live & (np.arange(layout.layers) >= boundary)[:, None, None], (layout.layers, *live.shape)
    )
    step = backbone.recompute(
        splice.tokens._replace(embeddings=residual),
        splice.cache,
        splice.slots,
        None if splice.length is None else jnp.broadcast_to(live, chosen.shape),
        splice.mask,
        jnp.zeros((live.shape[0], 0), jnp.int32),
        start_layer=boundary,
    )
    lower = token_layer_bytes(layout, splice) * splice.cached_count * boundary
    numbers = splice.cached_count * residual.shape[-1] * jnp.result_type(residual).itemsize
    return Repaired(dict(step.cache), chosen, RepairBytes(canonical=lower, inputs=numbers, moved=lower + numbers))


def new_text_alone(backbone: Backbone, splice: SplicedCache) -> Repaired:
    """Computes new text over the cache as it was spliced: what every repair returns for a budget of 0."""
    new = np.flatnonzero(splice.new_text())
    if not len(new):
        return untouched(backbone.layout, splice)
    return repair_everywhere(backbone, splice, all_tokens(splice, new), blind_bytes(backbone.layout, splice))


def all_tokens(splice: SplicedCache, tokens: np.ndarray) -> jax.Array:
    """Returns the same token indices for every row, [B,n]."""
    return jax.device_put(np.broadcast_to(tokens.astype(np.int32), (splice.slots.shape[0], len(tokens))))


def _check_all(backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, method: str) -> None:
    check_splice(backbone.layout, splice)
    budget = RepairBudget.of(budget)
    if budget.share != 1.0 and budget.tokens != splice.cached_count:
        raise InputError(f"{method}.budget: got {budget}; expected all tokens, RepairBudget(share=1.0)")


def _reprefill(
    backbone: Backbone, splice: SplicedCache, budget: RepairBudget | float, method: str, bytes: RepairBytes
) -> Repaired:
    """Recomputes all tokens, those in front of them too where the splice has them."""
    _check_all(backbone, splice, budget, method)
    everything = all_tokens(splice, np.arange(splice.slots.shape[1]))
    if splice.front is None:
        return repair_everywhere(backbone, splice, everything, bytes)

    P, S = splice.front.embeddings.shape[1], next(iter(splice.cache.values())).shape[2]
    rows = splice.slots.shape[0]
    slots = jnp.concatenate([jnp.broadcast_to(jnp.arange(P), (rows, P)), jnp.asarray(splice.slots)], axis=1)
    mask = None
    if splice.mask is not None:
        own = jnp.broadcast_to(jnp.arange(S) <= jnp.arange(P)[:, None], (rows, 1, P, S))
        mask = jnp.concatenate([own, jnp.asarray(splice.mask)], axis=2)
    keep = None
    if splice.length is not None:
        live = jnp.pad(live_tokens(splice), ((0, 0), (P, 0)), constant_values=True)
        keep = jnp.broadcast_to(live, (backbone.layout.layers, *live.shape))

    tokens = joined_tokens(splice.front, splice.tokens)
    none = jnp.zeros((rows, 0), jnp.int32)
    cache = backbone.recompute(tokens, splice.cache, slots, keep, mask, none).cache
    chosen = jnp.broadcast_to(live_tokens(splice), (backbone.layout.layers, *splice.slots.shape))
    return Repaired(dict(cache), chosen, bytes)


def joined_tokens(*parts: Tokens) -> Tokens:
    """Returns tokens behind one another; parts without deepstack features (texts among images) get zeros."""
    features = [part.deepstack for part in parts if part.deepstack is not None]
    if features:
        like = jnp.asarray(features[0])
        filled = []
        for part in parts:
            zeros = jnp.zeros((*part.embeddings.shape[:2], *like.shape[2:]), like.dtype)
            filled.append(part if part.deepstack is not None else part._replace(deepstack=zeros))
        parts = tuple(filled)
    return jax.tree.map(lambda *leaves: jnp.concatenate([jnp.asarray(leaf) for leaf in leaves], axis=1), *parts)
