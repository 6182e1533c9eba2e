"""Attention with all scores in memory: the oracle, and what small sizes and single queries take."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def dense(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K W"],
    mask: Bool[Array, "#B 1 T S"],
    scale: float,
) -> Float[Array, "B T N W"]:
    """Attends with N query heads over K KV heads (GQA when N > K), softmax in float32.

    `mask` is True where a query may look. A query that may look nowhere returns zeros, not NaN.
    """
    B, T, N, H = query.shape
    K = key.shape[2]
    grouped = query.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    # The floor of the maximum keeps a row that sees nothing at exp(−∞) = 0, where −∞ − −∞ would be NaN. Softmax does
    # not depend on what is taken off, so nothing is differentiated through it.
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(top))
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    mixed = jnp.einsum("BKGTS,BSKW->BTKGW", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return mixed.reshape(B, T, N, value.shape[-1]).astype(query.dtype)
