"""Plan of one run: the launches that edits become, and the slot table after them.

Everything that can be refused is refused here, on a copy of the slot table. `edit_run` executes the launches.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ..backbone import Tokens
from ..cache import brief
from ..core import check_positions
from ..errors import InputError, WindowError
from ..patching import Placed
from ..pool import compaction_moves
from .edits import ApplyPatch, Compact, Compose, Copy, Drop, Edit, Fetch, Prefill, Recompute, Rotate
from .entry import PlacedPiece, contents_differ
from .paged_pool import KeyRotation, PagedPool
from .slot_table import DecodedAnswer, PieceTransition, ResidentPiece, SlotTable
from .sources import PatchStore, PieceSources
from .window import Window


class ResolvedEdit(NamedTuple):
    """An edit, and what the edits after it and the window say of its piece.

    Attributes:
      piece: as it will be in the window, None if it leaves.
      following: the next edit that rotates or drops the piece.
    """

    edit: Edit
    piece: PlacedPiece | None
    following: Rotate | Drop | None

    @property
    def start(self) -> int:
        """Start at which this edit places the piece: where the next rotation takes it from, or where it stays.

        Raises:
          WindowError: a later edit drops it, or it is not in the window.
        """
        if isinstance(self.following, Rotate):
            return self.following.old
        if self.following is not None:
            id = brief(self.following.id)
            raise WindowError(f"executor: got edits that place and drop {id!r}; expected two runs")
        if self.piece is None:
            raise WindowError(f"executor: got {self.edit!r:.200}; expected an edit of a piece of the window")
        return self.piece.start

    @property
    def content(self) -> str | None:
        """Digest of what the piece shows; None if unknown."""
        return None if self.piece is None else self.piece.entry.content


def resolve_edits(window: Window, edits: Sequence[Edit]) -> list[ResolvedEdit]:
    """Looks ahead from every edit, in one pass from the end."""
    pieces = {piece.entry.id: piece for piece in window.pieces}
    following: dict[str, Rotate | Drop] = {}
    resolved = []

    for edit in reversed(edits):
        id = getattr(edit, "id", "")  # a compaction is of no piece
        resolved.append(ResolvedEdit(edit, pieces.get(id), following.get(id)))
        if isinstance(edit, Rotate | Drop):
            following[id] = edit

    return resolved[::-1]


def check_pieces(pieces: Iterable[Any], window: Window) -> None:
    """Refuses a window that does not consist of these pieces of an executor.

    Raises:
      WindowError: another piece, start or number of tokens than expected.
    """
    held = [(piece.id, piece.start, piece.length) for piece in pieces]
    wanted = [(piece.entry.id, piece.start, piece.entry.tokens) for piece in window.pieces]
    if held == wanted:
        return

    # None ends the shorter list, so that one piece too many or too few differs as well.
    pairs = zip([*held, None], [*wanted, None], strict=False)
    shown = []
    for piece in next(pair for pair in pairs if pair[0] != pair[1]):
        shown.append(f"{brief(piece[0])!r} at {piece[1]} of {piece[2]} tokens" if piece else "nothing more")
    raise WindowError(
        f"executor: got {shown[0]} in branch {window.branch!r}; expected {shown[1]}, as the window says (run the edits "
        "of every operation once, in their order)"
    )


# Launches hold arrays, which do not compare: they are told apart by identity.


class ForwardLaunch(NamedTuple):
    """Forward of a piece behind those in front of it, and the launch that writes its KV, from a layer up.

    `below` is the transition whose lower layers it keeps, in a hybrid model.
    """

    kind: str
    tokens: Tokens
    piece: ResidentPiece
    front: Sequence[ResidentPiece]
    start_layer: int = 0
    below: PieceTransition | None = None


class PlaceLaunch(NamedTuple):
    """Placement of a canonical, or of the conditioned KV of `base`, with a patch or without.

    Attributes:
      placed: chunk and patch, padded; where there is a `base` its KV only tells the number of tokens.
      patch_bytes: of the patch without padding.
    """

    kind: str
    piece: ResidentPiece
    placed: Placed
    patch_bytes: int
    base: ResidentPiece | None


class RotateLaunch(NamedTuple):
    """Rotation of pieces; `whole`: into slots of their own, the other channels too."""

    moves: Sequence[KeyRotation]
    whole: bool


class CopyLaunch(NamedTuple):
    """Copy of vectors between slots, as they are."""

    kind: str
    old: Int[np.ndarray, " N"]
    new: Int[np.ndarray, " N"]


class AdoptLaunch(NamedTuple):
    """Write of what a decoded answer lacks to become a piece: its phase-free source, and its transition."""

    answer: DecodedAnswer


Launch = ForwardLaunch | PlaceLaunch | RotateLaunch | CopyLaunch | AdoptLaunch


@dataclasses.dataclass(eq=False)
class EditPlan:
    """Launches that lead a branch to a window, and the slot table after them.

    Attributes:
      window: after the edits.
      table: a copy, changed as the edits say.
      sources: inputs of pieces.
      pool: what the launches will run on; only looked at here.
      launches: in their order.
    """

    window: Window
    table: SlotTable
    sources: PieceSources
    pool: PagedPool
    launches: list[Launch] = dataclasses.field(default_factory=list)

    def add(self, edits: Sequence[Edit], current: tuple[PlacedPiece, ...], store: PatchStore | None) -> None:
        """Plans edits, in their order.

        Args:
          current: pieces of the window whose edits the branch ran last.
          store: where `Fetch` reads.

        Raises:
          As `PagedExecutor.run`.
        """
        # An adopted answer is in place already, and its one edit changes nothing else.
        if self.window.branch not in self.table.answers or not self._adopt(edits, current):
            rotations: dict[str, Rotate] = {}
            for resolved in resolve_edits(self.window, edits):
                edit = resolved.edit
                # Consecutive rotations share a launch, in which no piece rotates twice.
                if rotations and (not isinstance(edit, Rotate) or edit.id in rotations):
                    self._rotate(rotations.values())
                    rotations = {}

                if isinstance(edit, Rotate):
                    rotations[edit.id] = edit
                else:
                    self._add(resolved, store)

            if rotations:
                self._rotate(rotations.values())

        check_pieces(self.table.ordered(self.window.branch), self.window)

    def _adopt(self, edits: Sequence[Edit], current: tuple[PlacedPiece, ...]) -> bool:
        """Makes the answer decoded behind the window the piece that these edits would prefill, if it is that piece;
        otherwise discards it. Returns whether the edits are planned so.
        """
        # It is that piece if it was decoded at this place, in this length and behind the very pieces that are there.
        answer, forwards = self.table.answers[self.window.branch], [e for e in edits if not isinstance(e, Compose)]
        edit = forwards[0] if len(forwards) == 1 else None
        if isinstance(edit, Prefill) and edit.id == answer.piece.id and edit.id in self.window:
            wanted = self.window.piece(edit.id)
            same = (wanted.start, wanted.entry.tokens) == (answer.piece.start, answer.piece.length)
            if same and answer.behind == self.window.pieces[:-1] == current:
                del self.table.answers[self.window.branch]
                piece = dataclasses.replace(
                    answer.piece, content=wanted.entry.content, transition=self.pool.new_transition()
                )
                self.table.put(self.window.branch, piece)
                self.launches.append(AdoptLaunch(dataclasses.replace(answer, piece=piece)))
                return True

        # Any other edit of the branch invalidates what was decoded behind the old window.
        self.table.discard(self.window.branch)
        return False

    def _add(self, resolved: ResolvedEdit, store: PatchStore | None) -> None:
        """Plans one edit other than a rotation."""
        edit = resolved.edit
        match edit:
            # Sharing and dropping change owners of slots only; nothing is launched.
            case Drop():
                self.table.drop(self.window.branch, edit.id)
            case Copy(source="shared"):
                self.table.share(edit.branch or "", self.window.branch, [edit.id])
            case Fetch():
                nbytes = self.sources.fetch(edit, self.window, store)
                if nbytes is not None:
                    self.pool.meter.fetched(nbytes)
            case Copy() | ApplyPatch():
                self._place(edit, resolved, store)
            case Prefill():
                self._prefill(edit.id, resolved)
            case Recompute():
                self._recompute(edit.id, edit.start_layer)
            case Compose():
                pass  # by the forward, when it reads what is in front of it
            case Compact():
                # Of every branch, because all of them share the pool.
                old, new = compaction_moves(self.table.compact())
                if old.size:
                    self.launches.append(CopyLaunch("Compact", old, new))
            case _:
                found = type(edit).__name__
                raise WindowError(f"executor: got an edit of type {found}; expected those of kvpatch_jax.window")

    def _prefill(self, id: str, resolved: ResolvedEdit) -> None:
        """Plans a forward of a piece behind those in front of its start, into fresh slots."""
        content, given = resolved.content, self.sources[id].content
        if contents_differ(content, given):
            raise InputError(f"prefill: got tokens of {brief(id)!r} that show {given!r}; expected {content!r}")

        start = resolved.start
        tokens, local = self.sources.forward(id, "prefill")
        if id in self.table.branches.get(self.window.branch, {}):
            raise WindowError(f"prefill: got {brief(id)!r}; expected no piece that branch {self.window.branch!r} holds")
        check_positions(self.pool.layout.rope, local, np.asarray(start, np.int32))

        # The front is as the edits so far leave it, and the forward reads it when its turn comes.
        front = self.table.ordered(self.window.branch, before=start)
        slots = self.table.allocate(len(local), self.pool.aligned, f"prefill of piece {brief(id)!r}")
        piece = ResidentPiece(id, content, slots, local, start, transition=self.pool.new_transition())
        self.table.put(self.window.branch, piece)
        self.launches.append(ForwardLaunch("Prefill", tokens, piece, front))

    def _recompute(self, id: str, start_layer: int) -> None:
        """Plans a forward of a piece in its place, from a layer up, behind what is in front of it now."""
        old = self.table.held(self.window.branch, id)
        tokens, _ = self.sources.forward(id, "recompute", start_layer)
        front = self.table.ordered(self.window.branch, before=old.start)

        # The layers below the first one keep their KV, so it goes along to slots of the branch's own.
        own = self._owned(old, copied=start_layer > 0)
        transition, below = self.pool.new_transition(), old.transition if start_layer else None
        piece = dataclasses.replace(own, transition=transition)
        self.table.put(self.window.branch, piece)
        self.launches.append(ForwardLaunch("Recompute", tokens, piece, front, start_layer, below))

    def _rotate(self, edits: Iterable[Rotate]) -> None:
        """Plans rotations: one launch for pieces that keep their slots, one for those whose slots others own too."""
        moves: dict[bool, list[KeyRotation]] = {False: [], True: []}
        for edit in edits:
            old = self.table.held(self.window.branch, edit.id)
            if old.start != edit.old:
                raise WindowError(
                    f"rotate: got piece {brief(edit.id)!r} from start {edit.old}; expected {old.start}, where it is"
                )
            check_positions(self.pool.layout.rope, old.local, np.asarray(edit.new, np.int32))

            own = self._owned(old)
            new = dataclasses.replace(own, start=edit.new)
            self.table.put(self.window.branch, new)
            moves[own is not old].append(KeyRotation(old, new))

        for whole, group in moves.items():
            if group:
                self.launches.append(RotateLaunch(group, whole))

    def _place(self, edit: Copy | ApplyPatch, resolved: ResolvedEdit, store: PatchStore | None) -> None:
        """Plans that a canonical is placed, patched or bare: in fresh slots, or over what the piece has."""
        kind, id, patch, patch_bytes = type(edit).__name__, edit.id, None, 0
        if isinstance(edit, ApplyPatch):
            patch, patch_bytes = self.sources.patch(id, edit.patch)
        state = None if resolved.piece is None else resolved.piece.state
        if isinstance(edit, Copy) and edit.source == "prefill":
            chunk = self.sources.take_prefill(id, "" if state is None else state.patch or state.behind)
        else:
            # A patch is added to the base that it was formed on; what stands for a prefill is not encoded.
            whole = patch is None and state is not None and state.kind == "conditioned"
            encodings = (None,) if whole else None if patch is None else (patch.metadata.encoding,)
            chunk = self.sources.chunk(id, resolved.content, encodings, store)
        removal = patch is not None and patch.metadata.base == "conditioned"

        # A removal patch is added to what the piece has in the pool; here the canonical stands for its shapes.
        # Whether the patch was formed behind the right antecedent was checked by the window, so a stale one passes.
        start, base = resolved.start, chunk.kv if removal else None
        base_antecedent = (patch.metadata.base_behind or ()) if patch is not None and removal else ()
        placed = Placed(chunk, patch, start, base=base, base_antecedent=base_antecedent, allow_stale=True)

        there = self.table.branches.get(self.window.branch, {}).get(id)
        if removal and there is None:
            raise WindowError(f"{kind}: got a removal patch of {brief(id)!r}; expected it for a piece in the pool")

        local = np.asarray(chunk.local, np.float32)[: chunk.length]
        transition = self.pool.new_transition()
        if there is None:
            slots = self.table.allocate(chunk.length, self.pool.aligned, f"{kind} of piece {brief(id)!r}")
            piece = ResidentPiece(id, chunk.content, slots, local, start, transition=transition)
        else:
            if there.length != chunk.length:
                raise WindowError(f"{kind}: got {chunk.length} tokens of {brief(id)!r}; expected {there.length}")

            piece = dataclasses.replace(self._owned(there), start=start, local=local, transition=transition)

        self.table.put(self.window.branch, piece)
        self.launches.append(PlaceLaunch(kind, piece, placed, patch_bytes, there if removal else None))

    def _owned(self, old: ResidentPiece, copied: bool = False) -> ResidentPiece:
        """Returns the piece at slots that this branch alone owns: new ones if another branch owns its slots too.

        Args:
          copied: copies the vectors there; otherwise the caller writes all of them.
        """
        if not (self.table.allocator.owners(old.slots) > 1).any():
            return old

        aligned = self.pool.aligned
        slots = self.table.allocate(old.length, aligned, f"a copy of shared piece {brief(old.id)!r}")
        self.table.allocator.release(old.slots)

        # The other branch still owns the old slots, so a copy that runs later finds them unchanged.
        if copied:
            self.launches.append(CopyLaunch("copy on write", old.slots, slots))
        return dataclasses.replace(old, slots=slots)
