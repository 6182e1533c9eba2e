"""The paged pool: pages of vectors per channel, and chunks spliced into them, rotated, moved and read in place.

A pool is a bare pytree {channel: [L, P, O, K, H]}: P pages of O slots, in the engine frame. A slot is
page · O + offset. `slots` counts their owners, `programs` has what runs on a device, and `page_format` has other
engines' pages.

All functions raise before anything is written: LayoutError, ShapeError or ShapeError for another pool than the
layout's, PoolError for a pool that was donated, KernelError for slots out of range or named twice.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from pallas_kernels.splice import check_slots, padded_width

from ..core import (
    AnyArray,
    KVLayout,
    Pool,
    Positions,
    Slots,
    Start,
    arrays_of,
    check_pool,
    padded_slots,
    token_offsets,
    trimmed,
)
from ..errors import InputError, PoolError, ShapeError
from ..patching import Placed
from . import programs
from .programs import Pools
from .slots import SlotAllocator, chunk_slots


def make_pool(
    layout: KVLayout,
    pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    padded: bool = False,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> dict[str, Float[Array, "L P O _ _"]]:
    """Allocates a pool of zeros, {channel: [L, P, O, K, H]}, for the channels with a row per token.

    Args:
      padded: H is the channel's width padded to a multiple of 128 lanes, as engines for TPUs store it. There the kernel
        writes a narrower channel (the 64-wide `kpe` of latent attention) in place only so: XLA lays half-filled lanes
        out with other axes innermost, and copies the pool for every splice. Padding is zero, and `splice` keeps it so.
      shardings: how each channel lies over devices, such as a backbone's `kv_shardings`; None: on the default device.

    Raises:
      PoolError: no pages, or an empty page.
    """
    if pages < 1 or page_size < 1:
        raise PoolError(f"pool: got pages {pages}, page_size {page_size}; expected at least 1 of each")
    pool = {}
    for channel in layout.token_channels:
        width = padded_width(channel.width) if padded else channel.width
        shape = (layout.depth(channel.name), pages, page_size, channel.heads, width)
        if shardings:
            pool[channel.name] = jnp.zeros(shape, dtype, device=shardings[channel.name])
        else:
            pool[channel.name] = programs.zeros(shape, jnp.dtype(dtype))
    return pool


def splice(
    pool: Pool, slots: Slots, placed: Placed, *, allocator: SlotAllocator | None = None
) -> dict[str, Float[Array, "L P O _ _"]]:
    """Writes R(start + local) · (KV + u v) into the pool, in place: `apply_patch`, with pages as its destination.

    A transition has no slots: what `apply_patch` gives of it stands beside the pool, composed (`Paged.transition`).

    Args:
      pool: donated; use what comes back. Slots that are not named keep their bits. Of a padded pool, the padding of
        slots that are named becomes zero.
      slots: int32 [T] of the chunk's padded length, in any order; those from the chunk's length on are ignored, and
        their tokens are not written.
      placed: one chunk, without a batch axis.
      allocator: of the pool. With it, slots that are written must have exactly one owner, so that shared slots are not
        overwritten. Without it, the caller ensures that.

    Raises:
      PoolError: slots that are shared or have no owner. ShapeError: the chunk's dtype is not the pool's; a
      batch of chunks, or slots that are not one per token. KernelError: a rank beyond a channel's width.
    """
    if not isinstance(placed, Placed):
        raise InputError(f"splice: got a {type(placed).__name__}; expected a Placed: a chunk, its patch, a start, …")
    chunk = placed.chunk
    pages, page_size = check_pool(chunk.layout, pool)
    for name, vectors in pool.items():
        if placed.kv[name].dtype != vectors.dtype:
            raise ShapeError(
                f"splice: got {name!r} of dtype {placed.kv[name].dtype}; expected the pool's {vectors.dtype}"
            )
    slots, length = chunk_slots(placed, slots, pages * page_size, "splice"), np.int32(chunk.length)
    if allocator is not None:
        allocator.check_sole_owner(slots[: chunk.length], pool)

    # All is checked: the programs donate the pool, so an error after this would leave none.
    arrays: Any = dict(pool)
    operands = (slots, chunk.local, placed.start, length, placed.kv, placed.factors)
    return programs.write_piece(chunk.layout, Pools(arrays, {}), *operands, layers=placed.layers).engine


def read_slots(pool: Pool, slots: Slots, layout: KVLayout | None = None) -> dict[str, Float[Array, "L T _ _"]]:
    """Reads the vectors at `slots` [T] (int32), which may repeat: {channel: [L, T, K, H]}.

    Args:
      layout: of the pool; removes its padding. None reads whole rows.
    """
    pages, page_size = check_pool(layout, pool)
    slots = slots if isinstance(slots, Tracer) else np.asarray(slots)
    if slots.ndim != 1:
        raise ShapeError(f"read_slots: got slots of shape {slots.shape}; expected [T]")
    # A slot may be read twice, so slots are checked for their range alone.
    check_slots(slots if isinstance(slots, Tracer) else np.unique(slots), pages * page_size)
    rows = programs.read_rows(Pools(arrays_of(pool), {}), slots).engine
    return rows if layout is None else trimmed(layout, rows)


def move_slots(pool: Pool, old: Slots, new: Slots) -> dict[str, Float[Array, "L P O _ _"]]:
    """Copies the vectors at `old` to `new`, padding included, reading all before writing any. Donates the pool.

    Both are [N] and are padded to a bucket, so that few programs are compiled. Keys are not rotated: positions do not
    depend on slots. Only `new` must be distinct; ShapeError for unequal numbers of slots.
    """
    pages, page_size = check_pool(None, pool)
    if old.shape != new.shape:
        raise ShapeError(f"move_slots: got {old.shape[0]} slots to {new.shape[0]}; expected as many")
    write, length = padded_slots(new, pages * page_size)
    # A vector may be copied to several slots, so sources are checked for their range alone.
    check_slots(np.unique(np.asarray(old)), pages * page_size)
    # Padding reads slot 0 and is written nowhere.
    read = np.pad(np.asarray(old, np.int32), (0, len(write) - len(old)))
    return programs.copy_slots(Pools(arrays_of(pool), {}), read, write, length).engine


def rotate_slots(
    layout: KVLayout,
    pool: Pool,
    slots: Slots,
    offset: Positions | Start,
    source: Mapping[str, Float[AnyArray, "L T _ _"]] | None = None,
) -> dict[str, Float[Array, "L P O _ _"]]:
    """Rotates the keys at some slots, of any number of chunks, in place and in one launch. The pool is donated.

    Values and slots that are not named keep their bits.

    Args:
      slots: int32 [T], distinct; padded to a bucket, so that few programs are compiled.
      offset: new position − old one, integers: for all slots alike, a scalar or one per axis [A]; or of each slot, [T]
        or [T, A]. With a source: the new positions themselves, fractional ones too.
      source: phase-free keys {channel: [L,T,K,H]} of the slots, from which they are rotated with one rounding
        however often they move; channels without phase are ignored. None: from the keys in the pool.

    Raises:
      InputError: offsets of another shape, not integers, or from 2³⁰ on. ShapeError: a source of other tokens.
    """
    pages, page_size = check_pool(layout, pool)
    slots, length = padded_slots(slots, pages * page_size)
    # Offsets are differences, which are whole; with a source they are positions, which may be fractional.
    kinds = "iu" if source is None else "iuf"
    offsets = token_offsets(layout.rope, offset, int(length), len(slots), "rotate_slots", kinds)
    pools = Pools(arrays_of(pool), {})
    if source is None:
        start = np.zeros_like(offsets)
        return programs.rotate_pieces(layout, pools, slots, slots, offsets, start, length, whole=False).engine

    keys = {}
    for channel in (channel for channel in layout.token_channels if channel.rotates):
        value = source.get(channel.name)
        expected = layout.depth(channel.name), int(length), channel.heads, channel.width
        if value is None or value.shape != expected:
            shape = None if value is None else value.shape
            raise ShapeError(f"rotate_slots: got source[{channel.name!r}] of shape {shape}; expected {expected}")
        keys[channel.name] = jnp.pad(value, ((0, 0), (0, len(slots) - int(length)), (0, 0), (0, 0)))
    return programs.write_piece(layout, pools, slots, offsets, np.int32(0), length, keys, {}).engine
