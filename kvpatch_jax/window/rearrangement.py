"""A whole window changed in one step: what goes, what stays and where, what comes in, and how each of them is served.

It does what `evict`, `reorder`, `append`, `insert`, `recall`, `replace`, `condition`, `bare` and `recompute` do one
after the other, from the front: the same pieces in the same states, each turned at most once. A plan takes it, where a
window has hundreds of chunks.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from ..cache import brief
from ..errors import PatchMismatchError, WindowError
from .edits import ApplyPatch, Copy, Drop, Edit, Edits, Fetch, Prefill, Recompute, Rotate, made
from .entry import BARE, FRESH, LIMIT, Entry, PatchNote, PieceState, PlacedPiece, tuple_of
from .provenance_chain import Targets, chain_of, linked, targets_of
from .window import Window
from .window_operations import _starts_again
from .window_state import MOST_GONE

AtHand = Callable[[str, str | None], bool]
"""Whether the canonical of an id (None), or its patch of this digest, needs no `Fetch`."""


class ServingChoice(NamedTuple):
    """How a piece is to be served: as it stands ("keep"); by a forward; by a patch; by its canonical alone; or, of a
    piece that was switched to that, as it was before ("restore").

    allow_stale: a patch that was formed behind something else is taken.
    """

    how: Literal["keep", "prefill", "patch", "bare", "restore"]
    note: PatchNote | None = None
    allow_stale: bool = False


PREFILL = ServingChoice("prefill")
KEEP = ServingChoice("keep")


@dataclasses.dataclass(frozen=True, eq=False)
class Rearrangement:
    """A window with its pieces where they are to be.

    Attributes:
      before: the window as it is.
      window: all in their places; those that stay as they were, new ones by a forward.
      gone: ids of what leaves, replaced pieces included. kept: whether each of the pieces stood in the window before.
    """

    before: Window
    window: Window
    gone: tuple[str, ...]
    kept: tuple[bool, ...]

    @functools.cached_property
    def targets(self) -> Targets:
        """What a patch must have been formed behind to serve a piece, and which pieces may be kept.

        It does not depend on how what is approximate or new in front is served, for all of that counts as prefilled.
        """
        return targets_of(self.window.backbone, self.window.pieces, self.window.promise == "forget")

    def serve(self, services: Sequence[ServingChoice], at_hand: AtHand | None = None) -> tuple[Window, Edits]:
        """The window with its pieces served so, and the edits that lead there from the window before.

        Args:
          services: of all pieces, in their order.
          at_hand: what needs no `Fetch`; None: all do.

        Raises:
          WindowError: a new piece that is to be kept, a text that is not prefilled, nothing to restore.
          StalePatchError, PatchMismatchError: a patch that does not belong there.
        """
        window, pieces = self.window, list(self.window.pieces)
        changed: list[int] = []
        clock, again = window.clock, False
        for index, (kept, service) in enumerate(zip(self.kept, services, strict=True)):
            if service.how == ("keep" if kept else "prefill"):
                if changed and not kept:  # behind other KV than was thought
                    entry, start, _, _, born, placed, *derived = pieces[index]
                    pieces[index] = tuple_of(PlacedPiece, (entry, start, FRESH, None, born, placed, *derived))
                continue
            changed.append(index)
            if service.how == "prefill":
                again, clock = True, max(clock, self.before.clock + 1)
                pieces[index] = pieces[index].run_again(clock)
            else:
                pieces[index] = _served(pieces[index], kept, service)
        if changed:
            window = dataclasses.replace(window, pieces=linked(window.backbone, pieces, changed[0]), clock=clock)
            patched = [index for index in changed if services[index].note is not None]
            targets = self.targets.digests if patched else ()
            if patched and again and window.promise == "remember":  # a survivor that is run again is another one
                targets = targets_of(window.backbone, window.pieces, forget=False).digests
            for index in patched:
                self._check(window, index, services[index], targets[index])
        return window, self._edits(window, services, at_hand)

    def _check(self, window: Window, index: int, service: ServingChoice, target: str) -> None:
        """Refuses a patch as `Window` does: of what stands in front by digests first."""
        note, piece, kept = service.note, self.window.pieces[index], self.kept[index]
        assert note is not None
        window._check_patch(note, piece, allow_stale=True)
        if note.base != "canonical":
            if not kept:
                raise PatchMismatchError(
                    f"patch of chunk {brief(piece.id)!r}: base {note.base!r}; expected 'canonical' of what comes in"
                )
            window._check_base(note, piece.aside or piece.state, piece.id)
        if not service.allow_stale and chain_of(window.backbone, note) != target:
            window._check_patch(note, piece, allow_stale=False)

    def _edits(self, window: Window, services: Sequence[ServingChoice], at_hand: AtHand | None) -> Edits:
        costs, turning, placing = window.costs, window.costs.rotate(1), window.costs.copy(1)
        each = placing["bytes"], placing["flops"], costs.kv_bytes
        turned_bytes, turned_flops = turning["bytes"], turning["flops"]
        before = {piece[0].id: piece for piece in self.before.pieces}
        turns: list[Edit] = []
        fetches: list[Edit] = []
        copies: list[Edit] = []
        patches: list[Edit] = []
        forwards: list[Edit] = []
        behind = 0
        for piece, kept, service in zip(window.pieces, self.kept, services, strict=True):
            entry, start, state = piece[:3]
            id, tokens, how = entry.id, entry.tokens, service.how
            turned = kept and before[id].start != start
            if turned and (how in ("keep", "prefill")):
                old, nbytes, flops = before[id][1], turned_bytes * tokens, turned_flops * tokens
                turns.append(made(Rotate, id=id, old=old, new=start, bytes=nbytes, flops=flops))
            if how == "prefill":
                nbytes, flops = costs.kv_bytes * (tokens + behind), costs.run(tokens, behind)
                if kept:
                    forward = made(Recompute, id=id, start_layer=0, behind=behind, bytes=nbytes, flops=flops)
                else:
                    forward = made(Prefill, id=id, behind=behind, bytes=nbytes, flops=flops)
                forwards.append(forward)
            elif how != "keep" and not (kept and before[id].state == state):
                _place(id, tokens, state, how, each, at_hand, (fetches, copies, patches))
            elif turned and how != "keep":  # asked to be served as it is already
                turns.append(Rotate(id, before[id].start, start, turned_bytes * tokens, turned_flops * tokens))
            behind += tokens
        return (*(Drop(id) for id in self.gone), *turns, *fetches, *copies, *patches, *forwards)


def _place(
    id: str,
    tokens: int,
    state: PieceState,
    how: str,
    each: tuple[int, int, int],
    at_hand: AtHand | None,
    edits: tuple[list[Edit], list[Edit], list[Edit]],
) -> None:
    """Adds the edits that place a canonical, a patch or what was aside: to fetches, copies and patches.

    Args:
      each: of a token, bytes and FLOPs of placing it, and bytes of its KV.
    """
    fetches, copies, patches = edits
    nbytes, flops = each[0] * tokens, each[1] * tokens
    if state.kind == "conditioned":
        copies.append(Copy(id, "conditioned", None, nbytes, flops))
        return
    here = how == "restore"
    if state.base == "canonical" and not here and not (at_hand is not None and at_hand(id, None)):
        fetches.append(made(Fetch, id=id, what="canonical", digest=None, bytes=each[2] * tokens, flops=0))
    if state.patch is None:
        copies.append(Copy(id, "canonical", None, nbytes, flops))
        return
    if not here and not (at_hand is not None and at_hand(id, state.patch)):
        fetches.append(made(Fetch, id=id, what="patch", digest=state.patch, bytes=state.patch_bytes, flops=0))
    nbytes, flops = nbytes + state.patch_bytes, flops + state.patch_flops * tokens
    patch, rank, base = state.patch, state.rank, state.base
    patches.append(made(ApplyPatch, id=id, patch=patch, rank=rank, base=base, bytes=nbytes, flops=flops))


def _served(piece: PlacedPiece, kept: bool, service: ServingChoice) -> PlacedPiece:
    """A piece in the state that a service other than a forward puts it in."""
    entry, note, how = piece.entry, service.note, service.how
    if (how == "patch") != (note is not None):
        given = "no patch" if note is None else "a patch"
        raise WindowError(
            f"arrange: {how!r} of {brief(entry.id)!r} with {given}; expected one for 'patch', and no other"
        )
    if entry.kind == "text" or (how in ("keep", "restore") and not kept):
        raise WindowError(f"arrange: {how!r} of {entry.kind} {brief(entry.id)!r}; expected it prefilled")
    if how == "restore":
        if piece.aside is None:
            raise WindowError(f"arrange: nothing of {brief(entry.id)!r} is aside; expected it bare before")
        return piece._replace(state=piece.aside, aside=None)
    if note is None:
        aside = piece.state if kept and piece.state.kind != "bare" else piece.aside
        return piece._replace(state=BARE, aside=aside)
    return tuple_of(PlacedPiece, (entry, piece.start, note.served, None, *piece[4:]))


_UNLINKED = PlacedPiece(Entry("-", None, 1, 1), 0, FRESH)[6:]
"""What linking derives of a piece, before it did."""


def arrange(window: Window, entries: Sequence[Entry]) -> Rearrangement:
    """Arranges a window to hold these entries, in this order, and no others.

    Args:
      entries: all that is to stand there, what is pinned in front included. An entry that stands in the window or was
        evicted from it is that piece; one of the same id that is otherwise another takes its place.

    Raises:
      WindowError: an entry named twice; what is pinned missing or elsewhere; chunks in another order that are not
      order-free; an id that was evicted as another entry; positions beyond 2**30.
    """
    wanted = _checked(window, entries)
    own, places = window.pieces, window.places
    kept = {id for id, entry in wanted.items() if id in places and own[places[id]].entry == entry}
    staying, placed_again = _stay(window, [id for id in wanted if id in kept])
    pieces, clock, shift, low = [], window.clock + 1, 0, 0
    lead, settled, next_start = window.lead, window.lead_settled, window.next_start
    if window.gaps == "close":
        next_start = sum(piece.entry.span for piece in staying)
    following = iter([*staying[1:], None] if staying else [None])
    upcoming: PlacedPiece | None = staying[0] if staying else None
    for id, entry in wanted.items():
        if id in kept:
            assert upcoming is not None
            piece, upcoming = upcoming, next(following)
            if shift:
                piece = piece._replace(start=piece.start + shift)
        else:
            high = next_start + shift if upcoming is None else upcoming.start + shift
            gone = own[places[id]] if id in places else window.evicted_by_id.get(id)
            start, more = _room(entry.span, low, high, upcoming is None, gone)
            shift += more
            piece = tuple_of(PlacedPiece, (entry, start, FRESH, None, clock, clock, *_UNLINKED))
            if upcoming is None:
                next_start = piece.end - shift
            if not settled:
                settled = entry.kind == "chunk"
                lead = lead if settled and lead else len(pieces) + 1
        pieces.append(piece)
        low = piece.end
    if low >= LIMIT:
        raise WindowError(f"window: positions to {low}; expected them below 2**30 (`compact` closes gaps)")
    gone = [piece for piece in own if piece.entry.id not in kept]
    there = dataclasses.replace(
        window,
        pieces=linked(window.backbone, pieces, _same(own, pieces)),
        evicted=_left(window, wanted, gone),
        lead=lead,
        lead_settled=settled,
        next_start=max(next_start + shift, low),
        clock=clock if placed_again or len(kept) < len(wanted) else window.clock,
    )
    return Rearrangement(window, there, tuple(piece.entry.id for piece in gone), tuple(id in kept for id in wanted))


def _checked(window: Window, entries: Sequence[Entry]) -> dict[str, Entry]:
    wanted = {entry.id: entry for entry in entries}
    if len(wanted) != len(entries):
        ids = [entry.id for entry in entries]
        twice = next(id for id in wanted if ids.count(id) > 1)
        raise WindowError(f"arrange: {brief(twice)!r} is named twice; expected each once")
    pinned = [piece.entry for piece in window.pieces[: window.lead]]
    if list(entries[: len(pinned)]) != pinned:
        shown = tuple(brief(entry.id) for entry in pinned)
        raise WindowError(f"arrange: {shown} are pinned in front; expected the window to begin with them")
    for id in window.evicted_by_id.keys() & wanted.keys():
        piece, entry = window.evicted_by_id[id], wanted[id]
        if entry != piece.entry:
            raise WindowError(
                f"arrange: {brief(entry.id)!r} was evicted as {piece.entry}; expected that, or another id"
            )
    return wanted


def _stay(window: Window, order: Sequence[str]) -> tuple[list[PlacedPiece], bool]:
    """The pieces that stay, in their new order and where they stand before anything comes in between them; and whether
    the order changed."""
    chosen = set(order)
    old = [piece for piece in window.pieces if piece.entry.id in chosen]
    if window.gaps == "close":
        old = _packed_from_zero(old)
    own, places = window.pieces, window.places
    new = [own[places[id]] for id in order]
    changed = [place for place, (was, now) in enumerate(zip(old, new, strict=True)) if was.entry.id != now.entry.id]
    if not changed:
        return old, False
    fixed = next((new[place] for place in changed if not new[place].entry.order_free), None)
    if fixed is not None:
        raise WindowError(
            f"arrange: {brief(fixed.entry.id)!r} is not order-free; expected it in the order it stands in"
        )
    place_of = {piece.entry.id: place for place, piece in enumerate(old)}
    at = {piece.entry.id: piece for piece in old}
    new, earliest, unseen = [at[id] for id in order], len(old), set[int]()
    for place in reversed(range(len(new))):
        if earliest < place_of[order[place]]:  # what stood in front of it stands behind it now
            unseen.add(place)
        earliest = min(earliest, place_of[order[place]])
    first = changed[0]
    laid = new[:first]
    for place, start in enumerate(_starts_again(old, new, first), first):
        placed = window.clock + 1 if place in unseen else new[place].placed
        entry, _, state, aside, born, _, *derived = new[place]
        laid.append(tuple_of(PlacedPiece, (entry, start, state, aside, born, placed, *derived)))
    return laid, True


def _packed_from_zero(pieces: Sequence[PlacedPiece]) -> list[PlacedPiece]:
    laid, start = [], 0
    for piece in pieces:
        laid.append(piece if piece.start == start else tuple_of(PlacedPiece, (piece[0], start, *piece[2:])))
        start += piece.entry.span
    return laid


def _room(span: int, low: int, high: int, last: bool, before: PlacedPiece | None) -> tuple[int, int]:
    """Where an entry of this span is placed behind `low`, and how far what stands from `high` on has to move."""
    if last:
        return max(low, high), 0
    if high - low < span:
        return low, span - (high - low)
    wanted = low if before is None else before.start
    return (wanted if low <= wanted <= high - span else low), 0


def _same(own: Sequence[PlacedPiece], pieces: Sequence[PlacedPiece]) -> int:
    """How many pieces at the front are the very ones that stood there."""
    count = 0
    for was, now in zip(own, pieces, strict=False):
        if was is not now:
            break
        count += 1
    return count


def _left(window: Window, wanted: Mapping[str, Entry], gone: Sequence[PlacedPiece]) -> tuple[PlacedPiece, ...]:
    """What can be recalled afterwards."""
    left = [piece for piece in window.evicted if piece.entry.id not in wanted]
    for piece in gone:
        if piece.entry.kind == "chunk" and piece.entry.id not in wanted:
            state = dataclasses.replace(piece.aside or piece.state, kind="evicted")
            left.append(PlacedPiece(piece.entry, piece.start, state, None, piece.born, piece.placed))
    return tuple(left[-MOST_GONE:])
