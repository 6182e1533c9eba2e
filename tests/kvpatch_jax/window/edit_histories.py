"""Whole histories of KV, made by executing a window's edits on symbols: what its claims are held against.

It knows no digests and no clocks. A history is the number of a tuple (`Histories`): how KV was made and, of a forward,
the content and history of everything in front of it then.
"""

from typing import Any

from window_model import Histories

from kvpatch_jax.window import ApplyPatch, Copy, Drop, Edits, Fetch, Prefill, Recompute, Window

ANY = frozenset([("", 0)])
"""Approximations of unknown size."""


class EditHistories:
    """The pieces of one window, with the history of each one's KV as it is, and as it would be as promised."""

    def __init__(self) -> None:
        self.histories = Histories()
        self.list: list[dict[str, Any]] = []
        self.stored: dict[tuple[str, str], int] = {}
        self.notes: dict[str, int] = {}
        self.ranks: dict[str, tuple[str, int]] = {}

    def copy(self) -> "EditHistories":
        """Another branch: histories and what is stored are shared."""
        other = EditHistories()
        other.histories, other.stored = self.histories, self.stored
        other.notes, other.ranks = self.notes, self.ranks
        other.list = [dict(piece) for piece in self.list]
        return other

    # ----------------------------------------------------------------------------------------------- execution

    def run(self, after: Window, edits: Edits, alike: dict[str, str] | None = None, emptied: bool = False) -> None:
        """Executes edits in their order; places are those of the window afterwards, which other tests check.

        `alike`: what is restored from elsewhere, and how that is alike. `emptied`: the pool was lost before.
        """
        held = {piece["id"]: piece for piece in self.list}
        for edit in edits:
            if isinstance(edit, Drop):
                del held[edit.id]
        made = [edit for edit in edits if isinstance(edit, Copy | ApplyPatch | Prefill | Recompute)]
        new = {edit.id for edit in made if edit.id not in held}
        entries = {piece.id: piece for piece in after.pieces}
        for id in new:
            entry = entries[id].entry
            held[id] = {"id": id, "key": entry.key, "stale": False}
        self.list = [held[id] for id in after.ids]

        again = set(new)
        for edit in made:
            own, index = held[edit.id], after.index(edit.id)
            if isinstance(edit, Prefill | Recompute):
                if isinstance(edit, Recompute) and edit.start_layer:
                    own["kv"] = self.histories.number(("deep", (), own["kv"], edit.start_layer))
                else:
                    own["kv"] = self.forward(index, [piece["kv"] for piece in self.list[:index]])
                    again.add(edit.id)
            elif isinstance(edit, ApplyPatch):
                again.update(() if emptied else (edit.id,))
                base = () if edit.base == "canonical" else (own["kv"],)
                own["kv"] = self.histories.number(("patch", (), edit.patch, base))
            elif edit.source == "canonical":
                again.update(() if emptied else (edit.id,))
                own["kv"] = self.histories.number(("bare", ()))
            elif edit.source == "prefill":
                own["kv"] = self.restored(edit.id, edits)
                if edit.id in (alike or {}):
                    own["kv"] = self.histories.number(("alike", (), own["kv"], (alike or {})[edit.id]))
                again.add(edit.id)

        # What comes in, or is made again, is from now on as promised behind what is in front of it now. A patch belongs
        # where it was formed: behind these very histories.
        for index, piece in enumerate(self.list):
            if piece["id"] in again:
                piece["promised"] = self.forward(index, self.promises(index))
                piece["stands"] = self.target(index, after.promise)
                kind, _, *more = self.made(piece["kv"])
                piece["stale"] = kind == "patch" and self.is_stale(more[0], index, after)

    def forward(self, index: int, front: list[int]) -> int:
        """The history that a forward at an index makes, if those in front have these histories."""
        story = tuple((piece["key"], kv) for piece, kv in zip(self.list[:index], front[:index], strict=True))
        return self.histories.number(("prefill", story))

    def restored(self, id: str, edits: Edits) -> int:
        """The history of a stored prefill, by what the edits fetch."""
        fetched = [edit for edit in edits if isinstance(edit, Fetch) and edit.what == "prefill" and edit.id == id]
        return self.stored[id, fetched[0].digest or ""]

    def remember(self, window: Window) -> None:
        """Notes what was prefilled behind which digest; one digest never names two histories."""
        for own, piece in zip(self.list, window.pieces, strict=True):
            if piece.state.kind == "conditioned" and piece.state.patch is None and self.made(own["kv"])[0] == "prefill":
                assert self.stored.setdefault((piece.id, piece.state.behind), own["kv"]) == own["kv"]

    # -------------------------------------------------------------------------------------------------- truths

    def made(self, history: int) -> Any:
        """How a history came about."""
        return self.histories.made[history]

    def promises(self, stop: int, held: bool = False) -> list[int]:
        """The histories that the first pieces would have as promised: what each has seen of all in front, it keeps.

        `held`: only what it has; anything else is made again, behind what is in front now.
        """
        found: list[int] = []
        for index, piece in enumerate(self.list[:stop]):
            seen = iter(self.made(piece["promised"])[1])
            front = zip((front["key"] for front in self.list), found, strict=False)
            kept = all(each in seen for each in front)
            kept = kept and (not held or piece["promised"] == piece["kv"])
            found.append(piece["promised"] if kept else self.forward(index, found))
        return found

    def prefills(self) -> list[int]:
        """The histories of a prefill of the window as it is, where it is."""
        found: list[int] = []
        for index in range(len(self.list)):
            found.append(self.forward(index, found))
        return found

    def target(self, index: int, promise: str) -> int:
        """The history of a forward at an index, once everything in front that is not as promised was made again."""
        return self.forward(index, self.promises(index, True) if promise == "remember" else self.prefills()[:index])

    def fidelities(self, promise: str) -> list[str]:
        """How faithfully each piece is served."""
        found, truth, promised, exact = [], self.prefills(), self.as_promised(promise), True
        banded = self.as_promised("remember")
        for index, piece in enumerate(self.list):
            exact = exact and piece["kv"] == truth[index]
            found.append("exact" if exact else "survivor" if promised[index] or banded[index] else "approximate")
        return found

    def as_promised(self, promise: str) -> list[bool]:
        """Whether each piece's KV is what the window promises: as things went, or once the others are made again."""
        count = len(self.list)
        wanted = [self.promises(count), self.promises(count, True)] if promise == "remember" else [self.prefills()]
        return [piece["kv"] in own for piece, *own in zip(self.list, *wanted, strict=True)]

    def approximations(self, history: int) -> frozenset[tuple[str, int]]:
        """All approximations that KV of this history went through, in itself or in what it was computed behind."""
        kind, story, *more = self.made(history)
        if kind == "bare":
            return frozenset([("bare", 0)])
        if kind == "deep":
            return ANY
        if kind == "patch":
            return frozenset([self.ranks[more[0]]]).union(*(self.approximations(base) for base in more[1]))
        if kind == "alike":
            return frozenset([(more[1], 0)])
        return frozenset().union(*(self.approximations(kv) for _, kv in story))

    def bounds(self, index: int, ways: tuple[tuple[str, int], ...], promise: str) -> bool:
        """Whether these ways say everything in which a piece differs from what the window promises."""
        piece = self.list[index]
        kind = self.made(piece["kv"])[0]
        remembers, own = promise == "remember", self.approximations(piece["kv"])
        if not own:
            banded = self.as_promised("remember")[index]
            return self.as_promised(promise)[index] or (banded and ("survivor", 0) in ways)
        if (kind == "patch" and piece["stale"]) or not own <= set(ways):
            return False
        if kind == "bare":
            return True
        # It has seen, in its own way, all that is in front of it; where the window forgets, that and nothing else.
        if remembers:
            return piece["promised"] == self.promises(index + 1)[index] or (
                kind in ("patch", "alike") and piece["stands"] == self.target(index, promise)
            )
        there = [front["kv"] for front in self.list[:index]]
        return (
            piece["kv"] == self.forward(index, there)
            if kind == "prefill"
            else piece["stands"] == self.target(index, promise)
        )

    def note(self, digest: str, index: int, orbit: bool, window: Window) -> None:
        """Notes behind what a patch was formed: one of an orbit behind exact pieces, in any order."""
        self.notes[digest] = self.place(index, orbit, window.promise)

    def place(self, index: int, orbit: bool, promise: str) -> Any:
        """What must be equal for a patch to belong at an index."""
        if not orbit:
            return self.target(index, promise)
        exact = self.target(index, promise) == self.forward(index, self.prefills()[:index])
        return tuple(sorted(piece["key"] for piece in self.list[:index])) if exact else None

    def is_stale(self, digest: str, index: int, window: Window) -> bool:
        """Whether a patch was formed behind something else than is promised in front of an index."""
        orbit = isinstance(self.notes[digest], tuple)
        return self.notes[digest] != self.place(index, orbit, window.promise)
