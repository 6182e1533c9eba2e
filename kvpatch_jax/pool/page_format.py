"""Formats of other engines' pages: chunks written into them, keys rotated in them and tokens read out, in place.

`page_layout` says how pages hold tokens. Pages are donated; slots that are not named are not touched. Of pages that are
split over devices the result lies as they did, and only what is read goes between devices.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.splice import check_slots

from ..core import (
    Channel,
    EngineKV,
    KVLayout,
    PackedArray,
    Slots,
    Start,
    ops,
    padded_slots,
    relocation_tables,
    token_offsets,
)
from ..errors import DtypeError, InputError, ShapeError
from ..patching import Placed
from ..utils.kinds import expect_kind
from .page_layout import InterleavedLayout, JoinedLayout, LatentLayout, PageLayout, Pages, checked_pages


@functools.partial(jax.jit, static_argnames=("form", "layers", "frame"), donate_argnames="pages")
def jitted_splice(
    form: PageLayout,
    pages: tuple[Array, ...],
    slots: Array,
    kv: Mapping[str, Array | PackedArray],
    factors: ops.Factors,
    local: Array,
    start: Array,
    length: Array,
    **options: Any,
) -> tuple[Array, ...]:
    """Writes `ops.apply` of kv into pages. Compiled once per form, layer set and shapes; the pages are donated."""
    rows = form.rows(ops.apply(form.layout, kv, factors, local, start, **options))
    # Pages of all layers take all rows at once; an array per layer takes its own.
    parts = [rows] if form.lead(pages[0]) else list(rows)
    return tuple(form.written(page, slots, part, length) for page, part in zip(pages, parts, strict=True))


@functools.partial(jax.jit, static_argnames="form", donate_argnames="pages")
def jitted_rotate(
    form: PageLayout, pages: tuple[Array, ...], slots: Array, offset: Array, length: Array
) -> tuple[Array, ...]:
    """Rotates keys in pages. Compiled once per form, bucket of slots and shape of the pages, which are donated."""
    cos, sin = relocation_tables(form.layout.rope, jnp.zeros_like(offset), offset)
    rotated = []
    for page in pages:
        rows = form.rotated(page.at[form.at(page, slots)].get(mode="clip"), cos, sin)
        rotated.append(form.written(page, slots, rows, length))
    return tuple(rotated)


@functools.partial(jax.jit, static_argnames="form")
def jitted_read(form: PageLayout, pages: tuple[Array, ...], slots: Array) -> dict[str, Array]:
    """Reads slots of pages. Compiled once per form, bucket of slots and shape of the pages, which stay."""
    found = [page.at[form.at(page, slots)].get(mode="clip") for page in pages]
    kv = form.kv(found[0] if form.lead(pages[0]) else jnp.stack(found))
    return kv if form.split.sharding is None else jax.lax.with_sharding_constraint(kv, form.split.over())


def check_dtype(what: str, channel: Channel, found: np.dtype, pages: np.dtype) -> None:
    """Refuses kv of another dtype than the pages'; what rotates may be float32, and is rounded once, when turned.

    Raises:
      DtypeError: it names the channel.
    """
    if found == pages or (channel.rotates and found == jnp.float32 and jnp.dtype(pages).itemsize < 4):
        return
    more = " or float32" if channel.rotates else ""
    raise DtypeError(f"{what}: got {channel.name!r} of dtype {found}; expected the pages' {pages}{more}")


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """One format of an engine's pages, with the three operations on them.

    Attributes:
      name: for messages.
      kind: describes how pages of this format hold a layout's tokens.
    """

    name: str
    kind: type[PageLayout]

    def splice(self, pages: Pages, slots: Slots, placed: Placed, first: int = 0) -> Any:
        """Writes R(start + local) · (KV + u v) into pages, in place: `pool.splice` into an engine's own format.

        Args:
          pages: one array of all layers, [L, P, …], or a list of arrays without L, one per layer. Donated. Padding of
            slots that are named becomes zero.
          slots: int32 [T], as in `pool.splice`.
          placed: one chunk. Its keys may be float32 where pages are narrower: they are rounded once, after the
            rotation. So keys that an engine cached in bfloat16, turned back in float32, come back bit by bit.
          first: tokens before this one are written nowhere, and their slots are not looked at: the engine has them.

        Returns:
          The pages, as one array or a list of them as they were given.

        Raises:
          LayoutError, ShapeError: not pages of the chunk's layout. Else as `pool.splice`, before anything is written.
        """
        what = f"{self.name}.splice"
        expect_kind(placed, Placed, what, "a Placed: a chunk, its patch, a start and an antecedent")
        chunk = placed.chunk
        if chunk.batch is not None:
            raise ShapeError(f"{what}: got chunk {chunk.id!r}, a batch of {chunk.batch}; expected one chunk")

        # All is checked before the program, which donates the pages.
        form, arrays = checked_pages(chunk.layout, pages, self.kind, what)
        for channel in chunk.layout.channels:
            check_dtype(what, channel, placed.kv[channel.name].dtype, arrays[0].dtype)

        slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
        if slots.shape != (chunk.tokens,):
            raise ShapeError(f"{what}: got slots of shape {slots.shape}; expected [{chunk.tokens}], one per token")
        if not 0 <= first < chunk.length:
            raise InputError(f"{what}: got first token {first}; expected 0 to {chunk.length - 1}")
        total = form.slots_of(arrays[0])
        check_slots(slots[first:], total, chunk.length - first)

        if first:
            # Beyond the last slot nothing is written, and tokens from the length on take the places after these.
            slots = np.concatenate([total + np.arange(first), np.asarray(slots)[first:]])

        # The layout of the chunk as it is placed, whose rope computes angles as the caller wants them.
        form, slots = dataclasses.replace(form, layout=placed.layout), slots.astype(np.int32)
        others = (slots, placed.factors, chunk.local, placed.start, np.int32(chunk.length))
        kv, (slots, *others) = form.split.placed(placed.kv, others)
        made = jitted_splice(form, arrays, slots, kv, *others, **placed.options)
        return list(made) if isinstance(pages, Sequence) else made[0]

    def rotate(self, layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
        """Rotates the keys at some slots by position offsets, in place and in one launch.

        Values, padding and slots that are not named keep their bits. For keys of which no phase-free source is kept:
        each call rounds once, so a chunk that moves often is better spliced again.

        Args:
          layout: its rope should have the engine's `angles`.
          pages: as in `splice`. Donated.
          slots: int32 [T], distinct, of any number of chunks.
          offset: new position − old one, integers: for all slots alike, a scalar or one per axis [A]; or of each slot,
            [T] or [T, A].

        Raises:
          InputError: offsets of another shape, not integers, or from 2³⁰ on. KernelSlotError: slots out of range, or
          named twice. LayoutError, ShapeError, DtypeError: not pages of this layout. PoolError: pages that were
          donated.
        """
        what = f"{self.name}.rotate"
        form, arrays = checked_pages(layout, pages, self.kind, what)
        padded, length = padded_slots(slots, form.slots_of(arrays[0]))
        offsets = token_offsets(layout.rope, offset, int(length), len(padded), what)
        made = jitted_rotate(form, arrays, padded, offsets, length)
        return list(made) if isinstance(pages, Sequence) else made[0]

    def read(self, layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
        """Reads tokens: {channel: [L, T, K, H]} in the engine frame, without padding.

        Of pages on several devices every one has all of what was read.

        Args:
          pages: as in `splice`. They stay.
          slots: int32 [T], distinct, in the tokens' order.

        Raises:
          KernelSlotError: slots out of range, or named twice. LayoutError, ShapeError, DtypeError: not pages of this
          layout. PoolError: pages that were donated.
        """
        form, arrays = checked_pages(layout, pages, self.kind, f"{self.name}.read")
        padded, length = padded_slots(slots, form.slots_of(arrays[0]))

        # The rows of padding are cut off outside of the program, which does not depend on their number.
        found = jitted_read(form, arrays, padded)
        return EngineKV({name: value[:, : int(length)] for name, value in found.items()})


RAGGED = PageFormat("ragged", InterleavedLayout)
"""Interleaved heads, [L, P, O, 2·K, H'] or packed [L, P, O, 2·K / packing, packing, H'], as
`to_ragged_paged_attention` makes them."""
JOINED = PageFormat("joined", JoinedLayout)
"""k and v of a head in one row, [L, P, O, K / packing, packing, 2·H], as `to_joined_heads` makes them."""
LATENT = PageFormat("latent", LatentLayout)
"""Latent rows, [L, P, O / packing, packing, C' + R'], as `to_latent_rows` makes them."""
