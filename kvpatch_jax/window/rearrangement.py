"""Rearrangement of a window in one step: what leaves, what stays and where, what enters, and how each is served.

The operations of `Window` and plans are both this: a list of entries, and a choice of how each of them is served. Each
piece is rotated at most once.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from ..cache import brief
from ..errors import PatchMismatchError, StalePatchError, WindowError
from .edits import Drop, Edit, Edits, Prefill, Recompute, Rotate, in_order, new_edit
from .entry import BARE, FRESH, Entry, Likeness, PatchNote, PieceState, PlacedPiece, tuple_of
from .fidelity import chain_of
from .window_state import WindowState, recallable
from .window_steps import (
    check_base,
    check_fits,
    check_patch,
    check_positions_below_limit,
    composing_edits,
    patched_piece,
    placing_edits,
    relinked,
    reordered,
    restored_state,
    restoring_edits,
    shown,
)

AtHand = Callable[[str, str | None], bool]
"""Returns whether the canonical of an id (None), or its patch of this digest, needs no `Fetch`."""

_UNLINKED = PlacedPiece(Entry("-", None, 1, 1), 0, FRESH)[6:]
"""The fields of a piece that linking derives, before it did."""


class ServingChoice(NamedTuple):
    """How a piece is to be served.

    Attributes:
      how: as it is ("keep"); by a forward; by a patch; by its canonical alone; by its canonical in place of a forward,
        at the front ("leading"); or by a stored prefill ("restored").
      note: of the patch; None for the other choices.
      allow_stale: accepts a patch that was formed behind something else.
      behind: of a stored prefill: chain digest of what it was computed behind; None: of what is in front here.
      likeness: what that has in common with the place; None: it is the very same, or nothing is known.
    """

    how: Literal["keep", "prefill", "patch", "bare", "leading", "restored"]
    note: PatchNote | None = None
    allow_stale: bool = False
    behind: str | None = None
    likeness: Likeness | None = None


PREFILL = ServingChoice("prefill")
KEEP = ServingChoice("keep")


@dataclasses.dataclass(frozen=True, eq=False)
class Rearrangement[W: WindowState]:
    """A window with its pieces at their new places.

    Attributes:
      before: the window as it is.
      window: all in their places; kept ones in their states, new ones by a forward.
      gone: ids of what leaves, replaced pieces included.
      kept: for each piece, whether it was in the window before.
      placed: the pieces of `window` as they were before it was linked, which serving them otherwise starts from.
    """

    before: W
    window: W
    gone: tuple[str, ...]
    kept: tuple[bool, ...]
    placed: tuple[PlacedPiece, ...]

    def serve(self, services: Sequence[ServingChoice], at_hand: AtHand | None = None) -> tuple[W, Edits]:
        """Returns the window with its pieces served so, and the edits that lead there from the window before.

        Args:
          services: of all pieces, in their order.
          at_hand: says what needs no `Fetch`; None: everything needs one.

        Raises:
          WindowError: a new piece that is to be kept, a text that is not prefilled, nothing to restore.
          StalePatchError, PatchMismatchError: a patch that does not belong there.
        """
        # Pieces that are served as they were arranged keep what was derived of them, up to the first that is not.
        pieces, clock, changed = list(self.placed), self.window.clock, list[int]()
        for index, (kept, service) in enumerate(zip(self.kept, services, strict=True)):
            how, piece = service.how, pieces[index]
            if how == ("keep" if kept else "prefill"):
                continue

            # A canonical at the front, and what a store has of this very front, are what a forward would compute.
            if how == "leading" and (kept or index):
                given = f"{shown(piece[0].id)} leading behind {index} pieces"
                raise WindowError(f"window: got {given}; expected none in front of it, and that it comes in")
            here = how == "leading" or (how == "restored" and service.behind is None)
            if here and not kept and piece[0].kind == "chunk":
                continue

            changed.append(index)
            # Another KV than those behind it have seen.
            if kept and how != "keep":
                clock = max(clock, self.before.clock + 1)
            if how == "prefill":
                pieces[index] = piece.run_again(clock)
            else:
                pieces[index] = _with_service(piece, kept, service, self.window.pieces[index].target, clock)

        window = self.window
        if changed:
            pieces[: changed[0]] = window.pieces[: changed[0]]
            # Nothing else is promised while what was there before stays what it is.
            same = None if any(self.kept[index] for index in changed) else window.pieces
            window = relinked(window, pieces, changed[0], same, clock=clock)
            stale = [index for index in changed if self._is_stale(window, index, services[index])]
            for index in stale:
                note = services[index].note
                assert note is not None  # only a patch is stale
                pieces[index] = pieces[index]._replace(state=note.serving(stale=True))
            window = relinked(window, pieces, changed[0]) if stale else window

        return window, self._edits(window, services, at_hand)

    def _is_stale(self, window: W, index: int, service: ServingChoice) -> bool:
        """Returns whether a piece's patch was formed behind something else; refuses it as the operations do."""
        if service.note is None:
            return False
        note, piece = service.note, self.window.pieces[index]
        if note.base != "canonical" and not self.kept[index]:
            raise PatchMismatchError(
                f"patch of chunk {brief(piece.id)!r}: got base {note.base!r}; expected 'canonical' of what comes in"
            )
        check_base(window, note, piece)

        # By digests first, which is fast.
        check_fits(note, piece.entry)
        if chain_of(window.backbone, note) == window.pieces[index].target:
            return False
        try:
            check_patch(window, note, piece)
        except StalePatchError:
            if not service.allow_stale:
                raise
            return True
        return False

    def _edits(self, window: W, services: Sequence[ServingChoice], at_hand: AtHand | None) -> Edits:
        costs, rotation = window.costs, window.costs.rotate(1)
        before = {piece[0].id: piece for piece in self.before.pieces}
        edits: list[Edit] = [Drop(id) for id in self.gone]
        forwards, behind = list[Edit](), 0

        for index, (piece, kept, service) in enumerate(zip(window.pieces, self.kept, services, strict=True)):
            entry, start, state = piece[:3]
            id, tokens, how = entry.id, entry.tokens, service.how
            old = before[id] if kept else piece
            same_kv = kept and (how == "keep" or old.state.digest == state.digest)

            # What is placed again is placed where it belongs; everything else that moved rotates, before a forward too.
            if old.start != start and (same_kv or how == "prefill"):
                nbytes, flops = rotation["bytes"] * tokens, rotation["flops"] * tokens
                edits.append(new_edit(Rotate, id=id, old=old.start, new=start, bytes=nbytes, flops=flops))

            if how == "prefill":
                fields = {"behind": behind, "bytes": costs.forward_bytes(tokens, behind)}
                fields["flops"] = costs.run(tokens, behind)
                forwards += composing_edits(costs, id, index)
                if kept:
                    forwards.append(new_edit(Recompute, id=id, start_layer=0, **fields))
                else:
                    forwards.append(new_edit(Prefill, id=id, **fields))
            elif how == "restored":
                edits += restoring_edits(costs, piece)
            elif how == "leading":
                edits += placing_edits(costs, piece, at_hand is not None and at_hand(id, None), True)
            elif not same_kv:
                has_canonical = at_hand is not None and at_hand(id, None)
                has_patch = state.patch is not None and at_hand is not None and at_hand(id, state.patch)
                edits += placing_edits(costs, piece, has_canonical, has_patch)

            behind += tokens

        # Forwards keep the order of the pieces: each runs behind those in front of it.
        return (*in_order(edits), *forwards)


