"""Contexts that lie in a paged pool: which pages hold them, and which of their vectors count.

A pool is a bare pytree {channel: [L, P, O, K, H]}: P pages of O slots, in the engine frame; slot = page · O + offset.
`Paged` names the pages of some sequences, and a backbone reads (and, decoding, writes) them where they lie.

Axis letters: B sequences, N pages of a table, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.splice import check_slots, padded_width

from ..errors import DtypeError, KernelSlotError, LayoutError, PoolError, PositionError, ShapeError
from .buckets import Buckets
from .layout import AnyArray, Channel, KVLayout, Positions, Start, on_device
from .rope import Rope, check_positions

Slots = Int[AnyArray, " T"]
Rows = Int[AnyArray, "..."] | Sequence[Int[AnyArray, " _"] | Sequence[int]]
Pool = Mapping[str, Float[AnyArray, "L P O _ _"]]

DEFAULT = Buckets()
NO_PAGE = -1
"""What a table names where it names no page: padding to a bucket."""


class Paged(NamedTuple):
    """A batch of contexts in a paged pool, in place of contiguous KV {channel: [L,B,S,K,H]}.

    The keys of a row are the N·O vectors of its pages. Attention does not depend on their order, for they are in the
    engine frame. A pytree; another table, other slots or other contents of the pool compile nothing anew.

    Attributes:
      pool: {channel: [L,P,O,K,H]}, of which rows share pages as they like.
      table: int32 [B,N], pages, each named once in a row; `NO_PAGE` fills up.
      seen: bool [B,N·O], which keys count: tails of pages, and what others own there, do not.
      places: int32 [B,N·O], where each key that counts stands among its row's tokens, for layers whose window slides;
        None: in the table's order.
    """

    pool: Pool
    table: Int[AnyArray, "B N"]
    seen: Bool[AnyArray, "B S"]
    places: Int[AnyArray, "B S"] | None = None

    @classmethod
    def of(cls, pool: Pool, slots: Rows, buckets: Buckets | None = DEFAULT) -> "Paged":
        """Names the pages of slots.

        Args:
          pool: left where it is; nothing of it is looked at but its shape.
          slots: of one sequence, [S], in the sequence's order; or of each row's, [B, S] or a list of rows of any
            lengths. Slots may lie in any order, and chunks may share pages.
          buckets: sizes that the number of keys is rounded up to, so that a growing context compiles few programs; None
            takes as many pages as there are.

        Raises:
          KernelSlotError: slots out of range, or named twice in a row. ShapeError: no rows of slots. LayoutError,
          DtypeError, PoolError: no pool, or one that was donated.
        """
        check_held(pool)
        pages, size = next(iter(pool.values())).shape[1:3]
        rows = _rows_of(slots)
        for row in rows:
            check_slots(row, pages * size)
        named = [_pages_in_order(row // size) for row in rows]
        count = _pages_for(max(map(len, named)), size, buckets)
        table = np.full((len(rows), count), NO_PAGE, np.int32)
        seen, places = np.zeros((len(rows), count * size), bool), np.zeros((len(rows), count * size), np.int32)
        order = np.zeros(pages, np.int32)
        for number, (row, own) in enumerate(zip(rows, named, strict=True)):
            table[number, : len(own)] = own
            order[own] = np.arange(len(own))
            at = order[row // size] * size + row % size
            seen[number, at] = True
            places[number, at] = np.arange(len(row))
        return cls(pool, table, seen, places)

    @property
    def page_size(self) -> int:
        """Slots of a page, O."""
        return next(iter(self.pool.values())).shape[2]

    @property
    def key_count(self) -> int:
        """Keys of a row, N·O, those that do not count included."""
        return self.table.shape[1] * self.page_size

    def places_of_keys(self) -> Int[AnyArray, "B S"]:
        """Where keys stand among their row's tokens, [B,N·O]; of keys that do not count it says nothing."""
        if self.places is not None:
            return self.places
        return _numbers(self.seen).cumsum(self.seen, axis=1, dtype=np.int32) - 1

    def extended(self, slots: Int[AnyArray, "B T"], buckets: Buckets | None = DEFAULT) -> "Paged":
        """Names the pages of `slots` too, which tokens are about to be written to; what counts stays as it is.

        `decode` does so by itself. Arrays that are traced pass as they are: no page can be added to them.

        Args:
          buckets: as in `of`, where a row has no room left in its table.
        """
        if isinstance(slots, Tracer) or isinstance(self.table, Tracer):
            return self
        table = np.asarray(self.table)
        pages = np.asarray(slots) // self.page_size
        missing = [np.setdiff1d(own, row) for own, row in zip(pages, table, strict=True)]
        if not any(map(len, missing)):
            return self
        held = (table != NO_PAGE).sum(axis=1)
        count = max(held[row] + len(own) for row, own in enumerate(missing))
        more = max(_pages_for(int(count), self.page_size, buckets), table.shape[1]) - table.shape[1]
        table = np.pad(table, ((0, 0), (0, more)), constant_values=NO_PAGE)
        for row, own in zip(table, missing, strict=True):
            row[np.flatnonzero(row == NO_PAGE)[: len(own)]] = own
        room = lambda value: np.pad(np.asarray(value), ((0, 0), (0, more * self.page_size)))
        return Paged(self.pool, table, room(self.seen), None if self.places is None else room(self.places))

    def written(self, slots: Int[AnyArray, "B T"]) -> tuple["Paged", tuple[Int[AnyArray, "B T"], Int[AnyArray, "B T"]]]:
        """The context once tokens are written to `slots`: they count.

        Slots that count already keep their places; others get those behind the last that counts, in the tokens' order.

        Returns:
          The context; and which of a row's keys each token is (N·O where its page is not named), and its place.
        """
        numbers, size = _numbers(self.table, self.seen, slots), self.page_size
        named = (self.table[:, None, :] == (slots // size)[:, :, None]) & (slots >= 0)[:, :, None]
        keys = numbers.where(named.any(-1), named.argmax(-1) * size + slots % size, self.key_count).astype(np.int32)
        rows, places = numbers.arange(len(keys))[:, None], self.places_of_keys()
        behind = (numbers.where(self.seen, places, -1).max(axis=1, initial=-1) + 1)[:, None]

        # One key more, for what the table does not name.
        pad = lambda value: numbers.pad(value, ((0, 0), (0, 1)))
        seen, places = pad(self.seen), pad(places)
        found = numbers.where(seen[rows, keys], places[rows, keys], behind + numbers.arange(keys.shape[1]))
        found = found.astype(np.int32)
        seen, places = _put(seen, (rows, keys), True), _put(places, (rows, keys), found)
        return Paged(self.pool, self.table, seen[:, :-1], places[:, :-1]), (keys, found)


def _numbers(*arrays: AnyArray) -> Any:
    """NumPy, or jax's where an array is traced: what the host has stays there, and waits for no device."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def _put(value: AnyArray, at: Any, new: Any) -> AnyArray:
    if isinstance(value, jax.Array):
        return value.at[at].set(new)
    value[at] = new
    return value


def _rows_of(slots: Rows) -> list[np.ndarray]:
    """Slots as rows of integers.

    Raises:
      ShapeError: no rows. KernelSlotError: slots that are not integers.
    """
    if isinstance(slots, np.ndarray | jax.Array):
        whole = np.asarray(slots)
        rows = [whole] if whole.ndim < 2 else list(whole)
    else:
        rows = [np.asarray(row) for row in slots]
    if not rows or any(row.ndim != 1 for row in rows):
        found = [row.shape for row in rows]
        raise ShapeError(f"Paged: rows of slots of shapes {found}; expected [S], [B, S] or rows [S] of any lengths")
    # An empty list is an array of floats.
    rows = [row.astype(np.int32) if not row.size else row for row in rows]
    for row in rows:
        if row.dtype.kind not in "iu":
            raise KernelSlotError(f"Paged: slots of dtype {row.dtype}; expected integers")
    return rows


def _pages_in_order(pages: Int[np.ndarray, " T"]) -> Int[np.ndarray, " N"]:
    """Distinct pages in the order in which they are first named."""
    runs = pages[np.flatnonzero(np.diff(pages, prepend=-1))]
    _, first = np.unique(runs, return_index=True)
    return runs[np.sort(first)]


def _pages_for(count: int, page_size: int, buckets: Buckets | None) -> int:
    """How many pages a table has room for, where so many are named."""
    return count if buckets is None else -(-buckets.round_up(count * page_size) // page_size)


def pool_widths(channel: Channel) -> tuple[int, int]:
    """Numbers per head in a pool, without padding and with it."""
    return channel.width, padded_width(channel.width)


def trimmed(layout: KVLayout, values: Mapping[str, AnyArray]) -> dict[str, Float[Array, "..."]]:
    """Cuts the padding off what a pool holds of each channel: [..., H'] to [..., H]."""
    return {channel.name: jnp.asarray(values[channel.name])[..., : channel.width] for channel in layout.channels}


def check_pool(layout: KVLayout, pool: Pool, *, padded: bool = True) -> tuple[int, int]:
    """Refuses a pool of another layout; returns its pages and page size.

    Args:
      padded: whether channels may be padded to whole lanes.

    Raises:
      LayoutError: other channels. ShapeError: other shapes, or channels with unequal pages. DtypeError: not floats, or
      no arrays of ours. PoolError: a pool that was donated.
    """
    check_held(pool)
    if set(pool) != set(layout.names):
        raise LayoutError(f"pool: channels {sorted(pool)}; expected {sorted(layout.names)}")
    paging = None
    for channel in layout.channels:
        value = pool[channel.name]
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise DtypeError(f"pool[{channel.name!r}]: dtype {value.dtype}; expected a floating-point dtype")
        shape = value.shape
        widths = pool_widths(channel)[: 1 + padded]
        if len(shape) != 5 or shape[0] != layout.layers or shape[3] != channel.heads or shape[4] not in widths:
            raise ShapeError(
                f"pool[{channel.name!r}]: shape {shape}; expected [{layout.layers}, P, O, {channel.heads}, "
                f"{' or '.join(map(str, dict.fromkeys(widths)))}]"
            )
        if paging is not None and shape[1:3] != paging:
            raise ShapeError(f"pool[{channel.name!r}]: pages {shape[1:3]}; expected {paging}")
        paging = shape[1:3]
    return paging  # pyright: ignore[reportReturnType]


def check_held(pool: Mapping[str, Any]) -> None:
    """Refuses what is no pool of arrays, and a pool that was given away.

    Raises:
      LayoutError: no mapping. DtypeError: not NumPy's arrays nor jax's. PoolError: arrays that were donated.
    """
    if not isinstance(pool, Mapping) or not pool:
        raise LayoutError(f"pool of type {type(pool).__name__}; expected arrays by channel, as `make_pool` gives them")
    for name, value in pool.items():
        if not hasattr(value, "dtype") or not isinstance(getattr(value, "shape", None), tuple):
            kind = type(value).__name__
            raise DtypeError(f"pool[{name!r}] of type {kind}; expected an array [L, P, O, K, H] of NumPy or jax")
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
            raise PoolError(f"pool[{name!r}] was donated, and is gone; expected the pool that the last operation gave")


def held_arrays(layout: KVLayout, pool: Pool) -> dict[str, Float[Array, "L P O _ _"]]:
    """A pool of this layout as what programs take: one kind of pytree, of jax arrays."""
    return {name: on_device(pool[name]) for name in layout.names}


def flat(value: Float[Array, "L P O K H"]) -> Float[Array, "L S K H"]:
    """A pool's pages one behind the other, a view: by slots."""
    return value.reshape(value.shape[0], -1, *value.shape[-2:])


def check_paged(layout: KVLayout, context: Paged, rows: int, what: str) -> None:
    """Refuses a context that does not name pages of a pool of this layout for so many rows.

    Raises:
      PoolError: a page that the pool does not have, or that is named twice in a row; or a pool that was donated.
      DtypeError, ShapeError: arrays of another kind, or that do not fit. LayoutError: another layout's pool.
    """
    pages, size = check_pool(layout, context.pool)
    expected = {"table": (jnp.integer, "integers", 1), "seen": (jnp.bool_, "bool", size)}
    if context.places is not None:
        expected["places"] = (jnp.integer, "integers", size)
    for name, (kind, word, times) in expected.items():
        value = getattr(context, name)
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, kind):
            raise DtypeError(f"{what}.{name} of {getattr(value, 'dtype', type(value).__name__)}; expected {word}")
        if value.ndim != 2 or value.shape[0] != rows or value.shape[1] != context.table.shape[1] * times:
            wanted = f"[{rows}, N]" if name == "table" else f"[{rows}, {context.table.shape[1]} pages of {size}]"
            raise ShapeError(f"{what}.{name} of shape {value.shape}; expected {wanted}")
    if isinstance(context.table, Tracer):
        return
    table = np.asarray(context.table)
    wrong = table[(table < NO_PAGE) | (table >= pages)]
    if wrong.size:
        raise PoolError(
            f"{what}: page {int(wrong[0])} of a pool of {pages}; expected pages of it, or {NO_PAGE} for none"
        )
    for number, row in enumerate(table):
        named = np.sort(row[row != NO_PAGE])
        twice = named[1:][named[1:] == named[:-1]]
        if twice.size:
            raise PoolError(f"{what}: page {int(twice[0])} is named twice in row {number}; expected it once")


def padded_slots(slots: Slots) -> tuple[Int[np.ndarray, " N"], np.int32]:
    """Slots filled up to a bucket, so that few programs are compiled, and how many of them count."""
    given = np.asarray(slots, np.int32)
    return np.pad(given, (0, DEFAULT.round_up(given.size) - given.size)), np.int32(given.size)


def token_offsets(
    rope: Rope, offset: Positions | Start, tokens: int, room: int, what: str, kinds: str = "iu"
) -> Num[np.ndarray, "..."]:
    """Offsets of every token, [room] or [room, A], zero from `tokens` on, from one for all or one for each.

    Args:
      kinds: of numbers that are allowed, as NumPy names them.

    Raises:
      PositionError: other numbers, from 2³⁰ on, or of another shape.
    """
    given, axes = np.asarray(offset), () if rope.axes is None else (rope.axes,)
    if given.dtype.kind not in kinds or given.shape not in ((), axes, (tokens, *axes)):
        raise PositionError(
            f"{what}: offsets of dtype {given.dtype} and shape {given.shape}; expected integers, one for all or "
            f"for each slot, of shape (), {axes} or {(tokens, *axes)}"
        )
    check_positions(rope, given, np.zeros((), np.int32))
    each = np.broadcast_to(given.astype(np.float32 if given.dtype.kind == "f" else np.int32), (tokens, *axes))
    return np.pad(each, ((0, room - tokens), *((0, 0) for _ in axes)))
