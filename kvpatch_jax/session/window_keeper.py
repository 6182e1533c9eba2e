"""Choice of what leaves a session's window before something enters, and of what takes its place."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..cache import Text, chunk_id
from ..plan import DEFAULT_KL, Goal
from ..window import Edits, Entry, Window
from .piece_registry import PieceRecord, PieceRegistry
from .session_config import Keep
from .session_input import EmbeddedInput, SessionInput, embedded

DEFAULT_GOAL = Goal(kl=DEFAULT_KL)
"""The goal of a session with a certificate, unless it has its own."""


class WindowRoom(NamedTuple):
    """Window with room for what enters.

    Attributes:
      window: without what leaves, and with the placeholders.
      edits: of leaving. Empty where there are placeholders: then a plan says what becomes of the pieces behind them.
      stayed: the number of chunks that may stay, those that enter included. None: all.
      placeholders: records of the texts that take the place of chunks, by the name of the chunk.
    """

    window: Window
    edits: Edits
    stayed: int | None
    placeholders: dict[str, PieceRecord]


class WindowKeeper:
    """Keeper of the number of chunks of a session's window.

    Attributes:
      keep: the number of chunks that stay after the lead, as `Session` takes it.
      stayed: the number of chunks that the piece placed last allowed to stay, itself included. None: all.
      placeholders: what took the place of chunks for the piece placed last, by the name of the chunk.
    """

    def __init__(self, registry: PieceRegistry, keep: Keep):
        self._registry, self.keep = registry, keep
        self.stayed: int | None = None
        self.placeholders: dict[str, PieceRecord] = {}

    def make_room(self, window: Window, entering: Sequence[Entry]) -> WindowRoom:
        """Returns a window without the chunks that leave before so many others enter. Changes nothing.

        Of a pair, the oldest leave together, down to the lower number, once there would be more than the higher one.
        """
        count = sum(entry.kind == "chunk" for entry in entering)
        chunks = [piece for piece in window.pieces[window.lead :] if piece.entry.kind == "chunk"]
        # The lead is not settled until the first chunk; nothing leaves before that.
        settled = window.lead_settled and count > 0
        low, high = self.keep if isinstance(self.keep, tuple) else (self.keep, self.keep)
        if low is None or high is None or not settled or len(chunks) + count <= high:
            return WindowRoom(window, (), high, {})

        stay = max(low - count, 0)
        if self._placeholder is None:
            return WindowRoom(*window.slide(stay), low, {})

        placeholders = dict[str, PieceRecord]()
        for piece in chunks[: len(chunks) - stay]:
            replaced = self._registry.names([piece.entry.id])[0]
            record = self._new_record(replaced, {record.name for record in placeholders.values()})
            window, _ = window.replace(piece.entry.id, record.entry)
            placeholders[replaced] = record
        return WindowRoom(window, (), low, placeholders)

    @contextlib.contextmanager
    def admit(self, room: WindowRoom) -> Iterator[None]:
        """Provides the tokens of placeholders while the caller runs the edits, and registers them after that.

        Where that fails, nothing has changed.
        """
        records = room.placeholders.values()
        try:
            for record in records:
                self._registry.provide_tokens(record, None if self._placeholder is None else self._placeholder[1])
            yield
        except BaseException:
            for record in records:
                self._registry.release_tokens(record)
            raise

        for record in records:
            self._registry.register(record)
        self._registry.counters["placeholders"] += len(records)
        self.stayed, self.placeholders = room.stayed, room.placeholders

    # -------------------------------------------------------------------------------------------------- inside

    @functools.cached_property
    def _placeholder(self) -> tuple[SessionInput, EmbeddedInput] | None:
        """The text that takes the place of a chunk, embedded once; None if chunks leave nothing."""
        config, backbone = self._registry.config, self._registry.runtime.backbone
        if config.placeholder is None:
            return None
        # In a chat, the lead has the token that begins a sequence. Token ids, unlike a text, add no second one.
        model: Any = backbone
        item = model.ids(config.placeholder) if config.chat else Text(config.placeholder)
        return SessionInput((item,), chunk_id(backbone.fingerprint, item), True), embedded(backbone, [item])

    def _new_record(self, replaced: str, taken: set[str]) -> PieceRecord:
        """Returns the record of a new placeholder, named after the chunk whose place it takes."""
        registry = self._registry
        assert self._placeholder is not None
        read, tokens = self._placeholder
        name, number = f"{replaced} left", 1
        while registry.knows(name) or name in registry.used_names or name in taken:
            number += 1
            name = f"{replaced} left#{number}"
        return PieceRecord(tokens.entry(name, read, "text", False), name, read)
