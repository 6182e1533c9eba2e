"""State of a paged executor on the host: which piece of which branch occupies which slots, and in what form."""

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import PoolError, WindowError
from ..pool import SlotAllocator
from .entry import PlacedPiece


@dataclasses.dataclass(eq=False)
class PieceTransition:
    """Transition of a piece's own tokens in a hybrid model: what its linear layers make of any state in front of it.

    It has no position and occupies no slots. Its arrays are never donated or changed, so branches share it, and nothing
    has to be undone where a run fails.

    Attributes:
      parts: {part: float32 [L,R,K,W]}; None until the run that plans it is executed.
    """

    parts: Mapping[str, Float[Array, "L R _ _"]] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ResidentPiece:
    """Piece of one branch in the pool.

    Attributes:
      content: digest of what it shows, None if unknown.
      slots: [T], one per token that counts, in order.
      local: positions relative to its start, float32 [T] or [T, A].
      transition: of its tokens, in a hybrid model; None in others.
    """

    id: str
    content: str | None
    slots: Int[np.ndarray, " T"]
    local: Float[np.ndarray, "*positions"]
    start: int
    transition: PieceTransition | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.slots)


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedAnswer:
    """Tokens decoded behind a window: the piece that they may become, and the pieces in front of it.

    Attributes:
      before, after: of a hybrid model, what it decoded behind and what it decodes behind next, {part: [L,1,R,K,W]}: the
        state of window and answer, and the map of the answer alone.
    """

    piece: ResidentPiece
    behind: tuple[PlacedPiece, ...]
    before: Mapping[str, Float[Array, "L 1 R _ _"]] | None = None
    after: Mapping[str, Float[Array, "L 1 R _ _"]] | None = None


