"""Choice of how a chunk enters a window: by a forward, by a stored patch, or as a plan says."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from ..cache import Antecedent
from ..errors import InputError, PatchMismatchError, ShapeError
from ..plan import AvailablePatch, PatchInventory, Plan, plan
from ..traces import Op
from ..window import (
    Encodings,
    Entry,
    Fetch,
    Likeness,
    PatchNote,
    Prefill,
    Recompute,
    StoredPrefills,
    Window,
    chain_digest,
    likeness_keys,
)
from .piece_registry import PieceRecord, PieceRegistry
from .session_config import Keep
from .session_input import SessionInput
from .window_keeper import DEFAULT_GOAL, WindowKeeper, WindowRoom

Method = Literal["leading", "prefill", "patch", "restored"]
"""How an entry is placed without a plan, as `Window.append` takes it."""


class Entrance(NamedTuple):
    """How an entry enters a window without a plan, as `Window.append` takes it."""

    method: Method
    patch: PatchNote | None = None
    behind: str | None = None
    likeness: Likeness | None = None


class LargestPatchInventory(PatchInventory):
    """Inventory for sessions without a certificate: for each antecedent the patch of the largest rank.

    It offers no bare canonical, which would be the cheapest option and has an unknown loss.
    """

    def canonical(self, entry: Entry) -> bool:
        """Returns False: no bare canonical is offered."""
        return False

    def serving(self, entry: Entry, target: str, antecedent: Callable[[], Antecedent]) -> list[AvailablePatch]:
        """Returns the patch of the largest rank; one for this very order goes before an orbit patch."""
        patches = super().serving(entry, target, antecedent)
        return sorted(patches, key=lambda patch: (patch.point == "orbit", -patch.note.rank))[:1]


class ReusePlanner:
    """Planner of how chunks enter a session's window.

    Attributes:
      keeper: says which chunks leave.
    """

    def __init__(self, registry: PieceRegistry, keep: Keep):
        self._registry, self.keeper = registry, WindowKeeper(registry, keep)

    def plan(self, items: tuple[Any, ...]) -> Plan:
        """Plans how inputs, or evicted chunks by name, would enter now, in this order. Runs nothing."""
        registry, window = self._registry, self._registry.window
        entries = []
        for item in items:
            if registry.knows(item):
                entries.append(registry.find(item).entry)
                continue

            read = registry.read(item)
            evicted = registry.find_evicted(read.content)
            if evicted is not None:
                entries.append(evicted.entry)
            else:
                _, piece_id = registry.new_names(read.content, None)
                kind = "text" if read.textual else "chunk"
                entries.append(registry.embed(read).entry(piece_id, read, kind, False))

        # Chunks leave in this plan as they would one after the other in `place`.
        return self._plan(self.keeper.make_room(window, entries).window, entries)

    def place(self, record: PieceRecord) -> None:
        """Places a new or evicted piece after all others, and counts whether that took a forward.

        Where the window is full, the oldest chunk leaves first.
        """
        room = self.keeper.make_room(self._registry.window, [record.entry])
        with self.keeper.admit(room):
            self._place(record, room)

    def _place(self, record: PieceRecord, room: WindowRoom) -> None:
        """Places a piece where there is room for it."""
        registry, entry = self._registry, record.entry
        evicted = entry.id in registry.window.evicted_by_id
        seen_before = evicted or self._is_stored(entry, registry.runtime.executor.encodings)

        # What follows a placeholder has not seen it, which only a plan knows to mend.
        stay, sliding = room.window, room.edits
        choice = self._plan(stay, [entry]) if room.placeholders else self._choose(stay, entry)
        entering = {each.entry.id: each for each in (record, *room.placeholders.values())}

        # At most twice: the second choice fetches nothing.
        while True:
            if isinstance(choice, Plan):
                window, edits = choice.window, choice.edits
            else:
                method, note, behind, likeness = choice
                if evicted:
                    enter = stay.recall(entry.id, method, note, behind=behind, likeness=likeness)
                else:
                    enter = stay.append(entry, method, note, behind=behind, likeness=likeness)
                window, edits = enter[0], (*sliding, *enter[1])
            try:
                # Only forwards read tokens. A chunk whose content was discarded can still be served by a patch.
                for edit in edits:
                    if isinstance(edit, Prefill | Recompute):
                        registry.provide_tokens(entering.get(edit.id) or registry.records[edit.id])
                registry.run(window, edits)
                break
            except (InputError, PatchMismatchError, ShapeError):
                # What the choice would fetch may have been deleted from the store since.
                if choice == Entrance("prefill") or not any(isinstance(edit, Fetch) for edit in edits):
                    raise
                # A plan mends the other pieces too. A budget may be met by what is stored alone.
                again = isinstance(choice, Plan) and (room.placeholders or not choice.goal.budgeted)
                choice = self._plan(stay, [entry], fetching=False) if again else Entrance("prefill")

        # Counted last: a call that raises has counted nothing.
        missed = any(isinstance(edit, Prefill) and edit.id == entry.id for edit in edits)
        if entry.kind == "chunk" and (seen_before or not missed):
            registry.counters["misses" if missed else "hits"] += 1
            patch_count = getattr(registry.runtime.store, "patch_count", None)
            if missed and patch_count is not None and patch_count(entry.id, registry.runtime.backbone.fingerprint):
                registry.counters["stale"] += 1

    def recall(self, record: PieceRecord, read: SessionInput | None) -> str:
        """Places an evicted chunk again, with its input if the caller gave it. Returns its name."""
        registry = self._registry
        if record.input is None:
            record.input = read
        self.place(record)
        registry.counters["recalled"] += 1
        registry.trim_evicted()
        self.notify("recall", record)
        return record.name

    def notify(self, op: Op, record: PieceRecord, items: Sequence[Any] = ()) -> None:
        """Notifies the watchers of a piece that was placed, and first of the placeholders that made room for it."""
        # In this order a trace replays: each event changes the window that the one before it left.
        for replaced, placeholder in self.keeper.placeholders.items():
            shown = () if placeholder.input is None else placeholder.input.items
            self._registry.notify("replace", placeholder, shown, replaced=replaced)
        self._registry.notify(op, record, items, keep=self.keeper.stayed)

    # -------------------------------------------------------------------------------------------------- inside

    def _choose(self, stay: Window, entry: Entry) -> Plan | Entrance:
        """Returns how an entry enters after the pieces that stay."""
        config, runtime = self._registry.config, self._registry.runtime

        # Behind the very pieces that precede it a stored prefill is what a forward would compute, so no plan is better.
        prefills, keys = self._prefills, dict[Likeness, str]()
        if prefills is not None and entry.kind == "chunk" and len(stay):
            evicted = entry.id in stay.evicted_by_id
            placed, _ = stay.recall(entry.id, "prefill") if evicted else stay.append(entry, "prefill")
            piece, keys = placed.pieces[-1], likeness_keys(placed.pieces, len(stay), placed.lead)

            # Behind approximate pieces it is approximate as a forward is: a plan may prefer to run those again.
            unplanned = config.uncertified and config.certificate is None
            if (stay.as_promised or unplanned) and prefills.may_have(entry.id, piece.front):
                return Entrance("restored")

        # The same is true of a canonical at the front of a window.
        alone = not len(stay) and entry.kind == "chunk" and runtime.executor.lead is None
        if alone and self._is_stored(entry, (None,)):
            return Entrance("leading")

        # Without certificate and goal, a plan comes to a forward. Planning would take longer than the choice.
        undemanding = not config.uncertified and config.certificate is None and config.goal is None
        if undemanding and stay.promise == "remember":
            return Entrance("prefill")

        # A patch for the very antecedent is what a plan would choose without a certificate.
        if config.uncertified and config.certificate is None and runtime.store is not None and entry.kind == "chunk":
            backbone = runtime.backbone
            encodings = runtime.executor.encodings
            if PatchInventory.of(runtime.store, backbone, encodings=encodings).canonical(entry):
                target = stay.target()
                digest = chain_digest(stay.backbone, target)
                inventory = LargestPatchInventory.of(runtime.store, backbone, encodings=encodings)
                for patch in inventory.serving(entry, digest, lambda: target):
                    if patch.note.base == "canonical":
                        return Entrance("patch", patch.note)

            # Without a patch for them, what was computed behind the same nearest piece, the most alike first.
            for likeness, behind in ({} if prefills is None else prefills.alike(entry.id, keys)).items():
                return Entrance("restored", behind=behind, likeness=likeness)

        return self._plan(stay, [entry])

    def _plan(self, stay: Window, entries: list[Entry], fetching: bool = True) -> Plan:
        """Plans the pieces that stay and the entries after them; with or without what is stored."""
        config, runtime = self._registry.config, self._registry.runtime
        # With a certificate every option has a bound by which it is compared; without one, ranks are all there is.
        certified = config.certificate is not None
        kind = LargestPatchInventory if config.uncertified and not certified else PatchInventory
        inventory = PatchInventory(runtime.backbone.fingerprint)
        if fetching:
            # Bounds were measured on canonicals as they were prefilled.
            encodings = (None,) if certified else runtime.executor.encodings
            inventory = kind.of(runtime.store, runtime.backbone, prefills=self._prefills, encodings=encodings)
        return plan(
            self._registry.window,
            [*(piece.entry for piece in stay.pieces), *entries],
            DEFAULT_GOAL if config.goal is None and certified else config.goal,
            stored=inventory,
            certificate=config.certificate,
            costs=config.costs,
            uncertified=config.uncertified,
            forming=runtime.former is not None and bool(runtime.former.rank),
        )

    @functools.cached_property
    def _prefills(self) -> StoredPrefills | None:
        """The stored prefills that this session may read; None without a store that keeps them."""
        runtime = self._registry.runtime
        if not StoredPrefills.supports(runtime.store):
            return None
        return StoredPrefills(runtime.store, runtime.backbone.fingerprint, runtime.executor.dtype)

    def _is_stored(self, entry: Entry, encodings: Encodings) -> bool:
        """Returns whether the store has an entry in one of these encodings, as far as it can say without reading."""
        store, fingerprint = self._registry.runtime.store, self._registry.runtime.backbone.fingerprint
        contains = getattr(store, "contains", None)
        if contains is None:
            return False
        for word in encodings:
            options = {} if word is None else {"encoding": word}
            if contains(entry.id, fingerprint, **options):
                return True
        return False
