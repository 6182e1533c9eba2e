"""How a window changes: each operation returns the new window and the edits that bring its KV there."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from ..cache import Patch, brief, names_of
from ..errors import PatchMismatchError, StalePatchError, WindowError
from .edits import ApplyPatch, Compact, Copy, Drop, Edit, Edits, Fetch, Prefill, Rotate, in_order
from .entry import BARE, FRESH, LIMIT, Entry, How, PatchNote, PieceState, PlacedPiece
from .provenance_chain import chain_digest, linked
from .window_state import MOST_GONE, WindowState

W = TypeVar("W", bound="WindowOperations")


class WindowOperations(WindowState):
    """What is placed, leaves and moves."""

    def append(
        self: W,
        entry: Entry,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> tuple[W, Edits]:
        """Places an entry behind all others.

        Args:
          how: "prefill" it behind what stands there; place its canonical with a "patch"; or "bare", alone; or
            "leading", where nothing stands in front: a canonical that was prefilled alone is its prefill there. None:
            "patch" where one is given, else "prefill".
          patch: formed behind `target()`.
          fetched: canonical and patch are at hand, and need no `Fetch`.
          allow_stale: serve a patch that was formed behind something else.

        Raises:
          WindowError: an id that is there already or was evicted (`recall` brings it back), a text that is not
          prefilled, or positions beyond 2**30. StalePatchError, PatchMismatchError: a patch that does not belong here.
        """
        self._check_new(entry)
        there, placing = self._place(entry, len(self.pieces), how, patch, fetched, allow_stale)
        return there, self._with_moves(there, placing)

    def insert(
        self: W,
        entry: Entry,
        before: str,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> tuple[W, Edits]:
        """Places an entry in front of another; what stands behind moves on where there is no room, and has not seen it.

        Args:
          before: id of the piece that will stand behind it. Else as `append`.

        Raises:
          WindowError: a place in the lead, or a piece that is not in the window. Else as `append`.
        """
        self._check_new(entry)
        there, placing = self._place(entry, self._inner(before, "insert"), how, patch, fetched, allow_stale)
        return there, self._with_moves(there, placing)

    def recall(
        self: W,
        id: str,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        *,
        before: str | None = None,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> tuple[W, Edits]:
        """Brings an evicted chunk back, behind all others or in front of one.

        Args:
          before: id of the piece that will stand behind it. Else as `append`.

        Raises:
          WindowError: a chunk that was not evicted from this window. Else as `insert`.
        """
        gone = self.evicted_by_id.get(id) if isinstance(id, str) else None
        if gone is None:
            there = "in the window" if isinstance(id, str) and id in self.places else "unknown"
            evicted = tuple(brief(piece.entry.id) for piece in self.evicted[-8:])
            raise WindowError(f"recall: chunk {_shown(id)} is {there}; expected an evicted one, such as {evicted}")
        index = len(self.pieces) if before is None else self._inner(before, "recall")
        there, placing = self._place(gone.entry, index, how, patch, fetched, allow_stale, gone)
        return there, self._with_moves(there, placing)

    def replace(
        self: W,
        id: str,
        entry: Entry,
        how: How | None = None,
        patch: Patch | PatchNote | None = None,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> tuple[W, Edits]:
        """Puts an entry in the place of another, which leaves; what stands behind has not seen it.

        Args:
          id: of what leaves, which may be the new entry's too. Else as `append`.

        Raises:
          WindowError: a piece of the lead, or one that is not in the window. Else as `append`.
        """
        index = self._inner(id, "replace")
        if not isinstance(entry, Entry) or entry.id != id:
            self._check_new(entry)
        without, drops = self._without([index])
        kept = tuple(piece for piece in without.evicted if piece.entry.id != entry.id)
        without = dataclasses.replace(without, evicted=kept)
        there, placing = without._place(entry, index, how, patch, fetched, allow_stale, self.pieces[index])
        return there, self._with_moves(there, [*drops, *placing])

    def evict(self: W, *ids: str) -> tuple[W, Edits]:
        """Takes pieces out. Chunks can be recalled; texts are gone.

        Raises:
          WindowError: a piece of the lead, one that is not in the window, or one named twice.
        """
        indices = [self._inner(id, "evict") for id in ids]
        if len(set(indices)) != len(indices):
            raise WindowError(f"evict: {tuple(map(brief, ids))}; expected each once")
        left, drops = self._without(sorted(indices))
        return left, self._with_moves(left, drops)

    def slide(self: W, keep: int) -> tuple[W, Edits]:
        """Evicts all but the last `keep` chunks behind the lead, and the texts in front of the first that stays.

        Raises:
          WindowError: a negative number, or none.
        """
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
            raise WindowError(f"slide: keep {keep!r:.80}; expected how many chunks stay, 0 or more")
        lead = min(self.lead, len(self.pieces))
        chunks = [index for index in range(lead, len(self.pieces)) if self.pieces[index].entry.kind == "chunk"]
        if len(chunks) <= keep:
            return self, ()
        cut = chunks[-keep] if keep else len(self.pieces)
        left, drops = self._without(list(range(lead, cut)))
        return left, self._with_moves(left, drops)

    def reorder(
        self: W,
        order: Sequence[str],
        patches: Mapping[str, Patch | PatchNote] | None = None,
        *,
        fetched: bool = False,
        allow_stale: bool = False,
    ) -> tuple[W, Edits]:
        """Puts order-free chunks into another order; all others keep theirs and their place among the pieces.

        A chunk that gets no patch keeps its KV, turned, and is exact again only where it stands behind what it was made
        behind.

        Args:
          order: ids: the places of those that are named are filled in this order.
          patches: by id, what moved chunks are served by from now on, such as their orbit patch; formed behind their
            `target`.

        Raises:
          WindowError: a piece that would move and is no order-free chunk, is pinned, is not in the window or is named
          twice; a patch of a piece that is not named. StalePatchError, PatchMismatchError: as `append`.
        """
        ids = names_of(order, "order")
        places = [self.index(id) for id in ids]
        if len(set(ids)) != len(ids):
            raise WindowError(f"reorder: {tuple(map(brief, ids))}; expected each once")
        notes = {id: PatchNote.of(patch) for id, patch in (patches or {}).items()}
        if strangers := sorted(set(notes) - set(ids)):
            raise WindowError(f"reorder: a patch of {_shown(strangers[0])}; expected it of one of {ids}")

        moved, came_from = list(self.pieces), list(range(len(self.pieces)))
        for old, new in zip(places, sorted(places), strict=True):
            piece = self.pieces[old]
            if old != new and (old < self.lead or new < self.lead or not piece.entry.order_free):
                what = "pinned" if min(old, new) < self.lead else "not order-free"
                raise WindowError(f"reorder: {_shown(piece.entry.id)} is {what}; expected chunks that are order-free")
            moved[new], came_from[new] = piece, old
        changed = [index for index, old in enumerate(came_from) if index != old]
        first = min([*changed, *(self.index(id) for id in notes)], default=None)
        if first is None:
            return self, ()

        earliest, unseen = len(moved), set[int]()
        for index in reversed(range(first, len(moved))):
            if earliest < came_from[index]:  # what stood in front of it stands behind it, and has not seen it there
                unseen.add(index)
            earliest = min(earliest, came_from[index])
        laid: list[PlacedPiece] = list(moved[:first])
        for index, start in enumerate(_starts_again(self.pieces, moved, first), first):
            entry, _, state, aside, born, placed = moved[index][:6]
            if entry.id in notes:
                state, aside = notes[entry.id].state(), None
            placed = self.clock + 1 if index in unseen else placed
            laid.append(PlacedPiece(entry, start, state, aside, born, placed))
        there = self._with(laid, first, clock=self.clock + 1)
        edits: list[Edit] = []
        for id, note in notes.items():
            there._check_patch(note, there.piece(id), allow_stale)
            if self.piece(id).state != note.state():
                edits += there._placing(there.index(id), fetched)
        return there, self._with_moves(there, edits)

    def compact(self: W) -> tuple[W, Edits]:
        """Closes what is free between pieces, in positions and in slots."""
        laid = _packed(self.pieces, 0, 0)
        end = laid[-1].end if laid else 0
        there = self._with(laid, 0, next_start=end)
        packing = Compact(there.tokens, **self.costs.compact(there.tokens))
        return there, self._with_moves(there, [packing])

    # ------------------------------------------------------------------------------------------------- steps

    def _place(
        self: W,
        entry: Entry,
        index: int,
        how: How | None,
        patch: Patch | PatchNote | None,
        fetched: bool,
        allow_stale: bool,
        before: PlacedPiece | None = None,
    ) -> tuple[W, list[Edit]]:
        """Places an entry at an index; `before` is where it, or what it replaces, stood."""
        note = None if patch is None else PatchNote.of(patch)
        state = _state(entry, how, note)
        if how == "leading" and index:
            raise WindowError(f"window: {_shown(entry.id)} leading behind {index} pieces; expected none in front of it")
        start, shift = self._room(entry.span, index, before)
        piece = PlacedPiece(entry, start, state, born=self.clock + 1, placed=self.clock + 1)
        following = self.pieces[index:]
        if shift:
            following = [each._replace(start=each.start + shift) for each in following]
        pieces = [*self.pieces[:index], piece, *following]
        next_start = max(self.next_start + shift, piece.end)
        if next_start >= LIMIT:
            raise WindowError(f"window: positions to {next_start}; expected them below 2**30 (`compact` closes gaps)")

        settled = self.lead_settled or entry.kind == "chunk"
        lead = self.lead if self.lead_settled or (settled and self.lead) else 1 + len(self.pieces)
        evicted = tuple(gone for gone in self.evicted if gone.entry.id != entry.id)
        there = self._with(
            pieces,
            index,
            evicted=evicted,
            next_start=next_start,
            lead=lead,
            lead_settled=settled,
            clock=self.clock + 1,
        )
        if note is not None:
            there._check_patch(note, there.pieces[index], allow_stale)
        return there, there._placing(index, fetched, how == "leading")

    def _room(self, span: int, index: int, before: PlacedPiece | None) -> tuple[int, int]:
        """Where an entry of this span is placed at an index, and how far what stands behind has to move."""
        if index == len(self.pieces):
            return self.next_start, 0
        low = self.pieces[index - 1].end if index else 0
        high = self.pieces[index].start
        if high - low < span:
            return low, span - (high - low)
        wanted = low if before is None else before.start
        return (wanted if low <= wanted <= high - span else low), 0

    def _without(self: W, indices: Sequence[int]) -> tuple[W, list[Edit]]:
        """The window without these pieces, and the edits that drop them."""
        if not indices:
            return self, []
        gone, leaving = [self.pieces[index] for index in indices], set(indices)
        stay = [piece for index, piece in enumerate(self.pieces) if index not in leaving]
        first, next_start = indices[0], self.next_start
        if self.gaps == "close":
            stay = _packed(stay, first, stay[first - 1].end if first else 0)
            next_start = stay[-1].end if stay else 0
        left = []
        for piece in gone:
            if piece.entry.kind == "chunk":
                state = dataclasses.replace(piece.aside or piece.state, kind="evicted")
                left.append(PlacedPiece(piece.entry, piece.start, state, None, piece.born, piece.placed))
        there = self._with(stay, first, evicted=(*self.evicted, *left)[-MOST_GONE:], next_start=next_start)
        return there, [Drop(piece.entry.id) for piece in gone]

    def _with(self: W, pieces: Sequence[PlacedPiece], first: int, **changes: Any) -> W:
        """The window with these pieces, of which those from `first` on are linked anew."""
        return dataclasses.replace(self, pieces=linked(self.backbone, pieces, first), **changes)

    def _with_moves(self, there: WindowState, edits: Iterable[Edit]) -> Edits:
        """These edits and the rotations of all that stayed and moved, in order; each once."""
        edits = list(edits)
        placed = {edit.id for edit in edits if isinstance(edit, Copy | ApplyPatch | Prefill | Rotate)}
        before = {piece[0].id: piece[1] for piece in self.pieces}
        per_token = self.costs.rotate(1)
        for piece in there.pieces:
            entry, new = piece[:2]
            old = before.get(entry.id, new)
            if old != new and entry.id not in placed:
                bytes, flops = per_token["bytes"] * entry.tokens, per_token["flops"] * entry.tokens
                edits.append(Rotate(entry.id, old, new, bytes, flops))
        return in_order(edits)

    def _placing(self, index: int, fetched: bool, leading: bool = False) -> list[Edit]:
        """The edits that place the KV of a piece in its state; `leading`: its canonical is its prefill."""
        piece = self.pieces[index]
        id, tokens, state = piece.entry.id, piece.entry.tokens, piece.state
        if state.kind == "conditioned" and not leading:
            behind = sum(each.entry.tokens for each in self.pieces[:index])
            return [Prefill(id, behind, **self.costs.prefill(tokens, behind))]
        edits: list[Edit] = []
        if not fetched and state.base == "canonical":
            edits.append(Fetch(id, "canonical", None, **self.costs.fetch(tokens)))
        if state.patch is None:
            return [*edits, Copy(id, "canonical", None, **self.costs.copy(tokens))]
        if not fetched:
            edits.append(Fetch(id, "patch", state.patch, state.patch_bytes))
        costs = self.costs.patch(tokens, state.patch_bytes, state.patch_flops)
        return [*edits, ApplyPatch(id, state.patch, state.rank, state.base, **costs)]

    # ------------------------------------------------------------------------------------------------ checks

    def _check_new(self, entry: Entry) -> None:
        if not isinstance(entry, Entry):
            raise WindowError(f"window: a {type(entry).__name__}; expected an Entry, such as Entry.of(chunk)")
        if entry.id in self.ids:
            raise WindowError(f"window: {_shown(entry.id)} is in the window; expected an id that is not")
        if entry.id in self.evicted_by_id:
            raise WindowError(f"window: {_shown(entry.id)} was evicted; expected a new id, or `recall`")

    def _inner(self, id: str, what: str) -> int:
        """The index of a piece behind the lead."""
        index = self.index(id)
        if index < self.lead:
            raise WindowError(f"{what}: {_shown(id)} is one of {self.lead} pinned in front; expected one behind them")
        return index

    def _chunk(self, id: str, what: str) -> int:
        """The index of a chunk."""
        index = self.index(id)
        if self.pieces[index].entry.kind != "chunk":
            raise WindowError(f"{what}: {_shown(id)} is a text, which has no canonical; expected a chunk")
        return index

    def _check_patch(self, note: PatchNote, piece: PlacedPiece, allow_stale: bool) -> None:
        """Refuses a patch of another chunk or base, or one that was formed behind something else than `target`."""
        entry = piece.entry
        if note.chunk != entry.id:
            raise PatchMismatchError(f"patch: chunk {note.chunk!r}; expected {entry.id!r}")
        if None not in (note.content, entry.content) and note.content != entry.content:
            raise PatchMismatchError(
                f"patch: formed of chunk {_shown(entry.id)} with content {note.content!r}; expected {entry.content!r}"
            )
        if allow_stale:
            return
        difference = note.antecedent.difference(self.target(entry.id), note.orbit)
        if difference is not None:
            kind = "any ordering of " if note.orbit else ""
            raise StalePatchError(f"patch of chunk {_shown(entry.id)}: formed behind {kind}{difference}")

    def _check_base(self, note: PatchNote, state: PieceState, id: str) -> None:
        """Refuses a removal patch whose base was conditioned on something else than this state."""
        if note.base == "canonical":
            return
        found = None if note.base_antecedent is None else chain_digest(self.backbone, note.base_antecedent)
        if state.kind != "conditioned" or state.behind != found:
            ids = None if note.base_antecedent is None else note.base_antecedent.ids
            raise StalePatchError(
                f"patch of chunk {_shown(id)}: its base was conditioned on {ids}, digest {found}; expected "
                f"{state.behind or state.kind!r}, which is what the window holds"
            )


def _state(entry: Entry, how: How | None, note: PatchNote | None) -> PieceState:
    """The state in which an entry is placed."""
    how = how or ("prefill" if note is None else "patch")
    if how not in get_args(How) or (how == "patch") != (note is not None):
        given = "no patch" if note is None else "a patch"
        expected = "'prefill', 'bare', 'leading', or 'patch' with a patch"
        raise WindowError(f"window: how {how!r:.80} with {given}; expected {expected}")
    if entry.kind == "text" and how != "prefill":
        raise WindowError(f"window: {_shown(entry.id)} is a text, which has no canonical; expected it prefilled")
    if note is None:
        return BARE if how == "bare" else FRESH
    if note.base != "canonical":
        raise PatchMismatchError(f"patch: base {note.base!r}; expected 'canonical' (`condition` takes a removal patch)")
    return note.state()


def _packed(pieces: Sequence[PlacedPiece], first: int, start: int) -> list[PlacedPiece]:
    """The pieces from `first` on, one right behind the other from `start`."""
    laid = list(pieces[:first])
    for piece in pieces[first:]:
        entry, old, state, aside, born, placed = piece[:6]
        laid.append(piece if old == start else PlacedPiece(entry, start, state, aside, born, placed))
        start += entry.span
    return laid


def _starts_again(old: Sequence[PlacedPiece], new: Sequence[PlacedPiece], first: int) -> Iterator[int]:
    """Where pieces from `first` on start in their new order, with what is free in front of each place as it was."""
    end = before = old[first - 1].end if first else 0
    for was, now in zip(old[first:], new[first:], strict=True):
        start = end + was.start - before
        yield start
        end, before = start + now.entry.span, was.start + was.entry.span


def _shown(id: Any) -> str:
    return repr(brief(id)) if isinstance(id, str) else f"{id!r:.80}"
