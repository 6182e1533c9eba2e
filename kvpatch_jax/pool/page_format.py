"""Formats of other engines' pages: chunks written into them, keys rotated in them and tokens read out, in place.

An engine keeps an array of pages per layer. jax's ragged paged attention (TPU) reads k and v interleaved, K0 V0 K1 V1
…, each padded to a multiple of 128 lanes: [P, O, 2·K, H'], or packed [P, O, 2·K / packing, packing, H']. That of
tpu-inference for heads of 64 reads k and v of a head joined: [P, O, K / packing, packing, 2·H]. Engines with latent
attention keep one row per token, the latent, then the rope key, each padded to 128 lanes:
[P, O / packing, packing, C' + R']. Packed heads are filled up to the packing. Padding is zero.

Pages of one process may be split over N devices along their heads' first axis, as tpu-inference splits them: device d
has heads d·K/N up to (d + 1)·K/N, padded to the packing on its own. Where N is a multiple of K, each head is repeated
N/K times, side by side. Chunks have the model's K heads whatever N is. The result lies as the pages did, and only what
is read goes between devices.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels import rotate_patch
from pallas_kernels.splice import padded_width

from ..core import (
    AnyArray,
    Channel,
    EngineKV,
    KVLayout,
    Pool,
    Slots,
    Start,
    arrays_of,
    check_pool,
    check_uniform,
    is_packed,
    ops,
    padded_slots,
    token_offsets,
    trimmed,
)
from ..errors import LayoutError, ShapeError
from ..patching import Placed
from ..utils.kinds import expect_kind
from .programs import places, token_rotations
from .slots import chunk_slots

Pages = Sequence[Float[AnyArray, "P ..."]]
"""An engine's pages, an array per layer."""


