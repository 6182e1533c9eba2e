"""Rolling digests over pieces: what stands in front of each, and so how truly each is served."""

from collections.abc import Iterable, Sequence

from ..provenance import EXACT, Antecedent, Member
from .entry import FRESH, PlacedPiece, State, apart, short_digest


def root(backbone: str) -> str:
    """The digest in front of the first piece: whoever reads it."""
    return short_digest(f"window {backbone}")


def behind(front: str, key: str, service: str) -> str:
    """The digest behind one more piece, of this content (or id), served so."""
    return short_digest(f"{front}{len(key)}:{key}{service}")


def chain_digest(backbone: str, antecedent: Antecedent) -> str:
    """The digest that a window has in front of a piece behind this antecedent."""
    front = root(backbone)
    for member in antecedent.members:
        front = behind(front, member.id if member.content is None else member.content, member.state)
    return front


def linked(backbone: str, pieces: Sequence[PlacedPiece], first: int = 0) -> tuple[PlacedPiece, ...]:
    """Derives `front`, `fidelity`, `latest` and `pure` of pieces from `first` on; those in front of it have theirs.

    A piece whose state is `FRESH` is prefilled here: its state says behind what from now on.
    """
    done = list(pieces[:first])
    for piece in pieces[first:]:
        previous = done[-1] if done else None
        done.append(_link(backbone, previous, piece))
    return tuple(done)


def _link(backbone: str, previous: PlacedPiece | None, piece: PlacedPiece) -> PlacedPiece:
    if previous is None:
        front, gap, exact, pure, latest = root(backbone), 0, True, True, -1
    else:
        gap = piece.start - previous.start - previous.entry.span
        front = behind(previous.front, previous.entry.key, apart(previous.service, gap))
        exact, pure, latest = previous.fidelity == EXACT and not gap, previous.pure, previous.latest

    entry, start, state, aside, born, placed = piece[:6]
    if state is FRESH:
        state = State("conditioned", front, pure)
    fidelity = "approximate"
    if state.kind == "conditioned" and state.pure:
        if exact and state.behind == front:
            fidelity = EXACT
            born = max(born, latest)  # it has seen all in front, whenever that came to stand there
        elif latest <= born:
            fidelity = "survivor"
    latest, pure = max(latest, placed), pure and state.pure
    return PlacedPiece(entry, start, state, aside, born, placed, front, fidelity, latest, pure)


def served(pieces: Sequence[PlacedPiece], start: int) -> Iterable[Member]:
    """The pieces as members of the antecedent of what begins at `start`, as they are served."""
    for piece, gap in _gaps(pieces, start):
        yield piece.member(gap)


def aimed(backbone: str, pieces: Sequence[PlacedPiece], start: int) -> Iterable[Member]:
    """The pieces as a patch for what begins at `start` must have met them, where chunks that left are remembered.

    A kept piece as it is; one that is served otherwise, as a prefill in its place would serve it.
    """
    front, exact = root(backbone), True
    for piece, gap in _gaps(pieces, start):
        service, own = piece.service, piece.state
        if exact and own.kind == "conditioned" and own.pure and own.behind == front:
            service = EXACT
        elif piece.fidelity == "approximate":
            service = EXACT if exact else f"survivor:{State('conditioned', front, True).digest}"
        service = apart(service, gap)
        exact = exact and service == EXACT
        yield Member(piece.entry.id, piece.entry.content, service)
        front = behind(front, piece.entry.key, service)


def _gaps(pieces: Sequence[PlacedPiece], start: int) -> Iterable[tuple[PlacedPiece, int]]:
    """Each piece, and what is free between it and the next one, or what begins at `start`."""
    for index, piece in enumerate(pieces):
        then = pieces[index + 1].start if index + 1 < len(pieces) else start
        yield piece, then - piece.end
