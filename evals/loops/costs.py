"""What a prompt costs: the pieces that have to be computed, in every way of reusing what was computed before.

A reply counts when it enters the prompt, in every way alike. The prefix cache is as good as one can be: it knows every
prefix of pieces that any prompt ever had, to the token, and evicts nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .episodes import PromptPiece


class Changes(NamedTuple):
    """What makes one prompt of another, where new pieces enter at the end alone.

    Attributes:
      evicted: pieces that leave.
      replaced: pieces that take the place of what had their ids.
      entering: pieces that enter behind all others, in order.
    """

    evicted: tuple[PromptPiece, ...]
    replaced: tuple[PromptPiece, ...]
    entering: tuple[PromptPiece, ...]


def changes(before: Sequence[PromptPiece], pieces: Sequence[PromptPiece]) -> Changes:
    """Finds what makes one prompt of another: pieces stay up to the first that is new or stood further in front."""
    places = {piece.id: place for place, piece in enumerate(before)}
    last, staying = -1, list[PromptPiece]()
    for piece in pieces:
        place = places.get(piece.id, -1)
        if place <= last:
            break
        last = place
        staying.append(piece)

    ids = {piece.id for piece in staying}
    evicted = tuple(piece for piece in before if piece.id not in ids)
    replaced = tuple(piece for piece in staying if before[places[piece.id]].shown.content != piece.shown.content)
    return Changes(evicted, replaced, tuple(pieces[len(staying) :]))


class Survivors:
    """Pieces that stay keep their KV, whatever left or changed in front of them: what enters is computed."""

    def __init__(self) -> None:
        """Starts without a prompt."""
        self.before: Sequence[PromptPiece] = ()

    def computed(self, pieces: Sequence[PromptPiece]) -> tuple[PromptPiece, ...]:
        """Lists the pieces of the next prompt that are computed."""
        difference = changes(self.before, pieces)
        self.before = pieces
        return (*difference.replaced, *difference.entering)


class PrefixCache:
    """Prefixes of all prompts so far."""

    def __init__(self) -> None:
        """Starts without any."""
        self.chains: set[int] = {0}

    def computed(self, pieces: Sequence[PromptPiece]) -> tuple[PromptPiece, ...]:
        """Lists the pieces of the next prompt behind the longest prefix that is known, and learns all of its own."""
        chain, hit = 0, 0
        for place, piece in enumerate(pieces):
            chain = hash((chain, piece.shown.content))
            if chain in self.chains and hit == place:
                hit = place + 1
            self.chains.add(chain)
        return tuple(pieces[hit:])

    def ordered(self, pieces: Sequence[PromptPiece]) -> tuple[PromptPiece, ...]:
        """Orders a prompt for the cache, as ContextPilot does (arXiv 2511.03475): what extends a known prefix first.

        Movable pieces may stand anywhere, the others keep their order. Where no prefix is known any more, the movable
        ones stand last, so that a change in them leaves the others in a prefix.
        """
        fixed = [piece for piece in pieces if not piece.movable]
        movable = [piece for piece in pieces if piece.movable]
        chain, order = 0, list[PromptPiece]()
        while fixed or movable:
            following = [*fixed[:1], *movable]
            known = [piece for piece in following if hash((chain, piece.shown.content)) in self.chains]
            if not known:
                break
            piece = known[0]
            (movable if piece.movable else fixed).remove(piece)
            order.append(piece)
            chain = hash((chain, piece.shown.content))
        return (*order, *fixed, *movable)


def tokens(pieces: Sequence[PromptPiece]) -> int:
    """Counts the tokens of pieces."""
    return sum(piece.shown.tokens for piece in pieces)


def same(first: Sequence[PromptPiece], second: Sequence[PromptPiece]) -> bool:
    """Returns whether two prompts show the same at the same places."""
    return [(piece.id, piece.shown.content) for piece in first] == [(piece.id, piece.shown.content) for piece in second]
