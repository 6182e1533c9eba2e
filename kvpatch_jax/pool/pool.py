"""The paged pool: pages of vectors per channel, slots with reference counts, and chunks spliced into it in place.

A pool is a bare pytree {channel: [L, P, O, K, H]}: P pages of O slots, in the engine frame. A slot is
page · O + offset. `SlotAllocator` counts owners of slots on the host; `page_format` has other engines' pages.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import splice as splice_kernel
from pallas_kernels.splice import check_slots, padded_width

from ..core import (
    AnyArray,
    KVLayout,
    PackedArray,
    Pool,
    Positions,
    Slots,
    Start,
    arrays_of,
    check_held,
    check_pool,
    flat,
    is_packed,
    ops,
    padded_slots,
    relocation_tables,
    rope_tables,
    token_offsets,
    trimmed,
)
from ..errors import DtypeError, PoolError, ShapeError
from ..patching import Placed
from ..utils.kinds import expect_kind, is_whole
from .packed_splice import splice_packed


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
        pool[channel.name] = jnp.zeros(shape, dtype, device=shardings[channel.name] if shardings else None)
    return pool


def splice(
    pool: Pool, slots: Slots, placed: Placed, *, allocator: "SlotAllocator | None" = None
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
      KernelSlotError: a slot out of range, or named twice. PoolError: slots that are shared or have no owner,
      or a pool that was donated. DtypeError: the chunk's dtype is not the pool's. ShapeError: a batch of chunks, or
      slots that are not one per token. KernelShapeError: a rank beyond a channel's width. LayoutError: another pool
      than the layout's. All are raised before anything is written.
    """
    expect_kind(placed, Placed, "splice", "a Placed: a chunk, its patch, a start and an antecedent")
    chunk = placed.chunk
    if chunk.batch is not None:
        raise ShapeError(f"splice: got chunk {chunk.id!r}, a batch of {chunk.batch}; expected one chunk")

    pages, page_size = check_pool(chunk.layout, pool)
    for name, value in (chunk.kv if placed.base is None else placed.base).items():
        if name in pool and value.dtype != pool[name].dtype:
            raise DtypeError(f"splice: got {name!r} of dtype {value.dtype}; expected the pool's {pool[name].dtype}")

    # Tokens from the length on are padding, whose slots are not looked at. Slots that are no integers are refused by
    # `check_slots`, whatever their shape.
    slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
    if slots.dtype.kind in "iu" and slots.shape != (chunk.tokens,):
        raise ShapeError(f"splice: got slots of shape {slots.shape}; expected [{chunk.tokens}], one per token")
    check_slots(slots, pages * page_size, chunk.length)
    if allocator is not None:
        allocator.check_sole_owner(slots[: chunk.length], pool)

    # All is checked: the program donates the pool, so an error after this would leave none.
    own = arrays_of(pool)
    slots, length = slots.astype(np.int32, copy=False), np.int32(chunk.length)
    arrays = (slots, placed.kv, placed.factors, chunk.local, placed.start, length)
    return jitted_splice(placed.layout, own, *arrays, **placed.options)


@functools.partial(jax.jit, static_argnames=("layout", "layers", "frame"), donate_argnames=("pool",))
def jitted_splice(
    layout: KVLayout,
    pool: dict[str, Array],
    slots: Array,
    kv: Mapping[str, Array | PackedArray],
    factors: ops.Factors,
    local: Array,
    start: Array,
    length: Array,
    *,
    layers: tuple[int, ...] | None = None,
    frame: ops.PatchFrame = "phase_free",
) -> dict[str, Array]:
    """Does what `splice` does, without its checks.

    Compiled once per layout, layer set, padded shape and pool shape. Donates the pool.
    """
    # The paper's order adds after the rotation, which the kernel does not, so all is computed before it is written.
    if frame == "engine":
        kv = ops.apply(layout, kv, factors, local, start, layers=layers, frame=frame)
        return {name: splice_kernel(pool[name], slots, kv[name], length=length) for name in pool}

    arguments = ops.operator_arguments(layout, factors, local, start, layers)
    if any(map(is_packed, kv.values())):
        return splice_packed(layout, pool, slots, kv, arguments, length)  # pyright: ignore[reportArgumentType]

    spliced = {}
    for name in pool:
        how = {"layout": layout.rope_of(name).cached, "length": length}
        spliced[name] = splice_kernel(pool[name], slots, kv[name], **how, **arguments[name])  # pyright: ignore
    return spliced


@jax.jit
def _rows_at(pool: Pool, slots: Slots) -> dict[str, Float[Array, "L T _ _"]]:
    """Reads whole rows, padding included."""
    return {name: flat(jnp.asarray(value))[:, slots] for name, value in pool.items()}


