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


def written_into(
    cache: Mapping[str, Any],
    channels: Mapping[str, str],
    layer: Any,
    slots: Any,
    kept: Array | None,
    _: KV,
    turned: KV,
) -> tuple[KV, dict[str, Any]]:
    """Returns engine-frame KV of one layer with the tokens written into it, and the whole cache with them.

    A channel of the cache is [L,B,S,K,H], or a tuple of its layers. `channels` are its names for the tokens' own, and
    `layer` is the place along them.
    """
    keys, written = {}, dict(cache)
    for name, new in turned.items():
        whole, theirs = cache[channels[name]], channels[name]
        own = whole[layer] if isinstance(whole, tuple) else whole
        size = own.shape[-3]
        # One past the last slot is where writing is dropped.
        places = slots if kept is None else jnp.where(kept, slots, size)
        at = (jnp.arange(slots.shape[0])[:, None], places)
        new_values = new.astype(own.dtype)

        if isinstance(whole, tuple):
            own = own.at[at].set(new_values, mode="drop")
            written[theirs] = (*whole[:layer], own, *whole[layer + 1 :])
        else:
            written[theirs] = whole.at[(layer, *at)].set(new_values, mode="drop")
            own = jax.lax.dynamic_index_in_dim(written[theirs], layer, keepdims=False)

        keys[name] = own.astype(new.dtype)

    return keys, written


def written_into_keys(
    paged: Paged,
    channels: Mapping[str, Channel],
    layer: Any,
    slots: Int[Array, "B T"],
    kept: Array | None,
    _: KV,
    turned: KV,
) -> tuple[KV, KV]:
    """Returns engine-frame KV of one layer's pages with the tokens written among these keys, and the tokens' own.

    The pool stays as it is: `written_into_pages` writes all layers' tokens into it.
    """
    keys = slots if kept is None else jnp.where(kept, slots, paged.key_count)
    rows = jnp.arange(slots.shape[0])[:, None]
    found = {}
    for name, value in read_pages(paged, channels, layer).items():
        # As the next step will read it: rounded to the pool's type.
        own = turned[name].astype(value.dtype)
        found[name] = value.at[rows, keys].set(own, mode="drop").astype(turned[name].dtype)
    return found, turned


def written_into_pages(
    pool: Mapping[str, Array],
    layout: KVLayout,
    own: KV,
    slots: Int[Array, "B T"],
    keep: Bool[Array, "L B T"] | None,
) -> dict[str, Array]:
    """Returns the pool with the tokens' engine-frame KV [L,B,T,K,H] at their slots, in one scatter for all layers.

    A loop over layers that each wrote into the pool would copy it on a CPU. Padding becomes zero.
    """
    written = {}
    for name, new in own.items():
        whole = pool[name]
        layers, pages, size, _, width = whole.shape
        kept = layout.channel(name).layers
        marked = keep if keep is None or kept is None else keep[np.asarray(kept)]
        places = slots if marked is None else jnp.where(marked, slots, pages * size)
        places = jnp.broadcast_to(places, new.shape[:3])
        room = [(0, 0)] * (new.ndim - 1) + [(0, width - new.shape[-1])]
        row = jnp.pad(new.astype(whole.dtype), room)
        at = (jnp.arange(layers)[:, None, None], places // size, places % size)
        written[name] = whole.at[at].set(row, mode="drop")

    return written


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
    found: KV = {}
    for channel in layout.channels:
        found |= read_pages(paged, {channel.name: channel}, jnp.arange(layout.depth(channel.name)))
    return found
