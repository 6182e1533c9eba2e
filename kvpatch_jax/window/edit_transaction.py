"""One run of edits over a paged pool: planned on a copy of the books, then executed, or undone.

Everything that can be refused is refused while planning, before anything is written. While executing, each step leaves
behind how it is undone: where one fails those before it are undone, and books and pool are as they were.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from ..backbone import Tokens
from ..cache import Chunk, brief
from ..core import Factors, as_start, check_positions
from ..errors import WindowError
from ..patching import Placed
from ..pool import compaction_moves
from . import programs
from .edit_dispatch import PatchOperand
from .executor import key_count
from .executor_pool import PoolExecutor
from .fused_question import FusedQuestion, run_together
from .slot_table import ResidentPiece, SlotTable, StashedKV, all_slots
from .sources import grown
from .window import Window

Undo = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class PlannedLaunch:
    """One launch, or a forward and the launch that writes what it gave.

    Attributes:
      run: does it; returns how it is undone, None where nothing that lives is changed.
      forward: whether a backbone runs, which may fail where a launch does not.
    """

    run: Callable[[], Undo | None]
    forward: bool = False


@dataclasses.dataclass(frozen=True)
class KeyRotation:
    """A piece that turns to a new start: at its slots, or to slots of its own where another branch keeps the old."""

    old: ResidentPiece
    new: ResidentPiece


class EditTransaction:
    """Edits of one branch on their way into the pool."""

    def __init__(self, executor: PoolExecutor, window: Window, question: FusedQuestion | None = None):
        """Nothing planned yet; `window` is what the edits lead to, and behind which a question may be asked."""
        self.executor, self.window, self.branch, self.question = executor, window, window.branch, question
        self.books: SlotTable = executor.books.copy()
        self.actions: list[PlannedLaunch] = []
        self._alive = executor.books.allocator.counts > 0
        self._forwards_left = 0

    # ---------------------------------------------------------------------------------------------- planning

    def standing(self) -> list[ResidentPiece]:
        """The branch's pieces, in order, as they will be."""
        return self.books.ordered(self.branch)

    def drop(self, id: str) -> None:
        """Gives up a piece's slots.

        Raises:
          WindowError: a piece that is not there.
        """
        self.books.drop(self.branch, id)

    def share(self, branch: str, id: str) -> None:
        """Owns a piece's slots too, which another branch holds.

        Raises:
          WindowError: a piece that branch does not hold, or this one does.
        """
        self.books.share(branch, self.branch, [id])

    def leave(self, branch: str) -> None:
        """Lets go of a branch that was joined, once."""
        if branch not in self.books.joined:
            self.books.let_go(branch)
            self.books.joined.add(branch)

    def prefill(self, id: str, start: int, content: str | None) -> None:
        """Plans a forward of a piece behind those in front of its start, into fresh slots.

        Raises:
          InputError: tokens that were not given. WindowError: a piece that is there. PoolError: no room.
          PositionError: a start out of range.
        """
        executor, books = self.executor, self.books
        tokens, local = executor.sources.forward(id, "prefill")
        if id in books.pieces(self.branch):
            raise WindowError(f"prefill: branch {self.branch!r} holds piece {brief(id)!r}; expected one without it")
        check_positions(executor.layout.rope, local, np.asarray(start, np.int32))
        front = books.in_front(self.branch, start)
        slots = books.allocate(len(local), executor.aligned, f"prefill of piece {brief(id)!r}")
        held = ResidentPiece(id, content, slots, local, start)
        books.put(self.branch, held)

        def run() -> Undo | None:
            # With the window's last piece in the run's last action, all that a question sees stands in place.
            if self.question is not None and self.actions[-1] is action and self.window.pieces[-1].id == id:
                kv = run_together(executor, self.question, tokens, held, front)
            else:
                kv = self._forward("Prefill", tokens, held, front)
            undo = self._save(slots)
            self._write("Prefill", held, kv, {})
            executor.tell(self.window, id, tokens, held.length, kv)
            return undo

        action = PlannedLaunch(run, forward=True)
        self.actions.append(action)

    def recompute(self, id: str, start_layer: int) -> None:
        """Plans a forward of a piece where it stands, from a layer up, behind what stands in front of it now.

        Raises:
          InputError: tokens, or the residual entering `start_layer`, that were not given. Else as `Books.held`.
        """
        executor, books = self.executor, self.books
        old = books.held(self.branch, id)
        tokens, _ = executor.sources.forward(id, "recompute", start_layer)
        front = books.in_front(self.branch, old.start)
        held = dataclasses.replace(self._own(old, copied=start_layer > 0), turns=0, aside=None, patch=None)
        books.put(self.branch, held)

        def run() -> Undo | None:
            kv = self._forward("Recompute", tokens, held, front, start_layer)
            undo = self._save(held.slots)
            self._write("Recompute", held, kv, {}, first=start_layer)
            if not start_layer:
                executor.tell(self.window, id, tokens, held.length, kv)
            return undo

        self.actions.append(PlannedLaunch(run, forward=True))

    def rotate(self, moves: Sequence[tuple[str, int, int]]) -> None:
        """Plans that pieces turn, each from a start to another: one launch for those that stay at their slots, one for
        those whose slots another branch owns too.

        Raises:
          WindowError: a piece that stands elsewhere, or as `Books.held`. PositionError: a start out of range.
          PoolError: no room for copies.
        """
        executor, books = self.executor, self.books
        alone, apart = [], []
        for id, begin, end in moves:
            old = books.held(self.branch, id)
            if old.start != begin:
                raise WindowError(f"rotate: piece {brief(id)!r} from start {begin}; expected {old.start}, where it is")
            check_positions(executor.layout.rope, old.local, np.asarray(end, np.int32))
            shared = books.shared(old)
            turns = 0 if executor.keeps_source else old.turns + 1
            own = self._own(old, copied=False) if shared else old
            new = dataclasses.replace(own, start=end, turns=turns)
            books.put(self.branch, new)
            (apart if shared else alone).append(KeyRotation(old, new))
        for group, whole in ((alone, False), (apart, True)):
            if group:
                self.actions.append(PlannedLaunch(lambda group=group, whole=whole: self._turn(group, whole)))

    def splice(
        self,
        kind: str,
        id: str,
        start: int,
        chunk: Chunk,
        added: PatchOperand | None = None,
        keep_aside: bool = False,
    ) -> None:
        """Plans that a canonical stands at a start, patched or bare: in fresh slots, or over what the piece has there.

        A patch must be the chunk's own; whether its antecedent is the one wanted is for whoever chose it to say.

        Args:
          kind: of the edit. added: the patch; None places the bare canonical.
          keep_aside: what stands there now is kept outside the pool, for `put_back`.

        Raises:
          PatchMismatchError, ShapeError, PositionError: as `apply_patch`. WindowError: a chunk of another number of
          tokens than the piece; a removal patch for a piece that is not there. PoolError: no room.
        """
        executor, books = self.executor, self.books
        patch = None if added is None else added.patch
        removal = patch is not None and patch.metadata.base == "conditioned"
        base = chunk.kv if removal else None  # of the right shapes; its numbers are read where the piece lies
        before = (patch.metadata.base_behind or ()) if removal and patch is not None else ()
        placed = Placed(chunk, patch, start, base=base, base_antecedent=before, allow_stale=True)
        options = {word: value for word, value in placed.options.items() if word != "frame"}
        local = np.asarray(chunk.local, np.float32)[: chunk.length]
        if removal:
            self._bring_base(id, start, kind)
        there = books.pieces(self.branch).get(id)
        if removal and there is not None and there.patch is not None:
            return  # kept aside as it was served
        if there is None:
            slots = books.allocate(chunk.length, executor.aligned, f"{kind} of piece {brief(id)!r}")
            held = ResidentPiece(id, chunk.content, slots, local, start)
        else:
            if there.length != chunk.length:
                raise WindowError(f"{kind}: chunk {brief(id)!r} of {chunk.length} tokens; expected {there.length}")
            aside = self._aside(there) if keep_aside else None
            turns = there.turns if removal else 0
            held = dataclasses.replace(
                self._own(there, copied=False), start=start, turns=turns, local=local, aside=aside, patch=None
            )
        if removal and added is not None:
            held = dataclasses.replace(held, patch=added.digest)
        books.put(self.branch, held)

        def run() -> Undo | None:
            kv = executor.phase_free(there, chunk.tokens) if removal and there is not None else placed.kv
            undo = self._save(held.slots)
            self._write(kind, held, kv, placed.factors, **options)
            if added is not None:
                executor.meter.patched(kind, added.patch, added.nbytes, held.length, chunk.tokens)
            return undo

        self.actions.append(PlannedLaunch(run))

    def _bring_base(self, id: str, start: int, what: str) -> None:
        """Sees to it that a piece stands conditioned, so that a removal patch can be added."""
        there = self.books.pieces(self.branch).get(id)
        if there is None:
            raise WindowError(f"{what}: a removal patch for piece {brief(id)!r}, which is not there; expected it held")
        if there.aside is not None:
            self.put_back(id, start, counted=False)

    def put_back(self, id: str, start: int, counted: bool = True) -> None:
        """Plans that what a switch to the bare canonical kept aside stands again at the piece's place: bit for bit
        where it did not move meanwhile.

        Raises:
          WindowError: nothing was kept aside, or as `Books.held`. PoolError: no room.
        """
        executor, old = self.executor, self.books.held(self.branch, id)
        aside = old.aside
        if aside is None:
            raise WindowError(f"condition: nothing of piece {brief(id)!r} was kept; expected it bare before")
        own = self._own(old, copied=False)
        turned = int(aside.start != start and not executor.keeps_source)
        held = dataclasses.replace(own, start=start, turns=aside.turns + turned, aside=None, patch=aside.patch)
        self.books.put(self.branch, held)

        def run() -> Undo | None:
            undo = self._save(held.slots)
            assert aside.rows is not None
            padded, length = self._slots(held.slots)
            executor.pools = programs.put_rows(executor.pools, padded, aside.rows, length)
            if counted:
                executor.meter.placed("Copy", executor.pools.engine, held.length, len(padded))
            if aside.start != start:
                self._turn([KeyRotation(dataclasses.replace(held, start=aside.start), held)], False, kind=None)
            return undo

        self.actions.append(PlannedLaunch(run))

    def compact(self) -> None:
        """Plans that the slots in use are packed to the front, those of every branch."""
        mapping = self.books.allocator.compact()
        self.books.rename(mapping)
        old, new = compaction_moves(mapping)
        if not old.size:
            return

        def run() -> Undo | None:
            self._copy(old, new, "Compact")
            return lambda: self._copy(new, old, "undo")

        self.actions.append(PlannedLaunch(run))

    def _own(self, old: ResidentPiece, copied: bool) -> ResidentPiece:
        """The piece at slots that this branch alone owns: others, where another branch owns them too.

        Args:
          copied: whether the vectors go along (else whoever asks writes all of them).

        Raises:
          PoolError: no room.
        """
        books, executor = self.books, self.executor
        if not books.shared(old):
            return old
        slots = books.allocate(old.length, executor.aligned, f"a copy of shared piece {brief(old.id)!r}")
        books.allocator.release(old.slots)
        if copied:
            self.actions.append(PlannedLaunch(lambda: self._copy(old.slots, slots, "copy on write")))
        return dataclasses.replace(old, slots=slots)

    def _aside(self, old: ResidentPiece) -> StashedKV:
        """Plans that a piece's vectors are read before they are overwritten."""
        kept = StashedKV(old.start, old.turns, old.patch)

        def run() -> None:
            padded, _ = self._slots(old.slots)
            kept.rows = programs.read_rows(self.executor.pools, padded)
            self.executor.meter.moved("aside", self.executor.pools.engine, old.length, len(padded), 1)

        self.actions.append(PlannedLaunch(run))
        return kept

    # --------------------------------------------------------------------------------------------- executing

    def execute(self) -> None:
        """Does what was planned; where a step fails, those before it are undone and its error goes on.

        Raises:
          PoolLostError: a step failed with the pool in its hands.
        """
        undone: list[Undo] = []
        self._forwards_left = sum(action.forward for action in self.actions)
        try:
            for action in self.actions:
                self._forwards_left -= action.forward
                undo = action.run()
                if undo is not None:
                    undone.append(undo)
        except BaseException as error:
            self.executor.check_pool(error)
            for undo in reversed(undone):
                undo()
            raise
        self.executor.books = self.books

    def _forward(
        self, kind: str, tokens: Tokens, held: ResidentPiece, front: Sequence[ResidentPiece], start_layer: int = 0
    ) -> Any:
        """Phase-free KV of a piece behind those in front, {channel: [L',1,T',K,H]}.

        Raises:
          NotFiniteError: NaN or infinity. What the backbone raises.
        """
        executor = self.executor
        last = np.array([[held.length - 1]], np.int32)
        context = executor.context_of(front)
        out = executor.backbone.prefill(tokens.shift(held.start), context, start_layer=start_layer, logits=last)
        executor.check_finite(kind, held.id, out.logits)
        behind = sum(piece.length for piece in front), key_count(context)
        ran = held.length, tokens.embeddings.shape[1]
        executor.meter.ran(kind, executor.pools.engine, ran, behind, start_layer)
        return out.kv

    def _write(self, kind: str, held: ResidentPiece, kv: Any, factors: Factors, first: int = 0, **options: Any) -> None:
        executor = self.executor
        size = next(iter(kv.values())).shape[-3]
        slots, local = grown(held.slots, 0, size), grown(held.local, 0, size)
        start, length = np.asarray(as_start(executor.layout.rope, held.start)), np.int32(held.length)
        if first:
            executor.pools = programs.write_layers(
                executor.layout, executor.pools, slots, dict(kv), local, start, length, first=first
            )
        else:
            executor.pools = programs.write_piece(
                executor.layout, executor.pools, slots, dict(kv), factors, local, start, length, **options
            )
        if kind not in ("Prefill", "Recompute"):  # of which the forward was counted, with what it writes
            executor.meter.placed(kind, executor.pools.engine, held.length, size)
        if executor.pools.source:
            executor.meter.moved("source", executor.pools.source, held.length, size, 1)

    def _turn(self, moves: Sequence[KeyRotation], whole: bool, kind: str | None = "Rotate") -> Undo | None:
        """Turns pieces in one launch, counted as of a kind (None: not at all)."""
        executor = self.executor
        read, write = (all_slots(getattr(move, side) for move in moves) for side in ("old", "new"))
        local, counts = np.concatenate([move.new.local for move in moves]), [move.new.length for move in moves]
        starts = np.array([(move.old.start, move.new.start) for move in moves], np.int32).repeat(counts, axis=0)
        old, new = (_on_axes(starts[:, side], local.shape) for side in range(2))
        size = executor.bucket(len(read))
        arrays = [np.asarray(grown(array, 0, size)) for array in (read, write, local, old, new)]
        undo = None
        if not whole and self._forwards_left:
            undo = self._unturn(arrays, len(read))
        length = np.int32(len(read))
        executor.pools = programs.turn_slots(executor.layout, executor.pools, *arrays, length, whole=whole)
        if kind is not None:
            executor.meter.turned(kind, executor.pools.engine, len(read), size)
        if whole:
            executor.meter.moved("copy on write", executor.pools.engine, len(read), size)
        return undo

    def _unturn(self, arrays: Sequence[np.ndarray], count: int) -> Undo:
        """How a turn at the same slots is undone: from the source again, or by what lay there."""
        executor, length = self.executor, np.int32(count)
        read, write, local, old, new = arrays
        if executor.keeps_source:

            def again() -> None:
                back = (read, write, local, new, old)
                executor.pools = programs.turn_slots(executor.layout, executor.pools, *back, length, whole=False)

            return again
        turning = {channel.name for channel in executor.layout.channels if channel.rotates}
        rows = programs.read_rows(executor.pools, write)
        rows = programs.SavedRows({name: value for name, value in rows.engine.items() if name in turning}, {})

        def restore() -> None:
            executor.pools = programs.put_rows(executor.pools, write, rows, length)

        return restore

    def _copy(self, old: Int[np.ndarray, " N"], new: Int[np.ndarray, " N"], kind: str) -> None:
        executor = self.executor
        (read, length), (write, _) = self._slots(old), self._slots(new)
        executor.pools = programs.copy_slots(executor.pools, read, write, length)
        executor.meter.moved(kind, executor.pools.engine, len(old), len(read))

    def _save(self, slots: Int[np.ndarray, " T"]) -> Undo | None:
        """Keeps what lies at slots that lived when the run began, where a forward is still to come that may fail."""
        executor = self.executor
        if not self._forwards_left or not self._alive[slots].any():
            return None
        padded, length = self._slots(slots)
        rows = programs.read_rows(executor.pools, padded)

        def restore() -> None:
            executor.pools = programs.put_rows(executor.pools, padded, rows, length)

        return restore

    def _slots(self, slots: Int[np.ndarray, " T"]) -> tuple[np.ndarray, np.int32]:
        """Slots padded to their bucket, and how many count."""
        return np.asarray(grown(slots, 0, self.executor.bucket(len(slots)))), np.int32(len(slots))


def _on_axes(starts: Int[np.ndarray, " N"], shape: tuple[int, ...]) -> Int[np.ndarray, "..."]:
    """A start for each token, and for each axis where positions have axes."""
    return starts if len(shape) == 1 else np.repeat(starts[:, None], shape[1], axis=1)
