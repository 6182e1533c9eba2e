"""What the KV of each piece has absorbed, and how faithfully it serves the piece: decided here and nowhere else.

The record of a piece is its state and two steps of the window's clock. `PieceState.behind` digests what its KV was
computed behind: contents, in order, and how each of them was served. `PieceState.ways` has the
approximations that it went through, in any of these. `born` says which of the pieces in front it has seen: those that
were placed by then. `linked` derives everything else from that: fidelity, the ways that bound an answer, and what a
piece would have to be to be as promised.
"""

import functools
from collections.abc import Sequence
from hashlib import blake2b

from ..cache import EXACT, Antecedent, Member
from .entry import FRESH, UNKNOWN_WAYS, PatchNote, PieceState, PlacedPiece, Ways, merged, short_digest, tuple_of

SURVIVOR_WAYS: Ways = (("survivor", 0),)
"""Ways of a survivor in a window that forgets."""


@functools.lru_cache
def root_digest(backbone: str) -> str:
    """Returns the digest in front of the first piece, which depends on who reads it."""
    return short_digest(f"window {backbone}")


def next_digest(front: str, key: str, service: str) -> str:
    """Returns the digest behind one more piece of this content (or id), served so."""
    # `short_digest` without the call, because linking computes hundreds.
    text = f"{front}{len(key)}:{key}{service}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def chain_digest(backbone: str, antecedent: Antecedent) -> str:
    """Returns the digest that a window has in front of a piece behind this antecedent."""
    front = root_digest(backbone)
    for member in antecedent.members:
        front = next_digest(front, member.id if member.content is None else member.content, member.state)
    return front


def chain_of(backbone: str, note: PatchNote) -> str:
    """Returns the chain digest of a patch's antecedent, computed once for each note."""
    # Plans compare each note with many targets.
    if backbone not in note.chains:
        note.chains[backbone] = chain_digest(backbone, note.antecedent)
    return note.chains[backbone]


def linked(
    backbone: str,
    pieces: Sequence[PlacedPiece],
    first: int,
    forgets: bool,
    alike: Sequence[PlacedPiece] | None = None,
) -> tuple[PlacedPiece, ...]:
    """Derives all that `PlacedPiece` says is derived, of the pieces from `first` on; those in front have theirs.

    A piece whose state is `FRESH` is prefilled here: from now on its state says behind what, and through which
    approximations. `WindowState.fidelity` defines the words.

    Args:
      forgets: whether the window promises a prefill of itself, not the model under the banded mask.
      alike: the same pieces linked otherwise served, if all of the same is promised of them: saves half of the digests.
    """
    result = list(pieces[:first])
    previous = result[-1] if result else None
    front = target = root_digest(backbone)
    exact, target_exact, latest, absorbed, settled, steady = True, True, -1, (), True, True

    for index, (entry, start, state, replaced, born, placed, *_) in enumerate(pieces[first:], first):
        if previous is not None:
            before, old_front, old_target = previous[0], previous.front, previous.target
            latest, absorbed, settled, steady = previous.latest, previous.absorbed, previous.settled, previous.steady
            exact = previous.fidelity == EXACT

            # What is in front, as it is served.
            front = next_digest(old_front, before.key, previous.service)

            # The same if everything in front is served as promised. In most windows everything is.
            promised = previous.promised
            if old_target == old_front and promised is previous[2]:
                target, target_exact = front, exact
            elif alike is not None:
                target, target_exact = alike[index].target, alike[index].target_exact
            else:
                target_exact = previous.target_exact and (promised is None or promised.behind == old_target)
                service = EXACT if target_exact else promised_service(previous)
                target = next_digest(old_target, before.key, service)

        if state is FRESH:
            state = PieceState.conditioned(front, absorbed)
            # Those behind have seen what it was before, and not what it is now.
            if replaced is not None and replaced != state:
                placed = born
            born = 0 if absorbed else born
        elif not state.behind:
            state = state.standing_for(target)
            # Nor what it stands for now, unless it did before.
            if replaced is not None and replaced.behind != target:
                placed = born
            born = 0

        # A piece has seen what was placed before its KV was computed, and what that was made behind, whenever it was
        # placed here. Of what is approximate this is true as long as what is in front is what it was in front of it
        # then, or stood for it. (`max` would take a tenth of the loop's time.)
        kind, behind, ways = state.kind, state.behind, state.ways
        here = behind in (target, front)
        if born < latest and here and (steady or (behind == front and not ways)):
            born = latest
        seen = latest <= born

        fidelity = "approximate"
        if kind == "conditioned" and not ways:
            if exact and behind == front:
                fidelity = EXACT
            elif seen or here:
                fidelity = "survivor"
                if forgets and behind != target:
                    ways = SURVIVOR_WAYS
            else:
                ways = UNKNOWN_WAYS
        # A bare canonical has seen nothing, wherever it is. What a bound was measured on otherwise is a piece that has
        # seen all in front of it; where the window forgets, these very pieces and no others.
        elif kind != "bare" and not (here or (seen and steady and not forgets)):
            ways = UNKNOWN_WAYS
        steady = steady and (seen or here)

        promised = state
        fits = promised.behind == target or (settled and seen and not forgets)
        if promised.kind != "conditioned" or promised.ways or not fits:
            promised, settled = None, False

        if placed > latest:
            latest = placed
        if fidelity == "approximate" and ways != absorbed:
            absorbed = merged(absorbed, ways)
        own = (entry, start, state, None, born, placed)
        derived = (front, fidelity, ways, latest, absorbed, target, target_exact, promised, settled, steady)
        previous = tuple_of(PlacedPiece, (*own, *derived))
        result.append(previous)

    return tuple(result)


def promised_service(piece: PlacedPiece) -> str:
    """Returns how a piece would be served, as provenance has it, if it and everything in front were as promised."""
    if piece.target_exact and (piece.promised is None or piece.promised.behind == piece.target):
        return EXACT
    state = PieceState.conditioned(piece.target, ()) if piece.promised is None else piece.promised
    return f"survivor:{state.digest}"


def promised_member(piece: PlacedPiece) -> Member:
    """Returns a piece as what stands behind it must have met it to be as promised."""
    return Member(piece.entry.id, piece.entry.content, promised_service(piece))
