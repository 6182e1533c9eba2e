"""Attention over keys that lie over the devices of a mesh axis, inside `jax.shard_map`.

A readout is (o, lse) of queries over the keys of one device; readouts of all devices merge exactly.

Axis letters: B batch, T queries, S keys of a device, N query heads, K KV heads, H key width, W value width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvpatch_jax.core import merge_readouts

from ..attention import Mask
from ..attention.dispatch import DENSE_SCORES
from ..attention.mask import NOWHERE
from ..decoder.attention import Attend

AXIS = "chunks"
"""Name of the mesh axis."""
Readout = tuple[Float[Array, "B T N W"], Float[Array, "B T N"]]
LOWEST = -1e30
"""What a row's largest score is at least, so that a row which sees nothing has no mass."""


def readout(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K W"],
    mask: Mask,
    scale: float,
) -> Readout:
    """Computes attention over one device's keys, with the logarithm of its softmax mass.

    As `attention` computes it: products in the arrays' type, sums and softmax in float32. Many queries are taken in
    blocks, so that memory grows with the keys and not with queries times keys.

    Args:
      mask: causal, by places.

    Returns:
      o and lse, float32; (0, −∞) for a query that sees no key.
    """
    B, T, N, H = query.shape
    K, places = key.shape[2], mask.places_of_keys(key.shape[1])

    def one_query(query: Float[Array, "B N H"], place: Array) -> tuple[Array, Array]:
        grouped = query.reshape(B, K, N // K, H)
        scores = jnp.einsum("BKGH,BSKH->BKGS", grouped, key, preferred_element_type=jnp.float32) * scale
        scores = jnp.where((places <= place[:, None])[:, None, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1, keepdims=True, initial=LOWEST)
        weights = jnp.exp(scores - top)
        mass = jnp.sum(weights, axis=-1, keepdims=True)
        weights = (weights / jnp.maximum(mass, 1e-30)).astype(value.dtype)
        o = jnp.einsum("BKGS,BSKW->BKGW", weights, value, preferred_element_type=jnp.float32)
        lse = jnp.where(mass > 0, jnp.log(jnp.maximum(mass, 1e-30)) + top, -jnp.inf)
        return o.reshape(B, N, -1), lse.reshape(B, N)

    by_query = jnp.moveaxis(query, 1, 0), jnp.broadcast_to(mask.places_of_queries(T), (B, T)).T
    block = max(1, DENSE_SCORES // key.shape[1])
    o, lse = jax.lax.map(lambda query: one_query(*query), by_query, batch_size=block)
    return jnp.moveaxis(o, 0, 1), jnp.moveaxis(lse, 0, 1)


def over_all_devices(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
    """Computes attention of queries that every device has, over the keys of all; the mask is of a device's own keys."""
    # The largest lse and the mass travel first, then outputs in the queries' type, weighted by their share.
    o, lse = readout(query, key, value, mask, scale)
    top = jax.lax.pmax(lse, AXIS)
    weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    share = weights / jnp.maximum(jax.lax.psum(weights, AXIS), 1e-30)
    return jax.lax.psum((share[..., None] * o).astype(query.dtype), AXIS)


def exchange(rows: int, size: int) -> Attend:
    """Returns attention of each device's selected tokens, which come first, and of a question that all devices have.

    Selected tokens attend to their own device's keys and to all keys of the devices in front of it: their queries
    travel there, and readouts back. The mask is of a device's own keys.

    Args:
      rows: selected tokens of a device, with padding.
      size: keys of a device that belong to the sequence; those behind them are the question's.
    """

    def attend(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
        device, devices = jax.lax.axis_index(AXIS), jax.lax.axis_size(AXIS)
        queries, count = query[:, :rows], query.shape[1] - rows
        selected = readout(queries, key, value, mask.take_queries(0, rows, rows + count), scale)
        behind = Mask(causal=True, offset=size - 1, key_places=jnp.where(mask.key_places < size, 0, NOWHERE))
        for hop in range(1, devices):
            forth = [(index, index - hop) for index in range(hop, devices)]
            visitors = jax.lax.ppermute(queries, AXIS, forth)
            o, lse = readout(visitors, key, value, behind, scale)
            # The output travels as attention would return it, its mass in float32.
            o, lse = jax.lax.ppermute((o.astype(query.dtype), lse), AXIS, [(there, here) for here, there in forth])
            # A device that was sent nothing holds zeros, which are no readout.
            selected = merge_readouts(selected, (o, jnp.where(device >= hop, lse, -jnp.inf)))

        asked = mask.take_queries(rows, count, rows + count)
        question = over_all_devices(query[:, rows:], key, value, asked, scale=scale)
        return jnp.concatenate([selected[0].astype(query.dtype), question], axis=1)

    return attend
