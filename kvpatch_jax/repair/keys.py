"""Queries and keys that attention compares, for repairs that score them themselves."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..backbone import KV, LayerAttention
from ..core import KVLayout


def scaled_queries(layer: LayerAttention) -> Float[Array, "B T N H"]:
    """Returns queries in the engine frame times the scale of scores."""
    return layer.query * layer.scale


def attended_keys(layout: KVLayout, cache: KV, layer: int) -> Float[Array, "B S K H"]:
    """Returns the keys that queries meet at a layer; for MLA the latent and the rotary key of one head."""
    if layout.kind == "mla":
        return jnp.concatenate([cache["ckv"][layer], cache["kpe"][layer]], axis=-1)
    return cache["k"][layer]
