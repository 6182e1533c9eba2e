"""Which cached tokens a query looks at: what query-aware repairs choose by.

Source: InfoFlow KV (Information-Flow-Aware KV Recomputation for Long Context): attention of the query over the cached
chunks at their global positions. Here of a few layers, all heads, over the blind cache; the query is the text that is
scored, so it is known better than a server would know it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import rope_tables, rotate


def layers_of(backbone: Any) -> tuple[int, ...]:
    """The layers whose attention is looked at: at a quarter, a half, three quarters, and the last."""
    count = backbone.layout.layers
    return tuple(sorted({count // 4, count // 2, 3 * count // 4, count - 1}))


def read_and_look(
    backbone: Any, tokens: Tokens, cache: Mapping[str, Array]
) -> tuple[Float[Array, "B n V"], Float[Array, "L B S"]]:
    """Reads tokens behind a cache: their logits, and the attention that each cached token got at each layer.

    Summed over heads and over the tokens that look. Of grouped and multi-head attention alone.
    """
    out = backbone.prefill(tokens, context=cache, logits="all", hidden_at=tuple(range(backbone.layout.layers)))
    residual = jnp.stack([out.hidden[layer] for layer in range(backbone.layout.layers)])
    mass = _mass(backbone.programs.graph, backbone.programs.state, residual, tokens.positions, cache["k"])
    return out.logits, mass


@functools.partial(jax.jit, static_argnames="graph")
def _mass(
    graph: Any, state: Any, residual: Float[Array, "L B n D"], positions: Array, keys: Float[Array, "L B S K H"]
) -> Float[Array, "L B S"]:
    decoder = nnx.merge(graph, state).decoder
    rope = decoder.config.rope
    cos, sin = rope_tables(rope, positions)
    kind, stack = nnx.split(decoder.layers)

    def at(layer: Array) -> Float[Array, "B S"]:
        own = nnx.merge(kind, jax.tree.map(lambda leaf: leaf[layer], stack))
        query, _ = own.attention.project(own.input_norm(residual[layer]))
        turned = rotate(query["turning"], cos, sin, rope.cached, rope.attention_scaling)
        grouped = turned.reshape(*turned.shape[:2], keys.shape[3], -1, keys.shape[4])
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, keys[layer]) * keys.shape[4] ** -0.5
        return jax.nn.softmax(scores, axis=-1).sum((1, 2, 3))

    return jax.lax.map(at, jnp.arange(keys.shape[0]))


def attention_shift(
    backbone: Any,
    layer: int,
    residual: Float[Array, "B T D"],
    positions: Any,
    fresh: Float[Array, "B S K H"],
    spliced: Float[Array, "B S K H"],
) -> Float[Array, "B T"]:
    """Measures how much attention a chunk's tokens get otherwise, at one layer, over its spliced keys than over fresh.

    Σ |A(fresh) − A(spliced)| over heads and over the chunk's tokens as queries, which are the last of the keys.
    """
    programs = backbone.programs
    return _shift(programs.graph, programs.state, layer, residual, positions, fresh, spliced)


@functools.partial(jax.jit, static_argnames=("graph", "layer"))
def _shift(graph: Any, state: Any, layer: int, residual: Array, positions: Array, fresh: Array, spliced: Array):
    decoder = nnx.merge(graph, state).decoder
    rope = decoder.config.rope
    cos, sin = rope_tables(rope, positions)
    kind, stack = nnx.split(decoder.layers)
    own = nnx.merge(kind, jax.tree.map(lambda leaf: leaf[layer], stack))
    query, _ = own.attention.project(own.input_norm(residual))
    turned = rotate(query["turning"], cos, sin, rope.cached, rope.attention_scaling)
    queries, keys = turned.shape[1], fresh.shape[1]
    seen = jnp.arange(keys) <= jnp.arange(keys - queries, keys)[:, None]

    def attended(cached: Float[Array, "B S K H"]) -> Float[Array, "B K G T S"]:
        grouped = turned.reshape(*turned.shape[:2], cached.shape[2], -1, cached.shape[3])
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, cached) * cached.shape[3] ** -0.5
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)

    return jnp.abs(attended(fresh) - attended(spliced)).sum((1, 2, 3))[:, keys - queries :]
