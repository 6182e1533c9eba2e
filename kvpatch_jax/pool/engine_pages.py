"""Chunks written into other engines' pages, and keys turned there, in place: `kvp.engines` offers these functions.

`page_forms` says how pages hold tokens. Pages are donated; slots that are not named are not touched. Of pages that are
split over devices the result lies as they did, and only what is read goes between devices.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.splice import check_slots

from ..cache import Behind, Chunk, Patch, check_is_chunk
from ..core import (
    Angles,
    AnyArray,
    Channel,
    EngineKV,
    KVLayout,
    Slots,
    Start,
    ops,
    padded_slots,
    relocation_tables,
    token_offsets,
)
from ..errors import DtypeError, InputError, ShapeError
from ..patching import operator_call
from .page_format import PageFormat, Pages, checked_pages, interleaved_form, joined_form, latent_form


def _splice(
    form: PageFormat,
    pages: tuple[Array, ...],
    slots: Array,
    kv: dict[str, Array],
    factors: ops.Factors,
    local: Array,
    start: Array,
    length: Array,
    *,
    layers: tuple[int, ...] | None = None,
    heads: ops.Heads = "joint",
    frame: ops.PatchFrame = "phase_free",
) -> tuple[Array, ...]:
    rows = form.rows(ops.apply(form.layout, kv, factors, local, start, layers=layers, heads=heads, frame=frame))
    each = [rows] if form.lead(pages[0]) else list(rows)
    return tuple(form.written(page, slots, own, length) for page, own in zip(pages, each, strict=True))


def _turn(form: PageFormat, pages: tuple[Array, ...], slots: Array, offset: Array, length: Array) -> tuple[Array, ...]:
    cos, sin = relocation_tables(form.layout.rope, jnp.zeros_like(offset), offset)
    turned = []
    for page in pages:
        rows = form.turned(page.at[form.at(page, slots)].get(mode="clip"), cos, sin)
        turned.append(form.written(page, slots, rows, length))
    return tuple(turned)


jitted_splice = jax.jit(_splice, static_argnames=("form", "layers", "heads", "frame"), donate_argnames="pages")
"""Compiled once per form, layer set, padded shape and shape of the pages, which are donated."""
jitted_turn = jax.jit(_turn, static_argnames="form", donate_argnames="pages")
"""Compiled once per form, bucket of slots and shape of the pages, which are donated."""


def check_dtype(what: str, channel: Channel, found: np.dtype, pages: np.dtype) -> None:
    """Refuses kv of another dtype than the pages'; what rotates may be float32, and is rounded once, when turned.

    Raises:
      DtypeError: it names the channel.
    """
    if found == pages or (channel.rotates and found == jnp.float32 and jnp.dtype(pages).itemsize < 4):
        return
    more = " or float32" if channel.rotates else ""
    raise DtypeError(f"{what}: {channel.name!r} of dtype {found}; expected the pages' {pages}{more}")


def _splice_into(
    find: Any,
    what: str,
    pages: Pages,
    slots: Slots,
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    behind: Any,
    first: int,
) -> Any:
    check_is_chunk(chunk)
    if chunk.batch is not None:
        raise ShapeError(f"{what}: chunk {chunk.id!r} is a batch of {chunk.batch}; expected one chunk")
    form, arrays = checked_pages(chunk.layout, pages, find, what)
    call = operator_call(what, chunk, patch, start, *behind)
    for channel in chunk.layout.channels:
        check_dtype(what, channel, call.kv[channel.name].dtype, arrays[0].dtype)
    slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
    if slots.shape != (chunk.tokens,):
        raise ShapeError(f"{what}: slots of shape {slots.shape}; expected [{chunk.tokens}], one per token")
    if not 0 <= first < chunk.length:
        raise InputError(f"{what}: first token {first}; expected 0 to {chunk.length - 1}")
    total = form.slots_of(arrays[0])
    check_slots(slots[first:], total, chunk.length - first)
    if first:
        # Beyond the last slot nothing is written, and tokens from the length on take the places behind these.
        slots = np.concatenate([total + np.arange(first), np.asarray(slots)[first:]])

    form, slots = dataclasses.replace(form, layout=call.layout), slots.astype(np.int32)
    length = np.int32(chunk.length)
    kv, (slots, *others) = form.split.placed(call.kv, (slots, call.factors, chunk.local, call.start, length))
    made = jitted_splice(form, arrays, slots, kv, *others, **call.options)
    return list(made) if isinstance(pages, Sequence) else made[0]


def _turn_in(find: Any, what: str, layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
    form, arrays = checked_pages(layout, pages, find, what)
    check_slots(slots if isinstance(slots, jax.Array) else np.asarray(slots), form.slots_of(arrays[0]))
    padded, length = padded_slots(slots)
    made = jitted_turn(form, arrays, padded, token_offsets(layout.rope, offset, int(length), len(padded), what), length)
    return list(made) if isinstance(pages, Sequence) else made[0]


def splice_ragged(
    pages: Pages,
    slots: Slots,
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    antecedent: Behind = (),
    *,
    base: Mapping[str, Float[AnyArray, "L T _ _"]] | None = None,
    base_antecedent: Behind = (),
    allow_stale: bool = False,
    angles: Angles | None = None,
    first: int = 0,
) -> Any:
    """Writes R(start + local) · (KV + u v) into interleaved pages, in place: `pool.splice` into an engine's own layout.

    Args:
      pages: [L, P, O, 2·K, H'] or [L, P, O, 2·K / packing, packing, H'], as `to_ragged_paged_attention` makes them, or
        a list of such arrays without L, one per layer. Donated. Padding of slots that are named becomes zero.
      slots, chunk, patch, start, antecedent, base, base_antecedent, allow_stale, angles: as in `pool.splice`. Keys of
        the chunk may be float32 where pages are narrower: they are rounded once, behind the rotation. So keys that an
        engine cached in bfloat16, turned back in float32, come back bit by bit where they were.
      first: tokens in front of this one are written nowhere, and their slots are not looked at: the engine has them.

    Returns:
      The pages, as they were given.

    Raises:
      LayoutError, ShapeError: not pages of the chunk's layout. Else as `pool.splice`, before anything is written.
    """
    behind = (antecedent, base, base_antecedent, allow_stale, angles)
    return _splice_into(interleaved_form, "splice_ragged", pages, slots, chunk, patch, start, behind, first)


def rotate_ragged(layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
    """Turns the keys at some slots of interleaved pages by position offsets, in place and in one launch.

    Values, padding and slots that are not named keep their bits. For keys of which no phase-free source is kept: each
    call rounds once, so a chunk that moves often is better spliced again.

    Args:
      layout: its rope should have the engine's `angles`.
      pages: as `splice_ragged` takes them. Donated.
      slots: int32 [T], distinct, of any number of chunks.
      offset: new position − old one, integers: for all slots alike, a scalar or one per axis [A]; or of each slot,
        [T] or [T, A].

    Raises:
      PositionError: offsets of another shape, not integers, or from 2³⁰ on. KernelSlotError: slots out of range, or
      named twice. LayoutError, ShapeError, DtypeError: not pages of this layout. PoolError: pages that were donated.
    """
    return _turn_in(interleaved_form, "rotate_ragged", layout, pages, slots, offset)


def splice_joined(
    pages: Pages,
    slots: Slots,
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    antecedent: Behind = (),
    *,
    base: Mapping[str, Float[AnyArray, "L T _ _"]] | None = None,
    base_antecedent: Behind = (),
    allow_stale: bool = False,
    angles: Angles | None = None,
    first: int = 0,
) -> Any:
    """Writes a chunk into pages [L, P, O, K / packing, packing, 2·H], k and v of a head in one row, in place.

    Else as `splice_ragged`; `to_joined_heads` makes such pages.
    """
    behind = (antecedent, base, base_antecedent, allow_stale, angles)
    return _splice_into(joined_form, "splice_joined", pages, slots, chunk, patch, start, behind, first)


def rotate_joined(layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
    """Turns the keys at some slots of pages of `to_joined_heads`, in place and in one launch: as `rotate_ragged`."""
    return _turn_in(joined_form, "rotate_joined", layout, pages, slots, offset)


def splice_latent(
    pages: Pages,
    slots: Slots,
    chunk: Chunk,
    patch: Patch | None,
    start: Start,
    antecedent: Behind = (),
    *,
    base: Mapping[str, Float[AnyArray, "L T _ _"]] | None = None,
    base_antecedent: Behind = (),
    allow_stale: bool = False,
    angles: Angles | None = None,
    first: int = 0,
) -> Any:
    """Writes a chunk into latent rows [L, P, O / packing, packing, C' + R'], in place.

    Else as `splice_ragged`; `to_latent_rows` makes such rows.
    """
    behind = (antecedent, base, base_antecedent, allow_stale, angles)
    return _splice_into(latent_form, "splice_latent", pages, slots, chunk, patch, start, behind, first)


def rotate_latent(layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
    """Turns the rope keys at some slots of latent rows, in place and in one launch: as `rotate_ragged`."""
    return _turn_in(latent_form, "rotate_latent", layout, pages, slots, offset)


def _read(form: PageFormat, pages: tuple[Array, ...], slots: Array) -> dict[str, Array]:
    found = [page.at[form.at(page, slots)].get(mode="clip") for page in pages]
    kv = form.kv(found[0] if form.lead(pages[0]) else jnp.stack(found))
    return kv if form.split.sharding is None else jax.lax.with_sharding_constraint(kv, form.split.over())


jitted_read = jax.jit(_read, static_argnames="form")
"""Compiled once per form, bucket of slots and shape of the pages, which stay."""


def _read_from(find: Any, what: str, layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    form, arrays = checked_pages(layout, pages, find, what)
    check_slots(slots if isinstance(slots, jax.Array) else np.asarray(slots), form.slots_of(arrays[0]))
    padded, length = padded_slots(slots)
    found = jitted_read(form, arrays, padded)
    return EngineKV({name: value[:, : int(length)] for name, value in found.items()})


def read_ragged(layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    """Reads tokens out of interleaved pages: {channel: [L, T, K, H]} in the engine frame, without padding.

    Of pages on several devices every one has all of what was read.

    Args:
      pages: as `splice_ragged` takes them. They stay.
      slots: int32 [T], distinct, in the tokens' order.

    Raises:
      KernelSlotError: slots out of range, or named twice. LayoutError, ShapeError, DtypeError: not pages of this
      layout. PoolError: pages that were donated.
    """
    return _read_from(interleaved_form, "read_ragged", layout, pages, slots)


def read_joined(layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    """Reads tokens out of pages of `to_joined_heads`: as `read_ragged`."""
    return _read_from(joined_form, "read_joined", layout, pages, slots)


def read_latent(layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    """Reads tokens out of latent rows: as `read_ragged`."""
    return _read_from(latent_form, "read_latent", layout, pages, slots)
