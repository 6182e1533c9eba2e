"""A window as a list of dictionaries that keep whole histories: what `kvpatch_jax.window` is held against.

It digests nothing. How a piece's KV was made is a tuple of all that it was made behind, and how that was made, each
kept once (`Histories`), so that equal histories are equal numbers.
"""

from typing import Any


class Histories:
    """Numbers for histories: equal ones have equal numbers. `pure` says which are prefills behind prefills alone."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.made: list[Any] = []
        self.pure: list[bool] = []

    def number(self, history: Any) -> int:
        """The number of a history, a new one if it was never met."""
        if history not in self.known:
            self.known[history] = len(self.made)
            self.made.append(history)
            kind, front = history[:2]
            self.pure.append(kind == "prefill" and all(self.pure[kv] for _, kv, _ in front))
        return self.known[history]


class NaiveWindow:
    """The same operations, on a list of dictionaries: id, content, tokens, span, start, kv, text, free."""

    def __init__(self, gaps: str, lead: int | None) -> None:
        self.gaps, self.lead, self.settled = gaps, lead or 0, lead is not None
        self.list: list[dict[str, Any]] = []
        self.gone: dict[str, dict[str, Any]] = {}
        self.next = 0
        self.histories = Histories()

    def prefilled(self, index: int, front: list[int] | None = None) -> int:
        """What a prefill at an index makes, behind what stands in front, as it is (or as `front` has it)."""
        story = []
        for place in range(index):
            piece, then = self.list[place], self.list[place + 1]
            kv = piece["kv"] if front is None else front[place]
            story.append((piece["content"], kv, then["start"] - piece["start"] - piece["span"]))
        return self.histories.number(("prefill", tuple(story)))

    def settle(self) -> None:
        """Moves everything up, where gaps close."""
        if self.gaps == "keep":
            return
        at = 0
        for piece in self.list:
            piece["start"] = at
            at += piece["span"]
        self.next = at

    def place(self, piece: dict[str, Any], index: int, how: Any, old: int | None = None) -> None:
        """Places a piece; `how` is "prefill", or what its KV is otherwise."""
        behind = self.list[index:]
        low = self.list[index - 1]["start"] + self.list[index - 1]["span"] if index else 0
        if not behind:
            piece["start"] = self.next
        elif behind[0]["start"] - low >= piece["span"]:
            fits = old is not None and low <= old <= behind[0]["start"] - piece["span"]
            piece["start"] = old if fits else low
        else:
            more = low + piece["span"] - behind[0]["start"]
            piece["start"] = low
            for other in behind:
                other["start"] += more
            self.next += more
        self.next = max(self.next, piece["start"] + piece["span"])
        if not self.settled:
            self.settled = not piece["text"]
            if piece["text"] or not self.list:
                self.lead = len(self.list) + 1
        self.list.insert(index, piece)
        self.settle()
        piece["kv"] = self.prefilled(index) if how == "prefill" else self.histories.number(how)
        self.gone.pop(piece["id"], None)

    def remove(self, ids: list[str]) -> None:
        """Takes pieces out; chunks can come back."""
        for piece in [piece for piece in self.list if piece["id"] in ids]:
            self.list.remove(piece)
            if not piece["text"]:
                self.gone[piece["id"]] = piece
        self.settle()

    def reorder(self, ids: list[str]) -> None:
        """Fills the places of these pieces in this order, with what is free in front of each place as it was."""
        free = [
            piece["start"] - (self.list[place - 1]["start"] + self.list[place - 1]["span"] if place else 0)
            for place, piece in enumerate(self.list)
        ]
        places = sorted(place for place, piece in enumerate(self.list) if piece["id"] in ids)
        moved = [next(piece for piece in self.list if piece["id"] == id) for id in ids]
        for place, piece in zip(places, moved, strict=True):
            self.list[place] = piece
        at = 0
        for piece, gap in zip(self.list, free, strict=True):
            piece["start"] = at + gap
            at = piece["start"] + piece["span"]

    def fidelities(self) -> list[str]:
        """How truly each piece is served, by comparison with what a prefill of the window would make."""
        found, truth, exact = [], [], True
        for index, piece in enumerate(self.list):
            truth.append(self.prefilled(index, truth))
            if index:
                before = self.list[index - 1]
                exact = exact and piece["start"] == before["start"] + before["span"]
            exact = exact and piece["kv"] == truth[-1]
            found.append("exact" if exact else "survivor" if self.has_seen(index) else "approximate")
        return found

    def has_seen(self, index: int) -> bool:
        """Whether a piece was prefilled behind prefills, among them all that stand in front now, in this order."""
        kv = self.list[index]["kv"]
        if not self.histories.pure[kv]:
            return False
        seen = iter([content for content, _, _ in self.histories.made[kv][1]])
        return all(piece["content"] in seen for piece in self.list[:index])
