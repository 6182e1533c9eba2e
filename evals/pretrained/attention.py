"""Attention that cached tokens receive from a query: what query-aware repairs choose by.

Source: InfoFlow KV (Information-Flow-Aware KV Recomputation for Long Context): attention of the query over the cached
chunks at their global positions. Here of a few layers, all heads, over the blind cache; the query is the text that is
scored, so it is known better than a server would know it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import rope_tables, rotate


def layers_of(backbone: Any) -> tuple[int, ...]:
    """Returns the layers whose attention is used: at a quarter, a half, three quarters, and the last."""
    count = backbone.layout.layers
    return tuple(sorted({count // 4, count // 2, 3 * count // 4, count - 1}))


def read_with_attention(
    backbone: Any, tokens: Tokens, cache: Mapping[str, Array]
) -> tuple[Float[Array, "B n V"], Float[Array, "L B S"]]:
    """Reads tokens after a cache: their logits, and the attention that each cached token receives at each layer.

    Summed over heads and over the tokens that are read. Of grouped and multi-head attention alone.
    """
    out = backbone.prefill(tokens, context=cache, logits="all", hidden_at=tuple(range(backbone.layout.layers)))
    residual = jnp.stack([out.hidden[layer] for layer in range(backbone.layout.layers)])
    mass = _mass(backbone.programs.graph, backbone.programs.state, residual, tokens.positions, cache["k"])
    return out.logits, mass


@functools.partial(jax.jit, static_argnames="graph")
def _mass(
    graph: Any, state: Any, residual: Float[Array, "L B n D"], positions: Array, keys: Float[Array, "L B S K H"]
) -> Float[Array, "L B S"]:
    query_scores = _query_scores(graph, state, positions)

    def mass_at(layer: Array) -> Float[Array, "B S"]:
        scores = query_scores(layer, residual[layer])(keys[layer])
        return jax.nn.softmax(scores, axis=-1).sum((1, 2, 3))

    return jax.lax.map(mass_at, jnp.arange(keys.shape[0]))


def _query_scores(graph: Any, state: Any, positions: Any) -> Callable[..., Callable[[Array], Array]]:
    """Returns a function of layer and residual [B,T,D] that scores keys [B,S,K,H]: scaled products [B,K,G,T,S]."""
    decoder = nnx.merge(graph, state).decoder
    rope = decoder.config.rope
    cos, sin = rope_tables(rope, positions)
    kind, stack = nnx.split(decoder.layers)

    def at_layer(layer: Any, residual: Array) -> Callable[[Array], Array]:
        block = nnx.merge(kind, jax.tree.map(lambda leaf: leaf[layer], stack))
        query, _ = block.attention.project(block.input_norm(residual))
        rotated = rotate(query["turning"], cos, sin, rope.cached, rope.attention_scaling)

        def scores(keys: Array) -> Array:
            grouped = rotated.reshape(*rotated.shape[:2], keys.shape[2], -1, keys.shape[3])
            return jnp.einsum("BTKGH,BSKH->BKGTS", grouped, keys) * keys.shape[3] ** -0.5

        return scores

    return at_layer


def attention_shift(
    backbone: Any,
    layer: int,
    residual: Float[Array, "B T D"],
    positions: Any,
    fresh: Float[Array, "B S K H"],
    spliced: Float[Array, "B S K H"],
) -> Float[Array, "B T"]:
    """Measures how attention to a chunk's tokens differs, at one layer, over its spliced keys from over fresh ones.

    Σ |A(fresh) − A(spliced)| over heads and over the chunk's tokens as queries, which are the last of the keys.
    """
    programs = backbone.programs
    return _shift(programs.graph, programs.state, layer, residual, positions, fresh, spliced)


@functools.partial(jax.jit, static_argnames=("graph", "layer"))
def _shift(graph: Any, state: Any, layer: int, residual: Array, positions: Array, fresh: Array, spliced: Array):
    scores = _query_scores(graph, state, positions)(layer, residual)
    queries, keys = residual.shape[1], fresh.shape[1]
    seen = jnp.arange(keys) <= jnp.arange(keys - queries, keys)[:, None]

    def attention(cached: Float[Array, "B S K H"]) -> Float[Array, "B K G T S"]:
        return jax.nn.softmax(jnp.where(seen, scores(cached), -jnp.inf), axis=-1)

    return jnp.abs(attention(fresh) - attention(spliced)).sum((1, 2, 3))[:, keys - queries :]
