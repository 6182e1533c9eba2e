"""`PagedExecutor`: executes the edits of windows on one paged pool, and answers questions behind them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from ..backbone import Backbone, Output, Tokens, check_tokens
from ..cache import Chunk, Patch, brief
from ..core import AnyArray, KVEncoding, Paged, PhaseFreeKV, end_position
from ..errors import InputError, WindowError
from ..patching import lead_digest, lead_tokens
from ..pool import SlotAllocator
from .costs import CostMeter, Ledger, row_bytes
from .edit_plan import EditPlan, check_pieces
from .edit_run import EditRun, FusedQuestion, PrefillObserver
from .edits import Compact, Edit
from .entry import PlacedPiece
from .padding import bucket, padded_tokens
from .paged_pool import PagedPool, key_count
from .precompilation import Precompiler, samples
from .slot_table import DecodedAnswer, ResidentPiece, SlotTable, all_slots, distinct_bytes
from .sources import Encodings, Lead, PatchStore, PieceSources
from .window import Window


class PagedExecutor:
    """Executor of the edits of windows on one paged pool, which the windows of one loop and its forks share.

    The pool is donated from launch to launch: the `Paged` that `context` returns is valid until the next `run`. Pieces
    occupy slots of their own, page-aligned or not; a fork owns its parent's slots too until one of the two changes a
    piece.

        window, edits = window.append(entry)
        executor.provide(entry.id, tokens=tokens)
        executor.run(window, edits)
        answer = executor.generate(window, question, 32)

    Attributes:
      sources: inputs of pieces.
      store: where canonicals and patches are fetched from.
      lead: digest of what their canonicals were prefilled behind (`Chunk.lead`), or None.
      encodings: in which canonicals are read from the store.
      formers: called after each prefill.
      meter: counts everything executed.
      pool: the vectors.
      books: which piece of which branch occupies which slots. A run works on a copy, which replaces it at the end.
      current: by branch, the pieces of the window whose edits it ran last.
    """

    def __init__(
        self,
        backbone: Backbone,
        pages: int,
        page_size: int,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        store: PatchStore | None = None,
        lead: Lead = None,
        encodings: Encodings = (None,),
        aligned: bool = True,
        padded: bool = False,
    ):
        """Allocates the pool.

        Args:
          dtype: of the pool; None: bfloat16.
          store: where canonicals and patches are fetched from.
          lead: what canonicals were prefilled behind, as `make_chunk` takes it; others are refused.
          encodings: words of the encodings in which canonicals, and patches of them, are read from the store, the first
            in preference; None among them stands for canonicals as they were prefilled. They stay packed, and are
            decoded where they are placed.
          aligned: pieces begin on a page of their own, whose tail is masked; else they share pages, and `compact`
            closes the holes that dropped pieces leave.
          padded: rows of whole lanes, as TPUs require.

        Raises:
          PoolError: no pages, or an empty page.
        """
        self.backbone, self.layout, self.store, self.aligned = backbone, backbone.layout, store, aligned
        self.buckets = getattr(backbone, "buckets", None)

        # Canonicals were prefilled behind this lead, and are padded to the buckets of the backbone's prompts.
        self.lead = None if lead is None else lead_digest(backbone.fingerprint, lead_tokens(backbone, lead))
        self.dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
        self.encodings = tuple(None if word is None else str(KVEncoding.of(word)) for word in encodings)
        self.sources = PieceSources(
            backbone, buckets=self.buckets, lead=self.lead, dtype=self.dtype, encodings=self.encodings
        )
        self.formers: list[PrefillObserver] = []

        # The pool's vectors on the device, and the books of them on the host.
        self.meter = CostMeter(backbone)
        shardings = getattr(backbone, "kv_shardings", None)
        self.pool = PagedPool(
            self.layout, self.meter, self.buckets, aligned=aligned, padded=padded, shardings=shardings
        )
        self.books = SlotTable(SlotAllocator(pages, page_size))
        self.pool.allocate(pages, page_size, self.dtype)
        self.current: dict[str, tuple[PlacedPiece, ...]] = {}

    # ----------------------------------------------------------------------------------------------------- edits

    def provide(
        self,
        id: str,
        *,
        tokens: Tokens | None = None,
        length: int | None = None,
        chunk: Chunk | None = None,
        patch: Patch | None = None,
        content: str | None = None,
        hidden: Mapping[int, Num[AnyArray, "*B T D"]] | None = None,
    ) -> str | None:
        """Provides what edits of a piece will need. An input replaces the one provided before.

        Args:
          tokens: one row, at the piece's own positions (from 0): for `Prefill` and `Recompute`.
          length: how many of the tokens count, the first ones, of tokens padded to a bucket; None: all.
          chunk: its canonical.
          patch: of that canonical, or a removal patch.
          content: digest of what the tokens show; another content than before discards all other inputs.
          hidden: residuals entering some layers, {layer: [T,D] or [1,T,D]}, as `prefill(hidden_at=…)` returns them: for
            `Recompute` from such a layer.

        Returns:
          The digest of `patch`, None without one.

        Raises:
          InputError, ShapeError: an argument of the wrong kind, or of another number of tokens than what is known.
          PatchMismatchError: a chunk or patch of another id, or another backbone.
        """
        inputs = {"tokens": tokens, "length": length, "chunk": chunk, "patch": patch, "content": content}
        return self.sources.give(id, **inputs, hidden=hidden)

    def forget(self, id: str) -> None:
        """Discards the inputs of a piece; its KV in the pool stays."""
        self.sources.forget(id)

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window. Returns what was executed.

        A run that fails changes neither the pool nor the books. If a launch fails after the pool was donated to it (out
        of memory, say), the pool is lost, and every run raises until `renew`.

        Args:
          window: after the edits.
          edits: as its operations returned them, of one operation or several in their order.

        Raises:
          PoolError: no room. InputError: tokens, a canonical or a patch that was not provided and that no store has.
          PatchMismatchError: a chunk or patch of another content. WindowError: edits that do not lead from what the
          branch holds to this window. NotFiniteError: a forward whose logits are NaN. PoolLostError: the pool is lost.
          What the backbone raises.
        """
        before = self.meter.ledger
        self._run(window, edits, None)
        return self.meter.ledger - before

    def ask(
        self, window: Window, edits: Sequence[Edit], tokens: Tokens, length: int | None = None
    ) -> Float[Array, "1 1 V"]:
        """Executes the edits that led to a window and asks behind it. Returns the logits as `prefill` does.

        A piece that the edits prefill at the window's end and the question run in one forward. If the edits end
        otherwise (a recall by a patch, a compaction) the question has a forward of its own. Nothing of it is kept.

        Args:
          window: after the edits.
          tokens: the question, at positions from 0.
          length: how many count, of tokens padded to a bucket.

        Raises:
          As `run`; then window and pool are as they were, for an invalid question too. NotFiniteError: also of the
          question's logits if it ran together with a piece.
        """
        # An invalid question is refused before the edits run.
        question = FusedQuestion(*self.question(window, tokens, length))
        self._run(window, edits, question)
        return self.prefill(window, tokens, length).logits if question.logits is None else question.logits

    def _run(self, window: Window, edits: Sequence[Edit], question: FusedQuestion | None) -> None:
        self.check_backbone(window)
        self.pool.check()

        # Everything that can be refused is refused by the plan, before anything is written.
        plan = EditPlan(window, self.books.copy(), self.sources, self.pool)
        plan.add(edits, self.current.get(window.branch, ()), self.store)

        # The books are replaced only after every launch has succeeded.
        alive = self.books.allocator.counts > 0
        EditRun(plan, self.pool, self.backbone, alive, question, self.formers).execute()
        self.books = plan.table
        self.settle(window)

    def release(self, branch: str) -> None:
        """Releases everything that a branch holds."""
        # Other threads may read the books at any moment, so they are replaced, never changed.
        books = self.books.copy()
        books.release(branch)
        self.books = books
        self.current.pop(branch, None)

    @property
    def ledger(self) -> Ledger:
        """Everything executed so far; `after - before` is what happened in between."""
        return self.meter.ledger

    # ------------------------------------------------------------------------------------------------- questions

    def prefill(self, window: Window, tokens: Tokens, length: int | None = None, **options: Any) -> Output:
        """Runs tokens behind a window and keeps nothing; their positions begin at its `next_start`.

        Args:
          tokens: at positions from 0.
          length: how many count, of tokens padded to a bucket.
          options: of `backbone.prefill`; `logits` is "last", "all", or indices [1,n].

        Raises:
          WindowError: as `context`. What the backbone raises.
        """
        tokens, length, context = self._asked(window, tokens, length, 1)

        # "last" is the last token that counts, which padding may follow.
        wanted = options.get("logits", "last")
        if isinstance(wanted, str) and wanted == "last":
            options["logits"] = np.full((len(tokens.embeddings), 1), length - 1, np.int32)
        if self.layout.parts:
            options["lengths"] = np.full(len(tokens.embeddings), length, np.int32)
        return self.backbone.prefill(tokens, context, **options)

    def generate(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Int[np.ndarray, "B n"]:
        """Answers behind a window, as `backbone.generate` does; the window stays as it is.

        Args:
          tokens: the question, at positions from 0.
          length: how many count, of tokens padded to a bucket.
          options: of `backbone.generate`.

        Raises:
          WindowError: as `context`. What the backbone raises.
        """
        tokens, length, context = self._asked(window, tokens, length, steps)
        backbone: Any = self.backbone
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        return backbone.generate(tokens, steps, context, lengths=lengths, **options)

    def stream(
        self, window: Window, tokens: Tokens, steps: int, length: int | None = None, **options: Any
    ) -> Iterator[Any]:
        """Answers behind a window token by token, as `backbone.stream` does.

        The answer must be read to its end, or abandoned, before the next `run`, to which the pool is donated.

        Raises:
          As `generate`.
        """
        tokens, length, context = self._asked(window, tokens, length, steps)
        backbone: Any = self.backbone
        lengths = np.full(len(tokens.embeddings), length, np.int32)
        return backbone.stream(tokens, steps, context, lengths=lengths, **options)

    def _asked(
        self, window: Window, tokens: Tokens, length: int | None, logits: int
    ) -> tuple[Tokens, int, Paged | None]:
        """Returns a question in place, how many of its tokens count and its context; counts it in the ledger."""
        # The question is checked first, because a context is of no use without it.
        tokens, length = self.question(window, tokens, length)
        context = self.context(window)

        # Attention reads whole pages; the ledger records the keys that count, and those with padding.
        keys = key_count(context)
        seen = 0 if context is None else int(np.asarray(context.seen).sum())
        vectors = {} if context is None else context.pool
        self.meter.asked(vectors, (length, tokens.embeddings.shape[1]), (seen, keys), logits)
        return tokens, length, context

    def question(self, window: Window, tokens: Tokens, length: int | None) -> tuple[Tokens, int]:
        """Pads a question and moves it behind a window. Returns it, and how many of its tokens count."""
        check_tokens(tokens, "question")
        size = tokens.embeddings.shape[1]
        count = size if length is None else length
        if not 1 <= count <= size:
            raise InputError(f"question.length: got {length} of {size} tokens; expected 1 to {size}")

        # Positions of padding do not matter: nothing that counts sees it.
        padded = padded_tokens(tokens, max(size, bucket(self.buckets, count)))
        return padded.shift(window.next_start), count

    def context(self, window: Window) -> Paged | None:
        """Returns the window's KV in place: what `backbone.prefill` and `generate` read. None of an empty window.

        Raises:
          WindowError: this executor does not hold the window: its edits were not run, or others since.
        """
        self.check_current(window)
        return self.pool.context_of(self.books.ordered(window.branch))

    def decode(self, window: Window, tokens: Tokens, id: str = "answer") -> Float[Array, "1 1 V"]:
        """Runs tokens behind a window and behind what was decoded there before, and keeps their KV in the pool. Returns
        the logits behind the last token.

            logits = executor.decode(window, question)
            while …:
                logits = executor.decode(window, next_token)
            window, edits = window.append(Entry("answer", None, tokens, span, "text"))
            executor.run(window, edits)      # no forward: what was decoded is the piece

        An append of this id with as many tokens, right behind the window, adopts what was decoded; any other run of the
        branch discards it, and so does `discard`.

        Args:
          tokens: one row, at positions from 0; they are placed behind what was decoded before.
          id: of the piece that it may become.

        Raises:
          WindowError: as `context`. PoolError: no room. InputError: another answer is decoded behind this branch.
        """
        self.check_current(window)
        check_tokens(tokens, "decode")
        if len(tokens.embeddings) != 1:
            raise InputError(f"decode.tokens: got {len(tokens.embeddings)} rows; expected one")

        answer = self.books.answers.get(window.branch)
        if answer is not None and (answer.piece.id != id or answer.behind != window.pieces):
            raise InputError(
                f"decode.id: got {id!r:.80}; expected {brief(answer.piece.id)!r}, which grows behind branch "
                f"{window.branch!r}, or `discard` first"
            )

        # The new tokens get slots of their own, behind the window and what was decoded before.
        before = None if answer is None else answer.piece
        offset = 0 if before is None else int(np.floor(end_position(before.local[None])[0])) + 1
        books, count = self.books.copy(), tokens.embeddings.shape[1]
        slots = books.allocate(count, False, f"decode of {brief(id)!r}")
        front = [*self.books.ordered(window.branch), *([] if before is None else [before])]
        # Of a hybrid model the state goes on from token to token; its map is of the answer alone.
        transition = self.pool.before_answer(front) if answer is None else answer.after
        begun = transition if answer is None else answer.before
        cache = Paged.of(self.pool.vectors.engine, all_slots(front), self.buckets, transition)
        backbone: Any = self.backbone  # backbones that decode in pages are a richer protocol
        step = backbone.decode(tokens.shift(window.next_start + offset), cache, slots[None])

        # From here nothing can fail: enter the tokens, with those before them, as one piece.
        local = np.asarray(tokens.positions[0], np.float32) + offset
        if before is not None:
            slots, local = np.concatenate([before.slots, slots]), np.concatenate([before.local, local])
        piece = ResidentPiece(id, None, slots, local, window.next_start)
        books.answers[window.branch] = DecodedAnswer(piece, window.pieces, begun, step.cache.transition)
        self.pool.vectors = self.pool.vectors._replace(engine=dict(step.cache.pool))
        self.books = books
        keys = sum(piece.length for piece in front), cache.key_count
        self.meter.asked(self.pool.vectors.engine, (count, bucket(self.buckets, count)), keys, 1)
        return step.logits

    def discard(self, window: Window) -> None:
        """Discards what was decoded behind a window, if anything."""
        books = self.books.copy()
        books.discard(window.branch)
        self.books = books

    # -------------------------------------------------------------------------------------------------- inspection

    def read(self, window: Window, id: str) -> PhaseFreeKV:
        """Copies a piece's phase-free KV out of the pool, {channel: [L,T,K,H]}.

        Raises:
          WindowError: the branch does not hold the piece.
        """
        piece = self.books.held(window.branch, id)
        kv = self.pool.phase_free(piece, bucket(self.buckets, piece.length))
        rows = {channel.name: kv[channel.name][:, : piece.length] for channel in self.layout.token_channels}
        return PhaseFreeKV({**kv, **rows})

    def settle(self, window: Window) -> None:
        """Records that a window's edits were run."""
        self.current[window.branch] = window.pieces

    def check_current(self, window: Window) -> None:
        """Refuses a window that is not the one whose edits its branch ran last.

        Raises:
          WindowError: another one, or one of another backbone.
        """
        self.check_backbone(window)
        if window.pieces != self.current.get(window.branch, ()):
            # Name the first piece that differs; if none does, their states do.
            check_pieces(self.books.ordered(window.branch), window)
            raise WindowError(
                f"executor: got a window with pieces in other states than in branch {window.branch!r}; expected one "
                "whose edits were run, and no other's since"
            )

    def check_backbone(self, window: Window) -> None:
        """Refuses a window of another backbone."""
        own = self.backbone.fingerprint
        if window.backbone != own:
            raise WindowError(f"executor: got a window of backbone {window.backbone[:16]!r}; expected {own[:16]!r}")

    # -------------------------------------------------------------------------------------------------- the pool

    def renew(self) -> None:
        """Allocates the pool again and releases every branch and answer; what was provided stays.

        window, edits = window.anew()
        executor.renew()
        executor.run(window, edits)
        """
        # Books and vectors go together: neither says anything about the other's former contents.
        allocator = self.books.allocator
        self.books = SlotTable(SlotAllocator(allocator.pages, allocator.page_size))
        self.current.clear()
        self.pool.allocate(allocator.pages, allocator.page_size, self.dtype)

    def enlarge(self, pages: int) -> None:
        """Appends pages to the pool, up to this number; what it holds stays. Programs compile for the new size.

        Raises:
          PoolError: fewer pages than there are. PoolLostError: the pool is lost.
        """
        # The allocator refuses fewer pages before the vectors change.
        self.pool.check()
        books = self.books.copy()
        books.allocator = books.allocator.enlarged(pages)
        self.pool.enlarge(pages - self.books.allocator.pages)
        self.books = books

    @property
    def transition_bytes(self) -> int:
        """Bytes beside the pool in a hybrid model: of transitions of pieces, around answers, and of the compositions
        that are kept for later forwards and questions; 0 of other models.
        """
        # What is decoded behind a composition shares its arrays.
        return distinct_bytes([*self.books.transitions(), *self.pool.compositions])

    def compaction(self, steps: int = 1) -> Compact | None:
        """Suggests packing the pool, `run(window, (edit,))`, if that pays by the next answer; None if it does not.

        Args:
          steps: tokens that will be decoded behind the windows as they are.
        """
        moved = self.books.slots_worth_moving(steps)
        return Compact(moved, bytes=2 * row_bytes(self.pool.vectors.engine, self.layout) * moved) if moved else None

    def warm_up(
        self,
        tokens: Sequence[int | Tokens],
        questions: Sequence[int | Tokens] = (),
        *,
        keys: int,
        ranks: Iterable[int] = (),
        steps: int = 0,
        ask: bool = False,
    ) -> None:
        """Compiles what a loop will need, so that nothing is compiled while it runs; the pool keeps its contents.

        Lengths fall into the backbone's buckets: one length of each is enough. Image tokens with features for deeper
        layers (deepstack) compile programs of their own: pass `Tokens` of such an image.

        Args:
          tokens: of pieces, lengths of texts or sample tokens.
          questions: likewise, of what is asked.
          keys: tokens of the largest window.
          ranks: of patches.
          steps: tokens of the longest answer; 0 if answers are not generated.
          ask: whether questions are asked by `ask`, in one forward with what is appended: a program for each bucket of
            pieces and of questions together.

        Raises:
          InputError: a window that the pool cannot hold.
        """
        pages, page_size = self.books.allocator.pages, self.books.allocator.page_size
        if not 0 <= keys <= pages * page_size:
            raise InputError(f"warm_up.keys: got {keys}; expected 0 to {pages * page_size}, the slots of the pool")

        pieces, asked = (samples(self.backbone, self.buckets, inputs) for inputs in (tokens, questions))
        precompiler = Precompiler(self.backbone, self.pool, keys, pages, page_size, self.encodings)
        precompiler.compile(pieces, asked, ranks=tuple(ranks), steps=steps, ask=ask)
