"""jax's splash attention for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`) behind our masks.

It is compiled ahead of time for v5e and interpreted on CPUs in tests; nobody ran it on a TPU here.

Axis letters: B batch, T queries, S keys, N query heads, K KV heads, H key width, W value width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha_single_device,
)
from jaxtyping import Array, Float

from pallas_kernels._target import interpretation

from .mask import Mask

LANES = 128
BLOCK = 512
"""Queries and keys per block; sequences are filled up to a multiple."""
NOBODY = -1
UNSEEN = -1e30
"""Log-sum-exp below which a row saw nothing."""


def unsupported(query: Any, key: Any, value: Any, mask: Mask) -> str | None:
    """Returns why the kernel cannot take these arrays (or shapes); None if it can."""
    if mask.ahead is not None:
        return "the mask has tokens that see others behind their own; expected causal order"
    if mask.allowed is not None or mask.query_places is not None or mask.key_places is not None:
        return "the mask has arrays of places or of bools; expected causal order, a window and segments alone"
    if mask.window is not None and not mask.causal:
        return "a window without causal order"
    if query.shape[1] < LANES:
        return f"{query.shape[1]} queries; expected at least {LANES}"
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {query.dtype}; expected float32 or bfloat16"
    return None


def kernel(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K W"],
    mask: Mask,
    scale: float,
) -> Float[Array, "B T N W"]:
    """Attends as `attention` says; sequences are padded to blocks and widths to 128, which changes nothing."""
    (B, T, N, _), S, W = query.shape, key.shape[1], value.shape[-1]
    query, key, value = (_heads_first(x) for x in ((query.astype(jnp.float32) * scale).astype(query.dtype), key, value))

    # The mask as the kernel knows it: made block by block, never whole.
    shape = (query.shape[2], key.shape[2])
    if mask.window is not None:
        structure = LocalMask(shape, (mask.window - 1, 0), offset=mask.offset)
    else:
        structure = CausalMask(shape, offset=mask.offset) if mask.causal else FullMask(shape)
    run = make_splash_mha_single_device(
        MultiHeadMask([structure] * N),
        block_sizes=BlockSizes(block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK),
        save_residuals=True,
        interpret=bool(interpretation()),
    )
    segments = _segments(mask, B, T, S)
    mixed, (seen,) = jax.vmap(run, in_axes=(0, 0, 0, None if segments is None else 0))(query, key, value, segments)

    # The kernel leaves anything in rows that see no key; `attention` has zeros there.
    mixed = jnp.where(seen[..., None] > UNSEEN, mixed, 0)
    return jnp.swapaxes(mixed, 1, 2)[:, :T, :, :W].astype(query.dtype)


def _heads_first(x: Array) -> Array:
    """Transposes [B,T,N,H] to [B,N,T',H'], padded with zeros to whole blocks and lanes."""
    room = ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, -x.shape[3] % LANES))
    return jnp.swapaxes(jnp.pad(x, room), 1, 2)


def _segments(mask: Mask, rows: int, queries: int, keys: int) -> SegmentIds | None:
    """Returns segments of queries and keys; what sees nothing, and padding, is in one that no other side has."""
    if mask.query_segments is None and queries % BLOCK == keys % BLOCK == 0:
        return None

    # Negative segments see nothing; queries and keys get different ones, so that they do not see each other.
    def padded(given: Any, length: int, nobody: int) -> Array:
        numbers = jnp.zeros((1, length), jnp.int32) if given is None else jnp.asarray(given)
        numbers = jnp.where(numbers < 0, nobody, numbers)
        numbers = jnp.pad(numbers, ((0, 0), (0, -length % BLOCK)), constant_values=nobody)
        return jnp.broadcast_to(numbers, (rows, numbers.shape[1]))

    return SegmentIds(padded(mask.query_segments, queries, NOBODY), padded(mask.key_segments, keys, NOBODY - 1))