class Split(NamedTuple):
    """Placement of an array of pages: on one device, split by heads over several, or replicated on several.

    Attributes:
      devices: number of devices that share the heads.
      sharding: of the pages; None on one device.
      axis: mesh axis that heads are split along.
    """

    devices: int = 1
    sharding: NamedSharding | None = None
    axis: str | tuple[str, ...] | None = None

    @classmethod
    def of(cls, page: Any, axis: int | None, what: str) -> "Split":
        """Reads the placement of pages, which may be split along this axis alone.

        Raises:
          LayoutError: pages are split along another axis, over processes, or over a mesh of Explicit axes.
        """
        sharding = None if isinstance(page, Tracer) else getattr(page, "sharding", None)
        # Pages on one device need no constraint, even if they lie on a mesh.
        if sharding is None or len(sharding.device_set) == 1:
            return cls()

        parts = [size // share for size, share in zip(page.shape, sharding.shard_shape(page.shape), strict=True)]
        devices = 1 if axis is None or axis >= len(parts) else parts[axis]
        named = isinstance(sharding, NamedSharding) and not sharding.mesh.explicit_axes
        if not named or not sharding.is_fully_addressable or math.prod(parts) != devices:
            along = "no axis" if axis is None else f"axis {axis} alone"
            raise LayoutError(
                f"{what}: got pages {page.shape} in {parts} parts as {sharding}; expected them split along {along}, "
                "over a mesh of Auto axes in one process"
            )
        return cls(devices, sharding, None if devices == 1 else sharding.spec[axis])

    def over(self, *axes: Any) -> NamedSharding:
        """Returns the sharding of these axes over the pages' devices; without axes, replicated on each."""
        assert self.sharding is not None
        return NamedSharding(self.sharding.mesh, PartitionSpec(*axes))

    def placed(self, kv: Any, others: Any) -> Any:
        """Moves a program's operands to the pages' devices: split by heads if they divide evenly, packed KV whole."""
        if self.sharding is None:
            return kv, others
        shardings = {}
        for name, value in kv.items():
            # A byte has codes of several heads. Fewer heads than devices are repeated only in rows.
            replicated = is_packed(value) or value.shape[-2] % self.devices
            shardings[name] = self.over() if replicated else self.over(None, None, self.axis)
        return jax.device_put(dict(kv), shardings), jax.device_put(others, self.over())


ON_ONE_DEVICE = Split()


@dataclasses.dataclass(frozen=True)
class PageLayout(abc.ABC):
    """Layout of a layer's pages [P, O, *row]. A subclass says how a row holds the KV of a token.

    Hashable: a static argument under jit.

    Attributes:
      layout: channels of the KV.
      row: shape of a row.
      split: placement of the pages on devices.
    """

    layout: KVLayout
    row: tuple[int, ...]
    split: Split = ON_ONE_DEVICE

    channels: ClassVar[tuple[str, ...]] = "k", "v"
    """Channels that the format holds."""
    packs_tokens: ClassVar[bool] = False
    """Whether tokens of a page are packed, on an axis of their own: [P, O / packing, packing, *row]."""
    splits: ClassVar[bool] = False
    """Whether the first axis of rows is one of heads, which may be split over devices."""

    @classmethod
    @abc.abstractmethod
    def of(cls, layout: KVLayout, packing: int | None = None, split: Split = ON_ONE_DEVICE) -> "PageLayout":
        """Makes the layout of pages whose rows have this many vectors on their packed axis, or no such axis."""

    @abc.abstractmethod
    def rows(self, kv: Mapping[str, Array]) -> Array:
        """Converts engine-frame KV {channel: [..., K, H]} to rows [..., *row]; padding is zero."""

    @abc.abstractmethod
    def kv(self, rows: Array) -> dict[str, Array]:
        """Converts rows to engine-frame KV {channel: [..., K, H]}; inverts `rows`."""

    @property
    def repeat(self) -> int:
        """Copies of each head in a row: more than one if more devices than heads share it."""
        return max(1, self.split.devices // self.layout.channels[0].heads)

    def slots_of(self, pages: Any) -> int:
        """Returns the number of slots of the pages."""
        return math.prod(pages.shape[: pages.ndim - len(self.row)])

    def at(self, pages: Array, slots: Array) -> tuple[Array, ...]:
        """Returns the index of these slots in pages; slots beyond the last are in a page that does not exist."""
        index: tuple[Array, ...] = ()
        for size in reversed(pages.shape[1 : pages.ndim - len(self.row)]):
            slots, index = slots // size, (slots % size, *index)
        return (slots, *index)

    def rotated(self, rows: Array, rotation: Mapping[str, Any]) -> Array:
        """Returns rows with their keys rotated; values and padding keep their bits."""
        kv, marks = self.kv(rows), {}
        for channel in self.layout.channels:
            # Which numbers of a row are those of keys.
            marks[channel.name] = jnp.full(kv[channel.name].shape[-2:], channel.rotates)
            if channel.rotates:
                kv[channel.name] = rotate_patch(kv[channel.name], layout=self.layout.rope.cached, **rotation)
        return jnp.where(self.rows(marks), self.rows(kv), rows)

    def written(self, pages: Array, slots: Array, rows: Array, length: Array) -> Array:
        """Returns the pages with these rows at the slots; tokens from `length` on are not written."""
        # Pages keep their shape: where an axis is 1, XLA copies a pool that was reshaped (two copies of a layer).
        at = self.at(pages, places(slots, length, self.slots_of(pages)))
        pages = pages.at[at].set(rows.astype(pages.dtype), mode="drop", unique_indices=True)
        sharding = self.split.sharding
        return pages if sharding is None else jax.lax.with_sharding_constraint(pages, sharding)


class HeadLayout(PageLayout):
    """Layout of rows of heads. A row is a sequence of parts, one per device: its heads, and zeros up to the packing.

    The key and the value of a head lie side by side in `vectors_per_head` vectors: in two, each padded to whole lanes,
    or joined in one.
    """

    vectors_per_head: ClassVar[int]
    splits = True

    @classmethod
    def of(cls, layout: KVLayout, packing: int | None = None, split: Split = ON_ONE_DEVICE) -> "PageLayout":
        """Makes the layout of rows whose heads are shared or repeated evenly by the devices; joined ones are packed."""
        width, joined = layout.channel("k").width, cls.vectors_per_head == 1
        form = cls(layout, (), split)
        packed = (packing or 1,) if joined or packing else ()
        vectors = split.devices * -(-form.vectors // (packing or 1))
        return dataclasses.replace(form, row=(vectors, *packed, 2 * width if joined else padded_width(width)))

    @property
    def vectors(self) -> int:
        """Vectors of a part, without padding."""
        return self.vectors_per_head * max(1, self.layout.channels[0].heads // self.split.devices)

    def rows(self, kv: Mapping[str, Array]) -> Array:
        """Shares heads out to the parts, and pads each up to the packing."""
        pairs = _widened(jnp.stack([kv["k"], kv["v"]], axis=-2), self.row[-1] * self.vectors_per_head // 2)
        tokens = pairs.shape[:-3]
        parts = pairs.reshape(*tokens, self.split.devices, self.vectors, self.row[-1])
        padding = math.prod(self.row[:-1]) // self.split.devices - self.vectors
        return jnp.pad(parts, [*[(0, 0)] * (len(tokens) + 1), (0, padding), (0, 0)]).reshape(*tokens, *self.row)

    def kv(self, rows: Float[Array, "..."]) -> dict[str, Float[Array, "*tokens K H"]]:
        """Takes the heads of all parts, without padding."""
        tokens = rows.shape[: rows.ndim - len(self.row)]
        parts = rows.reshape(*tokens, self.split.devices, -1, self.row[-1])[..., : self.vectors, :]
        pairs = parts.reshape(*tokens, -1, 2, self.row[-1] * self.vectors_per_head // 2)
        return {channel.name: pairs[..., index, : channel.width] for index, channel in enumerate(self.layout.channels)}


class InterleavedLayout(HeadLayout):
    """Layout of rows in which keys and values alternate, [2·K, H'] or [2·K / packing, packing, H']."""

    vectors_per_head = 2


class JoinedLayout(HeadLayout):
    """Layout of rows in which the key and the value of a head share one vector, [K / packing, packing, 2·H]."""

    vectors_per_head = 1


class LatentLayout(PageLayout):
    """Layout of rows of a latent and a rope key, each padded to whole lanes; tokens of a page are packed together."""

    channels = "ckv", "kpe"
    packs_tokens = True

    @classmethod
    def of(cls, layout: KVLayout, packing: int | None = None, split: Split = ON_ONE_DEVICE) -> "PageLayout":
        """Makes the layout of latent rows, which are whole on each device."""
        return cls(layout, (sum(padded_width(channel.width) for channel in layout.channels),), split)

    def rows(self, kv: Mapping[str, Array]) -> Array:
        """Concatenates the latent and the key, of one head each."""
        vectors = [_widened(kv[name][..., 0, :], padded_width(kv[name].shape[-1])) for name in self.channels]
        return jnp.concatenate(vectors, axis=-1)

    def kv(self, rows: Float[Array, "..."]) -> dict[str, Float[Array, "*tokens 1 H"]]:
        """Cuts out the latent and the key."""
        (latent, key), rows = self.layout.channels, rows[..., None, :]
        start = padded_width(latent.width)
        return {latent.name: rows[..., : latent.width], key.name: rows[..., start : start + key.width]}


def _widened(vectors: Array, width: int) -> Array:
    """Pads vectors with zeros to a width."""
    return jnp.pad(vectors, [*[(0, 0)] * (vectors.ndim - 1), (0, width - vectors.shape[-1])])


# Compiled once per form, bucket of slots and shape of the pages, which are donated by all but `jitted_read`.


@functools.partial(jax.jit, static_argnames=("form", "layers"), donate_argnames="pages")
def jitted_splice(
    form: PageLayout, pages: tuple[Array, ...], slots: Array, length: Array, *operands: Any, **options: Any
) -> tuple[Array, ...]:
    """Writes what `ops.apply` gives of these operands (kv, factors, local, start) and options into pages."""
    kv = ops.apply(form.layout, *operands, **options)
    rows = form.rows({name: jnp.repeat(value, form.repeat, axis=-2) for name, value in kv.items()})
    return tuple(form.written(page, slots, layer, length) for page, layer in zip(pages, rows, strict=True))


@functools.partial(jax.jit, static_argnames="form", donate_argnames="pages")
def jitted_rotate(
    form: PageLayout, pages: tuple[Array, ...], slots: Array, offset: Array, length: Array
) -> tuple[Array, ...]:
    """Rotates keys in pages."""
    rotation = token_rotations(form.layout, offset, jnp.zeros_like(offset), relative=True)[form.layout.rope]
    rows = [form.rotated(page.at[form.at(page, slots)].get(mode="clip"), rotation) for page in pages]
    return tuple(form.written(page, slots, layer, length) for page, layer in zip(pages, rows, strict=True))


@functools.partial(jax.jit, static_argnames="form")
def jitted_read(form: PageLayout, pages: tuple[Array, ...], slots: Array) -> dict[str, Array]:
    """Reads slots of pages, on every device."""
    kv = form.kv(jnp.stack([page.at[form.at(page, slots)].get(mode="clip") for page in pages]))
    # Copies of a head lie side by side; the first one is as good as any.
    kv = {name: value[..., :: form.repeat, :] for name, value in kv.items()}
    return kv if form.split.sharding is None else jax.lax.with_sharding_constraint(kv, form.split.over())


def check_dtype(what: str, channel: Channel, dtype: np.dtype, pages: np.dtype) -> None:
    """Refuses kv of another dtype than the pages'; what rotates may be float32, and is rounded once, when rotated.

    Raises:
      ShapeError: it names the channel.
    """
    if dtype == pages or (channel.rotates and dtype == jnp.float32 and jnp.dtype(pages).itemsize < 4):
        return
    more = " or float32" if channel.rotates else ""
    raise ShapeError(f"{what}: got {channel.name!r} of dtype {dtype}; expected the pages' {pages}{more}")


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """One format of an engine's pages, with the operations on them.

    Errors are raised before anything is written: LayoutError, ShapeError or ShapeError for pages that do not hold the
    layout in this format, PoolError for pages that were donated, KernelError for slots out of range or named twice.

    Attributes:
      name: for messages.
      kind: describes how pages of this format hold a layout's tokens.
    """

    name: str
    kind: type[PageLayout]

    def splice(self, pages: Pages, slots: Slots, placed: Placed, first: int = 0) -> list[Array]:
        """Writes R(start + local) · (KV + u v) into pages, in place: `pool.splice` into an engine's own format.

        Args:
          pages: donated. Padding of slots that are named becomes zero.
          slots: int32 [T], as in `pool.splice`.
          placed: one chunk. Its keys may be float32 where pages are narrower: they are rounded once, after the
            rotation. So keys that an engine cached in bfloat16, rotated back in float32, come back bit by bit.
          first: tokens before this one are written nowhere, and their slots are not looked at: the engine has them.

        Raises:
          Also what `pool.splice` raises.
        """
        what = f"{self.name}.splice"
        expect_kind(placed, Placed, what, "a Placed: a chunk, its patch, a start and an antecedent")
        chunk = placed.chunk
        form, arrays = self._checked(chunk.layout, pages, what)
        for channel in chunk.layout.channels:
            check_dtype(what, channel, placed.kv[channel.name].dtype, arrays[0].dtype)
        slots = chunk_slots(placed, slots, form.slots_of(arrays[0]), what, first)

        # The layout of the chunk as it is placed, whose rope computes angles as the caller wants them.
        form = dataclasses.replace(form, layout=placed.layout)
        others = (slots, np.int32(chunk.length), placed.factors, chunk.local, placed.start)
        kv, (slots, length, *others) = form.split.placed(placed.kv, others)
        return list(jitted_splice(form, arrays, slots, length, kv, *others, layers=placed.layers))

    def rotate(self, layout: KVLayout, pages: Pages, slots: Slots, offset: Start) -> list[Array]:
        """Rotates the keys at some slots by position offsets, in place and in one launch.

        Values, padding and slots that are not named keep their bits. For keys of which no phase-free source is kept:
        each call rounds once, so a chunk that moves often is better spliced again.

        Args:
          layout: its rope should have the engine's `angles`.
          pages: donated.
          slots: int32 [T], distinct, of any number of chunks.
          offset: new position − old one, integers: for all slots alike, a scalar or one per axis [A]; or of each slot,
            [T] or [T, A].

        Raises:
          Also InputError: offsets of another shape, not integers, or from 2³⁰ on.
        """
        form, arrays = self._checked(layout, pages, f"{self.name}.rotate")
        slots, length = padded_slots(slots, form.slots_of(arrays[0]))
        offsets = token_offsets(layout.rope, offset, int(length), len(slots), f"{self.name}.rotate")
        return list(jitted_rotate(form, arrays, slots, offsets, length))

    def read(self, layout: KVLayout, pages: Pages, slots: Slots) -> EngineKV:
        """Reads tokens at slots [T]: {channel: [L, T, K, H]} in the engine frame, without padding.

        Of pages on several devices every one has all of what was read.
        """
        form, arrays = self._checked(layout, pages, f"{self.name}.read")
        slots, length = padded_slots(slots, form.slots_of(arrays[0]))
        # The rows of padding are cut off outside of the program, which does not depend on their number.
        return EngineKV({name: value[:, :length] for name, value in jitted_read(form, arrays, slots).items()})

    def to_pages(self, layout: KVLayout, pool: Pool, packing: int | None = None) -> list[Array]:
        """Converts a pool {channel: [L, P, O, K, H]}, padded or not, to pages of this format, keeping every bit.

        Args:
          packing: heads, or tokens of latent rows, on an axis of their own, as the engine packs them: 32 bits ÷ the
            dtype's bits, or 32 for latent rows of tpu-inference 0.32. None: no such axis, or 1 where there always is.
        """
        what, joined = f"{self.name}.to_pages", 1 if packing is None else packing
        self._check_layout(layout, what)
        count, size = check_pool(layout, pool)
        if joined not in (1, 2, 4, 8, 16, 32) or (self.kind.packs_tokens and size % joined):
            raise ShapeError(f"{what}: got packing {packing}; expected a power of two up to 32, which divides tokens")
        rows = self.kind.of(layout, packing).rows(trimmed(layout, pool))
        shape = (count, size // joined, joined) if self.kind.packs_tokens else (count, size)
        return [layer.reshape(*shape, *layer.shape[2:]) for layer in rows]

    def from_pages(self, layout: KVLayout, pages: Pages) -> dict[str, Float[Array, "L P O _ _"]]:
        """Inverts `to_pages`, with and without packing."""
        form, arrays = self._checked(layout, pages, f"{self.name}.from_pages")
        kv = self.read(layout, pages, np.arange(form.slots_of(arrays[0]), dtype=np.int32))
        return {name: value.reshape(layout.layers, len(arrays[0]), -1, *value.shape[2:]) for name, value in kv.items()}

    def _check_layout(self, layout: KVLayout, what: str) -> None:
        """Checks that this format holds the layout's channels, each on all layers."""
        check_uniform(layout, what)
        if layout.names != self.kind.channels:
            raise LayoutError(f"{what}: got channels {layout.names}; expected {self.kind.channels}")

    def _checked(self, layout: KVLayout, pages: Pages, what: str) -> tuple[PageLayout, tuple[Array, ...]]:
        """Returns the layout of pages and the arrays, after checking that they hold `layout` in this format."""
        self._check_layout(layout, what)
        named = {f"layer {number}": page for number, page in enumerate(pages)}
        check_pool(None, named)
        first, kind, heads = pages[0], self.kind, layout.channels[0].heads
        split = Split.of(first, 2 if kind.splits else None, what)
        form = kind.of(layout, first.shape[3] if first.ndim == 5 else None, split)
        axes = 2 + kind.packs_tokens
        if tuple(first.shape[axes:]) != form.row or (heads % split.devices and split.devices % heads):
            over = f" over {split.devices} devices, {heads} heads shared or repeated evenly" if split.sharding else ""
            raise ShapeError(f"{what}: got pages {first.shape}; expected rows of {form.row}{over}")

        # Shardings count only where pages are split: arrays on one device may have any.
        placements = [(page.shape, getattr(page, "sharding", None) if split.sharding else None) for page in pages]
        if len(pages) != layout.layers or any(placement != placements[0] for placement in placements):
            raise ShapeError(f"{what}: got pages of {len(pages)} layers; expected {layout.layers}, all alike")
        if not all(jnp.issubdtype(page.dtype, jnp.floating) and page.dtype == first.dtype for page in pages):
            raise ShapeError(f"{what}: got pages of dtype {first.dtype}; expected one floating-point dtype")
        return form, tuple(arrays_of(named).values())


RAGGED = PageFormat("ragged", InterleavedLayout)
"""Interleaved heads, [P, O, 2·K, H'] or packed [P, O, 2·K / packing, packing, H']."""
JOINED = PageFormat("joined", JoinedLayout)
"""k and v of a head in one row, [P, O, K / packing, packing, 2·H]."""
LATENT = PageFormat("latent", LatentLayout)
"""Latent rows, [P, O / packing, packing, C' + R']."""
