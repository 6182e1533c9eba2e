"""Attention in bounded memory: softmax taken block by block of keys, as it goes (Rabe and Staats, arXiv:2112.05682).

Scores exist for one block of queries and one of keys at a time. Blocks of which no query sees any key are passed over:
above the diagonal, outside a window, between segments.

Axis letters as everywhere: B batch, T queries, S keys, N query heads, K KV heads, G = N/K, H key width, W value width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .mask import NOWHERE, Mask, sees_segments

LOWEST = -1e30
"""What a row's largest score is at least, so that a row which sees nothing gives zeros (as the dense form does)."""


class AttentionBlocks(NamedTuple):
    """Tokens per block of queries and of keys."""

    queries: int = 512
    keys: int = 1024


class _Keys(NamedTuple):
    """Arrays per block of keys, the number of blocks first."""

    key: Array
    value: Array
    places: Array
    segments: Array | None


class _Queries(NamedTuple):
    """Arrays per block of queries, the number of blocks first."""

    query: Array
    places: Array
    reach: Array
    segments: Array | None
    first: Array
    needed: Array


def blockwise(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K W"],
    mask: Mask,
    scale: float,
    blocks: AttentionBlocks = AttentionBlocks(),  # noqa: B008
) -> Float[Array, "B T N W"]:
    """Computes what `dense` does, within rounding; memory grows with T + S.

    Scores and sums are float32. Derivatives compute the scores of a block of queries again.
    """
    B, T, N, _ = query.shape
    S, K = key.shape[1:3]
    if T == 0 or S == 0:
        return jnp.zeros((B, T, N, value.shape[-1]), query.dtype)

    blocks = AttentionBlocks(min(blocks.queries, T), min(blocks.keys, S))

    def heads(x: Array) -> Array:
        return _cut(_padded(x, (1, blocks.keys)), blocks.keys).transpose(1, 0, 3, 2, 4)  # [blocks, B, K, size, H]

    def numbers(x: Array, fill: int) -> Array:
        return _cut(_padded(x, (1, blocks.keys), fill=fill), blocks.keys).transpose(1, 0, 2)

    segments = None if mask.key_segments is None else numbers(jnp.asarray(mask.key_segments), -1)
    keys = _Keys(heads(key), heads(value), numbers(mask.places_of_keys(S), NOWHERE), segments)
    allowed = None
    if mask.allowed is not None:
        allowed = _padded(jnp.asarray(mask.allowed), (2, blocks.queries), (3, blocks.keys))
    queries = _blocks_of_queries(query, mask, keys, allowed, blocks)

    # Derivatives compute a block of queries again, or all scores would be held.
    @jax.checkpoint
    def row(block: _Queries) -> Array:
        return _attend(block, keys, mask, allowed, scale, N // K).astype(query.dtype)

    mixed = jax.lax.map(row, queries)  # [blocks, B, K, G * queries, W]
    count, width = mixed.shape[0], mixed.shape[-1]
    mixed = mixed.reshape(count, B, K, N // K, blocks.queries, width).transpose(1, 0, 4, 2, 3, 5)
    return mixed.reshape(B, count * blocks.queries, N, width)[:, :T]


def _attend(block: _Queries, keys: _Keys, mask: Mask, allowed: Array | None, scale: float, groups: int) -> Array:
    """Returns one block of queries over all keys that any of them sees, [B, K, G * queries, W] float32."""
    B, K, rows, _ = block.query.shape
    size = keys.key.shape[-2]

    def step(carry: tuple[Array, Array, Array], index: Array):
        return jax.lax.cond(block.needed[index], functools.partial(look, index=index), lambda carry: carry, carry), None

    @jax.checkpoint
    def look(carry: tuple[Array, Array, Array], index: Array):
        mixed, total, top = carry
        at = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), keys)
        scores = jnp.einsum("BKRH,BKSH->BKRS", block.query, at.key, preferred_element_type=jnp.float32) * scale

        # The mask between these two blocks; padding behind the last key is nowhere.
        seen = mask.sees_places(block.places, at.places, block.reach)
        if block.segments is not None and at.segments is not None:
            seen = seen & sees_segments(block.segments, at.segments)
        if allowed is not None:
            extent = (allowed.shape[0], 1, block.places.shape[1], at.places.shape[1])
            seen = seen & jax.lax.dynamic_slice(allowed, (0, 0, block.first, index * size), extent)[:, 0]
        scores = scores.reshape(B, K, groups, rows // groups, size)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf).reshape(B, K, rows, size)

        # What was summed so far is rescaled to the new maximum.
        highest = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
        weights, kept = jnp.exp(scores - highest), jnp.exp(top - highest)
        total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
        added = jnp.einsum(
            "BKRS,BKSW->BKRW", weights.astype(at.value.dtype), at.value, preferred_element_type=jnp.float32
        )
        return mixed * kept + added, total, highest

    start = (
        jnp.zeros((B, K, rows, keys.value.shape[-1]), jnp.float32),
        jnp.zeros((B, K, rows, 1), jnp.float32),
        jnp.full((B, K, rows, 1), LOWEST, jnp.float32),
    )
    (mixed, total, _), _ = jax.lax.scan(step, start, jnp.arange(keys.key.shape[0]))
    return mixed / jnp.maximum(total, 1e-30)


def _blocks_of_queries(
    query: Array, mask: Mask, keys: _Keys, allowed: Array | None, blocks: AttentionBlocks
) -> _Queries:
    """Cuts queries, and what the mask says of them, into blocks, each with the blocks of keys that it looks at."""
    B, T, N, H = query.shape
    kv_heads, size = keys.key.shape[2], blocks.queries

    # Padding stands where the last query does, so that its block needs no more keys for it.
    def numbers(x):
        return _cut(_padded(x, (1, size), edge=True), size).transpose(1, 0, 2)

    own = mask.places_of_queries(T)
    places, reach = numbers(own), numbers(mask.reach(own))
    segments = None if mask.query_segments is None else numbers(jnp.asarray(mask.query_segments))
    cut = _cut(_padded(query, (1, size)).reshape(B, -1, kv_heads, N // kv_heads, H), size)
    count = cut.shape[1]
    cut = cut.transpose(1, 0, 3, 4, 2, 5).reshape(count, B, kv_heads, (N // kv_heads) * size, H)
    first = jnp.arange(count, dtype=jnp.int32) * size
    return _Queries(cut, places, reach, segments, first, _needed(mask, places, reach, segments, keys, allowed, blocks))


def _needed(
    mask: Mask,
    places: Array,
    reach: Array,
    segments: Array | None,
    keys: _Keys,
    allowed: Array | None,
    blocks: AttentionBlocks,
) -> Bool[Array, "blocks_of_queries blocks_of_keys"]:
    """Returns which blocks of keys a block of queries looks at: False only where no query of it sees any key of
    them.
    """
    # Bounds of places and of segments decide: a block may be looked at in vain, never passed over wrongly.
    low, high = jnp.min(places, axis=2)[:, None], jnp.max(reach, axis=2)[:, None]  # [queries, 1, B]
    first = jnp.min(keys.places, axis=2)[None]  # [1, keys, B]
    last = jnp.max(jnp.where(keys.places == NOWHERE, -1, keys.places), axis=2)[None]

    # Blocks of padding alone are passed over, then those above the diagonal and those behind every query's window.
    needed = first != NOWHERE
    if mask.causal:
        needed = needed & (first <= high)
    if mask.window is not None:
        needed = needed & (last > low - mask.window)

    if segments is not None and keys.segments is not None:

        def least(x):
            return jnp.min(jnp.where(x < 0, NOWHERE, x), axis=2)

        between = (least(keys.segments)[None] <= jnp.max(segments, axis=2)[:, None]) & (
            jnp.max(keys.segments, axis=2)[None] >= least(segments)[:, None]
        )
        needed = needed & between

    needed = jnp.broadcast_to(jnp.any(needed, axis=2), (places.shape[0], keys.places.shape[0]))
    if allowed is None:
        return needed
    rows, columns = needed.shape
    return needed & allowed.reshape(-1, rows, blocks.queries, columns, blocks.keys).any(axis=(0, 2, 4))


def _padded(x: Array, *axes: tuple[int, int], fill: int = 0, edge: bool = False) -> Array:
    """Returns `x` filled up along each axis to a multiple of a size: with `fill`, or with its last entries."""
    room = np.zeros((x.ndim, 2), int)
    for axis, size in axes:
        room[axis, 1] = -x.shape[axis] % size
    if not room.any():
        return x
    return jnp.pad(x, room, mode="edge") if edge else jnp.pad(x, room, constant_values=fill)


def _cut(x: Int[Array, "*shape"] | Array, size: int) -> Array:
    """Cuts axis 1 into blocks of `size`: [B, blocks, size, …]."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])
