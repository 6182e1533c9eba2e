"""Token repairs that take one count: first-k, CacheBlend, and the oracle that selects tokens by their true deficit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..backbone import Backbone
from ..core import to_engine
from ..errors import InputError
from .spliced_cache import (
    Repair,
    Repaired,
    SplicedCache,
    check_splice,
    deviation,
    largest,
    live_tokens,
    mark,
    read_slots,
    recompute_tokens,
    repair_everywhere,
    untouched,
)


def first_k(backbone: Backbone, splice: SplicedCache, count: int) -> Repaired:
    """Recomputes the first `count` tokens of the chunk in context, at every layer.

    A chunk that is prefilled alone has its attention sink there.
    Source: EPIC (Hu et al. 2025, LegoLink) and its multimodal form MPIC, as Kamera App. C.3 and Table 6 compare them.

    Args:
      count: tokens per row, static, 0 … T; 0 returns the cache unchanged.

    Returns:
      The repaired cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: the count is outside 0 … T. ShapeError, LayoutError, DtypeError: the splice does not match the
        backbone.
    """
    check_splice(backbone.layout, splice, count)
    if count == 0:
        return untouched(backbone.layout, splice)

    # In a row that is shorter than the count some of these are padding, which is never written.
    index = jnp.asarray(np.broadcast_to(np.arange(count, dtype=np.int32), (splice.slots.shape[0], count)))
    return repair_everywhere(backbone, splice, index)


class Checked(NamedTuple):
    """Result of the check of one splice, for any number of tokens above the check layer.

    Attributes:
      cache: after recomputing all tokens through the check layer, {channel: [L,B,S,K,H]}.
      score: deviation of each token's KV at the check layer, [B,T].
      rewritten: which tokens were rewritten at each layer, [L,B,T].
    """

    cache: dict[str, Array]
    score: Float[Array, "B T"]
    rewritten: Bool[Array, "L B T"]


def check_by_layer(backbone: Backbone, splice: SplicedCache, check_layer: int = 1) -> Checked:
    """Recomputes all tokens through `check_layer` and scores how much each token's KV changed there.

    Raises:
      InputError: the backbone lacks the layer. ShapeError, LayoutError, DtypeError: the splice does not match it.
    """
    layout = backbone.layout
    check_splice(layout, splice, 0)
    if not 0 <= check_layer < layout.layers:
        raise InputError(f"cacheblend.check_layer: got {check_layer}; expected 0 to {layout.layers - 1}")

    # One recompute, in which only the lower layers are written.
    live = live_tokens(splice)
    below = jax.device_put((np.arange(layout.layers) <= check_layer)[:, None, None])
    lower = backbone.recompute(splice.tokens, splice.cache, splice.slots, below & live, splice.mask).cache

    # Both are in the engine frame, at the same positions: what differs is what the tokens have seen.
    recomputed = read_slots(lower, splice.slots, check_layer)
    spliced = read_slots(splice.cache, splice.slots, check_layer)
    return Checked(lower, deviation(recomputed, spliced, live), below & live)


def cacheblend(
    backbone: Backbone, splice: SplicedCache, count: int, check_layer: int = 1, *, checked: Checked | None = None
) -> Repaired:
    """Recomputes all tokens through `check_layer`, and above it the `count` tokens whose KV deviates most there.

    The sets are nested: all tokens at layers 0 … check_layer, the chosen ones above. The full recompute of the lower
    layers is part of the method and of `token_layers`. Source: CacheBlend (Yao et al. 2025, "KV deviation" and "HKVD
    tokens"), in the strongest form of Kamera §6 and Table 6: recomputed tokens attend to the full context.

    Args:
      count: tokens per row above the check layer, static, 0 … T; 0 returns the cache unchanged.
      check_layer: layer at which recomputed and spliced KV are compared, static.
      checked: result of `check_by_layer` for this splice and layer, to try several counts; None: it is computed.

    Returns:
      The repaired cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: the count is outside 0 … T, or the backbone lacks the layer. ShapeError, LayoutError, DtypeError: the
        splice does not match the backbone.
    """
    layout = backbone.layout
    check_splice(layout, splice, count)
    if not 0 <= check_layer < layout.layers:
        raise InputError(f"cacheblend.check_layer: got {check_layer}; expected 0 to {layout.layers - 1}")
    if count == 0:
        return untouched(layout, splice)

    # Evaluations try many counts, for which the lower layers are recomputed once.
    if checked is None:
        checked = check_by_layer(backbone, splice, check_layer)
    index = largest(checked.score, count)

    # The chosen tokens start from the embeddings again. In the recomputed lower layers they get the same KV as before.
    cache = recompute_tokens(backbone, splice._replace(cache=checked.cache), index)
    return Repaired(cache, checked.rewritten | mark(index, live_tokens(splice)))


def oracle_delta(backbone: Backbone, splice: SplicedCache, count: int) -> Repaired:
    """Recomputes in context, at every layer, the `count` tokens with the largest true deficit ‖Δ‖.

    It cannot be used in serving, because it needs Δ. It is not an upper bound of token selection either: a question
    need not read the tokens with the largest Δ, and a selection by the question's attention can do better with fewer
    tokens. ‖Δ‖ is ‖conditioned − spliced‖ over each channel's typical norm, summed over layers and channels. Source:
    Kamera App. C.3, Fig. 6a (an oracle that selects tokens by true Δ-magnitude needs about half of them).

    Args:
      splice: with `conditioned`, which affects only the selection, never the values in the cache.
      count: tokens per row, static, 0 … T; 0 returns the cache unchanged.

    Returns:
      The repaired cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: `conditioned` is None, or the count is outside 0 … T. ShapeError, LayoutError, DtypeError: the splice
        does not match the backbone.
    """
    layout = backbone.layout
    check_splice(layout, splice, count)
    if splice.conditioned is None:
        raise InputError("oracle_delta.conditioned: got None; expected the chunk's phase-free KV in context")
    if count == 0:
        return untouched(layout, splice)

    # The truth is rotated to where the chunk lies, and only scored: the values are recomputed as in any repair.
    true = to_engine(layout, splice.conditioned, splice.tokens.positions, 0)
    score = deviation(true, read_slots(splice.cache, splice.slots), live_tokens(splice))
    return repair_everywhere(backbone, splice, largest(score, count))


REPAIRS: dict[str, Repair] = {"first_k": first_k, "cacheblend": cacheblend, "oracle_delta": oracle_delta}
"""Token repairs that take one count, by name; `vlcache` takes one per layer."""
