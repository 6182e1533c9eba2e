"""Options of serving each piece of a window, and the actions that each of them takes."""

from collections.abc import Sequence
from typing import NamedTuple

from ..cache import BARE_WAYS, UNKNOWN_WAYS, Ways, contents_differ, identity, merged
from ..window import (
    BARE,
    KEEP,
    PREFILL,
    Action,
    Costs,
    Encodings,
    Entry,
    Executor,
    Fidelity,
    Piece,
    Service,
    Standing,
    Step,
    Window,
    total,
)
from .device_costs import DeviceCosts
from .inventory import AvailablePatch, PatchInventory
from .operating_points import Point


class ServingOption(NamedTuple):
    """One option of serving a piece.

    Attributes:
      point: its operating point.
      service: what `Window.arranged` takes.
      step: the actions that it takes.
      bytes, flops, seconds: of these actions; the launch that all rotations share is left out.
      ways: what a certificate bounds it by; none: its KV is what the window promises; `UNKNOWN_WAYS`: nothing does.
      inherits: whether it is computed from the pieces in front as they are served, and so inherits their error.
      patch: the patch that it uses.
    """

    point: Point
    service: Service
    step: Step
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


class ActionCounter:
    """Counts the actions of serving a piece, with the functions that an executor counts with."""

    def __init__(self, costs: Costs, inventory: PatchInventory, executor: Executor | None):
        """Stores what decides which canonicals and patches are read from a store."""
        self.costs, self.executor, self._inventory = costs, executor, inventory
        self._encodings = inventory.encodings if executor is None else executor.sources.encodings

    def kept(self, piece: Piece, before: Piece) -> Step:
        """Counts what a piece takes that stays as it is."""
        return () if piece.start == before.start else (self.costs.rotate(piece.id, piece.entry.tokens),)

    def forward(self, entry: Entry, front: str, tokens: int, composed: int) -> Step:
        """Counts a forward behind so many tokens up to piece `front`.

        In a hybrid model, so many transitions are composed for it.
        """
        forward = self.costs.prefill(entry.id, entry.tokens, tokens)
        compose = composed and self.costs.state_bytes
        return (self.costs.compose(front, composed), forward) if compose else (forward,)

    def restored(self, entry: Entry) -> Step:
        """Counts the placement of a stored prefill, which is always read from the store."""
        return self.costs.fetch(entry.id, entry.tokens), self.costs.copy(entry.id, entry.tokens)

    def placed(self, entry: Entry, patch: AvailablePatch | None = None) -> Step:
        """Counts the placement of a canonical, alone or with a patch. What is not in memory is fetched."""
        id, tokens, costs = entry.id, entry.tokens, self.costs
        if patch is None:
            fetched = [costs.fetch(id, tokens)] if self._is_read(entry, self._encodings) else []
            return *fetched, costs.copy(id, tokens)
        # Base and patch are two objects of a store. A removal patch is added to what the pool has.
        note, sources = patch.note, None if self.executor is None else self.executor.sources
        in_memory = patch.patch is not None or (sources is not None and note.digest in sources[id].patches)
        fetched = [] if in_memory else [Action("fetch", id, 0, note.nbytes, 0)]
        if note.base == "canonical" and self._is_read(entry, (patch.encoding,)):
            fetched.append(costs.fetch(id, tokens))
        return *fetched, costs.patch(id, tokens, note)

    def _is_read(self, entry: Entry, encodings: Encodings) -> bool:
        """Returns whether a canonical is read from the store: none in memory has one of these encodings."""
        chunk = self._inventory.chunks.get(entry.id)
        if chunk is None and self.executor is not None:
            chunk = self.executor.sources[entry.id].chunk
        if chunk is None or contents_differ(entry.content, chunk.content):
            return True
        # One as it was prefilled is encoded where the store has none.
        encodable = chunk.encoding is None and not self._inventory.stored_canonical(entry, encodings)
        return chunk.encoding not in encodings and not encodable


