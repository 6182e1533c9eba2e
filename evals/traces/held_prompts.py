"""Prompts of agents that let old screenshots leave in batches, replace them in place, drop them, or keep them all.

Behind a prefix cache it costs little to show more than is needed: what a trace's window does not show any more stays
until many leave together. A prompt held so always shows what the trace's window shows, in its order.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from kvpatch_jax.window import Entry


class HoldingRule(NamedTuple):
    """What becomes of pieces that a trace's window shows no more.

    Attributes:
      high: chunks that may be shown; once there would be more, all that the window does not show leave together. None:
        nothing leaves.
      texts: whether texts stay then.
      placeholder: a text that takes the place of each chunk that leaves; None: nothing does.
      once: whether a piece that comes back while it is still shown stays in its place, as in a session; a prompt has
        it once more.
    """

    high: int | None
    texts: bool = False
    placeholder: Entry | None = None
    once: bool = False


@dataclasses.dataclass
class HeldPrompt:
    """Prompt of one session, under a rule.

    Attributes:
      pieces: in order, what left its window and is still shown included.
      placed: placeholders so far, for their ids.
    """

    rule: HoldingRule
    pieces: tuple[Entry, ...] = ()
    placed: int = 0

    def show(self, wanted: Sequence[Entry]) -> tuple[Entry, ...]:
        """Returns the prompt that shows a window's pieces, which from now on is the session's.

        What enters follows all that is shown; unless a piece is shown once, what comes back or changes places enters
        again.
        """
        pieces, stays, at, entering = list(self.pieces), set[int](), 0, 0
        if self.rule.once:
            shown, needed = {entry.id for entry in self.pieces}, {entry.id for entry in wanted}
            pieces += [entry for entry in wanted if entry.id not in shown]
            stays = {place for place, entry in enumerate(pieces) if entry.id in needed}
        else:
            # Greedily in order: as many of the wanted pieces as are shown in this order.
            for entry in wanted:
                place = next((place for place in range(at, len(pieces)) if pieces[place].id == entry.id), None)
                if place is None:
                    break
                stays.add(place)
                at, entering = place + 1, entering + 1
            pieces += wanted[entering:]
            stays |= set(range(len(self.pieces), len(pieces)))

        chunks = sum(entry.kind == "chunk" for entry in pieces)
        if self.rule.high is not None and chunks > self.rule.high:
            pieces = self._without(pieces, stays)
        self.pieces = tuple(pieces)
        return self.pieces

    def _without(self, pieces: Sequence[Entry], stays: set[int]) -> list[Entry]:
        """Returns pieces without the chunks that need not stay, and without such texts unless they are kept."""
        kept = list[Entry]()
        for place, entry in enumerate(pieces):
            if place in stays or (entry.kind == "text" and self.rule.texts):
                kept.append(entry)
            elif entry.kind == "chunk" and self.rule.placeholder is not None:
                self.placed += 1
                kept.append(dataclasses.replace(self.rule.placeholder, id=f"left {self.placed}"))
        return kept

    def branch(self) -> "HeldPrompt":
        """Returns the prompt of a branch that starts here."""
        return dataclasses.replace(self)
