"""How chunks enter a session's window: what leaves for them, what takes its place, and what they are served by."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..cache import brief, chunk_id
from ..errors import InputError, KVPatchError, PatchMismatchError, SessionError, ShapeError
from ..plan import Inventory, Plan, is_ruled_out, plan
from ..window import Entry, Kind, Window
from .config import Keep
from .inputs import EmbeddedInput, SessionInput, embedded
from .pieces import PieceBook, PieceRecord


class Room(NamedTuple):
    """A window without what leaves, how many chunks may stay (None: all), and placeholders by the name of the chunk."""

    window: Window
    stayed: int | None
    placeholders: dict[str, PieceRecord]


class Placer:
    """Places pieces in a session's window.

    Attributes:
      book: of the window.
      keep: the number of chunks that stay after the lead, as `Session` takes it.
    """

    def __init__(self, book: PieceBook, keep: Keep):
        self.book, self.keep = book, keep

    def add(
        self,
        read: SessionInput,
        name: str | None = None,
        order_free: bool = False,
        kind: Kind | None = None,
        *,
        before: str | None = None,
        lead: bool = False,
    ) -> str:
        """Places an input as `Session.add` does, or in front of a piece as `Session.insert`. Returns its name.

        Args:
          before: id of the piece that will follow it; None: it is placed behind all others, or recalled.
          lead: whether it is pinned: a first text is not split.
        """
        book, op, fields = self.book, "insert", {}
        if before is not None:
            fields["before"] = book.names([before])[0]
        else:
            # The name of a medium in a message may come again although it was forgotten here.
            op, name = "add", read.name if name is None and not book.was_used(read.name) else name
            evicted = book.find_evicted(read.content, name)
            if evicted is not None:
                return self.recall(evicted, read)
        records, tokens = book.new_records(read, name, order_free, kind, lead or before is not None)
        *sinks, record = records
        with book.entering(records, tokens):
            room = self._enter(op, record, before, sinks)
        book.counters["added"] += 1
        book.trim()
        self._notify(op, record, room, read.items, **fields)
        return record.name

    def recall(self, record: PieceRecord, read: SessionInput | None) -> str:
        """Places an evicted chunk again, with its input if the caller gave it. Returns its name."""
        if record.input is None:
            record.input = read
        room = self._enter("recall", record)
        self.book.counters["recalled"] += 1
        self.book.trim()
        self._notify("recall", record, room)
        return record.name

    def replace(self, old: PieceRecord, read: SessionInput, name: str | None, order_free: bool) -> str:
        """Places an input in the place of a piece, as `Session.replace` does. Returns its name."""
        book = self.book
        (record,), tokens = book.new_records(read, name, order_free, None, True)
        with book.entering([record], tokens):
            window = book.window.replace(old.entry.id, record.entry)
            book.run("replace", self._plan(window, [piece.entry for piece in window.pieces]).window)
        book.counters["added"] += 1
        book.trim()
        book.notify("replace", record, read.items, replaced=old.name)
        return record.name

    def plan(self, items: Sequence[Any]) -> Plan:
        """Plans how inputs, or evicted chunks by name, would enter now, in this order. Runs nothing."""
        book, entries = self.book, list[Entry]()
        for item in items:
            if book.knows(item):
                entries.append(book.find(item).entry)
                continue
            read = book.read(item)
            evicted = book.find_evicted(read.content)
            if evicted is not None and evicted.entry not in entries:
                entries.append(evicted.entry)
                continue
            _, piece_id = book.new_names(read.content, None)
            # The same input twice is two pieces.
            piece_id += f" {len(entries)}" if piece_id in [entry.id for entry in entries] else ""
            kind = "text" if read.textual else "chunk"
            entries.append(book.embed(read).entry(piece_id, read, kind, False))
        stay = self._make_room(book.window, entries).window
        return self._plan(book.window, [*(piece.entry for piece in stay.pieces), *entries])

    def mend(self) -> None:
        """Serves pieces of kinds that the guard has ruled out anew, where there is room for that."""
        window, ruled_out = self.book.window, self.book.guard.ruled_out
        pairs = zip(window.pieces, window.standings, strict=True) if ruled_out else ()
        if any(is_ruled_out(piece, standing.ways, ruled_out) for piece, standing in pairs):
            try:
                self.book.run("mend", self._plan(window, [piece.entry for piece in window.pieces]).window)
            except KVPatchError as error:
                # No room, or a content that was discarded: they stay until something enters or leaves.
                if getattr(error, "lost", False):
                    raise

    # --------------------------------------------------------------------------------------------------------- inside

    def _notify(self, op: Any, record: PieceRecord, room: Room, items: Sequence[Any] = (), **fields: Any) -> None:
        """Notifies the watchers of a piece that was placed, and first of the placeholders that made room for it."""
        # In this order a trace replays: each event changes the window that the one before it left.
        for replaced, placeholder in room.placeholders.items():
            shown = () if placeholder.input is None else placeholder.input.items
            self.book.notify("replace", placeholder, shown, replaced=replaced)
        self.book.notify(op, record, items, keep=room.stayed, **fields)

    def _enter(
        self, op: str, record: PieceRecord, before: str | None = None, sinks: Sequence[PieceRecord] = ()
    ) -> Room:
        """Places a new or evicted piece, and counts whether that took a forward.

        Where the window is full, the oldest chunk leaves first. What has not seen a placeholder, or a piece that enters
        in front of it, is mended as the policy says. `sinks` are placed in front of the piece in the same step.
        """
        book, entry, window = self.book, record.entry, self.book.window
        for sink in sinks:
            window = window.append(sink.entry)
        room = self._make_room(window, [entry])
        if before is not None and before not in room.window:
            found = f"{brief(book.names([before])[0])!r}, which leaves to make room"
            raise SessionError(f"{op}: got {found} (keep={self.keep}); expected a piece that stays")
        evicted, store = entry.id in window.gone, book.runtime.store
        # Asked before it is placed, because what is prefilled is then stored in the background.
        seen = evicted or entry.kind == "text" or self._is_stored(entry, book.runtime.executor.sources.encodings)
        placeholders = room.placeholders.values()
        with book.entering(placeholders, self._placeholder[1] if placeholders and self._placeholder else None):
            step = self._place(op, room.window, entry, before)
        book.counters["placeholders"] += len(placeholders)

        # Counted last: a call that raises has counted nothing.
        missed = ("prefill", entry.id) in [(action.kind, action.id) for action in step]
        if entry.kind == "chunk" and (seen or not missed):
            book.counters["misses" if missed else "hits"] += 1
            if missed and hasattr(store, "patch_count"):
                count: Any = store
                book.counters["stale"] += bool(count.patch_count(entry.id, book.runtime.backbone.fingerprint))
        return room

    def _make_room(self, window: Window, entering: Sequence[Entry]) -> Room:
        """Returns a window without the chunks that leave before so many others enter. Changes nothing.

        Given `(low, high)`, the oldest leave down to `low` when the window would exceed `high`.
        """
        count = [entry.kind for entry in entering].count("chunk")
        low, high = self.keep if isinstance(self.keep, tuple) else (self.keep, self.keep)
        # The first piece is pinned: nothing leaves for it.
        if low is None or high is None or not count or not len(window):
            return Room(window, high, {})
        chunks = [piece for piece in window.pieces[window.lead :] if piece.entry.kind == "chunk"]
        if len(chunks) + count <= high:
            return Room(window, high, {})
        stay = max(low - count, 0)
        if self._placeholder is None:
            return Room(window.slide(stay), low, {})

        read, tokens = self._placeholder
        placeholders = dict[str, PieceRecord]()
        for piece in chunks[: len(chunks) - stay]:
            # Named after the chunk whose place it takes.
            replaced = self.book.names([piece.id])[0]
            name, number = f"{replaced} left", 1
            while self.book.was_used(name) or name in [other.name for other in placeholders.values()]:
                number += 1
                name = f"{replaced} left#{number}"
            # Another session of the runtime may have another text under this name.
            record = PieceRecord(tokens.entry(f"{name} {read.content}", read, "text", False), name, read)
            window = window.replace(piece.id, record.entry)
            placeholders[replaced] = record
        return Room(window, low, placeholders)

    def _place(self, op: str, stay: Window, entry: Entry, before: str | None) -> Any:
        """Runs the window with an entry where there is room for it; a second choice fetches nothing."""
        entries = [piece.entry for piece in stay.pieces]
        entries.insert(len(entries) if before is None else stay.index(before), entry)
        for fetching in (True, False):
            plan = self._plan(stay, entries, fetching)
            try:
                return self.book.run(op, plan.window)
            except (InputError, PatchMismatchError, ShapeError):
                # What the choice would fetch may have been deleted from the store since.
                if not fetching or all(piece.method == "prefill" for piece in plan.window.pieces):
                    raise
        raise AssertionError("the second choice fetches nothing")

    def _plan(self, window: Window, entries: Sequence[Entry], fetching: bool = True) -> Plan:
        """Plans a window of these entries, with or without what is stored."""
        config, runtime = self.book.config, self.book.runtime
        inventory = None
        if fetching and runtime.store is not None:
            # Bounds were measured on canonicals as they were prefilled.
            encodings = (None,) if config.certificate is not None else runtime.executor.sources.encodings
            prefills = runtime.executor.sources.prefills
            inventory = Inventory.of(runtime.store, runtime.backbone, prefills=prefills, encodings=encodings)
        goal, ruled_out = self.book.guard.goal, self.book.guard.ruled_out
        options: dict[str, Any] = {"certificate": config.certificate, "prices": runtime.executor.costs}
        return plan(window, entries, goal, stored=inventory, ruled_out=ruled_out, **options)

    def _is_stored(self, entry: Entry, encodings: Sequence[str | None]) -> bool:
        """Returns whether the store has a canonical in one of these encodings, as far as it can say without reading."""
        store: Any = self.book.runtime.store
        if not hasattr(store, "contains"):
            return False
        for option in [{} if word is None else {"encoding": word} for word in encodings]:
            if store.contains(entry.id, self.book.runtime.backbone.fingerprint, **option):
                return True
        return False

    @functools.cached_property
    def _placeholder(self) -> tuple[SessionInput, EmbeddedInput] | None:
        """The text that takes the place of a chunk, embedded once; None if chunks leave nothing."""
        config, backbone = self.book.config, self.book.runtime.backbone
        if config.placeholder is None:
            return None
        items = self.book.text_items(config.placeholder)
        return SessionInput(tuple(items), chunk_id(backbone.fingerprint, *items), True), embedded(backbone, items)
