"""Attention over keys that lie over the devices of a mesh axis: partial readouts, and how devices exchange them.

Every function here runs inside `jax.shard_map`. A partial readout is (o, lse) of queries over the keys of one device;
readouts of all devices merge exactly. Three functions bring them together:

* `over_all_devices`: queries that every device has (a question's); the merged output is summed over devices.
* `ring`: every device's queries over all keys in front of them; blocks of keys rotate (Liu et al., arXiv:2310.01889).
* `exchange`: few queries per device (selected tokens). Queries travel to the devices in front of theirs and partial
  readouts travel back; where a device has many queries, keys travel in place of them.

Axis letters: B batch, T queries, S keys of a device, N query heads, K KV heads, G = N/K, H key width, W value width.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvpatch_jax.core import merge_readouts

from ..attention import Mask
from ..attention.dispatch import DENSE_SCORES
from ..attention.mask import NOWHERE
from ..decoder.attention import Attend

Readout = tuple[Float[Array, "B T N W"], Float[Array, "B T N"]]
Move = Literal["queries", "keys"]
"""What travels between the device of selected tokens and a device in front of it."""
LOWEST = -1e30
"""What a row's largest score is at least, so that a row which sees nothing has no mass."""


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """What devices exchange about the selected tokens, static: shapes of the compiled program follow from it.

    Attributes:
      axis: name of the mesh axis, whose devices hold the sequence in order.
      capacities: for each device, how many selected tokens at most it recomputes in a row of the batch.
      moves: for each device, what travels between it and the devices in front of it.
      copied: places at the front of every device that hold a copy of the first device's chunk, so that nothing travels
        between it and the others; 0: none.
      shared_values: values are the first numbers of the keys (latent attention), and do not travel beside them.
    """

    axis: str
    capacities: tuple[int, ...]
    moves: tuple[Move, ...]
    copied: int = 0
    shared_values: bool = False

    @property
    def rows(self) -> int:
        """Selected tokens that every device has room for: the largest capacity."""
        return max(self.capacities)

    def groups(self, hop: int) -> Iterator[tuple[Move, int, list[int]]]:
        """Yields (move, rows, devices): devices with selected tokens that read a device `hop` places in front."""
        found: dict[tuple[Move, int], list[int]] = {}
        for device in range(hop + bool(self.copied), len(self.capacities)):
            if self.capacities[device]:
                key = self.moves[device], self.capacities[device]
                found.setdefault(key, []).append(device)
        for (move, rows), devices in found.items():
            yield move, rows, devices


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
    if T == 0 or S == 0:
        return _nothing(query, value.shape[-1])
    count = min(T, -(-T * S // DENSE_SCORES))
    if count == 1:
        return _block_readout(query, key, value, mask.dense(T, S), scale)

    # Equal blocks: the last one ends with the queries, and repeats fewer of the block before than there are blocks.
    size = -(-T // count)
    count = -(-T // size)
    starts = jnp.minimum(jnp.arange(count) * size, T - size)

    def block(start: Array) -> Readout:
        some = jax.lax.dynamic_slice_in_dim(query, start, size, 1)
        return _block_readout(some, key, value, mask.take_queries(start, size, T).dense(size, S), scale)

    def joined(blocks: Array) -> Array:
        whole = jnp.moveaxis(blocks[:-1], 0, 1).reshape(blocks.shape[1], -1, *blocks.shape[3:])
        return jnp.concatenate([whole, blocks[-1][:, count * size - T :]], axis=1)

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


def merge_over_devices(readout: Readout, axis: str, dtype: DTypeLike) -> Float[Array, "B T N W"]:
    """Merges the readouts that all devices have of the same queries: attention over the keys of all.

    Outputs travel in `dtype`, the queries', each weighted by its device's share of the mass. Two float32 numbers per
    query and head travel before them: the largest lse, and the mass.
    """
    o, lse = readout
    top = jax.lax.pmax(lse, axis)
    weights = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    share = weights / jnp.maximum(jax.lax.psum(weights, axis), 1e-30)
    return jax.lax.psum((share[..., None] * o).astype(dtype), axis)


def over_all_devices(axis: str) -> Attend:
    """Returns attention of queries that every device has, over the keys of all; the mask is of a device's own keys."""

    def attend(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
        readout = partial_readout(query, key, value, mask, scale)
        return merge_over_devices(readout, axis, query.dtype)

    return attend


def ring(axis: str, devices: int, shared_values: bool) -> Attend:
    """Returns ring attention: causal, every device's queries over the keys of its own and of all devices in front.

    Blocks of keys and values go round once, devices - 1 hops. A block that comes from behind is passed on and not
    computed with. The mask is not looked at: tokens lie in order, and padding is at the very end.
    """

    def attend(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
        del mask
        width, device = value.shape[-1], jax.lax.axis_index(axis)
        around = [(index, (index + 1) % devices) for index in range(devices)]
        found = partial_readout(query, key, value, Mask(causal=True), scale)
        block = (key,) if shared_values else (key, value)

        for hop in range(1, devices):
            block = jax.lax.ppermute(block, axis, around)

            def read(block: tuple[Array, ...]) -> Readout:
                return partial_readout(query, block[0], _values(block, width), Mask(), scale)

            # Without the branch half of the work would be on blocks that the mask hides.
            part = jax.lax.cond(hop <= device, read, lambda _: _nothing(query, width), block)
            found = merge_readouts(found, part)

        return found[0].astype(query.dtype)

    return attend


def exchange(
    plan: ExchangePlan, lengths: Int[Array, " P"], size: int, selected_mask: Mask, question_mask: Mask
) -> Attend:
    """Returns attention of each device's selected tokens, which come first, and of a question that all devices have.

    Selected tokens attend to their own device's keys and to all keys of the devices in front of it. The keys that a
    layer's selected tokens wrote are among these.

    Args:
      lengths: how many keys of each device count, copies of the first chunk included.
      size: keys of a device that belong to the sequence; those behind them are the question's.
      selected_mask, question_mask: which of this device's keys the two see, in place of the mask of the whole.
    """
    axis = plan.axis

    def attend(query: Array, key: Array, value: Array, mask: Mask, *, scale: float) -> Array:
        del mask
        width, device = value.shape[-1], jax.lax.axis_index(axis)
        selected = partial_readout(query[:, : plan.rows], key, value, selected_mask, scale)
        question = partial_readout(query[:, plan.rows :], key, value, question_mask, scale)

        # What a device reads for others, or sends them: its own part of the sequence.
        own = (key[:, plan.copied : size],)
        own = own if plan.shared_values else (*own, value[:, plan.copied : size])

        for hop in range(1, len(plan.capacities)):
            for move, rows, devices in plan.groups(hop):
                queries = query[:, :rows]
                helpers = [index - hop for index in devices]

                def read(queries: Array, block: tuple[Array, ...], holder: Array) -> Readout:
                    live = jnp.arange(size - plan.copied) < lengths[holder] - plan.copied
                    places = jnp.where(live, 0, NOWHERE)[None]
                    return partial_readout(queries, block[0], _values(block, width), Mask(key_places=places), scale)

                def nothing(queries: Array, *_: object) -> Readout:
                    return _nothing(queries, width)

                if move == "queries":
                    there = jax.lax.ppermute(queries, axis, list(zip(devices, helpers, strict=True)))
                    helps = jnp.isin(device, jnp.array(helpers))
                    part_o, part_lse = jax.lax.cond(helps, read, nothing, there, own, device)
                    # The output travels as attention would return it, its mass in float32.
                    back = part_o.astype(query.dtype), part_lse
                    part_o, part_lse = jax.lax.ppermute(back, axis, list(zip(helpers, devices, strict=True)))
                else:
                    here = jax.lax.ppermute(own, axis, list(zip(helpers, devices, strict=True)))
                    asks = jnp.isin(device, jnp.array(devices))
                    part_o, part_lse = jax.lax.cond(asks, read, nothing, queries, here, device - hop)

                # A device that was sent nothing holds zeros, which are no readout.
                part_lse = jnp.where(jnp.isin(device, jnp.array(devices)), part_lse, -jnp.inf)
                merged = merge_readouts((selected[0][:, :rows], selected[1][:, :rows]), (part_o, part_lse))
                selected = (
                    jnp.concatenate([merged[0], selected[0][:, rows:]], axis=1),
                    jnp.concatenate([merged[1], selected[1][:, rows:]], axis=1),
                )

        merged = merge_over_devices(question, axis, query.dtype)
        return jnp.concatenate([selected[0].astype(query.dtype), merged], axis=1)

    return attend


def _values(block: tuple[Array, ...], width: int) -> Array:
    """Returns the values of a block that travelled: the second array, or the first numbers of the keys."""
    return block[1] if len(block) == 2 else block[0][..., :width]


def _nothing(query: Array, width: int) -> Readout:
    """Returns the readout of no keys."""
    shape = query.shape[:3]
    return jnp.zeros((*shape, width), jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)
