"""A Qwen2 decoder as an encoder: image features that all see each other, and behind them learned queries in causal
order, whose outputs are what an image becomes.

Source: transformers' DeepseekOcr2VisionModel and DeepseekOcr2VisionEncoder.
Axis letters: B images (or tiles), P features of one, Q queries, D width.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.core import rope_tables, rotate

from ..attention import Mask
from ..checkpoints import ParamPath, TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.decoder_layer import DecoderLayer
from ..decoder.layers import RMSNorm, in_blocks
from ..decoder.weights import decoder_entries
from .common import learned, scan_blocks

FEW, MANY = 144, 256
"""Queries of an image of at most 144 features, and of one with more."""


def query_count(features: int) -> int:
    """Returns how many queries read an image of so many features."""
    return FEW if features <= FEW else MANY


class QueryEncoder(nnx.Module):
    """Layers of a decoder over an image's features and the queries behind them."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.few, self.many = (learned(rngs, (count, config.width), dtype) for count in (FEW, MANY))
        self.layers = DecoderLayer(config, rngs, lead=(config.layers,))
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        self.config = config

    def __call__(self, features: Float[Array, "B P D"]) -> Float[Array, "B Q D"]:
        """Returns what the queries have read."""
        batch, count, _ = features.shape
        table = self.few if query_count(count) == FEW else self.many
        queries = jnp.broadcast_to(table[...].astype(features.dtype), (batch, *table.shape))
        hidden = jnp.concatenate([features, queries], axis=1)

        places = np.arange(hidden.shape[1], dtype=np.int32)[None]
        mask = Mask(causal=True, ahead=np.maximum(count - 1 - places, 0))
        rope = self.config.rope
        tables = rope_tables(rope, jnp.asarray(places))

        def step(layer: DecoderLayer, hidden: Array) -> Array:
            query, kv = layer.attention.project(layer.input_norm(hidden))
            query = {"turning": rotate(query["turning"], *tables, rope.cached)}
            mixed = layer.attention.mix(query, kv | {"k": rotate(kv["k"], *tables, rope.cached)}, mask)
            hidden = hidden + mixed
            return hidden + in_blocks(layer.mlp, layer.mlp_norm(hidden))

        hidden = scan_blocks(self.layers, step, hidden, 0, self.config.layers)
        return self.norm(hidden[:, count:])


def query_encoder_entries(
    config: DecoderConfig, prefix: str, few: str, many: str, path: ParamPath
) -> list[TensorEntry]:
    """Maps the encoder, whose layers are named as Llama's, and its tables of queries."""
    return [
        *decoder_entries(config, prefix=prefix, root=path),
        TensorEntry(f"{few}.weight", (*path, "few")),
        TensorEntry(f"{many}.weight", (*path, "many")),
    ]
