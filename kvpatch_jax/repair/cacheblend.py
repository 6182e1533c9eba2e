"""CacheBlend: recompute the lowest layers whole, and above them only the tokens whose KV changed most there."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from ..backbone import Backbone
from ..errors import InputError
from ._common import (
    Repaired,
    SplicedCache,
    check_splice,
    deviation,
    largest,
    live_tokens,
    mark,
    read_slots,
    recompute_tokens,
    untouched,
)


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
        raise InputError(f"cacheblend: check_layer {check_layer}; expected 0 to {layout.layers - 1}")

    live = live_tokens(splice)
    below = jax.device_put((np.arange(layout.layers) <= check_layer)[:, None, None])
    lower = backbone.recompute(splice.tokens, splice.cache, splice.slots, below & live, splice.mask).cache
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
        raise InputError(f"cacheblend: check_layer {check_layer}; expected 0 to {layout.layers - 1}")
    if count == 0:
        return untouched(layout, splice)

    if checked is None:
        checked = check_by_layer(backbone, splice, check_layer)
    index = largest(checked.score, count)

    # The chosen tokens start from the embeddings again. In the recomputed lower layers they get the same KV as before.
    cache = recompute_tokens(backbone, splice._replace(cache=checked.cache), index)
    return Repaired(cache, checked.rewritten | mark(splice, index))