def _with_service(piece: PlacedPiece, kept: bool, service: ServingChoice, target: str, clock: int) -> PlacedPiece:
    """Returns a piece in the state that a service other than a forward puts it in."""
    entry, note, how = piece.entry, service.note, service.how
    if (how == "patch") != (note is not None):
        given = "no patch" if note is None else "a patch"
        raise WindowError(
            f"arrange: got {how!r} of {brief(entry.id)!r} with {given}; expected one for 'patch', and no other"
        )
    if entry.kind == "text" or (how == "keep" and not kept):
        raise WindowError(f"arrange: got {how!r} of {entry.kind} {brief(entry.id)!r}; expected it prefilled")

    # Behind its target it is what the window promises.
    if how == "restored":
        if service.behind is None:
            raise WindowError(f"arrange: got 'restored' of {brief(entry.id)!r}; expected what it was computed behind")
        same = service.behind == target
        state = PieceState.conditioned(target, ()) if same else restored_state(service.behind, service.likeness)
        return tuple_of(PlacedPiece, (entry, piece.start, state, None, 0, clock if kept else piece.placed, *piece[6:]))

    if note is None:
        if not kept:
            return tuple_of(PlacedPiece, (entry, piece.start, BARE, None, 0, *piece[5:]))
        return piece if piece.state.kind == "bare" else piece._replace(state=BARE, replaced=piece.state, born=clock)
    return patched_piece(piece, note, clock)


