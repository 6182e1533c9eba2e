"""A window as a list of dictionaries that keep whole histories: what `kvpatch_jax.window` is held against.

It digests nothing. How a piece's KV was made is a tuple of all that it was made behind, and how that was made, each
kept once (`Histories`), so that equal histories are equal numbers.
"""

from typing import Any


class Histories:
    """Numbers for histories: equal ones have equal numbers."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.made: list[Any] = []

    def number(self, history: Any) -> int:
        """The number of a history, a new one if it was never met."""
        if history not in self.known:
            self.known[history] = len(self.made)
            self.made.append(history)
        return self.known[history]


class NaiveWindow:
    """The same operations, on a list of dictionaries: id, content, tokens, span, start, kv, promised, text, free.

    `kv` is the history of the KV as it is served. `promised` is the one that it would have if it, and all that it was
    made behind, had been prefilled, each behind what stood there at the time: the model under the banded mask. A piece
    is a survivor if the two are one and `promises` has it still; what came in front of it since, it has not seen.
    """

    def __init__(self, lead: int | None) -> None:
        self.lead, self.settled = lead or 0, lead is not None
        self.list: list[dict[str, Any]] = []
        self.gone: dict[str, dict[str, Any]] = {}
        self.next = 0
        self.histories = Histories()

    def prefilled(self, index: int, front: list[int] | None = None) -> int:
        """What a prefill at an index makes, behind what stands in front, as it is (or as `front` has it)."""
        story = []
        for place in range(index):
            piece = self.list[place]
            story.append((piece["content"], piece["kv"] if front is None else front[place]))
        return self.histories.number(("prefill", tuple(story)))

    def settle(self) -> None:
        """Moves everything right behind one another."""
        at = 0
        for piece in self.list:
            piece["start"] = at
            at += piece["span"]
        self.next = at

    def place(self, piece: dict[str, Any], index: int, how: Any) -> None:
        """Places a piece; `how` is "prefill", or what its KV is otherwise."""
        if not self.settled:
            self.settled = not piece["text"]
            if piece["text"] or not self.list:
                self.lead = len(self.list) + 1
        self.list.insert(index, piece)
        self.settle()
        piece["kv"] = self.prefilled(index) if how == "prefill" else self.histories.number(how)
        piece["promised"] = self.as_promised(index)
        self.gone.pop(piece["id"], None)

    def as_promised(self, index: int) -> int:
        """What a prefill at an index makes behind what is promised of those in front."""
        return self.prefilled(index, self.promises(index))

    def promises(self, stop: int) -> list[int]:
        """The histories that the first pieces would have if each had seen, of what stands in front of it, all.

        A piece that saw the very ones in this order keeps what it saw, chunks that have left among it. One that did not
        (something came in front of it, or is another since) would have to be made behind what stands there now.
        """
        found: list[int] = []
        for index, piece in enumerate(self.list[:stop]):
            seen = iter(self.histories.made[piece["promised"]][1])
            front = zip((front["content"] for front in self.list), found, strict=False)
            found.append(piece["promised"] if all(each in seen for each in front) else self.prefilled(index, found))
        return found

    def run_again(self, index: int) -> None:
        """Prefills a piece in its place: from now on it is another one to those behind, unless that is the same."""
        piece = self.list[index]
        piece["kv"], piece["promised"] = self.prefilled(index), self.as_promised(index)

    def anew(self) -> None:
        """Prefills from the front what was prefilled before; what is bare or patched stays so."""
        for index, piece in enumerate(self.list):
            if self.histories.made[piece["kv"]][0] in ("prefill", "deep"):
                self.run_again(index)
            else:
                piece["promised"] = self.as_promised(index)

    def fork(self) -> "NaiveWindow":
        """A branch: pieces of its own, histories shared."""
        branch = NaiveWindow(self.lead)
        branch.lead, branch.settled, branch.next, branch.histories = self.lead, self.settled, self.next, self.histories
        branch.list = [dict(piece) for piece in self.list]
        branch.gone = {id: dict(piece) for id, piece in self.gone.items()}
        return branch

    def remove(self, ids: list[str]) -> None:
        """Takes pieces out; chunks can come back."""
        for piece in [piece for piece in self.list if piece["id"] in ids]:
            self.list.remove(piece)
            if not piece["text"]:
                self.gone[piece["id"]] = piece
        self.settle()

    def reorder(self, ids: list[str]) -> None:
        """Fills the places of these pieces in this order."""
        places = sorted(place for place, piece in enumerate(self.list) if piece["id"] in ids)
        moved = [next(piece for piece in self.list if piece["id"] == id) for id in ids]
        for place, piece in zip(places, moved, strict=True):
            self.list[place] = piece
        self.settle()

    def fidelities(self) -> list[str]:
        """How truly each piece is served, by comparison with what a prefill of the window would make."""
        found, truth, exact, promises = [], [], True, self.promises(len(self.list))
        for index, piece in enumerate(self.list):
            truth.append(self.prefilled(index, truth))
            exact = exact and piece["kv"] == truth[-1]
            kept = piece["kv"] == promises[index] == piece["promised"]
            found.append("exact" if exact else "survivor" if kept else "approximate")
        return found
