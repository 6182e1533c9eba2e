"""Chunks written into other engines' pages, and keys turned there, in place: `kvp.engines` offers these functions.

Pages are [L, P, O, 2·K, H'] or packed [L, P, O, 2·K / packing, packing, H'], heads interleaved as
`to_ragged_paged_attention` makes them; [L, P, O, K / packing, packing, 2·H] of `to_joined_heads`, k and v of a head in
one row; or latent rows [L, P, O / packing, packing, F] of `to_latent_rows`. An engine that keeps an array per layer
passes a list of them. Pages are donated; slots that are not named are not touched.

Pages of one process may be split over N devices along their heads' first axis, as tpu-inference splits them: device d
has heads d·K/N up to (d + 1)·K/N, filled up to the packing by itself. Where N is a multiple of K, each head stands N/K
times, side by side. Chunks have the model's K heads whatever N is. The result lies as the pages did, and only what is
read goes between devices.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels import rotate_patch
from pallas_kernels.splice import check_slots, padded_width

from . import ops
from .chunk import AnyArray, Chunk
from .errors import DtypeError, InputError, LayoutError, ShapeError
from .frames import EngineKV
from .layout import Channel, KVLayout, Start, on_device
from .paging import Slots, check_held, padded_slots, token_offsets
from .patch import operator_call
from .patch_metadata import Patch, check_is_chunk
from .provenance import Behind
from .rope import Angles, relocation_tables

Pages = Float[AnyArray, "..."] | Sequence[Float[AnyArray, "..."]]
"""An engine's pages, of all layers in one array or as an array per layer."""


class Split(NamedTuple):
    """How an array of pages lies: on one device; or by heads over so many; or whole on each of several.

    Attributes:
      devices: that share the heads. sharding: of the pages, None on one device. axis: of the mesh, along which heads
        lie.
    """

    devices: int = 1
    sharding: NamedSharding | None = None
    axis: str | tuple[str, ...] | None = None

    def over(self, *axes: Any) -> NamedSharding:
        """An array with these of its axes over the pages' devices; without any, whole on each of them."""
        assert self.sharding is not None
        return NamedSharding(self.sharding.mesh, PartitionSpec(*axes))

    def placed(self, kv: Any, others: Any) -> Any:
        """What a program on these pages takes, from wherever it lies: KV by heads where every device has some."""
        if self.sharding is None:
            return kv, others
        by_heads = lambda x: self.over(None, None, None if x.shape[-2] % self.devices else self.axis)
        return jax.device_put(kv, {name: by_heads(x) for name, x in kv.items()}), jax.device_put(others, self.over())


ON_ONE_DEVICE = Split()


