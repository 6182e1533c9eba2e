"""Steps that the operations of windows have in common: their order, which edits place them, what is refused.

They take a `WindowState` and return one of the same class, because `Window`, which has the operations, calls them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict, get_args

from ..cache import brief
from ..errors import PatchMismatchError, StalePatchError, WindowError
from .costs import Costs
from .edits import ApplyPatch, Compose, Copy, Edit, Fetch, new_edit
from .entry import (
    BARE,
    FRESH,
    LIMIT,
    UNKNOWN_WAYS,
    Entry,
    How,
    Likeness,
    PatchNote,
    PieceState,
    PlacedPiece,
    contents_differ,
    tuple_of,
)
from .fidelity import chain_digest, linked
from .window_state import WindowState

# ----------------------------------------------------------------------------------------------------------- order


def reordered(old: Sequence[PlacedPiece], came_from: Sequence[int], clock: int) -> list[PlacedPiece]:
    """Returns the pieces in a new order, their starts as they were.

    Args:
      came_from: the old place of the piece at every new place.
      clock: the step at which pieces are placed that come in front of others which have not seen them there.
    """
    # From the back: a piece has overtaken another one if one behind it was in front of it before.
    earliest, unseen = len(came_from), set[int]()
    for place in reversed(range(len(came_from))):
        if earliest < came_from[place]:
            unseen.add(place)
        earliest = min(earliest, came_from[place])

    pieces = [old[source] for source in came_from]
    return [piece._replace(placed=clock) if place in unseen else piece for place, piece in enumerate(pieces)]


# ----------------------------------------------------------------------------------------------------------- edits


def relinked[W: WindowState](
    window: W, pieces: Sequence[PlacedPiece], first: int, alike: Sequence[PlacedPiece] | None = None, **changes: Any
) -> W:
    """Returns the window with these pieces, of which those in front of `first` are linked already (`linked`)."""
    forgets = window.promise == "forget"
    return dataclasses.replace(window, pieces=linked(window.backbone, pieces, first, forgets, alike), **changes)


def with_piece[W: WindowState](window: W, index: int, piece: PlacedPiece, **changes: Any) -> W:
    """Returns the window with another piece at an index."""
    return relinked(window, [*window.pieces[:index], piece, *window.pieces[index + 1 :]], index, **changes)


def placing_edits(costs: Costs, piece: PlacedPiece, has_canonical: bool, has_patch: bool) -> list[Edit]:
    """Returns the edits that place a piece by its canonical or a patch, with a `Fetch` of what is not available."""
    entry, _, state = piece[:3]
    id, tokens, patch, edits = entry.id, entry.tokens, state.patch, list[Edit]()
    nbytes, flops = costs.placing_bytes(tokens), costs.copy_flops * tokens

    # A removal patch is added to the KV that is in the pool, so it needs no canonical.
    if state.base == "canonical" and not has_canonical:
        fetched = costs.fetch(tokens)["bytes"]
        edits.append(new_edit(Fetch, id=id, what="canonical", digest=None, bytes=fetched, flops=0))
    if patch is None:
        edits.append(new_edit(Copy, id=id, source="canonical", branch=None, bytes=nbytes, flops=flops))
        return edits

    if not has_patch:
        edits.append(new_edit(Fetch, id=id, what="patch", digest=patch, bytes=state.patch_bytes, flops=0))
    nbytes, flops = nbytes + state.patch_bytes, flops + state.patch_flops * tokens + state.transition_flops
    edits.append(new_edit(ApplyPatch, id=id, patch=patch, rank=state.rank, base=state.base, bytes=nbytes, flops=flops))
    return edits


def composing_edits(costs: Costs, id: str, pieces: int) -> list[Edit]:
    """Returns the composition that a forward behind so many pieces reads; none of a model without transitions."""
    if not pieces or not costs.transition_bytes:
        return []
    return [new_edit(Compose, id=id, pieces=pieces, **costs.compose(pieces))]


def restoring_edits(costs: Costs, piece: PlacedPiece) -> list[Edit]:
    """Returns the edits that place a piece's stored prefill, which is always read from the store."""
    id, tokens = piece.entry.id, piece.entry.tokens
    fetch = Fetch(id, "prefill", piece.state.patch or piece.state.behind, **costs.fetch(tokens))
    return [fetch, Copy(id, "prefill", None, **costs.copy(tokens))]


# ---------------------------------------------------------------------------------------------------- new pieces


class PatchOptions(TypedDict, total=False):
    """Options of the operations that place an entry.

    Attributes:
      fetched: canonical and patch are available without a `Fetch`.
      allow_stale: accepts a patch that was formed behind something else.
      behind: chain digest of what a restored prefill was computed behind. None: behind these very pieces, served as
        they are, so that it is what a forward would compute. Otherwise the piece is approximate.
      likeness: what that has in common with what is in front here; None: nothing is known of it.
    """

    fetched: bool
    allow_stale: bool
    behind: str | None
    likeness: Likeness | None


