"""Contexts in a paged pool: page tables, and masks of the slots that hold a sequence's keys.

A pool is a bare pytree {channel: [L, P, O, K, H]}: P pages of O slots, in the engine frame; slot = page · O + offset.
It has the channels with a row per token; a hybrid model's transitions are constant in size and travel beside it.
`Paged` lists the pages of some sequences. A backbone reads them in place and, when decoding, writes them in place.

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

from ..errors import InputError, KernelError, LayoutError, PoolError, ShapeError
from .buckets import Buckets
from .layout import AnyArray, KVLayout, Positions, Start
from .rope import Rope, check_positions
from .transitions import check_parts

Slots = Int[AnyArray, " T"]
Rows = Int[AnyArray, "..."] | Sequence[Int[AnyArray, " _"] | Sequence[int]]
Pool = Mapping[str, Float[AnyArray, "L P O _ _"]]

DEFAULT = Buckets(smallest=64)
NO_PAGE = -1
"""Entry of a page table that pads it to a bucket."""


class Paged(NamedTuple):
    """Batch of contexts in a paged pool, in place of contiguous KV {channel: [L,B,S,K,H]}.

    The keys of a row are the N·O vectors of its pages. Attention does not depend on their order, because they are in
    the engine frame. A pytree: another table, other slots or other contents of the pool do not compile again.

    Attributes:
      pool: {channel: [L,P,O,K,H]}; rows may share pages.
      table: int32 [B,N], distinct pages of each row, padded with `NO_PAGE`.
      seen: bool [B,N·O], which keys belong to the row; unused slots and slots of other owners do not.
      places: int32 [B,N·O], index of each such key among its row's tokens, for layers with sliding-window attention;
        None: in the table's order.
      transition: of a hybrid model, what its linear layers keep of each row's tokens, composed in their order:
        {part: [L,B,R,K,W]}; None of other models.
    """

    pool: Pool
    table: Int[AnyArray, "B N"]
    seen: Bool[AnyArray, "B S"]
    places: Int[AnyArray, "B S"] | None = None
    transition: Mapping[str, AnyArray] | None = None

    @classmethod
    def of(
        cls,
        pool: Pool,
        slots: Rows,
        buckets: Buckets | None = DEFAULT,
        transition: Mapping[str, AnyArray] | None = None,
    ) -> "Paged":
        """Builds the page tables of sequences from their slots.

        Args:
          pool: referenced, not copied; only its shape is read.
          slots: of one sequence, [S], in the sequence's order, or of several: [B, S] or a list of rows of any lengths.
            Slots may be in any order, and chunks may share pages.
          buckets: sizes that the number of keys is rounded up to, so that a growing context compiles few programs;
            None: no rounding.
          transition: of a hybrid model, that of each row's tokens.

        Raises:
          KernelError: a slot is out of range, or appears twice in a row. ShapeError: there are no rows of slots.
          LayoutError, ShapeError, PoolError: `pool` is not a pool, or was donated.
        """
        pages, size = check_pool(None, pool)

        # Within a row slots are distinct; rows may share them, as forks of one context do.
        rows = _rows_of(slots)
        for row in rows:
            check_slots(row, pages * size)

        row_pages = [_pages_in_order(row // size) for row in rows]
        # All rows have the table of the longest one; unused columns are `NO_PAGE`.
        count = _padded_page_count(max(map(len, row_pages)), size, buckets)
        table = np.full((len(rows), count), NO_PAGE, np.int32)
        seen, places = np.zeros((len(rows), count * size), bool), np.zeros((len(rows), count * size), np.int32)

        # Column of each page in the current row's table. Entries of other rows are overwritten or not read.
        column = np.zeros(pages, np.int32)
        for number, (row, used) in enumerate(zip(rows, row_pages, strict=True)):
            table[number, : len(used)] = used
            # A key is named by its column in the table, whichever page of the pool that is.
            column[used] = np.arange(len(used))
            keys = column[row // size] * size + row % size
            seen[number, keys] = True
            places[number, keys] = np.arange(len(row))

        return cls(pool, table, seen, places, transition)

    @property
    def page_size(self) -> int:
        """Slots per page, O."""
        return next(iter(self.pool.values())).shape[2]

    @property
    def key_count(self) -> int:
        """Keys per row, N·O, including those that do not belong to it."""
        return self.table.shape[1] * self.page_size

    def places_of_keys(self) -> Int[AnyArray, "B S"]:
        """Returns the index of each key among its row's tokens, [B,N·O]; undefined for keys that are not `seen`."""
        if self.places is not None:
            return self.places
        return _numbers(self.seen).cumsum(self.seen, axis=1, dtype=np.int32) - 1

    def extended(self, slots: Int[AnyArray, "B T"], buckets: Buckets | None = DEFAULT) -> "Paged":
        """Adds the pages of `slots`, which tokens will be written to, to the table; `seen` does not change.

        `decode` calls this itself. With traced arrays the context is returned unchanged, because a table cannot grow
        under a trace.

        Args:
          buckets: as in `of`; applies if a row has no room left in its table.
        """
        if isinstance(slots, Tracer) or isinstance(self.table, Tracer):
            return self

        table = np.asarray(self.table)
        pages = np.asarray(slots) // self.page_size
        missing = [np.setdiff1d(wanted, row) for wanted, row in zip(pages, table, strict=True)]
        # The same object, so that a step that stays within its pages copies no table.
        if not any(map(len, missing)):
            return self

        # A table never shrinks: fewer columns would compile another program.
        used = (table != NO_PAGE).sum(axis=1)
        count = max(used[row] + len(added) for row, added in enumerate(missing))
        more = max(_padded_page_count(int(count), self.page_size, buckets), table.shape[1]) - table.shape[1]
        table = np.pad(table, ((0, 0), (0, more)), constant_values=NO_PAGE)
        for row, added in zip(table, missing, strict=True):
            row[np.flatnonzero(row == NO_PAGE)[: len(added)]] = added

        padding = ((0, 0), (0, more * self.page_size))
        seen = np.pad(np.asarray(self.seen), padding)
        places = None if self.places is None else np.pad(np.asarray(self.places), padding)
        return self._replace(table=table, seen=seen, places=places)

    def written(self, slots: Int[AnyArray, "B T"]) -> tuple["Paged", tuple[Int[AnyArray, "B T"], Int[AnyArray, "B T"]]]:
        """Marks tokens as written to `slots`.

        Slots that are `seen` already keep their index; the others follow the last one, in the tokens' order.

        Returns:
          The new context, and for each token its key in the row (N·O if the table lacks its page) and its index.
        """
        numbers, size = _numbers(self.table, self.seen, slots), self.page_size
        # Negative slots, of padding tokens, are on no page.
        matches = (self.table[:, None, :] == (slots // size)[:, :, None]) & (slots >= 0)[:, :, None]
        keys = numbers.where(matches.any(-1), matches.argmax(-1) * size + slots % size, self.key_count)
        keys = keys.astype(np.int32)
        rows, places = numbers.arange(len(keys))[:, None], self.places_of_keys()
        next_place = (numbers.where(self.seen, places, -1).max(axis=1, initial=-1) + 1)[:, None]

        # One key more takes the tokens whose page is not in the table.
        padding = ((0, 0), (0, 1))
        seen, places = numbers.pad(self.seen, padding), numbers.pad(places, padding)
        appended = next_place + numbers.arange(keys.shape[1])
        token_places = numbers.where(seen[rows, keys], places[rows, keys], appended).astype(np.int32)

        seen, places = _put(seen, (rows, keys), True), _put(places, (rows, keys), token_places)
        return self._replace(seen=seen[:, :-1], places=places[:, :-1]), (keys, token_places)


def _numbers(*arrays: AnyArray) -> Any:
    """Returns numpy, or jax.numpy if any array is on a device: host arrays stay on the host and wait for no device."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def _put(value: AnyArray, at: Any, new: Any) -> AnyArray:
    """Writes `new` at indices: in place in a NumPy array, which the caller must own, else into a copy."""
    if isinstance(value, jax.Array):
        return value.at[at].set(new)
    value[at] = new
    return value


def _rows_of(slots: Rows) -> list[np.ndarray]:
    """Converts slots to a list of integer rows.

    Raises:
      ShapeError: there are no rows. KernelError: slots are not integers.
    """
    if isinstance(slots, np.ndarray | jax.Array):
        array = np.asarray(slots)
        rows = [array] if array.ndim < 2 else list(array)
    else:
        rows = [np.asarray(row) for row in slots]

    if not rows or any(row.ndim != 1 for row in rows):
        shapes = [row.shape for row in rows]
        raise ShapeError(
            f"Paged: got rows of slots of shapes {shapes}; expected [S], [B, S] or rows [S] of any lengths"
        )

    # NumPy makes an empty list an array of floats.
    rows = [row.astype(np.int32) if not row.size else row for row in rows]
    for row in rows:
        if row.dtype.kind not in "iu":
            raise KernelError(f"Paged: got slots of dtype {row.dtype}; expected integers")
    return rows


def _pages_in_order(pages: Int[np.ndarray, " T"]) -> Int[np.ndarray, " N"]:
    """Returns distinct pages in the order of their first occurrence."""
    # Runs of one page are collapsed first, because sorting them is much cheaper.
    runs = pages[np.flatnonzero(np.diff(pages, prepend=-1))]
    _, first = np.unique(runs, return_index=True)
    return runs[np.sort(first)]


def _padded_page_count(count: int, page_size: int, buckets: Buckets | None) -> int:
    """Returns the columns of a table of `count` pages, rounded up so that its keys fill a bucket."""
    return count if buckets is None else -(-buckets.round_up(count * page_size) // page_size)


def trimmed(layout: KVLayout, values: Mapping[str, AnyArray]) -> dict[str, Float[Array, "..."]]:
    """Removes the pool's padding of each channel: [..., H'] → [..., H]."""
    return {channel.name: jnp.asarray(values[channel.name])[..., : channel.width] for channel in layout.token_channels}


def check_pool(layout: KVLayout | None, pool: Mapping[str, Any]) -> tuple[int, int]:
    """Checks that a pool was not donated and has the layout's channels and shapes; returns its pages and page size.

    Args:
      layout: of the pool, whose channels may be padded to whole lanes; None: any.

    Raises:
      LayoutError: `pool` is not a mapping, or the channels differ. ShapeError: a shape differs, or channels have
      different pages; a value is not a floating-point array of NumPy or jax. PoolError: the pool was
      donated.
    """
    if not isinstance(pool, Mapping) or not pool:
        raise LayoutError(
            f"pool: got type {type(pool).__name__}; expected arrays by channel, as `make_pool` gives them"
        )
    for name, value in pool.items():
        if not hasattr(value, "dtype") or not isinstance(getattr(value, "shape", None), tuple):
            kind = type(value).__name__
            raise ShapeError(f"pool[{name!r}]: got type {kind}; expected an array [L, P, O, K, H] of NumPy or jax")
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
            raise PoolError(
                f"pool[{name!r}]: got an array that was donated; expected the pool that the last operation gave"
            )
    paging = next(iter(pool.values())).shape[1:3]
    if layout is None:
        return paging  # pyright: ignore[reportReturnType]

    names = [channel.name for channel in layout.token_channels]
    if set(pool) != set(names):
        raise LayoutError(f"pool: got channels {sorted(pool)}; expected {sorted(names)}")
    for channel in layout.token_channels:
        value, widths = pool[channel.name], {channel.width}
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ShapeError(f"pool[{channel.name!r}]: got dtype {value.dtype}; expected a floating-point dtype")
        if value.shape[-1] not in widths:
            widths.add(padded_width(channel.width))
        layers = layout.layers if channel.layers is None else len(channel.layers)
        if value.ndim != 5 or value.shape[::3] != (layers, channel.heads) or value.shape[4] not in widths:
            raise ShapeError(
                f"pool[{channel.name!r}]: got shape {value.shape}; expected [{layers}, P, O, {channel.heads}, "
                f"{' or '.join(map(str, sorted(widths)))}]"
            )
        if value.shape[1:3] != paging:
            raise ShapeError(f"pool[{channel.name!r}]: got pages {value.shape[1:3]}; expected {paging}")
    return paging  # pyright: ignore[reportReturnType]


def flat(value: Float[Array, "L P O K H"]) -> Float[Array, "L S K H"]:
    """Reshapes a pool's pages to slots, S = P·O."""
    return value.reshape(value.shape[0], -1, *value.shape[-2:])


def check_paged(layout: KVLayout, context: Paged, rows: int, what: str) -> None:
    """Checks that a context has page tables of `rows` rows over a pool of this layout.

    Raises:
      PoolError: the pool lacks a page, a page appears twice in a row, or the pool was donated. ShapeError:
      an array has another dtype or shape. LayoutError: the pool has another layout.
    """
    pages, size = check_pool(layout, context.pool)
    expected = {"table": (jnp.integer, "integers", 1), "seen": (jnp.bool_, "bool", size)}
    if context.places is not None:
        expected["places"] = (jnp.integer, "integers", size)

    for name, (kind, word, times) in expected.items():
        value = getattr(context, name)
        if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, kind):
            raise ShapeError(f"{what}.{name}: got {getattr(value, 'dtype', type(value).__name__)}; expected {word}")
        if value.ndim != 2 or value.shape[0] != rows or value.shape[1] != context.table.shape[1] * times:
            wanted = f"[{rows}, N]" if name == "table" else f"[{rows}, {context.table.shape[1]} pages of {size}]"
            raise ShapeError(f"{what}.{name}: got shape {value.shape}; expected {wanted}")

    check_parts(layout, context.transition, f"{what}.transition", (rows,))

    # The pages themselves are known only outside a trace.
    if isinstance(context.table, Tracer):
        return

    table = np.asarray(context.table)
    wrong = table[(table < NO_PAGE) | (table >= pages)]
    if wrong.size:
        raise PoolError(
            f"{what}: got page {int(wrong[0])} of a pool of {pages}; expected pages of it, or {NO_PAGE} for none"
        )

    # A page that is named twice would count its keys twice.
    for number, row in enumerate(table):
        ordered = np.sort(row[row != NO_PAGE])
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise PoolError(f"{what}: got page {int(twice[0])} named twice in row {number}; expected it once")


