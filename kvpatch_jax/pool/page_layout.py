"""Layouts of other engines' pages: rows of heads or latents, on one device or split over several.

Pages are [L, P, O, 2·K, H'] or packed [L, P, O, 2·K / packing, packing, H'], heads interleaved as
`to_ragged_paged_attention` makes them; [L, P, O, K / packing, packing, 2·H] of `to_joined_heads`, k and v of a head in
one row; or latent rows [L, P, O / packing, packing, F] of `to_latent_rows`. An engine that keeps an array per layer
passes a list of them.

Pages of one process may be split over N devices along their heads' first axis, as tpu-inference splits them: device d
has heads d·K/N up to (d + 1)·K/N, padded to the packing on its own. Where N is a multiple of K, each head is repeated
N/K times, side by side. Chunks have the model's K heads whatever N is.
"""

import abc
import dataclasses
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

from ..core import AnyArray, KVLayout, arrays_of, check_held, check_uniform, is_packed
from ..errors import DtypeError, LayoutError, ShapeError

Pages = Float[AnyArray, "..."] | Sequence[Float[AnyArray, "..."]]
"""An engine's pages, of all layers in one array or as an array per layer."""


class Split(NamedTuple):
    """Placement of an array of pages: on one device, split by heads over several, or whole on each of several.

    Attributes:
      devices: number of devices that share the heads.
      sharding: of the pages; None on one device.
      axis: mesh axis that heads are split along.
    """

    devices: int = 1
    sharding: NamedSharding | None = None
    axis: str | tuple[str, ...] | None = None

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
            whole = is_packed(value) or value.shape[-2] % self.devices
            shardings[name] = self.over() if whole else self.over(None, None, self.axis)
        return jax.device_put(kv, shardings), jax.device_put(others, self.over())


ON_ONE_DEVICE = Split()


