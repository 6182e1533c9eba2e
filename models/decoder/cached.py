"""The KV that a layer attends over: what is cached in front of its tokens, contiguous or in pages, and the tokens' own.

Axis letters: B batch, T tokens, S keys, L layers, P pages of a pool, O slots of a page, N pages of a table, K KV heads,
H head width.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Int

from kvpatch_jax.core import Channel, KVLayout, Paged

KV = dict[str, Array]


def behind(cached: Mapping[str, Array] | None, _: KV, turned: KV) -> tuple[KV, None]:
    """Returns engine-frame KV to attend over: a layer's context, and the tokens behind it."""
    if cached is None:
        return turned, None

    def join(name, new):
        return jnp.concatenate([cached[name].astype(new.dtype), new], axis=1)

    return {name: join(name, new) for name, new in turned.items()}, None


def keys_of(context: Mapping[str, Any] | Paged, channels: Mapping[str, Channel], layer: Any) -> KV:
    """Returns what a context holds of one layer, [B,S,K,H] by channel, contiguous or in pages; of one with linear
    attention the parts of its transition, [B,R,K,W].

    `layer` counts along the channels, which are named as the result's entries are to be.
    """
    if isinstance(context, Paged):
        if all(channel.rows is None for channel in channels.values()):
            return read_pages(context, channels, layer)
        context = {name: jnp.asarray(part) for name, part in (context.transition or {}).items()}

    def own(channel: Channel) -> Array:
        return jax.lax.dynamic_index_in_dim(context[channel.name], layer, keepdims=False)

    return {name: own(channel) for name, channel in channels.items()}


def among(
    context: Mapping[str, Any] | Paged,
    channels: Mapping[str, Channel],
    layer: Any,
    keys: Int[Array, "B T"],
    kept: Array | None,
    _: KV,
    turned: KV,
) -> tuple[KV, KV]:
    """Returns one layer's engine-frame KV with the tokens written among these keys, and what `written_into` takes: the
    tokens' own KV. The context stays as it is: a loop over layers that each wrote into a stack would copy it on a CPU.
    """
    rows, held, found = jnp.arange(keys.shape[0])[:, None], keys_of(context, channels, layer), {}
    for name, value in held.items():
        # One past the last key is where writing is dropped.
        places = keys if kept is None else jnp.where(kept, keys, value.shape[1])
        # As the next step will read it: rounded to the cache's type.
        whole = value.at[rows, places].set(turned[name].astype(value.dtype), mode="drop")
        found[name] = whole.astype(turned[name].dtype)
    return found, {name: turned[name] for name in held}


def row_slots(size: int, keys: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns keys and slots of a contiguous cache, which is a pool whose page b is row b; none out of range is left.

    Args:
      size: keys of a row, S.
    """
    inside, rows = (keys >= 0) & (keys < size), jnp.arange(keys.shape[0])[:, None]
    return jnp.where(inside, keys, size), jnp.where(inside, rows * size + keys, keys.shape[0] * size)


def written_into(
    pool: Mapping[str, Any],
    layout: KVLayout,
    written: Mapping[str, Any],
    slots: Int[Array, "B T"],
    keep: Bool[Array, "L B T"] | None,
    layers: range,
) -> dict[str, Any]:
    """Returns a pool [L,P,O,K,H] with what `among` gave of these layers at its slots, in one scatter for all of them.

    A slot is page · O + offset, one past the last is nowhere. Padding of the pool's width becomes zero. The parts
    of a transition, which know of no slots, take the place of those that were there.
    """
    after = dict(pool)
    for name, new in written.items():
        whole, rows = pool[name], layout.rows_of(name, layers)
        if not rows:
            continue
        if layout.channel(name).rows is not None:
            new = new.astype(whole.dtype)
            after[name] = new if len(rows) == len(whole) else whole.at[np.asarray(rows)].set(new)
            continue

        _, pages, size, _, width = whole.shape
        kept = [layer for layer in layers if layout.rows_of(name, [layer])]
        places = slots if keep is None else jnp.where(keep[np.asarray(kept)], slots, pages * size)
        places = jnp.broadcast_to(places, new.shape[:3])
        room = [(0, 0)] * (new.ndim - 1) + [(0, width - new.shape[-1])]
        at = (np.asarray(rows)[:, None, None], places // size, places % size)
        after[name] = whole.at[at].set(jnp.pad(new.astype(whole.dtype), room), mode="drop")

    return after


def read_pages(paged: Paged, channels: Mapping[str, Channel], layer: Int[Array, "..."] | int) -> KV:
    """Returns what a table's pages hold of one layer, [B,N·O,K,H], or of each layer in `layer`, [L,B,N·O,K,H].

    `layer` counts along the channels, which are named as the result's entries are to be. Pages are gathered from the
    pool as it is, and nothing else of it is touched. Padding is cut off, and keys that do not count are zero: whatever
    lies there, NaN included, reaches no sum.
    """
    layer = jnp.asarray(layer, jnp.int32)
    found = {}
    for name, channel in channels.items():
        value = jnp.asarray(paged.pool[channel.name])
        layers, pages, size, heads, width = value.shape
        # Padding of a table (-1) reads page 0, which is zeroed below with all that does not count.
        at = layer[..., None, None] * pages + jnp.maximum(paged.table, 0)
        taken = value.reshape(layers * pages, size, heads, width).at[at].get(mode="clip")
        # Else a compiler for TPUs gives the pool the layout that attention likes, and copies all of it.
        taken = with_layout_constraint(taken, Layout(major_to_minor=tuple(range(taken.ndim))))
        own = taken[..., : channel.width].reshape(*at.shape[:-1], -1, heads, channel.width)
        found[name] = jnp.where(paged.seen[..., None, None], own, 0)

    return found


def read_all_pages(paged: Paged, layout: KVLayout) -> KV:
    """Returns what a table's pages hold of every layer, {channel: [L,B,N·O,K,H]}, as `read_pages` does of one."""
    found: KV = {name: jnp.asarray(part) for name, part in (paged.transition or {}).items()}
    for channel in layout.token_channels:
        found |= read_pages(paged, {channel.name: channel}, jnp.arange(layout.depth(channel.name)))
    return found
