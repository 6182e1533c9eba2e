"""Rolling digests over pieces: what stands in front of each, and so how truly each is served."""

import itertools
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from ..cache import EXACT, Antecedent, Member
from .entry import FRESH, PatchNote, PieceState, PlacedPiece, apart, short_digest, tuple_of


def root(backbone: str) -> str:
    """The digest in front of the first piece: whoever reads it."""
    return short_digest(f"window {backbone}")


def behind(front: str, key: str, service: str) -> str:
    """The digest behind one more piece, of this content (or id), served so."""
    text = f"{front}{len(key)}:{key}{service}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()  # `short_digest`, a call less


def chain_digest(backbone: str, antecedent: Antecedent) -> str:
    """The digest that a window has in front of a piece behind this antecedent."""
    front = root(backbone)
    for member in antecedent.members:
        front = behind(front, member.id if member.content is None else member.content, member.state)
    return front


def chain_of(backbone: str, note: PatchNote) -> str:
    """The digest that a window has in front of a piece behind a patch's antecedent, computed once for each note."""
    found = note.chains.get(backbone)
    if found is None:
        found = note.chains[backbone] = chain_digest(backbone, note.antecedent)
    return found


def linked(backbone: str, pieces: Sequence[PlacedPiece], first: int = 0) -> tuple[PlacedPiece, ...]:
    """Derives `front`, `fidelity`, `latest` and `pure` of pieces from `first` on; those in front of it have theirs.

    A piece whose state is `FRESH` is prefilled here: its state says behind what from now on, and whether none of that
    was approximate then, which stays with its KV. `Window.fidelity` says what the words mean.
    """
    done = list(pieces[:first])
    previous = done[-1] if done else None
    front, fidelity, pure, latest = root(backbone), EXACT, True, -1
    if previous is not None:
        front, fidelity, latest, pure = previous[6:]
    for entry, start, state, aside, born, placed, *_ in pieces[first:]:
        exact = fidelity == EXACT
        if previous is not None:
            before, gap = previous[0], start - previous[1] - previous[0].span
            service = EXACT if exact else previous.service
            front = behind(front, before.key, apart(service, gap) if gap else service)
            exact = exact and not gap

        if state is FRESH:
            state = PieceState.conditioned(front, pure)
            if aside is not None and aside != state:
                placed = born  # those behind have seen what it was before, and not what it is now
            aside = None
        fidelity = "approximate"
        if state.pure and state.kind == "conditioned":
            if exact and state.behind == front:
                fidelity = EXACT
                if born < latest:
                    born = latest  # it has seen all in front, whenever that came to stand there
            elif latest <= born:
                fidelity = "survivor"
        if placed > latest:
            latest = placed
        pure = pure and fidelity != "approximate"
        previous = tuple_of(PlacedPiece, (entry, start, state, aside, born, placed, front, fidelity, latest, pure))
        done.append(previous)
    return tuple(done)


class Targets(NamedTuple):
    """What is aimed at, of all pieces of a window.

    Attributes:
      digests: for each piece the chain digest of what a patch must have been formed behind to serve it where it stands.
      kept: how many pieces, from the front, stand behind none that would have to be run again: survivors there may be
        kept.
    """

    digests: tuple[str, ...]
    kept: int


def targets_of(backbone: str, pieces: Sequence[PlacedPiece], forget: bool) -> Targets:
    """Derives what is aimed at: what cannot be kept counts as prefilled in its place."""
    found, front, exact = [root(backbone)], root(backbone), True
    same, kept = True, len(pieces)  # what is aimed at has been what stands there, whose digests are known
    for index, (piece, following) in enumerate(itertools.pairwise(pieces)):
        gap = following[1] - piece[1] - piece[0].span
        if same and exact and not gap and piece.fidelity == EXACT:  # as most pieces are, at no cost
            front = following.front
            found.append(front)
            continue
        state = _kept_state(pieces, index, front, index >= kept)
        kept = min(kept, index + 1) if state is None else kept
        service = EXACT if forget else apart(_aimed_service(state, exact, front), gap)
        exact = exact and service == EXACT
        same = same and service == apart(piece.service, gap)
        front = following.front if same else behind(front, piece.entry.key, service)
        found.append(front)
    return Targets(tuple(found[: len(pieces)]), kept)


def served(pieces: Sequence[PlacedPiece], start: int) -> Iterable[Member]:
    """The pieces as members of the antecedent of what begins at `start`, as they are served."""
    for piece, gap in _gaps(pieces, start):
        yield piece.member(gap)


def aimed(backbone: str, pieces: Sequence[PlacedPiece], start: int) -> Iterable[Member]:
    """The pieces as a patch for what begins at `start` must have met them, where chunks that left are remembered.

    A kept piece as it is; one that is served otherwise, as a prefill in its place would serve it.
    """
    front, exact, another = root(backbone), True, False
    for index, (piece, gap) in enumerate(_gaps(pieces, start)):
        state = _kept_state(pieces, index, front, another)
        another = another or state is None
        service = apart(_aimed_service(state, exact, front), gap)
        exact = exact and service == EXACT
        yield Member(piece.entry.id, piece.entry.content, service)
        front = behind(front, piece.entry.key, service)


def _kept_state(pieces: Sequence[PlacedPiece], index: int, front: str, another: bool) -> PieceState | None:
    """The state in which a piece's KV is what is promised behind this front, however those in front are served now.

    Args:
      another: whether one in front would be run again, to another than this has seen.

    Returns:
      Its state, or the one it goes back to from being bare; None where it would have to be run again.
    """
    piece = pieces[index]
    own = piece.aside or piece.state
    if own.kind != "conditioned" or not own.pure:
        return None
    seen = not another and (index == 0 or pieces[index - 1].latest <= piece.born)
    return own if seen or own.behind == front else None


def _aimed_service(kept: PieceState | None, exact: bool, front: str) -> str:
    """How a piece would have to be served behind a front that is served as it is aimed at."""
    state = kept or PieceState.conditioned(front, True)
    return EXACT if exact and state.behind == front else f"survivor:{state.digest}"


def _gaps(pieces: Sequence[PlacedPiece], start: int) -> Iterable[tuple[PlacedPiece, int]]:
    """Each piece, and what is free between it and the next one, or what begins at `start`."""
    for index, piece in enumerate(pieces):
        then = pieces[index + 1].start if index + 1 < len(pieces) else start
        yield piece, then - piece.end
