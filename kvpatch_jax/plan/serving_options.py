"""Options of serving each piece of a window, and what each of them costs."""

from collections.abc import Sequence
from typing import NamedTuple

from ..cache import Antecedent
from ..window import (
    BARE_WAYS,
    KEEP,
    PREFILL,
    UNKNOWN_WAYS,
    AtHand,
    Entry,
    Fidelity,
    PlacedPiece,
    Rearrangement,
    ServingChoice,
    Ways,
    Window,
    chain_digest,
    likeness_keys,
    merged,
    tuple_of,
)
from .device_costs import DeviceCosts, Rates
from .inventory import AvailablePatch, PatchInventory
from .operating_points import Point

_BARE = ServingChoice("bare")

Cost = tuple[int, int, float]
"""Bytes, FLOPs and seconds."""


class ServingOption(NamedTuple):
    """One option of serving a piece.

    Attributes:
      point: its operating point.
      choice: what `Rearrangement.serve` is given.
      bytes, flops, seconds: of its edits.
      ways: what a certificate bounds it by; none: its KV is what the window promises; `UNKNOWN_WAYS`: nothing does.
      inherits: whether it is computed from the pieces in front as they are served, and so inherits their error.
      patch: the patch that it uses.
    """

    point: Point
    choice: ServingChoice
    bytes: int
    flops: int
    seconds: float
    ways: Ways = ()
    inherits: bool = False
    patch: AvailablePatch | None = None

    @property
    def rank(self) -> int:
        """Rank of its patch; 0 without one."""
        return 0 if self.patch is None else self.patch.note.rank


class EditPricing:
    """Costs of one window's edits on a device."""

    def __init__(self, arranged: Rearrangement, devices: DeviceCosts, at_hand: AtHand | None):
        """Reads the rates once: a plan prices every option of hundreds of pieces."""
        self.costs = arranged.window.costs
        self.at_hand = at_hand
        self._prefill, self._recompute = devices.rates("Prefill"), devices.rates("Recompute")
        self._apply, self._copy = devices.rates("ApplyPatch"), devices.rates("Copy")
        self._fetch, self._rotate = devices.rates("Fetch"), devices.rates("Rotate")
        self._compose = devices.rates("Compose")

        rotated = self.costs.rotate(1)
        self._copy_flops = self.costs.copy_flops
        self._rotate_bytes, self._rotate_flops = rotated["bytes"], rotated["flops"]
        self._placed: dict[int, Cost] = {}
        self._patched: dict[tuple[int, ...], Cost] = {}

    def forward(self, entry: Entry, preceding: int, pieces: int, again: bool) -> Cost:
        """Returns the cost of a prefill, or of a recompute in place (`again`), behind so many tokens of so many
        pieces, whose transitions are composed first.
        """
        rates = self._recompute if again else self._prefill
        nbytes = self.costs.forward_bytes(entry.tokens, preceding)
        priced = _priced(nbytes, self.costs.run(entry.tokens, preceding), rates)
        if not pieces or not self.costs.transition_bytes:
            return priced
        composed = self.costs.compose(pieces)
        return _sum(priced, _priced(composed["bytes"], composed["flops"], self._compose))

    def rotation(self, tokens: int) -> Cost:
        """Returns the cost of rotating keys, without the launch, which all rotations share."""
        nbytes, flops = self._rotate_bytes * tokens, self._rotate_flops * tokens
        return nbytes, flops, flops * self._rotate.flop + nbytes * self._rotate.byte

    def bare(self, entry: Entry) -> Cost:
        """Returns the cost of placing a canonical."""
        placed = self._copied(entry.tokens)

        # A canonical that is not in memory is read from the store first.
        if self.at_hand is not None and self.at_hand(entry.id, None):
            return placed
        return self._fetched(placed, entry.tokens)

    def _copied(self, tokens: int) -> Cost:
        placed = self._placed.get(tokens)
        if placed is None:
            nbytes = self.costs.placing_bytes(tokens)
            placed = self._placed[tokens] = _priced(nbytes, self._copy_flops * tokens, self._copy)
        return placed

    def _fetched(self, placed: Cost, tokens: int) -> Cost:
        """Returns the cost of placing what is read from a store first."""
        nbytes, flops, seconds = placed
        fetched = self.costs.fetch(tokens)["bytes"]
        return nbytes + fetched, flops, seconds + self._fetch.launch + fetched * self._fetch.byte

    def restored(self, entry: Entry) -> Cost:
        """Returns the cost of placing a stored prefill, which is always read from the store."""
        return self._fetched(self._copied(entry.tokens), entry.tokens)

    def patched(self, entry: Entry, patch: AvailablePatch) -> Cost:
        """Returns the cost of placing a base with a patch."""
        note, tokens = patch.note, entry.tokens
        key = tokens, note.nbytes, note.flops, note.transition_flops
        placed = self._patched.get(key)
        if placed is None:
            nbytes = self.costs.placing_bytes(tokens) + note.nbytes
            flops = (self._copy_flops + note.flops) * tokens + note.transition_flops
            placed = self._patched[key] = _priced(nbytes, flops, self._apply)

        # Base and patch are two objects of a store, each with a launch of its own.
        nbytes, flops, seconds = placed
        at_hand, fetched = self.at_hand, 0
        if note.base == "canonical" and not (at_hand is not None and at_hand(entry.id, None)):
            fetched += self.costs.fetch(tokens)["bytes"]
            seconds += self._fetch.launch

        if not (at_hand is not None and at_hand(entry.id, note.digest)):
            fetched += note.nbytes
            seconds += self._fetch.launch
        return nbytes + fetched, flops, seconds + fetched * self._fetch.byte