def read_slots(pool: Pool, slots: Slots, layout: KVLayout | None = None) -> dict[str, Float[Array, "L T _ _"]]:
    """Reads the vectors at `slots` [T] (int32, in range): {channel: [L, T, K, H]}.

    Args:
      layout: of the pool; removes its padding. None reads whole rows.

    Raises:
      LayoutError, ShapeError, DtypeError: another pool than the layout's. PoolError: a pool that was donated.
    """
    check_held(pool)
    if layout is not None:
        check_pool(layout, pool)
    rows = _rows_at(dict(pool), slots)
    return rows if layout is None else trimmed(layout, rows)


def move_slots(pool: Pool, old: Slots, new: Slots) -> dict[str, Float[Array, "L P O _ _"]]:
    """Copies the vectors at `old` to `new`, padding included, reading all before writing any. Donates the pool.

    Both are [N] and are padded to a power of two, so that few programs are compiled. Keys are not rotated: positions
    do not depend on slots.

    Raises:
      ShapeError: unequal numbers of slots. KernelSlotError: out of range, or a destination named twice. PoolError: a
      pool that was donated.
    """
    check_held(pool)
    shape = next(iter(pool.values())).shape
    total = shape[1] * shape[2]
    if old.shape != new.shape:
        raise ShapeError(f"move_slots: got {old.shape[0]} slots to {new.shape[0]}; expected as many")

    # A vector may be copied to several slots, so sources are checked for their range alone.
    check_slots(new, total)
    check_slots(np.unique(np.asarray(old)), total)
    if not old.shape[0]:
        return {name: jnp.asarray(value) for name, value in pool.items()}

    # Padding reads slot 0 and is written nowhere.
    padding = (0, (1 << (old.shape[0] - 1).bit_length()) - old.shape[0])
    sources = np.pad(np.asarray(old, np.int32), padding)
    targets = np.pad(np.asarray(new, np.int32), padding)
    own = {name: jnp.asarray(value) for name, value in pool.items()}
    return _jitted_move(own, sources, targets, np.int32(old.shape[0]))