class OptionTable:
    """Options of every piece of an arranged window."""

    def __init__(
        self,
        before: Window,
        arranged: Window,
        inventory: PatchInventory,
        counter: ActionCounter,
        devices: DeviceCosts,
        forming: bool,
    ):
        """Stores the collaborators; nothing is looked up yet.

        Args:
          before: the window that is planned for.
          arranged: the window with all entries in their places: pieces stay as they are, and others are prefilled.
          forming: a chunk without a valid patch that is prefilled is "fresh".
        """
        self.arranged, self.inventory, self.counter = arranged, inventory, counter
        self._devices, self._forming = devices, forming
        self._rotation_launch = devices.rates("rotate").launch
        pieces = {piece.id: piece for piece in before.pieces}
        found = [pieces.get(piece.id) for piece in arranged.pieces]
        # Another entry of the same id comes in.
        self._before = [
            old if old is not None and old.entry == piece.entry else None
            for old, piece in zip(found, arranged.pieces, strict=True)
        ]
        # Survivors that lose what they have seen, because something in front is run again.
        self._unseen: set[int] = set()

    def options(self, promised_only: bool = False) -> list[list[ServingOption]]:
        """Returns the options of each piece. The first one is as the window promises, and the cheapest of that kind.

        Args:
          promised_only: returns the first one alone. Then no patches are looked up, except that `forming` needs to know
            whether a piece's patch exists.
        """
        table, tokens = [], 0
        for index, piece in enumerate(self.arranged.pieces):
            options = self._options(index, tokens, promised_only)
            table.append(options[:1] if promised_only else options)
            tokens += piece.entry.tokens
        return table

    def mark_unseen(self, selected: Sequence[ServingOption], served: Window) -> bool:
        """Withdraws options to keep a piece because of what it has seen, where the selection runs that again.

        Args:
          served: the window as the selection serves it.

        Returns:
          Whether any option was withdrawn: then `options` returns others, and the selection must be repeated.
        """
        count = len(self._unseen)
        for index, (option, standing) in enumerate(zip(selected, served.standings, strict=True)):
            if option.service is KEEP and standing.ways == UNKNOWN_WAYS != option.ways:
                self._unseen.add(index)
        return len(self._unseen) > count

    def steps(self, selected: Sequence[ServingOption], served: Window) -> tuple[Step, ...]:
        """Returns the actions that an executor takes for each piece of the window, served as selected."""
        executor = self.counter.executor
        composed = set() if executor is None else set(executor.composed)
        steps, made, tokens = list[Step](), (), 0
        for index, (piece, option, old) in enumerate(zip(served.pieces, selected, self._before, strict=True)):
            if old is not None and old.made == piece.made:
                steps.append(self.counter.kept(piece, old))
            elif option.service is PREFILL:
                # One transition is added to a composition of those in front of it.
                count = 0 if made in composed else 2 if made[:-1] in composed else index
                front = served.pieces[index - 1].id if index else ""
                steps.append(self.counter.forward(piece.entry, front, tokens, count))
                composed |= {made} if made else set()
            else:
                steps.append(option.step)
            made, tokens = (*made, piece.made), tokens + piece.entry.tokens
        return tuple(steps)

    # ---------------------------------------------------------------------------------------------- of one piece

    def _options(self, index: int, tokens: int, promised_only: bool) -> list[ServingOption]:
        """Returns the options of a piece behind so many tokens."""
        piece, standing, old = self.arranged.pieces[index], self.arranged.standings[index], self._before[index]
        entry, keep = piece.entry, list[ServingOption]()
        if old is not None:
            ways = UNKNOWN_WAYS if index in self._unseen else standing.ways
            keep.append(self._option(kept_point(piece, standing), KEEP, self.counter.kept(piece, old), ways))
            if not ways:
                return keep

        # At most as many transitions are composed; `steps` counts how many.
        front = self.arranged.pieces[index - 1].id if index else ""
        step = self.counter.forward(entry, front, tokens, index)
        forward = self._option("prefill", PREFILL, step, (), True)
        if entry.kind == "text":
            return [forward, *keep]

        # What is as promised comes first, the cheapest in front.
        restored = self._restored(index, standing)
        patched = [] if promised_only and not self._forming else self._patched(index, standing)
        if self._forming and index and old is None and all(option.ways == UNKNOWN_WAYS for option in patched):
            # A forward of a chunk that has no valid patch yet lets the former make one.
            forward = forward._replace(point="fresh")
        promised = sorted([*restored[:1], forward], key=lambda option: (bool(option.ways), option.seconds))
        options = [*promised, *restored[1:], *keep, *patched]
        if not promised_only and piece.method != "bare" and self.inventory.canonical(entry):
            options.append(self._option("bare", BARE, self.counter.placed(entry), BARE_WAYS))
        return options

    def _restored(self, index: int, standing: Standing) -> list[ServingOption]:
        """Returns the options that place a stored prefill; one that is as promised goes first."""
        prefills, entry = self.inventory.prefills, self.arranged.pieces[index].entry
        if prefills is None or not index:
            return []
        options, step = [], self.counter.restored(entry)
        promised = identity(entry.key, "prefill", standing.target)
        if prefills.may_have(entry.id, promised):
            options.append(self._option("restored", Service("restored", stored=promised), step))
        for likeness, made in prefills.alike(entry.id, self.arranged.likeness(entry.id)).items():
            if made != promised:
                service = Service("restored", stored=made, likeness=likeness)
                options.append(self._option(likeness, service, step, ((likeness, 0),)))
        return options

    def _patched(self, index: int, standing: Standing) -> list[ServingOption]:
        """Returns the options that use a patch."""
        piece, old, options = self.arranged.pieces[index], self._before[index], []
        entry = piece.entry
        for patch in self.inventory.patches(entry, standing.target, lambda: self.arranged.target(entry.id)):
            note, ways = patch.note, patch.ways
            if note.base != "canonical":
                # A removal patch is added to the KV of a piece that was conditioned on what is removed.
                base = note.base_antecedent
                if old is None or base is None or old.made != identity(entry.key, "prefill", base.identities):
                    continue
                ways = merged(ways, old.ways)
            # A piece that has this patch, of another order of the pieces in front say, stays as it is.
            if old is not None and old.made == identity(entry.key, f"patch {note.digest}"):
                step = self.counter.kept(piece, old)
            else:
                step = self.counter.placed(entry, patch)
            options.append(self._option(note.point, Service("patch", note), step, ways, False, patch))
        return options

    def _option(
        self,
        point: Point,
        service: Service,
        step: Step,
        ways: Ways = (),
        inherits: bool = False,
        patch: AvailablePatch | None = None,
    ) -> ServingOption:
        """Prices the actions of an option."""
        _, nbytes, flops = total(step)
        seconds = self._devices.seconds(step)
        if step and step[0].kind == "rotate":
            seconds -= self._rotation_launch
        return ServingOption(point, service, step, nbytes, flops, seconds, ways, inherits, patch)


_KEPT: dict[Fidelity, Point] = {"exact": "leading", "survivor": "survivor", "approximate": "kept"}


def kept_point(piece: Piece, standing: Standing) -> Point:
    """Returns the operating point of a piece that stays as it is."""
    if piece.method == "bare":
        return "bare"
    return "stored" if piece.method == "patch" else _KEPT[standing.fidelity]
