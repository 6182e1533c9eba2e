"""Random programs of all operations of a window on branches, and beside it a symbolic window that they change too.

A term says how each piece's KV was computed; the symbols read labels from terms alone: no identities, digests, or
records of what is approximate. Equal terms are one object.
"""

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvpatch_jax.window import Entry, PatchNote, Promise, Service, Window

FINGERPRINT = "f" * 32
PROMISES: list[Promise] = ["remember", "forget"]


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

    def has_seen(self, front: Sequence["Term"]) -> bool:
        """Returns whether it was computed behind all of `front`, in this order; others may have been there too."""
        remaining = iter(self.front)
        return all(any(other is member for other in remaining) for member in front)


class Terms:
    """Makes terms; equal ones are one object."""

    def __init__(self) -> None:
        self.known: dict[Any, Term] = {}

    def __call__(
        self, kind: str, content: str, front: Iterable[Term] = (), patch: str | None = None, base: Term | None = None
    ) -> Term:
        line = tuple(front)
        fields = (kind, content, line, patch, base)
        if fields not in self.known:
            pure = kind == "prefill" and all(term.pure and term.has_seen(line[:n]) for n, term in enumerate(line))
            self.known[fields] = Term(*fields, pure=pure)
        return self.known[fields]


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
        branch.pieces, branch.gone = self.pieces, self.gone
        return branch

    @property
    def ids(self) -> list[str]:
        return [piece.id for piece in self.pieces]

    @property
    def starts(self) -> list[int]:
        return [sum(piece.span for piece in self.pieces[:index]) for index in range(len(self.pieces))]

    def promised(self, stop: int | None = None, promise: str | None = None) -> list[Term]:
        """Returns the terms that are promised: prefills, or, of what has seen all that is promised, its own."""
        line: list[Term] = []
        for piece in self.pieces[:stop]:
            remembers = (promise or self.promise) == "remember"
            stays = remembers and piece.term.pure and piece.term.has_seen(line)
            line.append(piece.term if stays else self.terms("prefill", piece.content, line))
        return line

    def labels(self) -> list[str]:
        labels, exact = [], True
        both = self.promised(promise="forget"), self.promised(promise="remember")
        for piece, anew, remembered in zip(self.pieces, *both, strict=True):
            exact = exact and piece.term is anew
            labels.append("exact" if exact else "survivor" if piece.term is remembered else "approximate")
        return labels

    def arrange(self, entries: Iterable[Entry], services: Mapping[str, tuple[str, Any]], added: bool = False) -> None:
        """Places entries from the front: those with a service are served so, behind those in front, others stay.

        Args:
          added: a patch is added to the piece's KV, not to its canonical.
        """
        before, self.pieces = {piece.id: piece for piece in self.pieces}, []
        for entry in entries:
            old = before.get(entry.id)
            if entry.id in services:
                term = self.served(entry.key, *services[entry.id], old.term if added and old else None)
            else:
                term = before[entry.id].term
            self.pieces.append(Symbol(entry.id, entry.key, entry.span, entry.kind == "text", term))
        self.gone = [piece for piece in self.gone if piece.id not in self.ids]
        self.gone += [piece for piece in before.values() if piece.id not in self.ids and not piece.text]

    def served(self, content: str, method: str, detail: Any, base: Term | None) -> Term:
        """Returns the term of a piece that is served so behind the pieces."""
        here = self.terms("prefill", content, [piece.term for piece in self.pieces])
        if method == "prefill":
            return here
        if method == "bare":
            return self.terms("bare", content)
        if method == "patched":
            return self.terms("patched", content, patch=detail, base=base or self.terms("bare", content))
        # A prefill of this history, as it went or as it is promised, is what a forward computes.
        promised = self.terms("prefill", content, self.promised())
        return detail if detail in (here, promised) else self.terms("restored", content, base=detail)


