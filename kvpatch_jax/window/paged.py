"""`PagedExecutor`: the edits of windows, executed on one paged pool."""

from collections.abc import Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..backbone import Backbone, Tokens
from ..errors import InputError
from ..frames import EngineKV, PhaseFreeKV
from ..layout import as_start, placed
from ..paging import Paged
from ..pool import SlotAllocator, make_pool, trimmed
from . import programs
from .books import Books, Held, all_slots, packing
from .dispatch import plan
from .edits import Compact, Edit
from .executor import Executor
from .growing import ANSWER, Answer, adopt, grow
from .ledger import Ledger
from .measure import row_bytes
from .running import Run
from .sources import PatchStore, grown
from .warming import warm_up
from .window import Window

Keep = Literal["all", "rotating", "none"]


class PagedExecutor(Executor):
    """Executes the edits of windows on one paged pool, which the windows of one loop and its forks share.

    The pool is donated from launch to launch and never leaves the executor but inside the `Paged` that `context` gives,
    which holds until the next `run`. Pieces lie at slots of their own, page-aligned or not; a fork owns its parent's
    slots too until one of the two changes a piece.

        window, edits = window.append(entry)
        executor.provide(entry.id, tokens=tokens)
        executor.run(window, edits)
        answer = executor.generate(window, question, 32)

    Attributes:
      books: which piece of which branch lies where.
      pools: the vectors.
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
        padded: bool = False,
        gather: bool = False,
    ):
        """Allocates the pool.

        Args:
          dtype: of the pool; None: bfloat16.
          aligned: pieces begin on a page of their own, whose tail is masked; else they share pages, and `compact`
            closes the holes that those leave who go.
          keep: what is kept phase-free beside the pool, slot by slot: the channels that carry phase ("rotating"), from
            which survivors turn, with one rounding however often; every channel ("all"), in the dtype of the tokens'
            embeddings; or "none": survivors turn from where they stand, and roundings add up (`turns` counts).
          store: where canonicals and patches are fetched from.
          padded: rows of whole lanes, as TPUs want them.
          gather: contexts are copied out of the pool, for a backbone that reads no page tables.

        Raises:
          PoolError: no pages, or an empty page. InputError: another word to keep.
        """
        if keep not in ("all", "rotating", "none"):
            raise InputError(f"executor: keep {keep!r}; expected 'all', 'rotating' or 'none'")
        super().__init__(backbone, store, padded=True)
        self.aligned, self.keep, self.gather = aligned, keep, gather
        self.dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
        engine = make_pool(self.layout, pages, page_size, self.dtype, padded=padded)
        kept = [channel.name for channel in self.layout.channels if keep == "all" or channel.rotates]
        source = {} if keep == "none" else {name: jnp.zeros_like(engine[name]) for name in kept}
        self.pools = programs.Pools(engine, source)
        self.books = Books(SlotAllocator(pages, page_size))
        self.answers: dict[str, Answer] = {}

    @property
    def keeps_source(self) -> bool:
        """Whether keys turn from a phase-free source."""
        return bool(self.pools.source)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and of what is kept beside it."""
        return sum(value.nbytes for value in jax.tree.leaves(self.pools))

    # --------------------------------------------------------------------------------------------- edits

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window.

        A run that fails leaves pool and books as they were.

        Args:
          window: after the edits. edits: as its operations gave them, of one operation or of several in their order.

        Returns:
          What was executed.

        Raises:
          PoolError: no room. InputError: tokens, a canonical or a patch that was not given and that no store has.
          PatchMismatchError: a chunk or patch of other content. WindowError: edits that do not lead from what the
          branch holds to this window. NotFiniteError: a forward that gave NaN. What the backbone raises.
        """
        self.check_backbone(window)
        before, run = self.ledger, Run(self, window)
        if adopt(self, run, window, edits):
            self.check_holds(run.standing(), window)
        else:
            plan(self, run, window, edits)
        run.execute()
        self.answers.pop(window.branch, None)
        self.settle(window)
        return self.ledger - before

    def pieces(self, branch: str) -> Sequence[Held]:
        """The pieces of a branch, in order."""
        return self.books.ordered(branch)

    def release(self, branch: str) -> None:
        """Lets go of all that a branch holds."""
        books = self.books.copy()
        books.let_go(branch)
        books.let_go(branch + ANSWER)
        self.books = books
        self.answers.pop(branch, None)
        self._current.pop(branch, None)

    def warm_up(
        self,
        tokens: Sequence[int | Tokens],
        questions: Sequence[int | Tokens] = (),
        *,
        keys: int,
        ranks: Iterable[int] = (),
        steps: int = 0,
    ) -> None:
        """Compiles what a loop will need, so that nothing is compiled while it runs; what lies in the pool stays.

        Lengths fall into the backbone's buckets: one length of each is enough. Image tokens with features for deeper
        layers (deepstack) compile programs of their own: give `Tokens` of such an image.

        Args:
          tokens: of pieces, lengths of texts or sample tokens. questions: likewise, of what is asked.
          keys: tokens of the largest window.
          ranks: of patches. steps: tokens of the longest answer; 0 where answers are not generated.

        Raises:
          InputError: a window that the pool cannot hold.
        """
        warm_up(self, tokens, questions, keys, ranks, steps)

    def compaction(self, steps: int = 1) -> Compact | None:
        """Suggests packing the pool where that pays by the next answer; None where it does not.

        Attention reads whole pages: slots of a context's pages that are not its own cost what its own cost. Packing
        pays once the bytes that a step reads for nothing, over `steps` of them, exceed what would move.

        Args:
          steps: tokens that will be decoded behind the windows as they are.

        Returns:
          The edit, with bytes of the slots that would move, read and written: `run(window, (edit,))`.
        """
        moved, saved = packing(self.books)
        if 2 * moved >= saved * steps:
            return None
        return Compact(moved, bytes=2 * row_bytes(self.pools.engine, self.layout) * moved)

    # ----------------------------------------------------------------------------------------- what is read

    def context(self, window: Window) -> Paged | EngineKV | None:
        """The window's KV where it lies: what `backbone.prefill` and `generate` read behind. None of an empty window.

        Raises:
          WindowError: a window that this executor does not hold: its edits were not run, or others since.
        """
        self.check_current(window)
        return self.context_of(self.books.ordered(window.branch))

    def context_of(self, pieces: Sequence[Held]) -> Paged | EngineKV | None:
        """The KV of some pieces where it lies."""
        slots = all_slots(pieces)
        if self.gather and slots.size:
            rows = trimmed(self.layout, programs.read_rows(self.pools, slots).engine)
            return EngineKV({name: value[:, None] for name, value in rows.items()})
        return Paged.of(self.pools.engine, slots, self.buckets) if slots.size else None

    def decode(self, window: Window, tokens: Tokens, id: str = "answer") -> Float[Array, "1 1 V"]:
        """Runs tokens behind a window and behind what was decoded there before, and keeps their KV in the pool.

            logits = executor.decode(window, question)
            while …:
                logits = executor.decode(window, next_token)
            window, edits = window.append(Entry("answer", None, tokens, span, "text"))
            executor.run(window, edits)      # no forward: what was decoded is the piece

        An append of this id with as many tokens, right behind the window that was decoded behind, takes over what is
        there; any other run of the branch lets go of it, and so does `discard`.

        Args:
          tokens: one row, at positions from 0; they are placed behind what was decoded before.
          id: of the piece that it may become.

        Returns:
          Logits behind the last token, [1,1,V].

        Raises:
          WindowError: as `context`. PoolError: no room. InputError: another answer grows behind this branch.
        """
        return grow(self, window, id, tokens)

    def discard(self, window: Window) -> None:
        """Lets go of what was decoded behind a window; nothing where nothing was."""
        books = self.books.copy()
        books.let_go(window.branch + ANSWER)
        self.books = books
        self.answers.pop(window.branch, None)

    def turns(self, window: Window) -> dict[str, int]:
        """How many rotations, each from where the keys stood, lie behind each piece; 0 where a source is kept."""
        return {held.id: held.turns for held in self.books.ordered(window.branch)}

    def phase_free(self, held: Held, size: int) -> dict[str, Float[Array, "L T _ _"]]:
        """The phase-free KV of a piece, padded to `size` tokens: from the source, or by turning keys back."""
        slots = np.asarray(grown(held.slots, 0, size))
        rows = programs.read_rows(self.pools, slots)
        trim = lambda name, value: value[..., : self.layout.channel(name).width]
        engine = {name: trim(name, value) for name, value in rows.engine.items()}
        source = {name: trim(name, value) for name, value in rows.source.items()}
        if not self.keeps_source:
            source = self.turned_back(held, size)
        return PhaseFreeKV({**engine, **source})

    def turned_back(self, held: Held, size: int) -> dict[str, Float[Array, "L T _ _"]]:
        """The phase-free KV of a piece, padded to `size` tokens, of the keys as they stand."""
        slots = np.asarray(grown(held.slots, 0, size))
        rows = trimmed(self.layout, programs.read_rows(self.pools, slots).engine)
        start = np.asarray(as_start(self.layout.rope, held.start))
        return placed(self.layout, rows, grown(held.local, 0, size), start, back=True)

    def read(self, window: Window, id: str) -> PhaseFreeKV:
        """Copies a piece's phase-free KV out of the pool, {channel: [L,T,K,H]}.

        Raises:
          WindowError: a piece that is not there.
        """
        held = self.books.held(window.branch, id)
        kv = self.phase_free(held, self.bucket(held.length))
        return PhaseFreeKV({name: value[:, : held.length] for name, value in kv.items()})