@dataclasses.dataclass(frozen=True)
class Form:
    """How pages hold tokens: a row of this shape for each, and for latents `packing` tokens on an axis of their own.

    A row is one part after the other, each of a device: its heads, and zeros up to the packing.
    """

    kind: Literal["interleaved", "joined", "latent"]
    layout: KVLayout
    row: tuple[int, ...]
    packing: int | None = None
    split: Split = ON_ONE_DEVICE

    def lead(self, page: Any) -> tuple[int, ...]:
        """What stands in front of the pages: the layers, or nothing."""
        return page.shape[: page.ndim - len(self.row) - (2 if self.packing is None else 3)]

    def slots_of(self, page: Any) -> int:
        """How many slots the pages have."""
        return int(np.prod(page.shape[len(self.lead(page)) : page.ndim - len(self.row)]))

    @property
    def repeat(self) -> int:
        """How often each head stands in a row: more than once where more devices than heads share it."""
        return max(1, self.split.devices // self.layout.channels[0].heads)

    @property
    def vectors(self) -> int:
        """Vectors of a part that are no padding: of its heads two each interleaved, one joined; one of a latent."""
        heads = max(1, self.layout.channels[0].heads // self.split.devices)
        return 2 * heads if self.kind == "interleaved" else heads

    def rows(self, kv: Mapping[str, Array]) -> Float[Array, "L T *row"]:
        """Engine-frame KV {channel: [L,T,K,H]} as rows; padding is zero."""
        first, second = (kv[name] for name in self.layout.names)
        widened = lambda x, width: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
        if self.kind == "latent":
            latent = widened(first[..., 0, :], padded_width(first.shape[-1]))
            return jnp.concatenate([latent, widened(second[..., 0, :], self.row[-1] - latent.shape[-1])], axis=-1)
        first, second = (jnp.repeat(x, self.repeat, axis=-2) for x in (first, second))
        if self.kind == "joined":
            both = jnp.concatenate([first, second], axis=-1)
        else:
            both = jnp.stack([widened(first, self.row[-1]), widened(second, self.row[-1])], axis=-2)
        parts = both.reshape(*both.shape[:2], self.split.devices, self.vectors, self.row[-1])
        more = math.prod(self.row[:-1]) // self.split.devices - self.vectors
        return jnp.pad(parts, [(0, 0)] * 3 + [(0, more), (0, 0)]).reshape(*both.shape[:2], *self.row)

    def kv(self, rows: Float[Array, "L T *row"]) -> dict[str, Float[Array, "L T _ _"]]:
        """Rows as engine-frame KV {channel: [L,T,K,H]}, one of each repeated head: inverts `rows`."""
        first, second = self.layout.channels
        if self.kind == "latent":
            begin, rows = padded_width(first.width), rows[..., None, :]
            pair = rows[..., : first.width], rows[..., begin : begin + second.width]
        else:
            keys, values, _ = self._parted(rows)
            flat = lambda x, width: x.reshape(*rows.shape[:2], -1, x.shape[-1])[..., :: self.repeat, :width]
            pair = flat(keys, first.width), flat(values, second.width)
        return dict(zip(self.layout.names, pair, strict=True))

    def turned(self, rows: Array, cos: Array, sin: Array) -> Array:
        """Rows with the keys in them rotated, and everything else as it is."""
        turn = lambda keys: rotate_patch(keys, cos, sin, layout=self.layout.rope.cached)
        if self.kind == "latent":
            begin = padded_width(self.layout.channels[0].width)
            return jnp.concatenate([rows[..., :begin], turn(rows[..., None, begin:])[..., 0, :]], axis=-1)
        keys, values, padding = self._parted(rows)
        flat = keys.reshape(*rows.shape[: rows.ndim - len(self.row)], -1, keys.shape[-1])
        keys = turn(flat).reshape(keys.shape)
        if self.kind == "joined":
            own = jnp.concatenate([keys, values], axis=-1)
        else:
            own = jnp.stack([keys, values], axis=-2)
            own = own.reshape(*keys.shape[:-2], self.vectors, self.row[-1])
        return jnp.concatenate([own, padding], axis=-2).reshape(rows.shape)

    def _parted(self, rows: Array) -> tuple[Array, Array, Array]:
        """Keys, values and padding of rows, [..., devices, heads or vectors, width], repeated heads as they stand."""
        leading = rows.shape[: rows.ndim - len(self.row)]
        parts = rows.reshape(*leading, self.split.devices, -1, self.row[-1])
        own, padding = parts[..., : self.vectors, :], parts[..., self.vectors :, :]
        if self.kind == "joined":
            width = self.layout.channels[0].width
            return own[..., :width], own[..., width:], padding
        pairs = own.reshape(*own.shape[:-2], -1, 2, own.shape[-1])
        return pairs[..., 0, :], pairs[..., 1, :], padding

    def at(self, page: Array, slots: Array) -> tuple[Any, ...]:
        """The index of these slots in pages; slots beyond the last are in a page that is not there."""
        size = self.slots_of(page) // page.shape[len(self.lead(page))]
        where = (slots // size, slots % size)
        if self.packing is not None:
            where = (where[0], where[1] // self.packing, where[1] % self.packing)
        return (..., *where, *(slice(None) for _ in self.row))

    def written(self, page: Array, slots: Array, rows: Array, length: Array) -> Array:
        """The pages with these rows at the slots; tokens from `length` on are written nowhere."""
        tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
        at = self.at(page, jnp.where(tokens < length, slots, self.slots_of(page) + tokens))
        # Pages keep their shape: where an axis is 1, XLA copies a pool that was reshaped (two copies of a layer).
        page = page.at[at].set(rows.astype(page.dtype), mode="drop", unique_indices=True)
        sharding = self.split.sharding
        return page if sharding is None else jax.lax.with_sharding_constraint(page, sharding)


def _splice(
    form: Form,
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


def _turn(form: Form, pages: tuple[Array, ...], slots: Array, offset: Array, length: Array) -> tuple[Array, ...]:
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


def _ragged(layout: KVLayout, pages: Sequence[Any], stacked: bool, what: str) -> Form:
    _need_kv(layout, what)
    heads, width = 2 * layout.channel("k").heads, layout.channel("k").width
    row, split = tuple(pages[0].shape[2 + stacked :]), _split_of(pages[0], 2 + stacked, what)
    form = Form("interleaved", layout, row, split=split)
    if len(row) not in (2, 3) or not _holds(form) or row[-1] < width:
        raise ShapeError(_refusal(what, pages, split, f"{heads} heads of {width} or more to a slot"))
    return form


def _joined(layout: KVLayout, pages: Sequence[Any], stacked: bool, what: str) -> Form:
    _need_kv(layout, what)
    heads, width = layout.channel("k").heads, layout.channel("k").width
    row, split = tuple(pages[0].shape[2 + stacked :]), _split_of(pages[0], 2 + stacked, what)
    form = Form("joined", layout, row, split=split)
    if len(row) != 3 or not _holds(form) or row[-1] != 2 * width:
        raise ShapeError(_refusal(what, pages, split, f"{heads} heads of {width} + {width} to a slot"))
    return form


def _need_kv(layout: KVLayout, what: str) -> None:
    if layout.names != ("k", "v"):
        raise LayoutError(f"{what}: channels {layout.names}; expected ('k', 'v')")


def _holds(form: Form) -> bool:
    """Whether the heads of a device, filled up to the packing, fill its part; a row that is not packed has no padding.

    Devices have heads alike, or heads have devices alike.
    """
    heads, devices = form.layout.channels[0].heads, form.split.devices
    if heads % devices and devices % heads:
        return False
    packing = 1 if len(form.row) == 2 else max(form.row[1], 1)
    return form.row[0] == devices * -(-form.vectors // packing)


def _refusal(what: str, pages: Sequence[Any], split: Split, expected: str) -> str:
    shape = pages[0].shape
    if split.devices == 1:
        return f"{what}: pages {shape}; expected {expected}"
    over = f"{what}: pages {shape} over {split.devices} devices"
    return f"{over}; expected {expected}, shared or repeated evenly, and filled up to the packing on each"


def _split_of(page: Any, axis: int | None, what: str) -> Split:
    """How pages lie on several devices: split along this axis alone, or whole on each.

    Raises:
      LayoutError: split along another one, over processes, or over a mesh of Explicit axes.
    """
    sharding = None if isinstance(page, Tracer) else getattr(page, "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return ON_ONE_DEVICE
    parts = [whole // own for whole, own in zip(page.shape, sharding.shard_shape(page.shape), strict=True)]
    devices = 1 if axis is None or axis >= len(parts) else parts[axis]
    named = isinstance(sharding, NamedSharding) and not sharding.mesh.explicit_axes
    if not named or not sharding.is_fully_addressable or math.prod(parts) != devices:
        along = "no axis" if axis is None else f"axis {axis} alone"
        raise LayoutError(
            f"{what}: pages {page.shape} lie in {parts} parts as {sharding}; expected them split along {along}, over a "
            "mesh of Auto axes in one process"
        )
    return Split(devices, sharding, None if devices == 1 else sharding.spec[axis])


def _latent(layout: KVLayout, pages: Sequence[Any], stacked: bool, what: str) -> Form:
    if layout.names != ("ckv", "kpe"):
        raise LayoutError(f"{what}: channels {layout.names}; expected ('ckv', 'kpe')")
    latent, rope = (padded_width(layout.channel(name).width) for name in layout.names)
    shape = pages[0].shape
    if len(shape) != 4 + stacked or shape[-1] != latent + rope:
        raise ShapeError(f"{what}: rows {shape}; expected [P, N, packing, {latent} + {rope}]")
    return Form("latent", layout, (shape[-1],), shape[-2], _split_of(pages[0], None, what))


def _checked(layout: KVLayout, pages: Pages, find: Any, what: str) -> tuple[Form, tuple[Array, ...]]:
    """How the pages hold tokens, and the arrays.

    Raises:
      LayoutError, ShapeError, DtypeError: pages of another layout. PoolError: pages that were donated.
    """
    stacked = not isinstance(pages, Sequence)
    arrays = (pages,) if stacked else tuple(pages)
    check_held({f"layer {number}": page for number, page in enumerate(arrays)})
    form = find(layout, arrays, stacked, what)
    layers = arrays[0].shape[0] if stacked else len(arrays)
    alike = lambda page: (page.shape, getattr(page, "sharding", None) if form.split.sharding else None)
    if layers != layout.layers or any(alike(page) != alike(arrays[0]) for page in arrays):
        raise ShapeError(f"{what}: pages of {layers} layers; expected {layout.layers}, all alike")
    if not all(jnp.issubdtype(page.dtype, jnp.floating) and page.dtype == arrays[0].dtype for page in arrays):
        raise DtypeError(f"{what}: pages of dtype {arrays[0].dtype}; expected one floating-point dtype")
    return form, tuple(on_device(page) for page in arrays)


def _check_dtype(what: str, channel: Channel, found: np.dtype, pages: np.dtype) -> None:
    """Refuses kv of another dtype than the pages'; what rotates may be float32, and is rounded once, when turned."""
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
    form, arrays = _checked(chunk.layout, pages, find, what)
    call = operator_call(what, chunk, patch, start, *behind)
    for channel in chunk.layout.channels:
        _check_dtype(what, channel, call.kv[channel.name].dtype, arrays[0].dtype)
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
    form, arrays = _checked(layout, pages, find, what)
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
    return _splice_into(_ragged, "splice_ragged", pages, slots, chunk, patch, start, behind, first)


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
    return _turn_in(_ragged, "rotate_ragged", layout, pages, slots, offset)


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
    return _splice_into(_joined, "splice_joined", pages, slots, chunk, patch, start, behind, first)


def rotate_joined(layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
    """Turns the keys at some slots of pages of `to_joined_heads`, in place and in one launch: as `rotate_ragged`."""
    return _turn_in(_joined, "rotate_joined", layout, pages, slots, offset)


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
    return _splice_into(_latent, "splice_latent", pages, slots, chunk, patch, start, behind, first)


def rotate_latent(layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> Any:
    """Turns the rope keys at some slots of latent rows, in place and in one launch: as `rotate_ragged`."""
    return _turn_in(_latent, "rotate_latent", layout, pages, slots, offset)


def _read(form: Form, pages: tuple[Array, ...], slots: Array) -> dict[str, Array]:
    found = [page.at[form.at(page, slots)].get(mode="clip") for page in pages]
    kv = form.kv(found[0] if form.lead(pages[0]) else jnp.stack(found))
    return kv if form.split.sharding is None else jax.lax.with_sharding_constraint(kv, form.split.over())


jitted_read = jax.jit(_read, static_argnames="form")
"""Compiled once per form, bucket of slots and shape of the pages, which stay."""


def _read_from(find: Any, what: str, layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    form, arrays = _checked(layout, pages, find, what)
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
    return _read_from(_ragged, "read_ragged", layout, pages, slots)


def read_joined(layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    """Reads tokens out of pages of `to_joined_heads`: as `read_ragged`."""
    return _read_from(_joined, "read_joined", layout, pages, slots)


def read_latent(layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
    """Reads tokens out of latent rows: as `read_ragged`."""
    return _read_from(_latent, "read_latent", layout, pages, slots)