@functools.partial(jax.jit, donate_argnames=("pool",))
def _jitted_move(pool, old, new, length):
    """Does what `move_slots` does for the first `length` slots."""
    return {name: splice_kernel(value, new, flat(value)[:, old], length=length) for name, value in pool.items()}


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
      InputError: offsets of another shape, not integers, or from 2³⁰ on. KernelSlotError: slots out of range, or
      named twice. ShapeError: a source of other tokens. LayoutError, DtypeError: another pool than the layout's.
      PoolError: a pool that was donated.
    """
    pages, page_size = check_pool(layout, pool)
    padded, length = padded_slots(slots, pages * page_size)

    # Offsets are differences, which are whole; with a source they are positions, which may be fractional.
    kinds = "iu" if source is None else "iuf"
    offsets = token_offsets(layout.rope, offset, int(length), len(padded), "rotate_slots", kinds)

    keys = None
    if source is not None:
        keys = {}
        # Channels without phase stay as they are, so a source need not have them.
        for channel in layout.channels:
            if not channel.rotates:
                continue
            value, depth = source.get(channel.name), layout.depth(channel.name)
            expected = depth, int(length), channel.heads, channel.width
            if value is None or value.shape != expected:
                found = None if value is None else value.shape
                raise ShapeError(f"rotate_slots: got source[{channel.name!r}] of shape {found}; expected {expected}")
            keys[channel.name] = jnp.pad(value, ((0, 0), (0, len(padded) - int(length)), (0, 0), (0, 0)))

    return _jitted_rotate(layout, arrays_of(pool), padded, keys, offsets, length)


@functools.partial(jax.jit, static_argnames="layout", donate_argnames="pool")
def _jitted_rotate(layout, pool, slots, source, offset, length):
    """Does what `rotate_slots` does; `offset` has one row per slot, and tokens from `length` on are padding."""
    turns = {}
    for rope in layout.ropes:
        # Keys in the pool carry the attention scaling already.
        from_pool = source is None
        tables = relocation_tables(rope, jnp.zeros_like(offset), offset) if from_pool else rope_tables(rope, offset)
        turns[rope] = tables, 1.0 if from_pool else rope.attention_scaling
    source = {name: flat(value)[:, slots] for name, value in pool.items()} if source is None else source

    rotated = dict(pool)
    for channel in layout.channels:
        if channel.rotates:
            rope, value = layout.rope_of(channel.name), pool[channel.name]
            (cos, sin), scale = turns[rope]
            how = {"layout": rope.cached, "scale": scale, "length": length}
            keys = source[channel.name].astype(value.dtype)
            rotated[channel.name] = splice_kernel(value, slots, keys, cos, sin, **how)
    return rotated


def pages_of(slots: Slots, page_size: int) -> Int[np.ndarray, " N"]:
    """Lists the pages, in order, of slots that fill them one after another from offset 0, for a page table.

    A sequence of several chunks passes the chunks' slots concatenated; only its last page may be partly filled.

    Raises:
      PoolError: token t is not at offset t mod page_size, or a page's tokens do not lie together.
    """
    slots = np.asarray(slots, np.int32)
    pages = slots[::page_size] // page_size
    tokens = np.arange(slots.size)
    wanted = pages[tokens // page_size] * page_size + tokens % page_size
    wrong = np.flatnonzero(slots != wanted)
    if wrong.size:
        token = int(wrong[0])
        raise PoolError(
            f"slots: got token {token} at slot {int(slots[token])}; expected slot {int(wanted[token])} for a page table"
        )
    return pages


def slot_mask(slots: Slots, pages: Int[AnyArray, " N"], page_size: int) -> Bool[np.ndarray, " S"]:
    """Marks which of the N · page_size vectors of `pages` are at `slots`: False for masked tails and other owners."""
    whole = np.asarray(pages)[:, None] * page_size + np.arange(page_size)
    return np.isin(whole.ravel(), np.asarray(slots))


class SlotAllocator:
    """Reference counts of the slots of one pool, on the host.

    `allocate` gives slots one owner, `share` adds one (a fork), `release` removes one. Page-aligned allocation takes
    whole pages: the rest of the last page is masked until the chunk's own slots there are free.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """Counts the slots of an empty pool.

        Raises:
          PoolError: no pages, or an empty page.
        """
        whole = is_whole(pages, 1) and is_whole(page_size, 1)
        # Slots are int32.
        if not whole or int(pages) * int(page_size) >= 2**31:
            raise PoolError(
                f"pool: got pages {pages!r:.40}, page_size {page_size!r:.40}; expected whole numbers from 1, and fewer "
                "than 2**31 slots"
            )
        self.pages, self.page_size = pages, page_size
        self._count = np.zeros(pages * page_size, np.int32)
        self._aligned = np.zeros(pages, bool)

    def copy(self) -> "SlotAllocator":
        """Returns an independent copy."""
        return self.enlarged(self.pages)

    def enlarged(self, pages: int) -> "SlotAllocator":
        """Returns an allocator of this many pages, the present ones first with their owners.

        Raises:
          PoolError: fewer pages than there are.
        """
        if pages < self.pages:
            raise PoolError(f"pool: got {pages} pages in place of {self.pages}; expected no fewer")

        # Pages are added behind the present ones, so that slots keep their numbers.
        other = SlotAllocator(pages, self.page_size)
        other._count[: self._count.size], other._aligned[: self.pages] = self._count, self._aligned
        return other

    @property
    def counts(self) -> Int[np.ndarray, " S"]:
        """Number of owners of each slot, a copy."""
        return self._count.copy()

    def owners(self, slots: Slots) -> Int[np.ndarray, " T"]:
        """Returns the number of owners of these slots."""
        return self._count[np.asarray(slots)]

    @property
    def free(self) -> int:
        """Number of slots that `allocate` can provide without alignment."""
        return int(self._open().sum())

    @property
    def free_pages(self) -> int:
        """Number of whole pages that are free."""
        return int((self._by_page() == 0).all(1).sum())

    def _by_page(self) -> np.ndarray:
        """Returns the owners of each slot as [P, O], a view."""
        return self._count.reshape(self.pages, self.page_size)

    def _open(self) -> np.ndarray:
        """Marks slots without owners that are not the masked tail of an aligned page."""
        return (self._count == 0) & ~np.repeat(self._aligned, self.page_size)

    def allocate(self, tokens: int, *, aligned: bool = False) -> Int[np.ndarray, " T"]:
        """Allocates slots for `tokens` tokens, int32, one owner each: a contiguous run if possible, else the lowest.

        Args:
          aligned: start at a page's first slot and share no page; the last page's tail is masked.

        Raises:
          PoolError: fewer free slots (or pages) than requested; nothing is allocated.
        """
        if tokens < 1:
            raise PoolError(f"allocate: got {tokens} tokens; expected at least 1")
        if aligned:
            needed = -(-tokens // self.page_size)
            empty = np.flatnonzero((self._by_page() == 0).all(1))
            if empty.size < needed:
                raise PoolError(
                    f"allocate: got {needed} whole pages; expected at most the {empty.size} of {self.pages} that are "
                    "free"
                )
            # The slots of the last page that stay empty are masked by this mark, not by an owner.
            self._aligned[empty[:needed]] = True
            slots = (empty[:needed, None] * self.page_size + np.arange(self.page_size)).ravel()[:tokens]
        else:
            free = np.flatnonzero(self._open())
            if free.size < tokens:
                raise PoolError(
                    f"allocate: got {tokens} slots; expected at most the {free.size} of {self._count.size} that are "
                    "free"
                )

            # A run is contiguous where its last slot is `tokens - 1` after its first.
            runs = np.flatnonzero(free[tokens - 1 :] - free[: free.size - tokens + 1] == tokens - 1)
            first = int(runs[0]) if runs.size else 0
            slots = free[first : first + tokens]

        self._count[slots] = 1
        return slots.astype(np.int32)

    def share(self, slots: Slots) -> None:
        """Adds one owner to each slot.

        Raises:
          PoolError: a slot without owners, out of range or named twice; nothing changes.
        """
        self._count[self._owned(slots, "share")] += 1

    def release(self, slots: Slots) -> None:
        """Removes one owner of each slot; slots without owners are free, and a page's masked tail with its last slot.

        Raises:
          PoolError: as `share`.
        """
        self._count[self._owned(slots, "release")] -= 1
        # A page's tail is masked as long as one of its slots has an owner.
        self._aligned &= (self._by_page() > 0).any(1)

    def check_sole_owner(self, slots: Slots, pool: Pool) -> None:
        """Checks that slots have exactly one owner each, and that a pool has the pages that are counted here.

        Raises:
          PoolError: either.
        """
        pages = next(iter(pool.values())).shape[1:3]
        if pages != (self.pages, self.page_size):
            raise PoolError(
                f"pool: got {pages[0]} pages of {pages[1]}; expected {self.pages} pages of {self.page_size}"
            )

        # A slot of several owners holds a token of forks, which a splice would overwrite.
        slots = np.asarray(slots)
        wrong = slots[self._count[slots] != 1]
        if wrong.size:
            owners = int(self._count[wrong[0]])
            raise PoolError(f"splice: got slot {int(wrong[0])} with {owners} owners; expected 1, the chunk's own")

    def _owned(self, slots: Slots, word: str) -> np.ndarray:
        """Returns slots as an array after checking that they are distinct and in use."""
        slots = np.asarray(slots)
        # NumPy makes an empty list an array of floats.
        if not slots.size:
            return slots.astype(np.int32)
        if slots.dtype.kind not in "iu" or slots.ndim != 1:
            raise PoolError(
                f"{word}: got slots of dtype {slots.dtype} and shape {slots.shape}; expected distinct integers in one "
                "row"
            )
        if np.unique(slots).size != slots.size or ((slots < 0) | (slots >= self._count.size)).any():
            raise PoolError(f"{word}: got slots {slots}; expected distinct numbers from 0 to {self._count.size - 1}")
        bare = slots[self._count[slots] == 0]
        if bare.size:
            raise PoolError(f"{word}: got slot {int(bare[0])} without an owner; expected slots in use")
        return slots

    def compact(self) -> Int[np.ndarray, " S"]:
        """Moves the slots in use to the front, and returns the new slot of each old one, −1 if free.

        Aligned pages go first, as whole pages; then all other slots without gaps. Order is kept within both. The caller
        moves the vectors (`move_slots(pool, *compaction_moves(mapping))`) and maps its own slots (`mapping[slots]`).
        """
        mapping = np.full(self._count.size, -1, np.int32)

        # Aligned pages keep their offsets, masked tails included; the other slots follow the last of them.
        aligned = np.flatnonzero(self._aligned)
        within = np.arange(self.page_size)
        used = np.flatnonzero((self._count > 0) & ~np.repeat(self._aligned, self.page_size))
        mapping[(aligned[:, None] * self.page_size + within).ravel()] = np.arange(aligned.size * self.page_size)
        mapping[used] = aligned.size * self.page_size + np.arange(used.size)
        mapping[self._count == 0] = -1

        count = np.zeros_like(self._count)
        count[mapping[mapping >= 0]] = self._count[mapping >= 0]
        self._count = count
        self._aligned = np.arange(self.pages) < aligned.size
        return mapping


def compaction_moves(mapping: Int[np.ndarray, " S"]) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """Lists the slots that a compaction's mapping moves: old and new, [N] each."""
    old = np.flatnonzero((mapping >= 0) & (mapping != np.arange(mapping.size))).astype(np.int32)
    return old, mapping[old]
