"""Attention over keys that lie over the devices of a mesh axis: partial readouts, and how devices exchange them.

Every function here runs inside `jax.shard_map`. A partial readout is (o, lse) of queries over the keys of one device;
readouts of all devices merge exactly.

Axis letters: B batch, T queries, S keys of a device, P devices, N query heads, K KV heads, H key width, W value width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvpatch_jax.core import merge_readouts

from ..attention import Mask
from ..attention.dispatch import DENSE_SCORES
from ..attention.mask import NOWHERE
from ..decoder.attention import Attend

Readout = tuple[Float[Array, "B T N W"], Float[Array, "B T N"]]
LOWEST = -1e30
"""What a row's largest score is at least, so that a row which sees nothing has no mass."""


def _empty_readout(shape: tuple[int, ...]) -> Readout:
    """Returns the identity of `merge_readouts` for o of a shape."""
    return jnp.zeros(shape, jnp.float32), jnp.full(shape[:-1], -jnp.inf, jnp.float32)


def partial_readout(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K W"],
    mask: Mask,
    scale: float,
) -> Readout:
    """Computes attention over one device's keys, with the logarithm of its softmax mass.

    As `attention` computes it: products in the arrays' type, sums and softmax in float32. Many queries are taken in
    blocks, so that memory grows with the keys and not with queries times keys.

    Returns:
      o and lse, float32; (0, −∞) for a query that sees no key.
    """
    T, S = query.shape[1], key.shape[1]
    if T == 0:
        return _empty_readout((*query.shape[:3], value.shape[-1]))
    count = min(T, -(-T * S // DENSE_SCORES))
    if count == 1:
        return _block_readout(query, key, value, mask.dense(T, S), scale)

    # Equal blocks: the last one ends with the queries, and repeats fewer of the block before than there are blocks.
    size = -(-T // count)
    count = -(-T // size)
    starts = jnp.minimum(jnp.arange(count) * size, T - size)

    def block(start: Array) -> Readout:
        queries = jax.lax.dynamic_slice_in_dim(query, start, size, 1)
        return _block_readout(queries, key, value, mask.take_queries(start, size, T).dense(size, S), scale)

    def joined(blocks: Array) -> Array:
        full = jnp.moveaxis(blocks[:-1], 0, 1).reshape(blocks.shape[1], -1, *blocks.shape[3:])
        return jnp.concatenate([full, blocks[-1][:, count * size - T :]], axis=1)

    o, lse = jax.lax.map(block, starts)
    return joined(o), joined(lse)


def _block_readout(query: Array, key: Array, value: Array, allowed: Array, scale: float) -> Readout:
    B, T, N, H = query.shape
    K = key.shape[2]
    grouped = query.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(allowed[:, :, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=LOWEST)
    weights = jnp.exp(scores - top)
    mass = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.maximum(mass, 1e-30)

    o = jnp.einsum("BKGTS,BSKW->BTKGW", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    lse = jnp.where(mass > 0, jnp.log(jnp.maximum(mass, 1e-30)) + top, -jnp.inf)[..., 0]
    return o.reshape(B, T, N, value.shape[-1]), jnp.moveaxis(lse.reshape(B, N, T), 1, 2)


def over_all_devices(axis: str) -> Attend:
    """Returns attention of queries that every device has, over the keys of all; the mask is of a device's own keys."""

    def attend(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
        # The largest lse and the mass travel first, then outputs in the queries' type, weighted by their share.
        o, lse = partial_readout(query, key, value, mask, scale)
        top = jax.lax.pmax(lse, axis)
        weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
        share = weights / jnp.maximum(jax.lax.psum(weights, axis), 1e-30)
        return jax.lax.psum((share[..., None] * o).astype(query.dtype), axis)

    return attend


def exchange(
    axis: str, rows: int, lengths: Int[Array, " P"], size: int, selected_mask: Mask, question_mask: Mask
) -> Attend:
    """Returns attention of each device's selected tokens, which come first, and of a question that all devices have.

    Selected tokens attend to their own device's keys and to all keys of the devices in front of it: their queries
    travel there, and partial readouts back. The keys that a layer's selected tokens wrote are among these.

    Args:
      rows: selected tokens of a device, with padding.
      lengths: how many keys of each device count.
      size: keys of a device that belong to the sequence; those behind them are the question's.
      selected_mask, question_mask: which of this device's keys the two see, in place of the mask of all.
    """

    def attend(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
        del mask
        queries, width, device = query[:, :rows], value.shape[-1], jax.lax.axis_index(axis)
        selected = partial_readout(queries, key, value, selected_mask, scale)
        places = jnp.where(jnp.arange(size) < lengths[device], 0, NOWHERE)[None]

        def read(queries: Array) -> Readout:
            return partial_readout(queries, key[:, :size], value[:, :size], Mask(key_places=places), scale)

        for hop in range(1, len(lengths) if rows else 1):
            forth = [(index, index - hop) for index in range(hop, len(lengths))]
            visitors = jax.lax.ppermute(queries, axis, forth)
            helps = device < len(lengths) - hop
            o, lse = jax.lax.cond(helps, read, lambda _: _empty_readout((*queries.shape[:3], width)), visitors)
            # The output travels as attention would return it, its mass in float32.
            o, lse = jax.lax.ppermute((o.astype(query.dtype), lse), axis, [(there, here) for here, there in forth])
            # A device that was sent nothing holds zeros, which are no readout.
            selected = merge_readouts(selected, (o, jnp.where(device >= hop, lse, -jnp.inf)))

        question = over_all_devices(axis)(query[:, rows:], key, value, question_mask, scale=scale)
        return jnp.concatenate([selected[0].astype(query.dtype), question], axis=1)

    return attend
