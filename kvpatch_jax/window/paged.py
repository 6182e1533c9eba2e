"""`PagedExecutor`: the edits of windows, executed on one paged pool."""

from collections.abc import Iterable, Sequence

from jaxtyping import Array, Float

from ..backbone import Tokens
from ..core import EngineKV, Paged, PhaseFreeKV
from .answer_decoding import adopt, grow
from .cost_meter import row_bytes
from .edit_dispatch import plan
from .edit_transaction import EditTransaction
from .edits import Compact, Edit
from .executor_pool import PoolExecutor
from .fused_question import FusedQuestion
from .ledger import Ledger
from .precompilation import warm_up
from .slot_table import packing
from .window import Window


class PagedExecutor(PoolExecutor):
    """Executes the edits of windows on one paged pool, which the windows of one loop and its forks share.

    The pool is donated from launch to launch and never leaves the executor but inside the `Paged` that `context` gives,
    which holds until the next `run`. Pieces lie at slots of their own, page-aligned or not; a fork owns its parent's
    slots too until one of the two changes a piece.

        window, edits = window.append(entry)
        executor.provide(entry.id, tokens=tokens)
        executor.run(window, edits)
        answer = executor.generate(window, question, 32)

    Attributes are those of `PoolExecutor`, which allocates the pool.
    """

    # --------------------------------------------------------------------------------------------- edits

    def run(self, window: Window, edits: Sequence[Edit]) -> Ledger:
        """Executes the edits that led to a window.

        A run that fails leaves pool and books as they were; but where a launch fails with the pool in its hands (out
        of memory, say), the pool is lost, and every run says so until `renew`.

        Args:
          window: after the edits. edits: as its operations gave them, of one operation or of several in their order.

        Returns:
          What was executed.

        Raises:
          PoolError: no room. InputError: tokens, a canonical or a patch that was not given and that no store has.
          PatchMismatchError: a chunk or patch of other content. WindowError: edits that do not lead from what the
          branch holds to this window. NotFiniteError: a forward that gave NaN. PoolLostError: the pool is gone. What
          the backbone raises.
        """
        before = self.ledger
        self._run(window, edits)
        return self.ledger - before

    def ask(
        self, window: Window, edits: Sequence[Edit], tokens: Tokens, length: int | None = None
    ) -> Float[Array, "1 1 V"]:
        """See `Executor.ask`."""
        question = FusedQuestion(*self.question(window, tokens, length))
        self._run(window, edits, question)
        return self.prefill(window, tokens, length).logits if question.logits is None else question.logits

    def _run(self, window: Window, edits: Sequence[Edit], question: FusedQuestion | None = None) -> None:
        self.check_backbone(window)
        self.check_pool()
        run = EditTransaction(self, window, question)
        if adopt(self, run, window, edits):
            self.check_holds(run.standing(), window)
        else:
            plan(self, run, window, edits)
        run.execute()
        self.settle(window)

    def release(self, branch: str) -> None:
        """Lets go of all that a branch holds."""
        books = self.books.copy()
        books.let_go(branch)
        books.joined = {other for other in books.joined if not other.startswith(f"{branch}/")}
        self.books = books
        self._current.pop(branch, None)

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
        """Compiles what a loop will need, so that nothing is compiled while it runs; what lies in the pool stays.

        Lengths fall into the backbone's buckets: one length of each is enough. Image tokens with features for deeper
        layers (deepstack) compile programs of their own: give `Tokens` of such an image.

        Args:
          tokens: of pieces, lengths of texts or sample tokens. questions: likewise, of what is asked.
          keys: tokens of the largest window.
          ranks: of patches. steps: tokens of the longest answer; 0 where answers are not generated.
          ask: whether questions are asked by `ask`, in one forward with what is appended: a program for each bucket of
            pieces and of questions together.

        Raises:
          InputError: a window that the pool cannot hold.
        """
        warm_up(self, tokens, questions, keys, ranks, steps, ask)

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
        books.discard(window.branch)
        self.books = books

    def turns(self, window: Window) -> dict[str, int]:
        """How many rotations, each from where the keys stood, lie behind each piece; 0 where a source is kept."""
        return {held.id: held.turns for held in self.books.ordered(window.branch)}

    def read(self, window: Window, id: str) -> PhaseFreeKV:
        """Copies a piece's phase-free KV out of the pool, {channel: [L,T,K,H]}.

        Raises:
          WindowError: a piece that is not there.
        """
        held = self.books.held(window.branch, id)
        kv = self.phase_free(held, self.bucket(held.length))
        return PhaseFreeKV({name: value[:, : held.length] for name, value in kv.items()})