class Pair:
    """A window and its symbols, changed together; and what both know of identities."""

    def __init__(self, seed: int, backbone: Any = FINGERPRINT, most: int = 8):
        """Begins an empty window of a backbone, or of its fingerprint, that will have this many pieces or one more."""
        self.random = random.Random(seed)
        lead, promise = self.random.choice([0, 1, 1, 2]), self.random.choice(PROMISES)
        self.terms, self.most = Terms(), most
        self.window = Window.empty(backbone, lead=lead, promise=promise)
        self.symbols = SymbolicWindow(self.terms, lead, promise)
        self.branches = [(self.window, self.symbols)]
        self.entries: dict[str, Entry] = {}
        self.stored: dict[str, dict[Term, str]] = {}
        self.term_of: dict[str, Term] = {}
        self.identity_of: dict[Term, str] = {}
        self.notes = 0
        # Survivors are rare where much is approximate, so programs differ in what they do.
        self.approximations = self.random.choice([0, 0, 1, 4])
        self.rarely = self.random.choice([1, 3])

    def movable(self) -> list[str]:
        return self.symbols.ids[self.symbols.lead :]

    def entry(self) -> Entry:
        """Makes an entry; contents come twice now and then."""
        number = len(self.entries)
        content = f"content {self.random.choice([number, number, number, self.random.randrange(number + 1)])}"
        text = self.random.random() < 0.15
        tokens, span = self.random.randint(1, 9), self.random.randint(1, 9)
        entry = Entry(f"c{number}", content, tokens, span, "text" if text else "chunk", order_free=not text)
        self.entries[entry.id] = entry
        return entry

    def service(self, entry: Entry, index: int, old: bool = False) -> tuple[Service, tuple[str, Any], bool]:
        """Chooses how an entry is served at an index, as the window and as the symbols take it; the patch's base."""
        approximations = ["bare", "patched", "restored", "other"] * self.approximations
        kind = self.random.choice(["prefill"] * 6 + ([] if entry.kind == "text" else approximations))
        before = self.window.pieces[index].id if index < len(self.window) else None
        if kind == "bare":
            return Service("bare"), ("bare", None), False
        if kind == "patched":
            return self.patch(entry, index, before, old)
        front = [piece.term for piece in self.symbols.pieces[:index]]
        if kind == "restored":
            return Service("restored"), ("restored", self.terms("prefill", entry.key, front)), False

        # A prefill of another history with the same nearest piece, or of any.
        stored = self.stored.get(entry.key, {})
        if kind == "other" and stored:
            term = self.random.choice(list(stored))
            near = bool(front and term.front) and front[-1].content == term.front[-1].content
            service = Service("restored", stored=stored[term], likeness="near" if near else None)
            return service, ("restored", term), False
        return Service("prefill"), ("prefill", None), False

    def patch(self, entry: Entry, index: int, before: str | None, old: bool) -> tuple[Service, tuple[str, Any], bool]:
        """Makes a patch of the canonical; or of KV in the window that was prefilled where it is."""
        self.notes += 1
        digest, target, stale = f"patch {self.notes}", self.window.target(before), self.random.random() < 0.2
        if stale and self.symbols.pieces:
            target = self.window.target(self.random.choice(self.symbols.pieces).id)
        here = [piece.term for piece in self.symbols.pieces[:index]]
        term = self.symbols.pieces[index].term if old else None
        removal = term is self.terms("prefill", entry.key, here) and self.random.random() < 0.5
        base, behind = ("conditioned", self.window.antecedent(before)) if removal else ("canonical", None)
        note = PatchNote(digest, entry.id, entry.content, base, target, behind, False, 8, 100, 5)
        return Service("patch", note, allow_stale=stale), ("patched", digest), removal

    def step(self) -> str:
        """Runs a random operation."""
        operations = ["append"] * 5 * self.rarely + ["branch"]
        if self.movable():
            operations += ["evict", "evict", "slide"] * self.rarely
            operations += ["insert", "reorder", "replace", "serve"]
        if self.symbols.gone:
            operations += ["recall", "recall"]
        if len(self.symbols.pieces) >= self.most:
            operations = ["evict", "slide", "reorder", "replace", "serve"]
        operation = self.random.choice(operations)
        getattr(self, operation)()
        self.branches[0] = (self.window, self.symbols)
        return operation

    def arrange(self, ids: Iterable[str], services: Mapping[str, tuple[str, Any]] | None = None) -> None:
        self.symbols.arrange([self.entries[id] for id in ids], services or {})

    def place(self, entry: Entry, before: str | None, replaced: bool = False) -> Service:
        """Places an entry among the symbols, in front of a piece or in its place; returns how it is served."""
        ids = self.symbols.ids
        index = len(ids) if before is None else ids.index(before)
        service, symbol, _ = self.service(entry, index)
        self.arrange([*ids[:index], entry.id, *ids[index + replaced :]], {entry.id: symbol})
        return service

    def append(self) -> None:
        entry = self.entry()
        self.window = self.window.append(entry, self.place(entry, None))

    def insert(self) -> None:
        entry, before = self.entry(), self.random.choice(self.movable())
        self.window = self.window.insert(entry, before, self.place(entry, before))

    def recall(self) -> None:
        entry = self.entries[self.random.choice(self.symbols.gone).id]
        before = self.random.choice([None, *self.movable()])
        self.window = self.window.recall(entry.id, self.place(entry, before), before=before)

    def replace(self) -> None:
        id = self.random.choice(self.movable())
        entry = self.random.choice([self.entry(), self.entries[id]])
        self.window = self.window.replace(id, entry, self.place(entry, id, replaced=True))

    def evict(self) -> None:
        movable = self.movable()
        leaving = self.random.sample(movable, self.random.randint(1, min(2, len(movable))))
        self.arrange([id for id in self.symbols.ids if id not in leaving])
        self.window = self.window.evict(*leaving)

    def slide(self) -> None:
        """The last chunks behind the lead stay, each with the texts that follow it, and the texts in front of all."""
        keep, ids = self.random.randint(0, 3), self.symbols.ids
        lead, pieces = self.symbols.lead, self.symbols.pieces
        chunks = [index for index, piece in enumerate(pieces) if index >= lead and not piece.text]
        if len(chunks) > keep:
            stop = chunks[len(chunks) - keep] if keep else len(ids)
            self.arrange([*ids[: chunks[0]], *ids[stop:]])
        self.window = self.window.slide(keep)

    def reorder(self) -> None:
        """Chunks fill the places of those that are named, in the order of the names."""
        free, ids = [id for id in self.movable() if self.entries[id].order_free], self.symbols.ids
        order = self.random.sample(free, self.random.randint(0, len(free)))
        for place, id in zip(sorted(map(ids.index, order)), order, strict=True):
            ids[place] = id
        self.arrange(ids)
        self.window = self.window.reorder(order)

    def serve(self) -> None:
        """Serves a piece otherwise in its place."""
        id = self.random.choice(self.symbols.ids)
        service, symbol, removal = self.service(self.entries[id], self.symbols.ids.index(id), old=True)
        self.symbols.arrange([self.entries[other] for other in self.symbols.ids], {id: symbol}, removal)
        self.window = self.window.serve({id: service})

    def branch(self) -> None:
        """Forks, changes the promise, or goes on with another branch."""
        if len(self.branches) < 3:
            self.branches.insert(0, (self.window.fork(f"branch {len(self.branches)}"), self.symbols.fork()))
        self.random.shuffle(self.branches)
        self.window, self.symbols = self.branches[0]
        if self.random.random() < 0.3:
            promise = self.random.choice(PROMISES)
            self.symbols.promise, self.window = promise, dataclasses.replace(self.window, promise=promise)

    def check(self) -> list[str]:
        """Compares everything, and returns the labels."""
        window, symbols = self.window, self.symbols
        labels, promised = symbols.labels(), symbols.promised()
        assert list(window.ids) == symbols.ids
        assert [piece.start for piece in window.pieces] == symbols.starts
        assert window.gone == tuple(piece.id for piece in symbols.gone)
        as_promised = [piece.term is term for piece, term in zip(symbols.pieces, promised, strict=True)]
        assert [window.fidelity(id) for id in window.ids] == labels
        assert [not window.standing(id).ways for id in window.ids] == as_promised
        assert window.as_promised == all(as_promised)

        # One identity names one term. What may be called as promised is never what went through an approximation.
        for piece, symbol, standing, term in zip(
            window.pieces, symbols.pieces, window.standings, promised, strict=True
        ):
            for identity, same in ((piece.made, symbol.term), (standing.promised, term)):
                assert self.term_of.setdefault(identity, same) is same
                assert self.identity_of.setdefault(same, identity) == identity
            assert bool(piece.ways) != symbol.term.pure
            if symbol.term.kind == "prefill":
                self.stored.setdefault(symbol.content, {})[symbol.term] = piece.made
        return labels
