"""Padding of tokens, chunks and patches to buckets, on the host: on a device every length would compile a program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..backbone import Tokens
from ..cache import Chunk, Patch, trusted
from ..core import (
    PARTS,
    AnyArray,
    Buckets,
    PackedArray,
    PhaseFreeKV,
    Quantised,
    RaggedFactors,
    is_low_rank,
)
from ..core.encoding import resize as resize_packed


def bucket(buckets: Buckets | None, size: int) -> int:
    """Returns a size rounded up to its bucket, or unchanged without buckets."""
    return size if buckets is None else buckets.round_up(size)


def zero_padded(value: AnyArray, axis: int, size: int) -> AnyArray:
    """Pads an array with zeros to `size` along an axis, on the host; returns it unchanged if it has that size."""
    if value.shape[axis] == size:
        return value

    # On the device every length would compile a program.
    host = np.asarray(value)
    axis %= host.ndim
    padded = np.zeros((*host.shape[:axis], size, *host.shape[axis + 1 :]), host.dtype)
    padded[(*(slice(None),) * axis, slice(host.shape[axis]))] = host
    return padded


def padded_tokens(tokens: Tokens, size: int) -> Tokens:
    """Pads tokens with zeros to [B,size]."""
    deepstack = None if tokens.deepstack is None else jnp.asarray(zero_padded(tokens.deepstack, 1, size))
    positions = np.asarray(zero_padded(np.asarray(tokens.positions), 1, size))
    ahead = None if tokens.ahead is None else np.asarray(zero_padded(np.asarray(tokens.ahead), 1, size))
    return Tokens(jnp.asarray(zero_padded(tokens.embeddings, 1, size)), positions, deepstack, ahead)


def padded_chunk(chunk: Chunk, size: int) -> Chunk:
    """Pads a canonical to `size` tokens; its length and content stay. A longer one is returned unchanged."""
    # Its metadata were checked when it was made, and padding changes none.
    size = max(size, chunk.tokens)
    kv: dict[str, Any] = {}
    for name, value in chunk.kv.items():
        if name in PARTS:
            kv[name] = value if isinstance(value, PackedArray) else jnp.asarray(value)
            continue
        # Packed tokens are rows of a matrix, and stay packed.
        packed = isinstance(value, PackedArray)
        kv[name] = _padded(value, -2, size) if packed else jnp.asarray(zero_padded(value, -3, size))
    hidden = None
    if chunk.hidden is not None:
        hidden = {layer: zero_padded(value, -2, size) for layer, value in chunk.hidden.items()}
    local = zero_padded(np.asarray(chunk.local, np.float32), 0, size)
    return trusted(chunk, kv=PhaseFreeKV(kv), local=local, hidden=hidden)


def padded_patch(patch: Patch, size: int) -> Patch:
    """Pads a patch for its chunk padded to `size`: nothing is added to padding."""
    if patch.tokens in (None, size):
        return patch

    factors: dict[str, Any] = {}
    for name, own in patch.factors.items():
        if name in PARTS:
            # A transition has as many rows whatever the number of tokens.
            factors[name] = own
        elif isinstance(own, RaggedFactors):
            factors[name] = dataclasses.replace(own, u=_padded(own.u, -1, size))
        elif is_low_rank(own):
            factors[name] = _padded(own[0], -2, size), own[1]
        else:
            factors[name] = _padded(own, -3, size)
    return Patch(factors, patch.metadata)


def _padded(leaf: Any, axis: int, size: int) -> Any:
    """Pads one array of a chunk or patch."""
    if isinstance(leaf, PackedArray):
        have = leaf.columns if axis == -1 else leaf.planes[0].shape[axis]
        return jax.tree.map(jnp.asarray, leaf if have == size else resize_packed(leaf, axis, size, host=True))
    if not isinstance(leaf, Quantised):
        return jnp.asarray(zero_padded(leaf, axis, size))

    # Values and scales of a rounded factor are padded alike, unless one scale is for all tokens.
    scale = leaf.scale if leaf.scale.shape[axis] == 1 else jnp.asarray(zero_padded(leaf.scale, axis, size))
    return Quantised(jnp.asarray(zero_padded(leaf.values, axis, size)), scale)
