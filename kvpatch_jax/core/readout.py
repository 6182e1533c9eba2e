"""Readouts: attention over one segment as (o, lse), and their exact merge. Kamera §2; FlashAttention's state merge.

Results are float32 and every lse is a natural logarithm, so merged segments equal attention over their union.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..errors import ShapeError
from .layout import AnyArray

Readout = tuple[Float[AnyArray, "..."], Float[AnyArray, "..."]]
HIGHEST = jax.lax.Precision.HIGHEST


READABLE = "True where a query may read a key (of a mask that is added to the scores: mask == 0)"
"""What the bools of a mask say."""


def check_mask(mask: Any, what: str, meaning: str = READABLE) -> None:
    """Refuses a mask that is no array of bools: read as one, a mask that is added to scores would mean the opposite.

    Raises:
      ShapeError: it names the dtype.
    """
    if mask is None or (hasattr(mask, "dtype") and mask.dtype == bool):
        return
    shown = getattr(mask, "dtype", f"a {type(mask).__name__}")
    raise ShapeError(f"{what}: got {shown}; expected an array of bool, {meaning}")


def attention_with_lse(
    q: Float[AnyArray, "*batch T N H"],
    k: Float[AnyArray, "*batch S K H"],
    v: Float[AnyArray, "*batch S K E"],
    mask: Bool[AnyArray, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
) -> tuple[Float[Array, "*batch T N E"], Float[Array, "*batch T N"]]:
    """Computes attention of queries over one segment, with the logarithm of the softmax mass.

    Args:
      q: queries; query head n reads KV head n // (N / K).
      k, v: the segment's keys and values in the engine frame (K divides N; K = 1 serves MLA's absorbed form).
      mask: True where a query may read a key, broadcastable to [..., T, S] ([S]: the same for all queries). A row of
        False reads nothing. Masked slots never affect a query, even if they hold NaN.
      scale: of the scores; H^-0.5 if None.

    Returns:
      o [..., T, N, E] and lse [..., T, N], float32; (0, −∞) for a query that reads nothing.

    Raises:
      ShapeError: N is not a multiple of K, k and v differ in tokens or heads, or the mask is not boolean.
    """
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % kv_heads or v.shape[-3:-1] != k.shape[-3:-1]:
        shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
        raise ShapeError(f"attention: got {shapes}; expected equal tokens and KV heads, and a multiple of query heads")
    check_mask(mask, "attention: mask")
    return _attention(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)


# Inlined in a traced caller. Called eagerly, it is one program in place of one per operation.
@functools.partial(jax.jit, inline=True)
def _attention(q: Array, k: Array, v: Array, mask: Array | None, factor: Array | float) -> tuple[Array, Array]:
    """Does what `attention_with_lse` does; `factor` scales the scores."""
    kv_heads, heads = k.shape[-2], q.shape[-2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    reads_nan = None
    if mask is not None:
        mask = jnp.atleast_2d(mask)
        # Zero times NaN is NaN, so a weight of zero does not exclude a masked slot from a sum or from a gradient: slots
        # that are not finite become zero, and queries that may read one get NaN at the end.
        finite = jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1)
        infinite = 1.0 - finite.astype(jnp.float32)
        reads_nan = jnp.einsum("...ts,...sk->...tk", mask.astype(jnp.float32), infinite) > 0
        k, v = jnp.where(finite[..., None], k, 0.0), jnp.where(finite[..., None], v, 0.0)

    # Query head n reads KV head n // G, so the query heads are grouped by KV head.
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    scores = jnp.einsum("...tkgh,...skh->...tkgs", grouped, k, precision=HIGHEST) * factor
    if mask is not None:
        scores = jnp.where(mask[..., :, None, None, :], scores, -jnp.inf)

    # Subtract the largest score, so that no exponential overflows. It cancels, so it needs no derivative.
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weights = jnp.exp(scores - top)
    mass = weights.sum(-1)

    # `!=`, because a mass of NaN is not empty and has to be propagated.
    read = mass != 0
    safe = jnp.where(read, mass, 1.0)
    o = jnp.einsum("...tkgs,...ske->...tkge", weights, v, precision=HIGHEST) / safe[..., None]
    lse = jnp.where(read, jnp.log(safe) + top[..., 0], -jnp.inf)
    if reads_nan is not None:
        o, lse = jnp.where(reads_nan[..., None, None], jnp.nan, o), jnp.where(reads_nan[..., None], jnp.nan, lse)
    return o.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1])


def merge_readouts(*readouts: Readout) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Merges (o, lse) of segments into attention over their union. Exact, in any order.

    Args:
      readouts: one or more (o [..., N, E], lse [..., N]), natural-log lse. An infinite lse marks an empty segment,
        whatever its o holds; kernels of some engines write +∞, others −∞.

    Returns:
      (o, lse) float32; (0, −∞) where every segment is empty.

    Raises:
      ShapeError: there is no readout, or shapes differ.
    """
    pairs = [isinstance(pair, tuple) and [hasattr(array, "shape") for array in pair] == [True] * 2 for pair in readouts]
    if not pairs or not all(pairs):
        raise ShapeError(f"merge_readouts: got {readouts!r:.80}; expected at least one pair (o, lse) of arrays")
    shape = readouts[0][0].shape
    for o, lse in readouts:
        if o.shape != shape or lse.shape != shape[:-1]:
            raise ShapeError(f"merge_readouts: got o {o.shape}, lse {lse.shape}; expected {shape} and {shape[:-1]}")
    return _merged(readouts)


@functools.partial(jax.jit, inline=True)
def _merged(readouts: tuple[Readout, ...]) -> tuple[Array, Array]:
    """Does what `merge_readouts` does."""
    outputs = jnp.stack([o.astype(jnp.float32) for o, _ in readouts])
    masses = jnp.stack([lse.astype(jnp.float32) for _, lse in readouts])

    # The o of an empty segment may hold NaN, which a weight of zero would not remove.
    empty = jnp.isinf(masses)
    outputs, masses = jnp.where(empty[..., None], 0.0, outputs), jnp.where(empty, -jnp.inf, masses)

    top = jnp.max(masses, axis=0)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
    weights = jnp.exp(masses - top)
    mass = weights.sum(0)
    read = mass != 0
    safe = jnp.where(read, mass, 1.0)
    o = (weights[..., None] * outputs).sum(0) / safe[..., None]
    return o, jnp.where(read, jnp.log(safe) + top, -jnp.inf)