def padded_slots(slots: Slots, total: int) -> tuple[Int[np.ndarray, " N"], np.int32]:
    """Pads slots to a bucket, so that few programs are compiled; returns them and the number that is not padding.

    Raises:
      KernelError: a slot that is not among the `total` of the pool, or is named twice.
    """
    array = np.asarray(slots)
    check_slots(array, total)
    return np.pad(array.astype(np.int32), (0, DEFAULT.round_up(array.size) - array.size)), np.int32(array.size)


def token_offsets(
    rope: Rope, offset: Positions | Start, tokens: int, room: int, what: str, kinds: str = "iu"
) -> Num[np.ndarray, "..."]:
    """Broadcasts an offset, for all tokens or one per token, to [room] or [room, A], with zeros from `tokens` on.

    Args:
      kinds: NumPy kinds of dtype that are allowed.

    Raises:
      InputError: the dtype or shape differs, or an offset is 2³⁰ or more.
    """
    array, axes = np.asarray(offset), () if rope.axes is None else (rope.axes,)
    if array.dtype.kind not in kinds or array.shape not in ((), axes, (tokens, *axes)):
        raise InputError(
            f"{what}: got offsets of dtype {array.dtype} and shape {array.shape}; expected integers, one for all or "
            f"for each slot, of shape (), {axes} or {(tokens, *axes)}"
        )

    check_positions(rope, array, np.zeros((), np.int32))

    # Padding is rotated by zero and written nowhere.
    dtype = np.float32 if array.dtype.kind == "f" else np.int32
    offsets = np.broadcast_to(array.astype(dtype), (tokens, *axes))
    return np.pad(offsets, [(0, room - tokens)] + [(0, 0)] * len(axes))