def check_entering(
    entry: Entry, how: How | None, note: PatchNote | None, behind: str | None, likeness: Likeness | None
) -> How:
    """Returns how an entry enters; refuses ways and options that do not go together."""
    how = how or ("prefill" if note is None else "patch")
    if how not in get_args(How) or (how == "patch") != (note is not None):
        given = "no patch" if note is None else "a patch"
        expected = "'prefill', 'bare', 'leading', 'restored', or 'patch' with a patch"
        raise WindowError(f"window.how: got {how!r:.80} with {given}; expected {expected}")
    if entry.kind == "text" and how != "prefill":
        raise WindowError(f"window.how: got {how!r} of {shown(entry.id)}, which is a text; expected it prefilled")
    if behind is not None and (how != "restored" or not isinstance(behind, str)):
        given = f"{behind!r:.40} of {shown(entry.id)}, {how}"
        raise WindowError(f"window.behind: got {given}; expected a chain digest, of what is 'restored'")
    if likeness is not None and (behind is None or likeness not in get_args(Likeness)):
        given = f"{likeness!r:.40} of {shown(entry.id)}"
        raise WindowError(f"window.likeness: got {given}; expected one of {get_args(Likeness)}, of what is 'restored'")
    return how


def restored_state(behind: str, likeness: Likeness | None) -> PieceState:
    """Returns the state of a stored prefill that was computed behind other pieces than are in front of it."""
    return PieceState("conditioned", ways=UNKNOWN_WAYS if likeness is None else ((likeness, 0),), patch=behind)


# ----------------------------------------------------------------------------------------------------------- checks


def check_positions_below_limit(end: int) -> None:
    """Raises WindowError for positions beyond `LIMIT`."""
    if end >= LIMIT:
        raise WindowError(f"window: got positions to {end}; expected them below 2**30")


def check_new(window: WindowState, entry: Any) -> None:
    """Refuses what is no entry, and an id that the window knows already."""
    if not isinstance(entry, Entry):
        raise WindowError(f"window: got a {type(entry).__name__}; expected an Entry, such as Entry.of(chunk)")
    if entry.id in window.places:
        raise WindowError(f"window.entry: got {shown(entry.id)}, which is in the window; expected another id")
    if entry.id in window.evicted_by_id:
        raise WindowError(f"window.entry: got {shown(entry.id)}, which was evicted; expected a new id, or `recall`")


def movable_index(window: WindowState, id: str, operation: str) -> int:
    """Returns the index of a piece behind the lead."""
    index = window.index(id)
    if index < window.lead:
        raise WindowError(
            f"{operation}: got {shown(id)}, one of {window.lead} pinned in front; expected one behind them"
        )
    return index


def chunk_index(window: WindowState, id: str, operation: str) -> int:
    """Returns the index of a chunk."""
    index = window.index(id)
    if window.pieces[index].entry.kind != "chunk":
        raise WindowError(f"{operation}: got {shown(id)}, which is a text; expected a chunk, which has a canonical")
    return index


def patched_piece(piece: PlacedPiece, note: PatchNote, clock: int) -> PlacedPiece:
    """Returns a piece as a patch serves it from this step on, not linked yet and not checked."""
    old = piece.state
    base = old if note.base == "conditioned" else BARE
    # A piece that comes in has no old state: then it is one that has not been linked.
    replaced = None if old is FRESH else old
    return tuple_of(PlacedPiece, (piece.entry, piece.start, note.serving(base), replaced, clock, *piece[5:]))


def check_patch(window: WindowState, note: PatchNote, piece: PlacedPiece) -> None:
    """Refuses a patch of another chunk or content, or one that was formed behind something other than `target`."""
    check_fits(note, piece.entry)
    # What it was formed behind is compared with what this window promises, not with what it has.
    difference = note.antecedent.difference(window.target(piece.entry.id), note.orbit)
    if difference is not None:
        kind = "any ordering of " if note.orbit else ""
        raise StalePatchError(f"patch of chunk {shown(piece.entry.id)}: got one formed behind {kind}{difference}")


def check_fits(note: PatchNote, entry: Entry) -> None:
    """Refuses a patch of another chunk or content."""
    if note.chunk != entry.id:
        raise PatchMismatchError(f"patch: got one of chunk {note.chunk!r}; expected {entry.id!r}")
    if contents_differ(note.content, entry.content):
        raise PatchMismatchError(
            f"patch: got one of chunk {shown(entry.id)} with content {note.content!r}; expected {entry.content!r}"
        )


def check_base(window: WindowState, note: PatchNote, piece: PlacedPiece) -> None:
    """Refuses a removal patch whose base was conditioned on something other than the piece was."""
    if note.base == "canonical":
        return

    state, antecedent = piece.state, note.base_antecedent
    found = None if antecedent is None else chain_digest(window.backbone, antecedent)
    if state.kind != "conditioned" or state.behind != found:
        ids = None if antecedent is None else antecedent.ids
        raise StalePatchError(
            f"patch of chunk {shown(piece.entry.id)}: got a base conditioned on {ids}, digest {found}; expected "
            f"{state.behind or state.kind!r}, which is what the window holds"
        )


def shown(id: Any) -> str:
    """Returns an id as messages show it."""
    return repr(brief(id)) if isinstance(id, str) else f"{id!r:.80}"
