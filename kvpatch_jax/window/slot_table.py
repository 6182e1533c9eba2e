"""The host's books of a paged window: which piece of which branch lies at which slots, and as what."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Float, Int

from ..errors import PoolError, WindowError
from ..pool import SlotAllocator
from .entry import PlacedPiece
from .programs import SavedRows


@dataclasses.dataclass(eq=False)
class StashedKV:
    """Conditioned vectors that a switch to the bare canonical took out of the pool, to be put back.

    Attributes:
      start, turns, patch: of the piece then.
      rows: what lay at its slots, padded; None until the run that plans it is executed.
    """

    start: int
    turns: int
    patch: str | None
    rows: SavedRows | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ResidentPiece:
    """One piece of one branch in the pool.

    Attributes:
      content: digest of what it shows, None where nobody said.
      slots: [T], one per token that counts, in order.
      local: positions relative to its start, float32 [T] or [T, A].
      turns: rotations since the vectors were written, each from where they stood; 0 where they turn from a source.
      patch: digest of a removal patch that was added to its conditioned KV.
      aside: what `condition` puts back.
    """

    id: str
    content: str | None
    slots: Int[np.ndarray, " T"]
    local: Float[np.ndarray, "*positions"]
    start: int
    turns: int = 0
    patch: str | None = None
    aside: StashedKV | None = None

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.slots)


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedAnswer:
    """What was decoded behind a window: as a piece that is none yet, and the pieces that it saw."""

    held: ResidentPiece
    behind: tuple[PlacedPiece, ...]


class SlotTable:
    """Branches, their pieces in order of start, and the owners of every slot. A run works on a copy of them.

    Attributes:
      branches: {branch: {id: Held}}.
      allocator: owners of slots.
      answers: what grows behind branches.
      joined: branches that were joined into another, and let go of.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        branches: Mapping[str, Mapping[str, ResidentPiece]] | None = None,
        joined: Iterable[str] = (),
        answers: Mapping[str, DecodedAnswer] | None = None,
    ):
        self.allocator = allocator
        self.branches = {name: dict(pieces) for name, pieces in (branches or {}).items()}
        self.joined = set(joined)
        self.answers = dict(answers or {})

    def copy(self) -> "SlotTable":
        """Books that change without these; what they say of pieces is shared."""
        return SlotTable(self.allocator.copy(), self.branches, self.joined, self.answers)

    def pieces(self, branch: str) -> dict[str, ResidentPiece]:
        """The pieces of a branch, {} of one that has none yet."""
        return self.branches.setdefault(branch, {})

    def held(self, branch: str, id: str) -> ResidentPiece:
        """A piece of a branch.

        Raises:
          WindowError: a piece that the branch does not hold.
        """
        found = self.branches.get(branch, {}).get(id)
        if found is None:
            holds = sorted(self.branches.get(branch, {}))
            raise WindowError(f"branch {branch!r} holds no piece {id!r}; expected one of {holds}")
        return found

    def put(self, branch: str, held: ResidentPiece) -> None:
        """Enters a piece, or changes what is said of it."""
        self.pieces(branch)[held.id] = held

    def allocate(self, tokens: int, aligned: bool, what: str) -> Int[np.ndarray, " T"]:
        """Takes slots for a piece.

        Raises:
          PoolError: no room; it names the piece and what is free.
        """
        try:
            return self.allocator.allocate(tokens, aligned=aligned)
        except PoolError as error:
            raise PoolError(f"{what}: {error}") from None

    def drop(self, branch: str, id: str) -> ResidentPiece:
        """Takes a piece out of a branch; its slots are free once no branch owns them.

        Raises:
          WindowError: as `held`.
        """
        held = self.held(branch, id)
        self.allocator.release(held.slots)
        del self.branches[branch][id]
        if not self.branches[branch]:
            del self.branches[branch]
        return held

    def let_go(self, branch: str) -> None:
        """Takes every piece out of a branch, and what grows behind it; one that holds nothing stays so."""
        for id in list(self.branches.get(branch, {})):
            self.drop(branch, id)
        self.discard(branch)

    def discard(self, branch: str) -> None:
        """Lets go of what grows behind a branch; nothing where nothing does."""
        answer = self.answers.pop(branch, None)
        if answer is not None:
            self.allocator.release(answer.held.slots)

    def share(self, parent: str, child: str, ids: Iterable[str]) -> None:
        """Lets a branch own what another one has, slot by slot the same.

        Raises:
          WindowError: a piece that the parent does not hold, or that the child has already.
        """
        for id in ids:
            held = self.held(parent, id)
            if id in self.branches.get(child, {}):
                raise WindowError(f"branch {child!r} has piece {id!r} already; expected a fork without it")
            self.allocator.share(held.slots)
            self.put(child, held)

    def shared(self, held: ResidentPiece) -> bool:
        """Whether another branch owns a piece's slots too."""
        return bool((self.allocator.owners(held.slots) > 1).any())

    def in_front(self, branch: str, start: int) -> list[ResidentPiece]:
        """The pieces of a branch that stand before a place, in order."""
        return [held for held in self.ordered(branch) if held.start < start]

    def ordered(self, branch: str) -> list[ResidentPiece]:
        """The pieces of a branch in the order of their starts."""
        return sorted(self.branches.get(branch, {}).values(), key=lambda held: held.start)

    def rename(self, mapping: Int[np.ndarray, " S"]) -> None:
        """Follows a compaction: every piece's and answer's slots by their new numbers."""
        moved = lambda held: dataclasses.replace(held, slots=mapping[held.slots])
        for name, pieces in self.branches.items():
            self.branches[name] = {id: moved(held) for id, held in pieces.items()}
        for name, answer in self.answers.items():
            self.answers[name] = dataclasses.replace(answer, held=moved(answer.held))

    def together(self) -> list[list[ResidentPiece]]:
        """What lies together: each branch's pieces in order, and each answer."""
        return [*map(self.ordered, self.branches), *([answer.held] for answer in self.answers.values())]

    def owners(self) -> Int[np.ndarray, " S"]:
        """How many pieces and answers of all branches lie at each slot: what the allocator's counts must be."""
        counts = np.zeros_like(self.allocator.counts)
        for pieces in self.together():
            for held in pieces:
                counts[held.slots] += 1
        return counts


def all_slots(pieces: Iterable[ResidentPiece]) -> Int[np.ndarray, " S"]:
    """The slots of pieces, one behind the other."""
    slots = [held.slots for held in pieces]
    return np.concatenate(slots) if slots else np.zeros(0, np.int32)


def packing(books: SlotTable) -> tuple[int, int]:
    """What a compaction would move, and what one reading of every branch would then save.

    Returns:
      Slots that move; and slots that lie on the pages of each branch's context beyond its own, now less then.
    """
    packed = books.copy()
    mapping = packed.allocator.compact()
    packed.rename(mapping)
    moved = int(((mapping >= 0) & (mapping != np.arange(mapping.size))).sum())
    return moved, _idle(books) - _idle(packed)


def _idle(books: SlotTable) -> int:
    """Slots on the pages of each branch, or answer, that are not its own."""
    size, idle = books.allocator.page_size, 0
    for pieces in books.together():
        slots = all_slots(pieces)
        idle += np.unique(slots // size).size * size - slots.size
    return idle