@dataclasses.dataclass(frozen=True)
class PageLayout(abc.ABC):
    """Layout of pages: one row per token, and possibly `packing` tokens on an axis of their own.

    A subclass describes how a row holds the KV of a token. Hashable: a static argument under jit.

    Attributes:
      layout: channels of the KV.
      row: shape of a row.
      packing: tokens on the axis before rows, or None without that axis.
      split: placement of the pages on devices.
    """

    layout: KVLayout
    row: tuple[int, ...]
    packing: int | None = None
    split: Split = ON_ONE_DEVICE

    @classmethod
    @abc.abstractmethod
    def describe(cls, layout: KVLayout, pages: Sequence[Any], stacked: bool, what: str) -> "PageLayout":
        """Finds the layout of pages that hold a layout's tokens in this format.

        Args:
          pages: one array of all layers, or one per layer.
          stacked: whether the layers are the arrays' first axis.
          what: begins messages.

        Raises:
          LayoutError, ShapeError: pages of another format, or that are split over devices in another way.
        """

    @abc.abstractmethod
    def rows(self, kv: Mapping[str, Array]) -> Float[Array, "L T *row"]:
        """Converts engine-frame KV {channel: [L,T,K,H]} to rows; padding is zero."""

    @abc.abstractmethod
    def kv(self, rows: Float[Array, "L T *row"]) -> dict[str, Float[Array, "L T _ _"]]:
        """Converts rows to engine-frame KV {channel: [L,T,K,H]}; inverts `rows`."""

    @abc.abstractmethod
    def rotated(self, rows: Array, cos: Array, sin: Array) -> Array:
        """Returns rows with their keys rotated, and everything else unchanged."""

    def lead(self, page: Any) -> tuple[int, ...]:
        """Returns the axes before the pages: the layers, or none."""
        return page.shape[: page.ndim - len(self.row) - (2 if self.packing is None else 3)]

    def slots_of(self, page: Any) -> int:
        """Returns the number of slots of the pages."""
        return int(np.prod(page.shape[len(self.lead(page)) : page.ndim - len(self.row)]))

    def at(self, page: Array, slots: Array) -> tuple[Any, ...]:
        """Returns the index of these slots in pages; slots beyond the last are in a page that does not exist."""
        size = self.slots_of(page) // page.shape[len(self.lead(page))]
        where = (slots // size, slots % size)
        if self.packing is not None:
            where = (where[0], where[1] // self.packing, where[1] % self.packing)
        return (..., *where, *(slice(None) for _ in self.row))

    def written(self, page: Array, slots: Array, rows: Array, length: Array) -> Array:
        """Returns the pages with these rows at the slots; tokens from `length` on are not written."""
        tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
        at = self.at(page, jnp.where(tokens < length, slots, self.slots_of(page) + tokens))
        # Pages keep their shape: where an axis is 1, XLA copies a pool that was reshaped (two copies of a layer).
        page = page.at[at].set(rows.astype(page.dtype), mode="drop", unique_indices=True)
        sharding = self.split.sharding
        return page if sharding is None else jax.lax.with_sharding_constraint(page, sharding)


class HeadLayout(PageLayout):
    """Layout of rows of heads. A row is a sequence of parts, one per device: its heads, and zeros up to the packing."""

    vectors_per_head: ClassVar[int]

    @abc.abstractmethod
    def combined(self, keys: Array, values: Array) -> Array:
        """Combines keys and values [..., K, H] to an array whose reshape to [..., vectors, row[-1]] is a part."""

    @abc.abstractmethod
    def separated(self, vectors: Array) -> tuple[Array, Array]:
        """Splits the vectors of a part into keys and values [..., K, H]; inverts `combined`."""

    @classmethod
    def describe(cls, layout: KVLayout, pages: Sequence[Any], stacked: bool, what: str) -> "HeadLayout":
        """Describes pages whose rows consist of heads, after checking their shape and their placement on devices."""
        if layout.names != ("k", "v"):
            raise LayoutError(f"{what}: got channels {layout.names}; expected ('k', 'v')")

        shape, heads, width = pages[0].shape, layout.channel("k").heads, layout.channel("k").width
        row, split = tuple(shape[2 + stacked :]), _split_of(pages[0], 2 + stacked, what)
        form, joined = cls(layout, row, split=split), cls.vectors_per_head == 1

        # Heads divide evenly over devices, or devices over heads.
        fits = len(row) in ((3,) if joined else (2, 3)) and 0 in (heads % split.devices, split.devices % heads)
        if fits:
            # The heads of a device, padded to the packing, fill its part; a row that is not packed has no padding.
            packing = 1 if len(row) == 2 else max(row[1], 1)
            fits = row[0] == split.devices * -(-form.vectors // packing)
        if not fits or (row[-1] != 2 * width if joined else row[-1] < width):
            expected = f"{heads} heads of {width} + {width}" if joined else f"{2 * heads} heads of {width} or more"
            over, evenly = "", ""
            if split.devices > 1:
                over = f" over {split.devices} devices"
                evenly = ", shared or repeated evenly, and filled up to the packing on each"
            raise ShapeError(f"{what}: got pages {shape}{over}; expected {expected} to a slot{evenly}")
        return form

    @property
    def repeat(self) -> int:
        """Copies of each head in a row: more than one if more devices than heads share it."""
        return max(1, self.split.devices // self.layout.channels[0].heads)

    @property
    def vectors(self) -> int:
        """Vectors of a part, without padding."""
        return self.vectors_per_head * max(1, self.layout.channels[0].heads // self.split.devices)

    def rows(self, kv: Mapping[str, Array]) -> Float[Array, "L T *row"]:
        """Converts KV to rows, with each head repeated `repeat` times side by side."""
        keys, values = (jnp.repeat(kv[name], self.repeat, axis=-2) for name in self.layout.names)
        combined = self.combined(keys, values)
        parts = combined.reshape(*combined.shape[:2], self.split.devices, self.vectors, self.row[-1])

        # Every device pads its own heads up to the packing.
        padding = math.prod(self.row[:-1]) // self.split.devices - self.vectors
        return jnp.pad(parts, [(0, 0)] * 3 + [(0, padding), (0, 0)]).reshape(*combined.shape[:2], *self.row)

    def kv(self, rows: Float[Array, "L T *row"]) -> dict[str, Float[Array, "L T _ _"]]:
        """Converts rows to KV, with one of each repeated head."""
        keys, values, _ = self._parted(rows)
        result = {}
        for channel, heads in zip(self.layout.channels, (keys, values), strict=True):
            flat = heads.reshape(*rows.shape[:2], -1, heads.shape[-1])
            # Copies of a head lie side by side; the first one is as good as any.
            result[channel.name] = flat[..., :: self.repeat, : channel.width]
        return result

    def rotated(self, rows: Array, cos: Array, sin: Array) -> Array:
        """Rotates the keys of all heads."""
        keys, values, padding = self._parted(rows)
        flat = keys.reshape(*rows.shape[: rows.ndim - len(self.row)], -1, keys.shape[-1])
        # Without an attention scaling, which keys in pages carry already.
        keys = rotate_patch(flat, cos, sin, layout=self.layout.rope.cached).reshape(keys.shape)
        vectors = self.combined(keys, values).reshape(*keys.shape[:-2], self.vectors, self.row[-1])
        return jnp.concatenate([vectors, padding], axis=-2).reshape(rows.shape)

    def _parted(self, rows: Array) -> tuple[Array, Array, Array]:
        """Splits rows into keys, values and padding, [..., devices, heads or vectors, width], with repeats."""
        leading = rows.shape[: rows.ndim - len(self.row)]
        parts = rows.reshape(*leading, self.split.devices, -1, self.row[-1])
        keys, values = self.separated(parts[..., : self.vectors, :])
        return keys, values, parts[..., self.vectors :, :]


class InterleavedLayout(HeadLayout):
    """Layout of rows in which the key and the value of each head alternate, padded to whole lanes."""

    vectors_per_head = 2

    def combined(self, keys: Array, values: Array) -> Array:
        """Stacks keys and values: [..., K, 2, H']."""
        return jnp.stack([widened(keys, self.row[-1]), widened(values, self.row[-1])], axis=-2)

    def separated(self, vectors: Array) -> tuple[Array, Array]:
        """Takes every other vector; both keep the padding of lanes."""
        pairs = vectors.reshape(*vectors.shape[:-2], -1, 2, vectors.shape[-1])
        return pairs[..., 0, :], pairs[..., 1, :]


class JoinedLayout(HeadLayout):
    """Layout of rows in which the key and the value of a head share one vector, 2·H wide."""

    vectors_per_head = 1

    def combined(self, keys: Array, values: Array) -> Array:
        """Concatenates keys and values: [..., K, 2·H]."""
        return jnp.concatenate([keys, values], axis=-1)

    def separated(self, vectors: Array) -> tuple[Array, Array]:
        """Cuts each vector in the middle."""
        width = self.layout.channels[0].width
        return vectors[..., :width], vectors[..., width:]


class LatentLayout(PageLayout):
    """Layout of rows of a latent and a decoupled key, each padded to whole lanes."""

    @classmethod
    def describe(cls, layout: KVLayout, pages: Sequence[Any], stacked: bool, what: str) -> "LatentLayout":
        """Describes pages of latent rows, which are whole on each device."""
        if layout.names != ("ckv", "kpe"):
            raise LayoutError(f"{what}: got channels {layout.names}; expected ('ckv', 'kpe')")
        latent, rope = (padded_width(layout.channel(name).width) for name in layout.names)
        shape = pages[0].shape
        if len(shape) != 4 + stacked or shape[-1] != latent + rope:
            raise ShapeError(f"{what}: got rows {shape}; expected [P, N, packing, {latent} + {rope}]")
        return cls(layout, (shape[-1],), shape[-2], _split_of(pages[0], None, what))

    def rows(self, kv: Mapping[str, Array]) -> Float[Array, "L T *row"]:
        """Concatenates the latent and the key."""
        # Latent attention has one head.
        latent, key = (kv[name][..., 0, :] for name in self.layout.names)
        latent = widened(latent, padded_width(latent.shape[-1]))
        return jnp.concatenate([latent, widened(key, self.row[-1] - latent.shape[-1])], axis=-1)

    def kv(self, rows: Float[Array, "L T *row"]) -> dict[str, Float[Array, "L T _ _"]]:
        """Cuts out the latent and the key, without padding."""
        latent, key = self.layout.channels
        start, rows = padded_width(latent.width), rows[..., None, :]
        return {latent.name: rows[..., : latent.width], key.name: rows[..., start : start + key.width]}

    def rotated(self, rows: Array, cos: Array, sin: Array) -> Array:
        """Rotates the key of each row."""
        start = padded_width(self.layout.channels[0].width)
        # The key comes with its padding, which lies behind the channels that rotate.
        keys = rotate_patch(rows[..., None, start:], cos, sin, layout=self.layout.rope.cached)
        return jnp.concatenate([rows[..., :start], keys[..., 0, :]], axis=-1)


def widened(vectors: Array, width: int) -> Array:
    """Pads vectors with zeros to a width."""
    more = width - vectors.shape[-1]
    return vectors if more == 0 else jnp.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, more)])


def _split_of(page: Any, axis: int | None, what: str) -> Split:
    """Returns the placement of pages on devices: split along this axis alone, or replicated.

    Raises:
      LayoutError: pages are split along another axis, over processes, or over a mesh of Explicit axes.
    """
    sharding = None if isinstance(page, Tracer) else getattr(page, "sharding", None)
    # Pages on one device need no constraint, even if they lie on a mesh.
    if sharding is None or len(sharding.device_set) == 1:
        return ON_ONE_DEVICE

    parts = [whole // own for whole, own in zip(page.shape, sharding.shard_shape(page.shape), strict=True)]
    devices = 1 if axis is None or axis >= len(parts) else parts[axis]
    named = isinstance(sharding, NamedSharding) and not sharding.mesh.explicit_axes
    if not named or not sharding.is_fully_addressable or math.prod(parts) != devices:
        along = "no axis" if axis is None else f"axis {axis} alone"
        raise LayoutError(
            f"{what}: got pages {page.shape} in {parts} parts as {sharding}; expected them split along {along}, over a "
            "mesh of Auto axes in one process"
        )
    return Split(devices, sharding, None if devices == 1 else sharding.spec[axis])


def checked_pages(
    layout: KVLayout, pages: Pages, kind: type[PageLayout], what: str
) -> tuple[PageLayout, tuple[Array, ...]]:
    """Returns the layout of pages, as their kind describes it, and the arrays.

    Raises:
      LayoutError, ShapeError, DtypeError: the pages have another layout. PoolError: the pages were donated.
    """
    check_uniform(layout, what)
    stacked = not isinstance(pages, Sequence)
    arrays = (pages,) if stacked else tuple(pages)
    named = {f"layer {number}": page for number, page in enumerate(arrays)}
    check_held(named)
    form = kind.describe(layout, arrays, stacked, what)
    layers = arrays[0].shape[0] if stacked else len(arrays)

    # Shardings count only where pages are split: an array per layer on one device may have any.
    placements = [(page.shape, getattr(page, "sharding", None) if form.split.sharding else None) for page in arrays]
    if layers != layout.layers or any(placement != placements[0] for placement in placements):
        raise ShapeError(f"{what}: got pages of {layers} layers; expected {layout.layers}, all alike")
    if not all(jnp.issubdtype(page.dtype, jnp.floating) and page.dtype == arrays[0].dtype for page in arrays):
        raise DtypeError(f"{what}: got pages of dtype {arrays[0].dtype}; expected one floating-point dtype")
    return form, tuple(arrays_of(named).values())
