"""The pool of an executor: vectors, the books of them, and reading pieces where they lie."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..backbone import Backbone
from ..core import EngineKV, Paged, PhaseFreeKV, as_start, rotate_kv
from ..errors import InputError, PoolLostError
from ..pool import SlotAllocator, make_pool, trimmed
from . import programs
from .executor import Executor, Lead
from .slot_table import ResidentPiece, SlotTable, all_slots
from .sources import PatchStore, grown

Keep = Literal["all", "rotating", "none"]


class PoolExecutor(Executor):
    """An executor's pool. `PagedExecutor` is what runs edits on it.

    Attributes:
      pools: the vectors. books: which piece of which branch lies where, and what grows behind branches.
    """

    def __init__(
        self,
        backbone: Backbone,
        pages: int,
        page_size: int,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        aligned: bool = True,
        keep: Keep = "rotating",
        store: PatchStore | None = None,
        lead: Lead = None,
        padded: bool = False,
        gather: bool = False,
    ):
        """Allocates the pool.

        Args:
          dtype: of the pool; None: bfloat16.
          aligned: pieces begin on a page of their own, whose tail is masked; else they share pages, and `compact`
            closes the holes that those leave who go.
          keep: what is kept phase-free beside the pool, slot by slot, in its dtype: the channels that carry phase
            ("rotating"), from which survivors turn, with one rounding however often; every channel ("all"), which is
            more bytes for the same keys; or "none": survivors turn from where they stand, and roundings add up
            (`turns` counts).
          store: where canonicals and patches are fetched from.
          lead: what its canonicals were prefilled behind, as `make_chunk` takes it: others are refused.
          padded: rows of whole lanes, as TPUs want them.
          gather: contexts are copied out of the pool, for a backbone that reads no page tables.

        Raises:
          PoolError: no pages, or an empty page. InputError: another word to keep.
        """
        if keep not in ("all", "rotating", "none"):
            raise InputError(f"executor: keep {keep!r}; expected 'all', 'rotating' or 'none'")
        super().__init__(backbone, store, padded=True, lead=lead)
        self.aligned, self.keep, self.gather, self._padded = aligned, keep, gather, padded
        self.dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
        self.books = SlotTable(SlotAllocator(pages, page_size))
        self.pools = self._empty_pools()

    def _empty_pools(self) -> programs.Pools:
        """Vectors for as many slots as the books have."""
        books = self.books.allocator
        engine = make_pool(self.layout, books.pages, books.page_size, self.dtype, padded=self._padded)
        kept = [channel.name for channel in self.layout.channels if self.keep == "all" or channel.rotates]
        source = {} if self.keep == "none" else {name: jnp.zeros_like(engine[name]) for name in kept}
        return programs.Pools(engine, source)

    def renew(self) -> None:
        """Allocates the pool anew, and lets go of every branch and answer; what was provided stays.

        window, edits = window.anew()
        executor.renew()
        executor.run(window, edits)
        """
        books = self.books.allocator
        self.books = SlotTable(SlotAllocator(books.pages, books.page_size))
        self._current.clear()
        self.pools = self._empty_pools()

    def enlarge(self, pages: int) -> None:
        """Gives the pool more pages, behind those it has: what lies there stays, and programs compile for the new size.

        Raises:
          PoolError: fewer pages than there are. PoolLostError: the pool is gone.
        """
        self.check_pool()
        books = self.books.copy()
        books.allocator = books.allocator.enlarged(pages)
        more = pages - self.books.allocator.pages
        longer = lambda value: jnp.pad(value, [(0, more if axis == 1 else 0) for axis in range(value.ndim)])
        self.pools = jax.tree.map(longer, self.pools)
        self.books = books

    @property
    def lost(self) -> bool:
        """Whether a launch that was given the pool failed, and took it along."""
        return any(value.is_deleted() for value in jax.tree.leaves(self.pools))

    def check_pool(self, cause: BaseException | None = None) -> None:
        """Raises PoolLostError where the pool is lost."""
        if self.lost:
            raise PoolLostError(
                "executor: a launch that was given the pool failed, and what lay there is gone; expected `renew()`, "
                "then a run of `window.anew()`"
            ) from cause

    @property
    def keeps_source(self) -> bool:
        """Whether keys turn from a phase-free source."""
        return bool(self.pools.source)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and of what is kept beside it."""
        return sum(value.nbytes for value in jax.tree.leaves(self.pools))

    def pieces(self, branch: str) -> Sequence[ResidentPiece]:
        """The pieces of a branch, in order."""
        return self.books.ordered(branch)

    def context_of(self, pieces: Sequence[ResidentPiece]) -> Paged | EngineKV | None:
        """The KV of some pieces where it lies."""
        slots = all_slots(pieces)
        if self.gather and slots.size:
            rows = trimmed(self.layout, programs.read_rows(self.pools, slots).engine)
            return EngineKV({name: value[:, None] for name, value in rows.items()})
        return Paged.of(self.pools.engine, slots, self.buckets) if slots.size else None

    def phase_free(self, held: ResidentPiece, size: int) -> dict[str, Float[Array, "L T _ _"]]:
        """The phase-free KV of a piece, padded to `size` tokens: from the source, or by turning keys back."""
        if not self.keeps_source:
            return PhaseFreeKV(self.turned_back(held, size))
        rows = programs.read_rows(self.pools, np.asarray(grown(held.slots, 0, size)))
        return PhaseFreeKV(trimmed(self.layout, {**rows.engine, **rows.source}))

    def turned_back(self, held: ResidentPiece, size: int) -> dict[str, Float[Array, "L T _ _"]]:
        """The phase-free KV of a piece, padded to `size` tokens, of the keys as they stand."""
        slots = np.asarray(grown(held.slots, 0, size))
        rows = trimmed(self.layout, programs.read_rows(self.pools, slots).engine)
        start = np.asarray(as_start(self.layout.rope, held.start))
        return rotate_kv(self.layout, rows, grown(held.local, 0, size), start, back=True)