@dataclasses.dataclass(eq=False)
class SlotTable:
    """Branches, their pieces, and the number of owners of every slot.

    A run changes a copy, which replaces the table when the run succeeds.

    Attributes:
      allocator: slots and their owners.
      branches: {branch: {id: piece}}; a branch without pieces is absent.
      answers: what was decoded behind branches, by branch.
    """

    allocator: SlotAllocator
    branches: dict[str, dict[str, ResidentPiece]] = dataclasses.field(default_factory=dict)
    answers: dict[str, DecodedAnswer] = dataclasses.field(default_factory=dict)

    def copy(self) -> "SlotTable":
        """Returns a table that changes independently; the pieces, which are immutable, are shared."""
        branches = {name: dict(pieces) for name, pieces in self.branches.items()}
        return SlotTable(self.allocator.copy(), branches, dict(self.answers))

    def held(self, branch: str, id: str) -> ResidentPiece:
        """Returns a piece of a branch.

        Raises:
          WindowError: the branch does not hold this piece.
        """
        pieces = self.branches.get(branch, {})
        if id not in pieces:
            raise WindowError(f"executor: got {id!r}: no piece of branch {branch!r}; expected one of {sorted(pieces)}")
        return pieces[id]

    def ordered(self, branch: str, before: int | None = None) -> list[ResidentPiece]:
        """Returns the pieces of a branch in the order of their starts; with `before`, those that start below it."""
        # Entries keep the order in which they came, which inserts and reorders do not follow.
        pieces = sorted(self.branches.get(branch, {}).values(), key=operator.attrgetter("start"))
        return pieces if before is None else [piece for piece in pieces if piece.start < before]

    def put(self, branch: str, piece: ResidentPiece) -> None:
        """Enters a piece, or replaces its record."""
        self.branches.setdefault(branch, {})[piece.id] = piece

    def allocate(self, tokens: int, aligned: bool, what: str) -> Int[np.ndarray, " T"]:
        """Takes free slots.

        Raises:
          PoolError: too few are free; the message begins with `what`.
        """
        try:
            return self.allocator.allocate(tokens, aligned=aligned)
        except PoolError as error:
            # The allocator knows how many slots are free, the caller for what.
            raise PoolError(f"{what}: {error}") from None

    def drop(self, branch: str, id: str) -> None:
        """Removes a piece from a branch; its slots are free once no branch owns them.

        Raises:
          WindowError: as `held`.
        """
        self.allocator.release(self.held(branch, id).slots)
        del self.branches[branch][id]

        # A branch without pieces is as one that never was.
        if not self.branches[branch]:
            del self.branches[branch]

    def release(self, branch: str) -> None:
        """Removes every piece of a branch, and the answer decoded behind it. Idempotent."""
        # The list is a copy: dropping changes the dictionary.
        for id in list(self.branches.get(branch, {})):
            self.drop(branch, id)
        self.discard(branch)

    def discard(self, branch: str) -> None:
        """Releases the answer decoded behind a branch, if any."""
        # It is no piece of the branch yet, so that `release` of its pieces would miss its slots.
        answer = self.answers.pop(branch, None)
        if answer is not None:
            self.allocator.release(answer.piece.slots)

    def share(self, parent: str, child: str, ids: Iterable[str]) -> None:
        """Makes a branch an owner of pieces of another one, in the same slots.

        Raises:
          WindowError: the parent does not hold a piece, or the child already does.
        """
        for id in ids:
            piece = self.held(parent, id)
            if id in self.branches.get(child, {}):
                raise WindowError(f"fork: got branch {child!r}, which has piece {id!r}; expected one without it")

            # The record is shared too: it is immutable, and a branch that changes the piece enters its own.
            self.allocator.share(piece.slots)
            self.put(child, piece)

    def compact(self) -> Int[np.ndarray, " S"]:
        """Packs the used slots to the front of the pool.

        Returns:
          The new number of every slot, -1 of a free one.
        """
        mapping = self.allocator.compact()

        # Pieces that branches share are renumbered in each of them.
        for pieces in self.branches.values():
            for id, piece in pieces.items():
                pieces[id] = dataclasses.replace(piece, slots=mapping[piece.slots])

        for branch, answer in self.answers.items():
            piece = dataclasses.replace(answer.piece, slots=mapping[answer.piece.slots])
            self.answers[branch] = dataclasses.replace(answer, piece=piece)
        return mapping

    def groups(self) -> list[list[ResidentPiece]]:
        """Returns what is read together: the pieces of each branch in order, and each answer."""
        return [*map(self.ordered, self.branches), *([answer.piece] for answer in self.answers.values())]

    def slots_worth_moving(self, steps: int) -> int:
        """Counts the slots that `compact` would move, 0 if that does not pay by the time `steps` tokens are decoded."""
        packed = self.copy()
        mapping = packed.compact()
        moved = int(((mapping >= 0) & (mapping != np.arange(mapping.size))).sum())

        # Attention reads whole pages: slots on the pages of a group that are not its own cost as much as its own.
        size, saved = self.allocator.page_size, 0
        for table, sign in ((self, 1), (packed, -1)):
            for pieces in table.groups():
                # A page that two pieces of one group share is read once.
                slots = all_slots(pieces)
                saved += sign * (np.unique(slots // size).size * size - slots.size)

        # What moves is read and written.
        return moved if 2 * moved < saved * steps else 0

    def transitions(self) -> Iterator[Mapping[str, Array]]:
        """Yields what all branches hold of transitions: of pieces, and around answers."""
        for piece in itertools.chain.from_iterable(self.groups()):
            if piece.transition is not None:
                yield piece.transition.parts or {}
        for answer in self.answers.values():
            yield answer.before or {}
            yield answer.after or {}

    @property
    def transition_bytes(self) -> int:
        """Bytes of `transitions`, each array counted once; 0 of a model that has none."""
        return distinct_bytes(self.transitions())

    def owners(self) -> Int[np.ndarray, " S"]:
        """Counts the pieces and answers of all branches at each slot: what the allocator's counts must be."""
        # A piece has one slot per token, so no index repeats within a piece.
        counts = np.zeros_like(self.allocator.counts)
        for pieces in self.groups():
            for piece in pieces:
                counts[piece.slots] += 1
        return counts


def distinct_bytes(tables: Iterable[Mapping[str, Array]]) -> int:
    """Returns the bytes of tables of arrays, of which some may be in several tables."""
    return sum({id(value): value.nbytes for table in tables for value in table.values()}.values())


def all_slots(pieces: Iterable[ResidentPiece]) -> Int[np.ndarray, " S"]:
    """Returns the slots of pieces, concatenated."""
    slots = [piece.slots for piece in pieces]
    return np.concatenate(slots) if slots else np.zeros(0, np.int32)
