"""Rolling digests over pieces: what precedes each of them, and therefore how faithfully each is served."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from ..cache import EXACT, Antecedent, Member
from .entry import FRESH, PatchNote, PieceState, PlacedPiece, apart, short_digest, tuple_of


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


def linked(backbone: str, pieces: Sequence[PlacedPiece], first: int = 0) -> tuple[PlacedPiece, ...]:
    """Derives `front`, `fidelity`, `latest` and `pure` of the pieces from `first` on; those in front have theirs.

    A piece whose state is `FRESH` is prefilled here: its state says behind what from now on, and whether none of that
    was approximate then, which stays with its KV. `WindowState.fidelity` defines the words.
    """
    result = list(pieces[:first])
    previous = result[-1] if result else None
    front, fidelity, pure, latest = root_digest(backbone), EXACT, True, -1
    if previous is not None:
        front, fidelity, latest, pure = previous[6:]

    for entry, start, state, aside, born, placed, *_ in pieces[first:]:
        # `exact` is of everything in front, gap included.
        exact = fidelity == EXACT
        if previous is not None:
            before, gap = previous[0], start - previous[1] - previous[0].span
            service = EXACT if exact else previous.service
            front = next_digest(front, before.key, apart(service, gap) if gap else service)
            exact = exact and not gap

        if state is FRESH:
            state = PieceState.conditioned(front, pure)
            # Those behind have seen what it was before, and not what it is now.
            if aside is not None and aside != state:
                placed = born
            aside = None

        fidelity = "approximate"
        if state.pure and state.kind == "conditioned":
            if exact and state.behind == front:
                fidelity = EXACT
                # An equal front is seen, whenever it was placed. (`max` would take a tenth of the loop's time.)
                if born < latest:
                    born = latest
            # A survivor has seen everything in front, which was placed before its KV was computed.
            elif latest <= born:
                fidelity = "survivor"

        if placed > latest:
            latest = placed
        pure = pure and fidelity != "approximate"
        previous = tuple_of(PlacedPiece, (entry, start, state, aside, born, placed, front, fidelity, latest, pure))
        result.append(previous)

    return tuple(result)


class Targets(NamedTuple):
    """What patches of all pieces of a window are measured against.

    Attributes:
      digests: for each piece the chain digest of what a patch must have been formed behind to serve it in its place.
      kept: how many pieces, from the front, follow none that would have to be run again, so that survivors among them
        may be kept.
    """

    digests: tuple[str, ...]
    kept: int


def targets_of(backbone: str, pieces: Sequence[PlacedPiece], forget: bool) -> Targets:
    """Derives the targets of all pieces: what cannot be kept counts as prefilled in its place."""
    front, exact = root_digest(backbone), True
    digests, same, kept = [front], True, len(pieces)
    for index, (piece, following) in enumerate(itertools.pairwise(pieces)):
        # While the target has been what the window has, its digests are known: true of most pieces of most windows.
        gap = following[1] - piece[1] - piece[0].span
        if same and exact and not gap and piece.fidelity == EXACT:
            front = following.front
            digests.append(front)
            continue

        state = _kept_state(pieces, index, front, index >= kept)
        kept = min(kept, index + 1) if state is None else kept
        service = EXACT if forget else apart(_target_service(state, exact, front), gap)
        exact = exact and service == EXACT
        same = same and service == apart(piece.service, gap)
        front = following.front if same else next_digest(front, piece.entry.key, service)
        digests.append(front)

    return Targets(tuple(digests[: len(pieces)]), kept)


def pieces_and_gaps(pieces: Sequence[PlacedPiece], start: int) -> Iterator[tuple[PlacedPiece, int]]:
    """Yields each piece, and the free positions between it and the next one, or `start`."""
    for index, piece in enumerate(pieces):
        following = pieces[index + 1].start if index + 1 < len(pieces) else start
        yield piece, following - piece.end


def target_members(backbone: str, pieces: Sequence[PlacedPiece], start: int) -> Iterator[Member]:
    """Yields the pieces as a patch for what begins at `start` must have met them, if chunks that left are remembered.

    A piece that may be kept as it is; any other one as a prefill in its place would serve it.
    """
    front, exact, rerun = root_digest(backbone), True, False
    for index, (piece, gap) in enumerate(pieces_and_gaps(pieces, start)):
        state = _kept_state(pieces, index, front, rerun)
        rerun = rerun or state is None
        service = apart(_target_service(state, exact, front), gap)
        exact = exact and service == EXACT
        yield Member(piece.entry.id, piece.entry.content, service)
        front = next_digest(front, piece.entry.key, service)


def _kept_state(pieces: Sequence[PlacedPiece], index: int, front: str, rerun: bool) -> PieceState | None:
    """Returns the state in which a piece's KV is what is promised behind this front, however those in front are served.

    Args:
      rerun: whether one in front would be run again, and so change from what this one has seen.

    Returns:
      Its state, or the one it goes back to from being bare; None if it would have to be run again.
    """
    piece = pieces[index]

    # A chunk that is bare for now can be switched back to what it was.
    own = piece.aside or piece.state
    if own.kind != "conditioned" or not own.pure:
        return None
    seen = not rerun and (index == 0 or pieces[index - 1].latest <= piece.born)
    return own if seen or own.behind == front else None


def _target_service(kept: PieceState | None, exact: bool, front: str) -> str:
    """Returns how a piece would have to be served behind a front that is served as its target says."""
    state = kept or PieceState.conditioned(front, True)
    return EXACT if exact and state.behind == front else f"survivor:{state.digest}"
