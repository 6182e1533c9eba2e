"""A window as symbols: a term says how each piece's KV was computed, and labels are read from terms alone.

Nothing here is of the library: no identities, digests, or records of what is approximate. Equal terms are one object.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """How KV was computed.

    Attributes:
      kind: "prefill", "bare" (the canonical), "patched", or "restored" (a prefill that belongs to another history).
      content: of the piece.
      front: terms of the KV that it was computed behind, in order.
      patch, base: name of a patch, and the term that it is added to.
      pure: whether it is a prefill behind pure terms, each of which was computed behind those in front of it.
    """

    kind: str
    content: str
    front: tuple["Term", ...] = ()
    patch: str | None = None
    base: "Term | None" = None
    pure: bool = False


class Terms:
    """Makes terms; equal ones are one object."""

    def __init__(self) -> None:
        self.known: dict[Any, Term] = {}

    def __call__(
        self, kind: str, content: str, front: Iterable[Term] = (), patch: str | None = None, base: Term | None = None
    ) -> Term:
        fields = (kind, content, tuple(front), patch, base)
        if fields not in self.known:
            self.known[fields] = Term(*fields, pure=kind == "prefill" and pure_line(fields[2]))
        return self.known[fields]


def has_seen(term: Term, front: Sequence[Term]) -> bool:
    """Returns whether KV was computed behind all of `front`, in this order; other things may have been there too."""
    remaining = iter(term.front)
    return all(any(other is member for other in remaining) for member in front)


def pure_line(front: Sequence[Term]) -> bool:
    """Returns whether terms are pure, and each was computed behind those in front of it."""
    return all(term.pure and has_seen(term, front[:index]) for index, term in enumerate(front))


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A piece: what is shown, and the term of its KV."""

    id: str
    content: str
    span: int
    text: bool
    term: Term


class SymbolicWindow:
    """Pieces from the front, and those that can be recalled, the oldest first."""

    def __init__(self, terms: Terms, lead: int, promise: str) -> None:
        self.terms, self.lead, self.promise = terms, lead, promise
        self.pieces: list[Symbol] = []
        self.gone: list[Symbol] = []

    def fork(self) -> "SymbolicWindow":
        branch = SymbolicWindow(self.terms, self.lead, self.promise)
        branch.pieces, branch.gone = list(self.pieces), list(self.gone)
        return branch

    @property
    def starts(self) -> list[int]:
        return [sum(piece.span for piece in self.pieces[:index]) for index in range(len(self.pieces))]

    # ---------------------------------------------------------------------------------------------------------- truths

    def anew(self, stop: int | None = None) -> list[Term]:
        """Returns the terms that a prefill of the window as it is would give."""
        line: list[Term] = []
        for piece in self.pieces[:stop]:
            line.append(self.terms("prefill", piece.content, line))
        return line

    def remembered(self, stop: int | None = None) -> list[Term]:
        """Returns the terms that a window promises which remembers: of what has seen all that is promised, its own."""
        line: list[Term] = []
        for piece in self.pieces[:stop]:
            stays = piece.term.pure and has_seen(piece.term, line)
            line.append(piece.term if stays else self.terms("prefill", piece.content, line))
        return line

    def promised(self, stop: int | None = None) -> list[Term]:
        return self.remembered(stop) if self.promise == "remember" else self.anew(stop)

    def labels(self) -> list[str]:
        labels, exact = [], True
        for piece, anew, remembered in zip(self.pieces, self.anew(), self.remembered(), strict=True):
            exact = exact and piece.term is anew
            labels.append("exact" if exact else "survivor" if piece.term is remembered else "approximate")
        return labels

    def as_promised(self) -> list[bool]:
        """Returns whether each piece's KV is what the window promises in its place."""
        return [piece.term is term for piece, term in zip(self.pieces, self.promised(), strict=True)]

    # ------------------------------------------------------------------------------------------------------ operations

    def served(self, index: int, content: str, service: tuple[str, Any], old: Term | None = None) -> Term:
        """Returns the term of a piece that is served so behind the first `index` pieces."""
        method, detail = service
        front = [piece.term for piece in self.pieces[:index]]
        here = self.terms("prefill", content, front)
        if method == "prefill":
            return here
        if method == "bare":
            return self.terms("bare", content)
        if method == "patched":
            return self.terms("patched", content, patch=detail, base=old or self.terms("bare", content))
        # A prefill of this history, as it went or as it is promised, is what a forward computes.
        promised = self.terms("prefill", content, self.promised(index))
        return detail if detail in (here, promised) else self.terms("restored", content, base=detail)

    def place(self, id: str, content: str, span: int, text: bool, index: int, service: tuple[str, Any]) -> None:
        """Places a piece at an index: a new one, or one that comes back."""
        self.gone = [piece for piece in self.gone if piece.id != id]
        self.pieces.insert(index, Symbol(id, content, span, text, self.served(index, content, service)))

    def serve(self, id: str, service: tuple[str, Any], removal: bool = False) -> None:
        """Serves a piece otherwise where it is; `removal`: the patch is added to its KV, not to its canonical."""
        index, piece = next((index, piece) for index, piece in enumerate(self.pieces) if piece.id == id)
        term = self.served(index, piece.content, service, piece.term if removal else None)
        self.pieces[index] = dataclasses.replace(piece, term=term)

    def remove(self, ids: Sequence[str], recallable: bool = True) -> None:
        leaving = [piece for piece in self.pieces if piece.id in ids]
        self.pieces = [piece for piece in self.pieces if piece.id not in ids]
        self.gone += [piece for piece in leaving if recallable and not piece.text]

    def slide(self, keep: int) -> None:
        """Keeps the last chunks behind the lead, each with the texts that follow it, and the texts in front of all."""
        behind = self.pieces[self.lead :]
        chunks = [index for index, piece in enumerate(behind) if not piece.text]
        if len(chunks) > keep:
            stop = chunks[len(chunks) - keep] if keep else len(behind)
            self.remove([piece.id for piece in behind[chunks[0] : stop]])

    def reorder(self, ids: Sequence[str]) -> None:
        """Fills the places of these pieces in this order."""
        places = [index for index, piece in enumerate(self.pieces) if piece.id in ids]
        moved = {piece.id: piece for piece in self.pieces}
        for index, id in zip(places, ids, strict=True):
            self.pieces[index] = moved[id]