def arrange[W: WindowState](window: W, entries: Sequence[Entry], renewed: Collection[str] = ()) -> Rearrangement[W]:
    """Arranges a window to hold these entries, in this order, and no others.

    Args:
      entries: everything that is to be there, what is pinned in front included. An entry that is in the window or was
        evicted from it is that piece; another one of the same id replaces it.
      renewed: ids of entries that come in anew, also where the window has the very same.

    Raises:
      WindowError: an entry named twice; what is pinned missing or elsewhere; chunks in another order that are not
      order-free; an id that was evicted as another entry; positions beyond 2**30.
    """
    wanted, own = {entry.id: entry for entry in entries}, window.pieces
    _check_entries(window, entries, wanted)
    kept = set[str]()
    for piece in own:
        entry = piece[0]
        same = wanted.get(entry.id)
        # Most are the very same object, and comparing fields takes longer.
        if same is not None and (same is entry or same == entry) and entry.id not in renewed:
            kept.add(entry.id)
    staying, moved = _staying_pieces(window, [id for id in wanted if id in kept])
    lead, settled = window.lead, window.lead_settled

    # From the front, each right behind the one before.
    pieces = list[PlacedPiece]()
    clock, end, remaining = window.clock + 1, 0, iter(staying)
    for id, entry in wanted.items():
        if id in kept:
            piece = next(remaining)
            if piece[1] != end:
                piece = tuple_of(PlacedPiece, (entry, end, *piece[2:]))
        else:
            piece = tuple_of(PlacedPiece, (entry, end, FRESH, None, clock, clock, *_UNLINKED))

            # Until the first chunk the pieces at the front join the lead.
            if not settled:
                settled = entry.kind == "chunk"
                lead = lead if settled and lead else len(pieces) + 1

        pieces.append(piece)
        end += entry.span

    check_positions_below_limit(end)

    # Pieces at the front that are the very ones that were there are linked already.
    first = 0
    for old, new in zip(own, pieces, strict=False):
        if old is not new:
            break
        first += 1
    gone = [piece for piece in own if piece.entry.id not in kept]
    evicted = [piece for piece in window.evicted if piece.entry.id not in wanted]
    there = relinked(
        window,
        pieces,
        first,
        evicted=recallable(evicted, [piece for piece in gone if piece.entry.id not in wanted]),
        lead=lead,
        lead_settled=settled,
        clock=clock if moved or len(kept) < len(wanted) else window.clock,
    )
    ids = tuple(piece.entry.id for piece in gone)
    return Rearrangement(window, there, ids, tuple(id in kept for id in wanted), tuple(pieces))


def _check_entries(window: WindowState, entries: Sequence[Entry], wanted: Mapping[str, Entry]) -> None:
    """Refuses entries that a window cannot be arranged to hold; `wanted` has them by id."""
    if len(wanted) != len(entries):
        ids = [entry.id for entry in entries]
        twice = next(id for id in wanted if ids.count(id) > 1)
        raise WindowError(f"arrange: got {brief(twice)!r} twice; expected each once")

    pinned = [piece.entry for piece in window.pieces[: window.lead]]
    if list(entries[: len(pinned)]) != pinned:
        ids = tuple(brief(entry.id) for entry in pinned)
        raise WindowError(f"arrange: got other entries in front; expected {ids}, which are pinned there")

    # An id that was evicted comes back as the same entry, or its patches and stored KV would be another's.
    for id in window.evicted_by_id.keys() & wanted.keys():
        gone = window.evicted_by_id[id].entry
        if wanted[id] != gone:
            raise WindowError(f"arrange: got {brief(id)!r}, evicted as {gone}; expected that entry, or another id")


def _staying_pieces(window: WindowState, order: Sequence[str]) -> tuple[list[PlacedPiece], bool]:
    """Returns the pieces that stay, in their new order, at their old starts; and whether the order changed."""
    chosen = set(order)
    old = [piece for piece in window.pieces if piece.entry.id in chosen]
    place_of = {piece.entry.id: place for place, piece in enumerate(old)}
    came_from = [place_of[id] for id in order]
    changed = [place for place, source in enumerate(came_from) if place != source]
    if not changed:
        return old, False

    fixed = next((old[came_from[place]] for place in changed if not old[came_from[place]].entry.order_free), None)
    if fixed is not None:
        raise WindowError(f"arrange: got {brief(fixed.entry.id)!r} moved; expected it in its order: not order-free")
    return reordered(old, came_from, window.clock + 1), True