def _priced(nbytes: int, flops: int, rates: Rates) -> Cost:
    return nbytes, flops, rates.launch + flops * rates.flop + nbytes * rates.byte


def _sum(first: Cost, second: Cost) -> Cost:
    return first[0] + second[0], first[1] + second[1], first[2] + second[2]


class OptionTable:
    """Options of every piece of an arranged window."""

    def __init__(self, arranged: Rearrangement, inventory: PatchInventory, pricing: EditPricing, forming: bool):
        """Stores the collaborators; nothing is looked up yet.

        Args:
          forming: a chunk without a valid patch that is prefilled is "fresh".
        """
        self.arranged, self.inventory, self.pricing = arranged, inventory, pricing
        self._forming = forming
        self._forgets = arranged.window.promise == "forget"
        self._bare_options: dict[tuple[int, float], ServingOption] = {}

        # Pieces that will not have seen all that precedes them, because something in front is run again.
        self._unseen: set[int] = set()

    def options(self, promised_only: bool = False) -> list[list[ServingOption]]:
        """Returns the options of each piece. The first one is as the window promises, and the cheapest of that kind.

        Args:
          promised_only: returns the first one alone. Then no patches are looked up, except that `forming` needs to know
            whether a piece's patch exists.
        """
        arranged = self.arranged
        starts = {piece[0].id: piece[1] for piece in arranged.before.pieces}
        skip_patches = promised_only and not self._forming

        table, preceding = [], 0

        for index, (piece, kept) in enumerate(zip(arranged.window.pieces, arranged.kept, strict=True)):
            if kept:
                moved = starts[piece[0].id] != piece.start
                options = self._of_present(index, piece, preceding, moved, skip_patches)
            else:
                options = self._of_new(index, piece[0], preceding, skip_patches)
            table.append(options[:1] if promised_only else options)
            preceding += piece[0].tokens

        return table

    def mark_unseen(self, selected: Sequence[ServingOption], served: Window) -> bool:
        """Withdraws options to keep a piece because of what it has seen, where the selection runs that again.

        Args:
          served: the window as the selection would serve it.

        Returns:
          Whether any option was withdrawn: then `options` returns others, and the selection must be repeated.
        """
        # Serving the window linked it again, so that the piece says now what it is behind what is run again.
        before = len(self._unseen)
        for index, (option, piece) in enumerate(zip(selected, served.pieces, strict=True)):
            if option.choice.how == "keep" and piece.ways == UNKNOWN_WAYS != option.ways:
                self._unseen.add(index)
        return len(self._unseen) > before

    # ---------------------------------------------------------------------------------------- new pieces

    def _of_new(self, index: int, entry: Entry, preceding: int, skip_patches: bool) -> list[ServingOption]:
        """Returns the options of a piece that was not in the window before."""
        forward = self.pricing.forward(entry, preceding, index, again=False)
        prefill = ServingOption("prefill", PREFILL, *forward, (), True)
        if entry.kind == "text":
            return [prefill]

        restored = self._restored(index, entry)
        if skip_patches:
            return [*(own for own in restored if not own.ways), prefill]

        # A forward of a chunk that has no valid patch yet lets the former make one.
        patched = self._patched(index, entry)
        unknown_only = all(option.ways == UNKNOWN_WAYS for option in patched)
        if self._forming and index and unknown_only:
            prefill = prefill._replace(point="fresh")
        options = [prefill, *patched]
        # What is as promised comes first, the cheapest in front.
        cheaper = bool(restored) and not restored[0].ways and restored[0].seconds <= forward[2]
        options = [*restored, *options] if cheaper else [*options, *restored]
        if self.inventory.canonical(entry):
            options.append(self._canonical_alone(entry))
        return options

    def _restored(self, index: int, entry: Entry) -> list[ServingOption]:
        """Returns the options that place a stored prefill; one that is as promised goes first."""
        prefills = self.inventory.prefills
        if prefills is None or not index:
            return []

        options, cost = [], self.pricing.restored(entry)
        window = self.arranged.window
        target = window.pieces[index].target
        if prefills.may_have(entry.id, target):
            options.append(ServingOption("restored", ServingChoice("restored", behind=target), *cost))
        for point, front in prefills.alike(entry.id, likeness_keys(window.pieces, index, window.lead)).items():
            if front != target:
                choice = ServingChoice("restored", behind=front, likeness=point)
                options.append(ServingOption(point, choice, *cost, ((point, 0),)))
        return options

    def _canonical_alone(self, entry: Entry) -> ServingOption:
        """Returns the option "bare". Pieces of equal cost share one object, which makes large tables quicker."""
        nbytes, flops, seconds = self.pricing.bare(entry)
        option = self._bare_options.get((nbytes, seconds))
        if option is None:
            option = ServingOption("bare", _BARE, nbytes, flops, seconds, BARE_WAYS)
            self._bare_options[nbytes, seconds] = option
        return option

    def _patched(self, index: int, entry: Entry, present: PlacedPiece | None = None) -> list[ServingOption]:
        """Returns the options that use a patch, for a new piece or one that is in the window (`present`)."""
        target, options = self.arranged.window.pieces[index].target, []
        for patch in self.inventory.serving(entry, target, lambda: self._antecedent(index)):
            note, ways = patch.note, patch.ways
            if note.base != "canonical":
                # A removal patch is added to the KV of a piece that was conditioned on what is removed.
                base, state = note.base_antecedent, None if present is None else present.state
                if state is None or base is None or state.kind != "conditioned":
                    continue
                if state.behind != chain_digest(self.inventory.backbone, base):
                    continue
                ways = merged(ways, state.ways)

            # Without the checks of a constructor, because a table may have thousands of options.
            nbytes, flops, seconds = self.pricing.patched(entry, patch)
            choice = tuple_of(ServingChoice, ("patch", note, False, None, None))
            options.append(tuple_of(ServingOption, (note.point, choice, nbytes, flops, seconds, ways, False, patch)))

        return options

    def _antecedent(self, index: int) -> Antecedent:
        window = self.arranged.window
        return window.target(window.pieces[index].entry.id)

    # ----------------------------------------------------------------------------- pieces of the window before

    def _of_present(
        self, index: int, piece: PlacedPiece, preceding: int, moved: bool, skip_patches: bool
    ) -> list[ServingOption]:
        """Returns the options of a piece that is in the window already."""
        entry, pricing, promised = piece.entry, self.pricing, piece.promised
        rotation = pricing.rotation(entry.tokens) if moved else (0, 0, 0.0)
        # It has not seen what will be run again; but that may turn out to be what it was computed behind.
        unseen = index in self._unseen
        if unseen and promised is not None and promised.behind != piece.target:
            promised = None
        if promised is piece.state:
            return [ServingOption(kept_point(piece), KEEP, *rotation)]

        # It is not as promised: a forward makes it so.
        nbytes, flops, seconds = pricing.forward(entry, preceding, index, again=True)
        taken = nbytes + rotation[0], flops + rotation[1], seconds + rotation[2]
        again = tuple_of(ServingOption, ("prefill", PREFILL, *taken, (), True, None))
        # What a forward there would compute may be stored.
        stored = [own for own in self._restored(index, entry) if not own.ways] if entry.kind == "chunk" else []
        if skip_patches:
            return [*stored, again]

        # A bare canonical has seen nothing, so nothing is lost by that.
        ways = UNKNOWN_WAYS if unseen and piece.state.kind != "bare" else piece.ways
        keep = ServingOption(kept_point(piece), KEEP, *rotation, ways)
        if entry.kind == "text":
            return [again, keep]

        options = [*stored, again, keep, *self._patched(index, entry, piece)]
        if piece.state.kind != "bare" and self.inventory.canonical(entry):
            options.append(self._canonical_alone(entry))
        return options


_KEPT_CONDITIONED: dict[Fidelity, Point] = {"exact": "leading", "survivor": "survivor", "approximate": "kept"}


def kept_point(piece: PlacedPiece) -> Point:
    """Returns the operating point of a piece that stays as it is."""
    if piece.state.kind == "bare":
        return "bare"
    if piece.state.kind == "patched":
        return "stored"
    return _KEPT_CONDITIONED[piece.fidelity]
