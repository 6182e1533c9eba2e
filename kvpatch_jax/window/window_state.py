"""The immutable fields of a window, and the queries on them. The operations are in `window`."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal

from ..cache import EXACT, Antecedent, brief
from ..errors import WindowError
from .costs import Costs
from .entry import Fidelity, PlacedPiece
from .fidelity import promised_member
from .window_json import body_of, digest_of_body

Promise = Literal["remember", "forget"]

MOST_GONE = 512
"""Evicted chunks that can be recalled. Beyond that the oldest is forgotten, which bounds the cost of a step."""


def recallable(evicted: Sequence[PlacedPiece], leaving: Iterable[PlacedPiece]) -> tuple[PlacedPiece, ...]:
    """Returns what can be recalled after these pieces left: chunks, in the states that they are remembered in."""
    # Texts have no canonical to come back by.
    found = list(evicted)
    for piece in leaving:
        if piece.entry.kind == "chunk":
            state = dataclasses.replace(piece.state, kind="evicted")
            found.append(PlacedPiece(piece.entry, piece.start, state, None, piece.born, piece.placed))
    return tuple(found[-MOST_GONE:])


@dataclasses.dataclass(frozen=True, repr=False)
class WindowState:
    """Pieces of a window, in order, and the bookkeeping beside them.

    Queries that take an id raise `WindowError` if no piece of the window has it.

    Attributes:
      costs: of its backbone, whose fingerprint is the window's.
      pieces: what is placed, from the front, right behind one another.
      evicted: chunks that left and can be recalled, in the order in which they left; at most `MOST_GONE`.
      lead: how many pieces at the front are pinned: they never leave and never move.
      lead_settled: whether the lead is final; until then texts in front of the first chunk join it.
      promise: what the window is measured against: "remember" (the model if no token sees a chunk that had left by
        then) or "forget" (a prefill of the window as it is).
      branch: "", or the name that it began under; a fork's is its parent's, a slash and its own name.
      clock: how many placements there were.
    """

    costs: Costs
    pieces: tuple[PlacedPiece, ...] = ()
    evicted: tuple[PlacedPiece, ...] = ()
    lead: int = 0
    lead_settled: bool = False
    promise: Promise = "remember"
    branch: str = ""
    clock: int = 0

    @property
    def backbone(self) -> str:
        """Fingerprint of the backbone."""
        return self.costs.backbone

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the pieces, from the front."""
        return tuple(self.places)

    @property
    def gone(self) -> tuple[str, ...]:
        """Ids of the evicted chunks, the oldest first."""
        return tuple(self.evicted_by_id)

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """Index of every piece from the front, by id."""
        # Cached: a step looks up ids many times, and a window never changes.
        return {piece.entry.id: index for index, piece in enumerate(self.pieces)}

    @functools.cached_property
    def evicted_by_id(self) -> dict[str, PlacedPiece]:
        """Evicted pieces by id."""
        return {piece.entry.id: piece for piece in self.evicted}

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id in self.places

    def __len__(self) -> int:
        return len(self.pieces)

    def __bool__(self) -> bool:
        # An empty window is a window: without this its length would make it false.
        return True

    @property
    def next_start(self) -> int:
        """Where what is appended is placed."""
        return self.pieces[-1].end if self.pieces else 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all pieces."""
        return sum(piece.entry.tokens for piece in self.pieces)

    @property
    def sink_left(self) -> bool:
        """Whether the tokens that the first piece was made behind have left, and the attention sink with them.

        KV that is kept then differs far more from a prefill than otherwise. A pinned lead prevents it.
        """
        # Conditioned and not exact at the front: it was made behind something that is gone.
        return bool(self.pieces) and self.pieces[0].state.kind == "conditioned" and self.pieces[0].fidelity != EXACT

    @property
    def as_promised(self) -> bool:
        """Whether the KV of every piece is what the window promises there (`fidelity`)."""
        return not any(piece.ways for piece in self.pieces)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of everything, 32 hexadecimal digits."""
        return digest_of_body(body_of(self))

    def index(self, id: str) -> int:
        """Returns the index of a piece from the front."""
        try:
            return self.places[id]
        except (KeyError, TypeError):
            # The message shows the last pieces, of which the id is most likely a misspelling.
            found = "evicted" if isinstance(id, str) and id in self.evicted_by_id else "not in the window"
            shown = brief(id) if isinstance(id, str) else id
            ids = ", ".join(repr(brief(piece.entry.id)) for piece in self.pieces[-8:])
            more = f"… of {len(self.pieces)}, " if len(self.pieces) > 8 else ""
            raise WindowError(
                f"window.id: got {shown!r:.80}, which is {found}; expected one of ({more}{ids})"
            ) from None

    def piece(self, id: str) -> PlacedPiece:
        """Returns a piece."""
        return self.pieces[self.index(id)]

    def start(self, id: str) -> int:
        """Returns the start of a piece: where its positions count from."""
        return self.piece(id).start

    def fidelity(self, id: str) -> Fidelity:
        """Returns how faithfully a piece is served.

        "exact": its KV is that of a prefill of this window as it is, and everything in front is exact too.

        "survivor": its KV is that of the model if no token sees a chunk that had left by then (the banded mask). So it
        was prefilled in all layers behind pieces that were exact or survivors then, and it has seen everything that is
        in front of it now: the same pieces, in this order, none of which was run again to another result since. It
        remembers what left since. How those in front are served now does not matter, because its KV is its own.

        "approximate": anything else. Patched or bare; recomputed from a higher layer; behind something that it has not
        seen there (inserted, recalled, replaced, moved or run again), until that leaves or it is prefilled itself; and
        prefilled behind a piece that was approximate then, for as long as that KV lives: a piece is as faithful as the
        least faithful one that it was ever conditioned on.

        The words do not depend on the window's promise; `as_promised` does. If the window remembers, exact pieces and
        survivors are as promised; it promises what came in front of others to those as well, so they are approximate.
        If it forgets, only exact pieces are.
        """
        return self.piece(id).fidelity

    def behind(self, id: str | None = None) -> int:
        """Counts the tokens in front of a piece, or of what will be appended."""
        index = len(self.pieces) if id is None else self.index(id)
        return sum(piece.entry.tokens for piece in self.pieces[:index])

    def antecedent(self, id: str | None = None) -> Antecedent:
        """Returns what precedes a piece, or what will be appended, as it is served.

        A prefill there is conditioned on this, and so is the patch formed of it.
        """
        return Antecedent(tuple(piece.member for piece in self._front(id)))

    def target(self, id: str | None = None) -> Antecedent:
        """Returns what a patch must have been formed behind to serve a piece there, or one that will be appended.

        Those in front as they would have to be served: where the window remembers, survivors as they are; all others as
        a prefill in their place would have them.
        """
        return Antecedent(tuple(promised_member(piece) for piece in self._front(id)))

    def _front(self, id: str | None) -> tuple[PlacedPiece, ...]:
        """Returns the pieces in front of a piece, or of what will be appended."""
        return self.pieces if id is None else self.pieces[: self.index(id)]

    def __repr__(self) -> str:
        # The whole window can be long, so pieces are only counted here.
        name = f"branch {self.branch!r}, " if self.branch else ""
        counts = f"{len(self.pieces)} pieces, {self.tokens} tokens, {len(self.evicted)} evicted"
        return f"Window({name}{counts}, next at {self.next_start}, {self.promise}, lead {self.lead})"

    def __str__(self) -> str:
        # One line for each piece: positions, kind, id, and what is special about it.
        lines = [repr(self)]
        width = len(str(self.next_start))
        for index, piece in enumerate(self.pieces):
            entry, marks = piece.entry, []

            if index < self.lead:
                marks.append("lead")
            if piece.state.kind != "conditioned":
                marks.append(piece.state.kind)
            if entry.order_free:
                marks.append("order-free")

            place = f"{piece.start:>{width}}–{piece.end - 1:<{width}}"
            words = ", ".join([f"{entry.tokens} tokens", piece.fidelity, *marks])
            lines.append(f"  {place}  {entry.kind:<5}  {brief(entry.id)!r}: {words}")

        return "\n".join(lines)
