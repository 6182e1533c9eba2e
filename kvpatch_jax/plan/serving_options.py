"""What each piece of a window could be served by, and what each of these ways takes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..cache import Antecedent
from ..window import (
    KEEP,
    PREFILL,
    AtHand,
    Entry,
    Fidelity,
    PlacedPiece,
    Rearrangement,
    ServingChoice,
    Window,
    chain_digest,
    tuple_of,
)
from .device_costs import DeviceCosts, Rates
from .inventory import AvailablePatch, PatchInventory
from .operating_points import Point

Way = tuple[str, int]
"""A point and a rank, as a certificate has rows of them."""
BARE_WAY: Way = ("bare", 0)
UNKNOWN: Way = ("", 0)
"""Of a piece that is approximate in a way that nobody knows: nothing bounds it."""


class ServingOption(NamedTuple):
    """One way of serving a piece.

    Attributes:
      point: its operating point. service: what a window is told.
      stocked: the patch, where it is one. rank: its rank.
      way: what a certificate is asked for; None: its KV is what the window promises. `UNKNOWN`: nothing bounds it.
      open: whether it is made behind what stands in front now, and so takes over what is wrong there.
    """

    point: Point
    service: ServingChoice
    bytes: int
    flops: int
    seconds: float
    way: Way | None = None
    open: bool = False
    stocked: AvailablePatch | None = None

    @property
    def rank(self) -> int:
        """Of its patch; 0 without one."""
        return 0 if self.stocked is None else self.stocked.note.rank


class EditPricing:
    """What edits of a window take on a device."""

    def __init__(self, arranged: Rearrangement, devices: DeviceCosts, at_hand: AtHand | None):
        """Takes the rates down."""
        self.costs = arranged.window.costs
        self.at_hand = at_hand
        self.prefill, self.recompute, self.apply, self.copy, self.fetch, self.turn = (
            devices.rates(kind) for kind in ("Prefill", "Recompute", "ApplyPatch", "Copy", "Fetch", "Rotate")
        )
        copied, turned = self.costs.copy(1), self.costs.rotate(1)
        self._copy = copied["bytes"], copied["flops"]
        self._turn = turned["bytes"], turned["flops"]
        self._bare: dict[int, tuple[int, int, float]] = {}
        self._patched: dict[tuple[int, int, int], tuple[int, int, float]] = {}

    def forward(self, entry: Entry, behind: int, again: bool) -> tuple[int, int, float]:
        """Bytes, FLOPs and seconds of a prefill, or of a recompute in place."""
        tokens, costs = entry.tokens, self.costs
        rates = self.recompute if again else self.prefill
        return _priced(costs.kv_bytes * (tokens + behind), costs.run(tokens, behind), rates)

    def turned(self, tokens: int) -> tuple[int, int, float]:
        """Of turning keys, without the launch, which all that turn share."""
        nbytes, flops = self._turn[0] * tokens, self._turn[1] * tokens
        return nbytes, flops, flops * self.turn.flop + nbytes * self.turn.byte

    def bare(self, entry: Entry, here: bool = False) -> tuple[int, int, float]:
        """Of placing a canonical, or what was kept aside (`here`)."""
        tokens = entry.tokens
        found = self._bare.get(tokens)
        if found is None:
            found = _priced(self._copy[0] * tokens, self._copy[1] * tokens, self.copy)
            self._bare[tokens] = found
        nbytes, flops, seconds = found
        if not here and not (self.at_hand is not None and self.at_hand(entry.id, None)):
            fetched = self.costs.kv_bytes * tokens
            return nbytes + fetched, flops, seconds + self.fetch.launch + fetched * self.fetch.byte
        return nbytes, flops, seconds

    def patched(self, entry: Entry, stocked: AvailablePatch) -> tuple[int, int, float]:
        """Of placing a base with a patch."""
        note, tokens = stocked.note, entry.tokens
        found = self._patched.get((tokens, note.nbytes, note.flops))
        if found is None:
            placing, adding = self._copy[0] * tokens + note.nbytes, (self._copy[1] + note.flops) * tokens
            found = self._patched[tokens, note.nbytes, note.flops] = _priced(placing, adding, self.apply)
        nbytes, flops, seconds = found
        hand, fetch, fetched = self.at_hand, self.fetch, 0
        if note.base == "canonical" and not (hand is not None and hand(entry.id, None)):
            fetched += self.costs.kv_bytes * tokens
            seconds += fetch.launch
        if not (hand is not None and hand(entry.id, note.digest)):
            fetched += note.nbytes
            seconds += fetch.launch
        return nbytes + fetched, flops, seconds + fetched * fetch.byte


def _priced(nbytes: int, flops: int, rates: Rates) -> tuple[int, int, float]:
    return nbytes, flops, rates.launch + flops * rates.flop + nbytes * rates.byte


class OptionTable:
    """The options of every piece of an arranged window."""

    def __init__(
        self,
        arranged: Rearrangement,
        stock: PatchInventory,
        priced: EditPricing,
        *,
        known: Mapping[str, Way],
        encoded: Any,
        forming: bool,
        allow_stale: bool,
    ):
        """Nothing looked up yet. Arguments as those of `plan`."""
        self.arranged, self.stock, self.priced = arranged, stock, priced
        self.known, self.encoded, self.forming, self.allow_stale = known, encoded, forming, allow_stale
        self.forget = arranged.window.promise == "forget"
        self._unseen: set[int] = set()
        self._bare: dict[tuple[int, float], ServingOption] = {}

    def options(self, promised: bool = False) -> list[list[ServingOption]]:
        """For each piece its options: the first one is as the window promises, and the cheapest of that kind.

        Args:
          promised: that one alone, for which no patches are looked up (but where it is to be told whether a piece's
            patch is still to be formed).
        """
        arranged, behind, found = self.arranged, 0, []
        starts = {piece[0].id: piece[1] for piece in arranged.before.pieces}
        few = promised and not self.forming
        for index, (piece, kept) in enumerate(zip(arranged.window.pieces, arranged.kept, strict=True)):
            if kept:
                own = self._standing(index, piece, behind, starts, few)
            else:
                own = self._coming(index, piece, behind, few)
            found.append(own[:1] if promised else own)
            behind += piece[0].tokens
        return found

    def repair(self, index: int) -> ServingOption | None:
        """What a canonical with 15 % of its tokens recomputed would take, which no edit does; None without one."""
        window = self.arranged.window
        entry = window.pieces[index].entry
        if entry.kind == "text" or not self.stock.canonical(entry):
            return None
        count, bare = math.ceil(0.15 * entry.tokens), self.priced.bare(entry)
        again = self.priced.forward(dataclasses.replace(entry, tokens=count), window.behind(entry.id), again=True)
        nbytes, flops, seconds = (own + more for own, more in zip(bare, again, strict=True))
        return ServingOption("repair", _BARE, int(nbytes), int(flops), seconds, ("repair", 15))

    def _coming(self, index: int, piece: PlacedPiece, behind: int, few: bool) -> list[ServingOption]:
        """Of a piece that comes in."""
        entry, priced = piece.entry, self.priced
        nbytes, flops, seconds = priced.forward(entry, behind, again=False)
        if few or entry.kind == "text":
            point = "encoded" if entry.id in self.encoded else "prefill"
            return [ServingOption(point, PREFILL, nbytes, flops, seconds, None, True)]
        patched = self._patched(index, entry)
        point: Point = "encoded" if entry.id in self.encoded else "prefill"
        if self.forming and index and point == "prefill" and all(option.way == UNKNOWN for option in patched):
            point = "fresh"
        options = [tuple_of(ServingOption, (point, PREFILL, nbytes, flops, seconds, None, True, None)), *patched]
        if self.stock.canonical(entry):
            options.append(self._alone(entry))
        return options

    def _alone(self, entry: Entry) -> ServingOption:
        """By the canonical alone: one and the same option of all that take as much."""
        nbytes, flops, seconds = self.priced.bare(entry)
        found = self._bare.get((nbytes, seconds))
        if found is None:
            found = self._bare[nbytes, seconds] = ServingOption("bare", _BARE, nbytes, flops, seconds, BARE_WAY)
        return found

    def _patched(self, index: int, entry: Entry, kept: PlacedPiece | None = None) -> list[ServingOption]:
        """By what patches a piece could be served at its place."""
        target, options = self.arranged.targets.digests[index], []
        found = self.stock.serving(entry, target, lambda: self._antecedent(index))
        for stocked in found:
            note = stocked.note
            if note.base == "canonical" or (kept is not None and self._has_base(stocked, kept)):
                nbytes, flops, seconds = self.priced.patched(entry, stocked)
                way, service = (stocked.point, note.rank), tuple_of(ServingChoice, ("patch", note, False))
                fields = stocked.point, service, nbytes, flops, seconds, way, False, stocked
                options.append(tuple_of(ServingOption, fields))
        if self.allow_stale:
            serving = {stocked.note.digest for stocked in found}
            for stocked in self.stock.stale(entry, target):
                if stocked.note.digest not in serving:
                    service = ServingChoice("patch", stocked.note, allow_stale=True)
                    numbers = self.priced.patched(entry, stocked)
                    options.append(ServingOption(stocked.point, service, *numbers, UNKNOWN, stocked=stocked))
        return options

    def _has_base(self, stocked: AvailablePatch, kept: PlacedPiece) -> bool:
        """Whether a piece stands as what a removal patch is added to."""
        base, state = stocked.note.base_antecedent, kept.aside or kept.state
        return (
            base is not None and state.kind == "conditioned" and state.behind == chain_digest(self.stock.backbone, base)
        )

    def _antecedent(self, index: int) -> Antecedent:
        window = self.arranged.window
        return window.target(window.pieces[index].entry.id)

    def _standing(
        self, index: int, piece: PlacedPiece, behind: int, starts: Mapping[str, int], few: bool
    ) -> list[ServingOption]:
        """Of a piece that stands in the window already."""
        entry, priced = piece.entry, self.priced
        turn = priced.turned(entry.tokens) if starts[entry.id] != piece.start else (0, 0, 0.0)
        if self._is_promised(index, piece):
            return [ServingOption(kept_point(piece), KEEP, *turn)]
        nbytes, flops, seconds = priced.forward(entry, behind, again=True)
        taken = nbytes + turn[0], flops + turn[1], seconds + turn[2]
        again = tuple_of(ServingOption, ("prefill", PREFILL, *taken, None, True, None))
        restored = piece.state.kind == "bare" and self._is_promised(index, piece, aside=True)
        if few and not restored:
            return [again]
        keep = ServingOption(kept_point(piece), KEEP, *turn, self._kept_way(index, piece))
        if entry.kind == "text":
            return [again, keep]
        options = [again, keep, *self._patched(index, entry, piece)]
        if piece.state.kind != "bare" and self.stock.canonical(entry):
            options.append(self._alone(entry))
        if restored:
            options.insert(0, ServingOption("survivor", _RESTORE, *priced.bare(entry, here=True)))
        return options

    def _is_promised(self, index: int, piece: PlacedPiece, aside: bool = False) -> bool:
        """Whether a piece's KV is what the window promises there, however those in front are served.

        It was computed behind the very front that a prefill there is to see; or it is a survivor that is remembered.
        """
        state = piece.aside if aside else piece.state
        if state is None or state.kind != "conditioned" or not state.pure:
            return False
        if state.behind == self.arranged.targets.digests[index]:
            return True
        return self._has_seen(index, piece) and index < self.arranged.targets.kept and not self.forget

    def _has_seen(self, index: int, piece: PlacedPiece) -> bool:
        """Whether a piece has seen all that stands in front of it, as far as it is known how that will be served."""
        seen = index == 0 or self.arranged.window.pieces[index - 1].latest <= piece.born
        return seen and index not in self._unseen

    def refuse_unseen(self, chosen: Sequence[ServingOption], there: Window) -> bool:
        """Refuses to keep pieces for what they have seen where what was chosen in front of them is run again.

        Args:
          there: the window as it would be served.

        Returns:
          Whether there are any: then the options are others, and all has to be chosen again.
        """
        before, pieces = len(self._unseen), self.arranged.window.pieces
        for index, (option, piece) in enumerate(zip(chosen, there.pieces, strict=True)):
            bounded = option.service.how == "keep" and option.way not in (None, UNKNOWN, BARE_WAY)
            unseen = index > 0 and there.pieces[index - 1].latest > piece.born
            if bounded and unseen and self._has_seen(index, pieces[index]):
                self._unseen.add(index)
        return len(self._unseen) > before

    def _kept_way(self, index: int, piece: PlacedPiece) -> Way:
        """What a certificate is asked for, of a piece that is approximate and stays as it is."""
        state = piece.state
        if state.kind == "bare":
            return BARE_WAY
        if state.kind == "conditioned":
            kept = self.forget or index < self.arranged.targets.kept
            if state.pure and kept and self._has_seen(index, piece):
                return "survivor", 0
            # What is known of it was said behind what it was made behind; what has left it is not to remember.
            same = state.behind == piece.front if self.forget else self._has_seen(index, piece)
            return self.known.get(state.digest, UNKNOWN) if same else UNKNOWN
        if self._has_seen(index, piece) and not self.forget:  # it remembers, as a survivor does
            return self.known.get(state.digest, ("stored", state.rank))
        if state.behind == self._antecedent(index).digest:
            return self.known.get(state.digest, ("stored", state.rank))
        return UNKNOWN


_BARE = ServingChoice("bare")
_RESTORE = ServingChoice("restore")


_CONDITIONED: dict[Fidelity, Point] = {"exact": "leading", "survivor": "survivor", "approximate": "kept"}


def kept_point(piece: PlacedPiece) -> Point:
    """The point of a piece that stays as it is."""
    if piece.state.kind == "bare":
        return "bare"
    if piece.state.kind == "patched":
        return "stored"
    return _CONDITIONED[piece.fidelity]
