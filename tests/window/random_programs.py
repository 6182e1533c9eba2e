"""Random programs of all operations of a window, on branches; its symbols (`oracle`) are changed with it."""

import dataclasses
import random
from typing import Any

from oracle import SymbolicWindow, Term, Terms

from kvpatch_jax.window import Entry, PatchNote, Promise, Service, Window

FINGERPRINT = "f" * 32
PROMISES: list[Promise] = ["remember", "forget"]


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

    # -------------------------------------------------------------------------------------------------------- choices

    def movable(self) -> list[str]:
        return [piece.id for piece in self.symbols.pieces[self.symbols.lead :]]

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
        kinds = ["prefill"] * 6 + ([] if entry.kind == "text" else approximations)
        kind = self.random.choice(kinds)
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

    # ----------------------------------------------------------------------------------------------------- operations

    def step(self) -> str:
        """Runs a random operation."""
        operations = ["append"] * 5 * self.rarely + ["branch"]
        if self.movable():
            operations += ["evict", "evict", "slide"] * self.rarely
            operations += ["insert", "reorder", "replace", "serve", "again"]
        if self.symbols.gone:
            operations += ["recall", "recall"]
        if len(self.symbols.pieces) >= self.most:
            operations = ["evict", "slide", "reorder", "replace", "serve"]
        operation = self.random.choice(operations)
        getattr(self, operation)()
        self.branches[0] = (self.window, self.symbols)
        return operation

    def place(self, entry: Entry, index: int) -> Service:
        service, symbol, _ = self.service(entry, index)
        self.symbols.place(entry.id, entry.key, entry.span, entry.kind == "text", index, symbol)
        return service

    def append(self) -> None:
        entry = self.entry()
        self.window = self.window.append(entry, self.place(entry, len(self.window)))

    def insert(self) -> None:
        entry, before = self.entry(), self.random.choice(self.movable())
        self.window = self.window.insert(entry, before, self.place(entry, self.window.index(before)))

    def recall(self) -> None:
        entry = self.entries[self.random.choice(self.symbols.gone).id]
        before = self.random.choice([None, *self.movable()])
        index = len(self.window) if before is None else self.window.index(before)
        self.window = self.window.recall(entry.id, self.place(entry, index), before=before)

    def replace(self) -> None:
        id = self.random.choice(self.movable())
        entry = self.random.choice([self.entry(), self.entries[id]])
        index = self.window.index(id)
        service, symbol, _ = self.service(entry, index)
        self.symbols.remove([id], recallable=entry.id != id)
        self.symbols.place(entry.id, entry.key, entry.span, entry.kind == "text", index, symbol)
        self.window = self.window.replace(id, entry, service)

    def evict(self) -> None:
        movable = self.movable()
        ids = self.random.sample(movable, self.random.randint(1, min(2, len(movable))))
        self.symbols.remove(ids)
        self.window = self.window.evict(*ids)

    def slide(self) -> None:
        keep = self.random.randint(0, 3)
        self.symbols.slide(keep)
        self.window = self.window.slide(keep)

    def reorder(self) -> None:
        free = [id for id in self.movable() if self.entries[id].order_free]
        ids = self.random.sample(free, self.random.randint(0, len(free)))
        self.symbols.reorder(ids)
        self.window = self.window.reorder(ids)

    def serve(self) -> None:
        """Serves a piece otherwise in its place."""
        id = self.random.choice(self.symbols.pieces).id
        service, symbol, removal = self.service(self.entries[id], self.window.index(id), old=True)
        self.symbols.serve(id, symbol, removal)
        self.window = self.window.serve({id: service})

    def again(self) -> None:
        """Prefills several pieces in their places, each behind what is then in front of it."""
        ids = self.random.sample(self.symbols.pieces, self.random.randint(1, len(self.symbols.pieces)))
        chosen = [piece.id for piece in self.symbols.pieces if piece in ids]
        for id in chosen:
            self.symbols.serve(id, ("prefill", None))
        self.window = self.window.serve(dict.fromkeys(chosen, Service("prefill")))

    def branch(self) -> None:
        """Forks, changes the promise, or goes on with another branch."""
        if len(self.branches) < 3:
            self.branches.insert(0, (self.window.fork(f"branch {len(self.branches)}"), self.symbols.fork()))
        self.random.shuffle(self.branches)
        self.window, self.symbols = self.branches[0]
        if self.random.random() < 0.3:
            promise = self.random.choice(PROMISES)
            self.symbols.promise, self.window = promise, dataclasses.replace(self.window, promise=promise)

    # --------------------------------------------------------------------------------------------------------- checks

    def check(self) -> list[str]:
        """Compares everything, and returns the labels."""
        window, symbols = self.window, self.symbols
        assert window.ids == tuple(piece.id for piece in symbols.pieces)
        assert [piece.start for piece in window.pieces] == symbols.starts
        assert window.gone == tuple(piece.id for piece in symbols.gone)
        labels, as_promised = symbols.labels(), symbols.as_promised()
        assert [window.fidelity(id) for id in window.ids] == labels
        assert [not window.standing(id).ways for id in window.ids] == as_promised
        assert window.as_promised == all(as_promised)

        # One identity names one term. What may be called as promised is never what went through an approximation.
        for piece, symbol, standing, term in zip(
            window.pieces, symbols.pieces, window.standings, symbols.promised(), strict=True
        ):
            self.same(piece.made, symbol.term)
            self.same(standing.promised, term)
            assert bool(piece.ways) != symbol.term.pure
            if symbol.term.kind == "prefill":
                self.stored.setdefault(symbol.content, {})[symbol.term] = piece.made
        return labels

    def same(self, identity: str, term: Term) -> None:
        assert self.term_of.setdefault(identity, term) is term
        assert self.identity_of.setdefault(term, identity) == identity
