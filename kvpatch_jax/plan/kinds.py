"""Kinds of approximate reuse: what a piece shows, and how its KV is made. A loss guard rules kinds out."""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from ..cache import UNKNOWN_WAYS, Ways
from ..window import Method, Piece, Window

_WORDS: Mapping[str, str] = {"patch": "patched", "restored": "restored", "bare": "blind", "prefill": "kept"}
_POINTS: Mapping[str, Method] = {"near": "restored", "mean": "restored", "bare": "bare"}
"""Methods of operating points; all others are those of patches."""


class ReuseKind(NamedTuple):
    """What a piece shows (`Entry.modality`), and how its KV is made; "prefill": it is kept behind other pieces."""

    modality: str | None
    method: Method | Literal["keep"]

    def __str__(self) -> str:
        return f"{_WORDS.get(self.method, self.method)} {self.modality or 'unknown'} pieces"


def is_inherited(piece: Piece) -> bool:
    """Returns whether a piece was prefilled behind approximate KV, whose error it has."""
    return piece.method in ("prefill", "leading") and piece.ways not in ((), UNKNOWN_WAYS)


def kind_of(piece: Piece) -> ReuseKind:
    """Returns the kind of a piece that is not as promised."""
    method = piece.method if piece.method in ("patch", "restored", "bare") else "prefill"
    return ReuseKind(piece.entry.modality, method)


def approximate_kinds(window: Window) -> frozenset[ReuseKind]:
    """Returns the kinds that make a window differ from what it promises.

    A piece that was prefilled behind approximate ones counts only where none of those is left.
    """
    pieces = [piece for piece, standing in zip(window.pieces, window.standings, strict=True) if standing.ways]
    causes = [piece for piece in pieces if not is_inherited(piece)] or pieces
    return frozenset(map(kind_of, causes))


def is_ruled_out(piece: Piece, ways: Ways, ruled_out: Collection[ReuseKind]) -> bool:
    """Returns whether a piece may not stay as it is: its kind is ruled out, or it inherits the error of such a method.

    Args:
      ways: what makes it differ from the promise; none: it may stay.
    """
    if not ways or not ruled_out:
        return False
    methods = {_POINTS.get(point, "patch") for point, _ in piece.ways} if is_inherited(piece) else set[str]()
    return kind_of(piece) in ruled_out or bool(methods & {kind.method for kind in ruled_out})
