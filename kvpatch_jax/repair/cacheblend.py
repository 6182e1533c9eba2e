"""CacheBlend: recompute a few whole layers, see which tokens moved most there, and recompute those above."""

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
    """What the check finds of one splice, for any number of tokens above it.

    cache: with all tokens run again through the check layer, {channel: [L,B,S,K,H]}. score: how far each token moved
    there [B,T]. rewritten: which tokens at which layer [L,B,T].
    """

    cache: dict[str, Array]
    score: Float[Array, "B T"]
    rewritten: Bool[Array, "L B T"]


def check_by_layer(backbone: Backbone, splice: SplicedCache, check_layer: int = 1) -> Checked:
    """Recomputes all tokens through `check_layer` and scores how far each one's KV moved there.

    Raises:
      InputError: a layer the backbone does not have. ShapeError, LayoutError, DtypeError: a splice that does not fit.
    """
    layout = backbone.layout
    check_splice(layout, splice, 0)
    if not 0 <= check_layer < layout.layers:
        raise InputError(f"cacheblend: check_layer {check_layer}; expected 0 to {layout.layers - 1}")
    live = live_tokens(splice)
    below = jax.device_put((np.arange(layout.layers) <= check_layer)[:, None, None])
    lower = backbone.recompute(splice.tokens, splice.cache, splice.slots, below & live, splice.mask).cache
    checked = lambda cache: read_slots(cache, splice.slots, check_layer)
    return Checked(lower, deviation(checked(lower), checked(splice.cache), live), below & live)


def cacheblend(
    backbone: Backbone, splice: SplicedCache, count: int, check_layer: int = 1, *, checked: Checked | None = None
) -> Repaired:
    """Recomputes all tokens through `check_layer`, and above it the `count` tokens whose KV deviates most there.

    The sets are nested: all tokens at layers 0 … check_layer, the chosen ones above. The full recompute of the lower
    layers is part of the method and of `token_layers`. Source: CacheBlend (Yao et al. 2025, "KV deviation" and "HKVD
    tokens"), in the strongest form of Kamera §6 and Table 6: recomputed tokens attend to the full context.

    Args:
      count: tokens per row above the check layer, static, 0 … T; 0 returns the cache as it is.
      check_layer: static; where fresh and spliced KV are compared.
      checked: what `check_by_layer` found of this splice at this layer, where several counts are tried; None: it runs.

    Returns:
      The mended cache, and the tokens rewritten [L,B,T].

    Raises:
      InputError: a count outside 0 … T, or a layer the backbone does not have. ShapeError, LayoutError, DtypeError: a
        splice that does not fit.
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
    # Run again from the embeddings, the chosen tokens meet fresh lower layers and pass through them unchanged.
    cache = recompute_tokens(backbone, splice._replace(cache=checked.cache), index)
    return Repaired(cache, checked.rewritten | mark(splice, index))
