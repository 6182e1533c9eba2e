"""Slots of a paged pool on the host: who owns which, which pages they fill, and the checks of slots to be written.

A slot is page · page size + offset.
"""

import jax
import numpy as np
from jaxtyping import Bool, Int

from pallas_kernels.splice import check_slots

from ..core import AnyArray, Pool, Slots
from ..errors import InputError, PoolError, ShapeError
from ..patching import Placed
from ..utils.kinds import is_whole


class SlotAllocator:
    """Reference counts of the slots of one pool.

    `allocate` gives slots one owner, `share` adds one (a fork), `release` removes one. Page-aligned allocation takes
    whole pages: the rest of the last page is masked until the chunk's slots there are free.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        """Counts the slots of an empty pool.

        Raises:
          PoolError: no pages, or an empty page.
        """
        # Slots are int32.
        if not (is_whole(pages, 1) and is_whole(page_size, 1)) or int(pages) * int(page_size) >= 2**31:
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
        return self._free_slots().size

    @property
    def free_pages(self) -> int:
        """Number of whole pages that are free."""
        return self._free_pages().size

    def _free_slots(self) -> np.ndarray:
        """Lists slots without owners that are not the masked tail of an aligned page."""
        return np.flatnonzero((self._count == 0) & ~np.repeat(self._aligned, self.page_size))

    def _free_pages(self) -> np.ndarray:
        return np.flatnonzero((self._count.reshape(self.pages, -1) == 0).all(1))

    def allocate(self, tokens: int, *, aligned: bool = False) -> Int[np.ndarray, " T"]:
        """Allocates slots for `tokens` tokens, int32, one owner each: a contiguous run if possible, else the lowest.

        Args:
          aligned: start at a page's first slot and share no page; the last page's tail is masked.

        Raises:
          PoolError: fewer free slots (or pages) than requested; nothing is allocated.
        """
        if tokens < 1:
            raise PoolError(f"allocate: got {tokens} tokens; expected at least 1")
        free, needed, unit, total = self._free_slots(), tokens, "slots", self._count.size
        if aligned:
            free, needed, unit, total = self._free_pages(), -(-tokens // self.page_size), "whole pages", self.pages
        if free.size < needed:
            raise PoolError(f"allocate: got {needed} {unit}; expected at most the {free.size} of {total} that are free")

        if aligned:
            # The slots of the last page that stay empty are masked by this mark, not by an owner.
            self._aligned[free[:needed]] = True
            slots = (free[:needed, None] * self.page_size + np.arange(self.page_size)).ravel()[:tokens]
        else:
            # A run is contiguous where its last slot is `tokens - 1` after its first.
            runs = np.flatnonzero(free[tokens - 1 :] - free[: free.size - tokens + 1] == tokens - 1)
            first = int(runs[0]) if runs.size else 0
            slots = free[first : first + tokens]

        self._count[slots] = 1
        return slots.astype(np.int32)

    def share(self, slots: Slots) -> None:
        """Adds one owner to each slot.

        Raises:
          KernelError: a slot out of range or named twice. PoolError: a slot without owners. Nothing changes.
        """
        self._count[self._in_use(slots, "share")] += 1

    def release(self, slots: Slots) -> None:
        """Removes one owner of each slot; slots without owners are free, and a page's masked tail with its last slot.

        Raises:
          KernelError, PoolError: as `share`.
        """
        self._count[self._in_use(slots, "release")] -= 1
        # A page's tail is masked as long as one of its slots has an owner.
        self._aligned &= (self._count.reshape(self.pages, -1) > 0).any(1)

    def _in_use(self, slots: Slots, word: str) -> np.ndarray:
        """Returns slots as an array after checking that they are distinct and have owners."""
        slots = np.asarray(slots)
        # NumPy makes an empty list an array of floats.
        slots = slots if slots.size else slots.astype(np.int32)
        check_slots(slots, self._count.size)
        bare = slots[self._count[slots] == 0]
        if bare.size:
            raise PoolError(f"{word}: got slot {int(bare[0])} without an owner; expected slots in use")
        return slots

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


def pages_of(slots: Slots, page_size: int) -> Int[np.ndarray, " N"]:
    """Lists the pages, in order, of slots that fill them one after another from offset 0, for a page table.

    A sequence of several chunks passes the chunks' slots concatenated; only its last page may be partly filled.

    Raises:
      PoolError: token t is not at offset t mod page_size, or a page's tokens do not lie together.
    """
    slots = np.asarray(slots, np.int32)
    pages, tokens = slots[::page_size] // page_size, np.arange(slots.size)
    expected = pages[tokens // page_size] * page_size + tokens % page_size
    wrong = np.flatnonzero(slots != expected)
    if wrong.size:
        token = int(wrong[0])
        raise PoolError(
            f"slots: got token {token} at slot {int(slots[token])}; expected slot {int(expected[token])} for a page "
            "table"
        )
    return pages


def slot_mask(slots: Slots, pages: Int[AnyArray, " N"], page_size: int) -> Bool[np.ndarray, " S"]:
    """Marks which of the N · page_size vectors of `pages` are at `slots`: False for masked tails and other owners."""
    vectors = np.asarray(pages)[:, None] * page_size + np.arange(page_size)
    return np.isin(vectors.ravel(), np.asarray(slots))


def chunk_slots(placed: Placed, slots: Slots, total: int, what: str, first: int = 0) -> Int[AnyArray, " T"]:
    """Returns int32 slots for a chunk's tokens, after checking those of its tokens from `first` to its length.

    Raises:
      ShapeError: a batch of chunks, or slots that are not one per token. InputError: no token from `first` on.
      KernelError: slots out of range, named twice, or no integers.
    """
    chunk, tokens, length = placed.chunk, placed.chunk.tokens, placed.chunk.length
    if chunk.batch is not None:
        raise ShapeError(f"{what}: got chunk {chunk.id!r}, a batch of {chunk.batch}; expected one chunk")
    slots = slots if isinstance(slots, jax.Array) else np.asarray(slots)
    # `check_slots` refuses what is no integer, whatever its shape.
    if slots.dtype.kind in "iu" and slots.shape != (tokens,):
        raise ShapeError(f"{what}: got slots of shape {slots.shape}; expected [{tokens}], one per token")
    if not 0 <= first < length:
        raise InputError(f"{what}: got first token {first}; expected 0 to {length - 1}")
    check_slots(slots[first:] if first else slots, total, length - first)
    if first:
        # Negative slots are written nowhere.
        slots = np.concatenate([np.full(first, -1), np.asarray(slots)[first:]])
    return slots.astype(np.int32)
