"""How chunks enter a session's window: what leaves for them, what takes its place, and what they are served by."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..cache import Text, chunk_id
from ..errors import InputError, PatchMismatchError, ShapeError
from ..plan import Goal, PatchInventory, Plan, plan
from ..window import BARE, PREFILL, Entry, Service, StoredPrefills, Window
from .config import Keep
from .inputs import EmbeddedInput, SessionInput, embedded
from .pieces import PieceBook, PieceRecord


class Room(NamedTuple):
    """A window with room for what enters.

    Attributes:
      window: without what leaves, and with the placeholders.
      stayed: the number of chunks that may stay, those that enter included. None: all.
      placeholders: records of the texts that take the place of chunks, by the name of the chunk.
    """

    window: Window
    stayed: int | None
    placeholders: dict[str, PieceRecord]


class Placer:
    """Places pieces in a session's window.

    Attributes:
      keep: the number of chunks that stay after the lead, as `Session` takes it.
    """

    def __init__(self, book: PieceBook, keep: Keep):
        self._book, self.keep = book, keep

    def enter(self, op: str, record: PieceRecord, before: str | None = None, sinks: Sequence[PieceRecord] = ()) -> Room:
        """Places a new or evicted piece, and counts whether that took a forward.

        Where the window is full, the oldest chunk leaves first. What has not seen a placeholder, or a piece that enters
        in front of it, is mended as the policy says.

        Args:
          before: id of the piece that will follow it; None: it is placed behind all others.
          sinks: placed in front of it in the same step.
        """
        book, entry, window = self._book, record.entry, self._book.window
        for sink in sinks:
            window = window.append(sink.entry)
        room = self.make_room(window, [entry])
        evicted, seen_before = entry.id in book.window.gone, self._was_seen(entry)
        records = room.placeholders.values()
        try:
            for placeholder in records:
                book.provide(placeholder, None if self._placeholder is None else self._placeholder[1])
                book.records[placeholder.entry.id] = placeholder
            book.records.setdefault(entry.id, record)
            step = self._place(op, room.window, entry, before, bool(room.placeholders) or before is not None)
        except BaseException:
            for placeholder in records:
                book.forget(placeholder)
                del book.records[placeholder.entry.id]
            if not evicted and entry.id not in book.ids.values():
                book.records.pop(entry.id, None)
            raise
        for placeholder in records:
            book.register(placeholder)
        book.counters["placeholders"] += len(records)

        # Counted last: a call that raises has counted nothing.
        missed = any(action.kind == "prefill" and action.id == entry.id for action in step)
        if entry.kind == "chunk" and (seen_before or not missed):
            book.counters["misses" if missed else "hits"] += 1
            patch_count = getattr(book.runtime.store, "patch_count", None)
            if missed and patch_count is not None and patch_count(entry.id, book.runtime.backbone.fingerprint):
                book.counters["stale"] += 1
        return room

    def make_room(self, window: Window, entering: Sequence[Entry]) -> Room:
        """Returns a window without the chunks that leave before so many others enter. Changes nothing.

        Given `(low, high)`, the oldest leave down to `low` when the window would exceed `high`.
        """
        count = sum(entry.kind == "chunk" for entry in entering)
        chunks = [piece for piece in window.pieces[window.lead :] if piece.entry.kind == "chunk"]
        low, high = self.keep if isinstance(self.keep, tuple) else (self.keep, self.keep)
        # The first piece is pinned: nothing leaves for it.
        if low is None or high is None or not count or not len(window) or len(chunks) + count <= high:
            return Room(window, high, {})
        stay = max(low - count, 0)
        if self._placeholder is None:
            return Room(window.slide(stay), low, {})

        placeholders = dict[str, PieceRecord]()
        for piece in chunks[: len(chunks) - stay]:
            replaced = self._book.names([piece.id])[0]
            record = self._new_placeholder(replaced, {record.name for record in placeholders.values()})
            window = window.replace(piece.id, record.entry)
            placeholders[replaced] = record
        return Room(window, low, placeholders)

    def mended(self, window: Window, fetching: bool = True) -> Window:
        """Returns a window whose pieces are as promised: those that are not are restored or prefilled again."""
        while True:
            wrong = next((piece for piece, own in zip(window.pieces, window.standings, strict=True) if own.ways), None)
            if wrong is None:
                return window
            # Everything in front of it is as promised, so a forward makes it so.
            stored = (
                fetching
                and wrong.entry.kind == "chunk"
                and self._may_restore(wrong.id, window.prefilled(wrong.entry, wrong.id))
            )
            window = window.serve({wrong.id: Service("restored") if stored else PREFILL})

    def plan(self, items: Sequence[Any]) -> Plan:
        """Plans how inputs, or evicted chunks by name, would enter now, in this order. Runs nothing."""
        book, window, entries = self._book, self._book.window, list[Entry]()
        for item in items:
            read = None if book.knows(item) else book.read(item)
            record = book.find(item) if read is None else book.find_evicted(read.content)
            if record is not None or read is None:
                entries.append(book.find(item).entry if record is None else record.entry)
                continue
            _, piece_id = book.new_names(read.content, None)
            kind = "text" if read.textual else "chunk"
            entries.append(book.embed(read).entry(piece_id, read, kind, False))
        return self._plan(self.make_room(window, entries).window, entries)

    # --------------------------------------------------------------------------------------------------------- inside

    def _place(self, op: str, stay: Window, entry: Entry, before: str | None, mending: bool) -> Any:
        """Runs the window with an entry where there is room for it; a second choice fetches nothing."""
        book = self._book
        for fetching in (True, False):
            window = self._entered(stay, entry, before, fetching)
            # A plan mends what stays by itself, but knows no insertion.
            planned = book.config.policy == "certified" and before is None
            if book.config.mends and not planned and (mending or window.promise == "forget"):
                window = self.mended(window, fetching)
            try:
                return book.run(op, window)
            except (InputError, PatchMismatchError, ShapeError):
                # What the choice would fetch may have been deleted from the store since.
                if not fetching or all(piece.method == "prefill" for piece in window.pieces):
                    raise
        raise AssertionError("the second choice fetches nothing")

    def _entered(self, stay: Window, entry: Entry, before: str | None, fetching: bool) -> Window:
        """Returns the window with an entry, served as the policy chooses."""
        if before is not None:
            return stay.insert(entry, before)
        if self._book.config.policy == "certified":
            choice = self._exact(stay, entry) if fetching else None
            if choice is None:
                return self._plan(stay, [entry], fetching).window
        else:
            choice = self._service(stay, entry) if fetching else PREFILL
        return stay.recall(entry.id, choice) if entry.id in stay.gone else stay.append(entry, choice)

    def _exact(self, window: Window, entry: Entry) -> Service | None:
        """Returns the service that is what a forward would compute, if that is stored."""
        if entry.kind == "text":
            return None
        if len(window):
            # Behind approximate pieces a stored prefill is approximate as a forward is: a plan may mend those.
            trusted = window.as_promised or not self._book.config.mends
            return Service("restored") if trusted and self._may_restore(entry.id, window.prefilled(entry)) else None
        # At the front of a window a canonical is the prefill.
        return Service("leading") if self._is_stored(entry, (None,)) else None

    def _service(self, window: Window, entry: Entry) -> Service:
        """Returns how an entry is served without a certificate."""
        runtime, policy = self._book.runtime, self._book.config.policy
        if entry.kind == "text" or ((exact := self._exact(window, entry)) is None and policy == "exact"):
            return PREFILL
        if exact is not None:
            return exact
        encodings = runtime.executor.sources.encodings
        if not self._is_stored(entry, encodings) and not self._prefills:
            return PREFILL
        if policy == "blind":
            return BARE if len(window) and self._is_stored(entry, encodings) else PREFILL

        # The patch of the largest rank, one for this very order before an orbit patch.
        inventory = PatchInventory.of(runtime.store, runtime.backbone, encodings=encodings)
        if len(window) and inventory.canonical(entry):
            patches = inventory.serving(entry, window.target())
            notes = [patch.note for patch in patches if patch.note.base == "canonical"]
            if notes:
                return Service("patch", min(notes, key=lambda note: (note.orbit, -note.rank)))
        # Without a patch for them, what was computed behind the same nearest piece, the most alike first.
        alike = {} if self._prefills is None else self._prefills.alike(entry.id, window.likeness())
        for likeness, made in alike.items():
            return Service("restored", stored=made, likeness=likeness)
        return PREFILL

    def _plan(self, stay: Window, entries: Sequence[Entry], fetching: bool = True) -> Plan:
        """Plans the pieces that stay and the entries after them; with or without what is stored."""
        config, runtime = self._book.config, self._book.runtime
        inventory = PatchInventory(runtime.backbone.fingerprint)
        if fetching:
            # Bounds were measured on canonicals as they were prefilled.
            encodings = (None,) if config.certificate is not None else runtime.executor.sources.encodings
            inventory = PatchInventory.of(runtime.store, runtime.backbone, prefills=self._prefills, encodings=encodings)
        return plan(
            self._book.window,
            [*(piece.entry for piece in stay.pieces), *entries],
            Goal(kl=config.kl) if config.policy == "certified" else Goal(),
            stored=inventory,
            certificate=config.certificate,
            executor=runtime.executor,
            uncertified=config.policy in ("patched", "blind"),
            forming=runtime.former is not None and bool(runtime.former.rank),
        )

    @functools.cached_property
    def _prefills(self) -> StoredPrefills | None:
        """The stored prefills that this session may read; None without a store that keeps them."""
        runtime = self._book.runtime
        if not StoredPrefills.supports(runtime.store):
            return None
        return StoredPrefills(runtime.store, runtime.backbone.fingerprint, runtime.executor.dtype)

    def _may_restore(self, id: str, made: str) -> bool:
        return self._prefills is not None and self._prefills.may_have(id, made)

    def _was_seen(self, entry: Entry) -> bool:
        """Returns whether a chunk was seen before: here, or by another writer of the store."""
        encodings = self._book.runtime.executor.sources.encodings
        return entry.id in self._book.window.gone or self._is_stored(entry, encodings)

    def _is_stored(self, entry: Entry, encodings: Sequence[str | None]) -> bool:
        """Returns whether the store has a canonical in one of these encodings, as far as it can say without reading."""
        contains, fingerprint = (
            getattr(self._book.runtime.store, "contains", None),
            self._book.runtime.backbone.fingerprint,
        )
        options = [{} if word is None else {"encoding": word} for word in encodings]
        return contains is not None and any(contains(entry.id, fingerprint, **option) for option in options)

    # --------------------------------------------------------------------------------------------------- placeholders

    @functools.cached_property
    def _placeholder(self) -> tuple[SessionInput, EmbeddedInput] | None:
        """The text that takes the place of a chunk, embedded once; None if chunks leave nothing."""
        config, backbone = self._book.config, self._book.runtime.backbone
        if config.placeholder is None:
            return None
        # In a chat, the lead has the token that begins a sequence. Token ids, unlike a text, add no second one.
        model: Any = backbone
        item = model.ids(config.placeholder) if config.chat else Text(config.placeholder)
        return SessionInput((item,), chunk_id(backbone.fingerprint, item), True), embedded(backbone, [item])

    def _new_placeholder(self, replaced: str, taken: set[str]) -> PieceRecord:
        """Returns the record of a new placeholder, named after the chunk whose place it takes."""
        book = self._book
        assert self._placeholder is not None
        read, tokens = self._placeholder
        name, number = f"{replaced} left", 1
        while book.was_used(name) or name in taken:
            number += 1
            name = f"{replaced} left#{number}"
        return PieceRecord(tokens.entry(name, read, "text", False), name, read)
