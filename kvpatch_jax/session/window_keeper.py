"""Choice of what leaves a session's window before something enters, and of what takes its place."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..cache import Text, chunk_id
from ..errors import PlanError
from ..plan import DEFAULT_KL, Goal, LoopSizes, PolicyComparison, compare_policies
from ..window import Edits, Entry, Window
from .piece_registry import PieceRecord, PieceRegistry
from .session_config import CheapestKeep, Keep
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
      keep: the session's, with its choice.
      policy: why that was chosen, if it was chosen just now.
    """

    window: Window
    edits: Edits
    stayed: int | None
    placeholders: dict[str, PieceRecord]
    keep: Keep
    policy: str | None = None


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
        # A fork that keeps otherwise has no reason to state.
        if not isinstance(keep, CheapestKeep) or keep.chosen is None:
            registry.policy = None

    def make_room(self, window: Window, entering: Sequence[Entry]) -> WindowRoom:
        """Returns a window without the chunks that leave before so many others enter. Changes nothing.

        Of a pair, the oldest leave together, down to the lower number, once there would be more than the higher one.
        """
        count, keep, policy = sum(entry.kind == "chunk" for entry in entering), self.keep, None
        chunks = [piece for piece in window.pieces[window.lead :] if piece.entry.kind == "chunk"]
        # The lead is not settled until the first chunk; nothing leaves before that.
        settled = window.lead_settled and count > 0
        if isinstance(keep, CheapestKeep) and keep.chosen is None and settled and len(chunks) + count > keep.low:
            keep, policy = self._choose(keep, window, entering)

        low, high = keep.chosen or (keep.low, keep.high) if isinstance(keep, CheapestKeep) else _pair(keep)
        if low is None or high is None or not settled or len(chunks) + count <= high:
            return WindowRoom(window, (), high, {}, keep, policy)

        stay = max(low - count, 0)
        if self._placeholder is None:
            return WindowRoom(*window.slide(stay), low, {}, keep, policy)

        placeholders = dict[str, PieceRecord]()
        for piece in chunks[: len(chunks) - stay]:
            replaced = self._registry.names([piece.entry.id])[0]
            record = self._new_record(replaced, {record.name for record in placeholders.values()})
            window, _ = window.replace(piece.entry.id, record.entry)
            placeholders[replaced] = record
        return WindowRoom(window, (), low, placeholders, keep, policy)

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
        self.keep, self.stayed, self.placeholders = room.keep, room.stayed, room.placeholders
        if room.policy is not None:
            self._registry.policy = room.policy

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

    def _choose(self, keep: CheapestKeep, window: Window, entering: Sequence[Entry]) -> tuple[CheapestKeep, str]:
        """Returns the choice by the sizes of what is in the window and what enters, and the reason for it."""
        comparison = self._compare(keep, window, entering)
        try:
            policy, reason = comparison.cheapest.policy, comparison.explain()
        except PlanError as error:
            # A budget that no policy meets: plans may still meet it, by reuse that no policy counts on.
            return dataclasses.replace(keep, chosen=(keep.low, keep.high)), str(error)
        assert policy.high is not None
        return dataclasses.replace(keep, chosen=(policy.low, policy.high)), reason

    def _compare(self, keep: CheapestKeep, window: Window, entering: Sequence[Entry]) -> PolicyComparison:
        """Compares policies by the mean sizes of what is in the window and what enters."""
        config = self._registry.config
        certificate = config.certificate
        assert not isinstance(certificate, str)  # the word became a certificate when the session was composed

        lead = [piece.entry for piece in window.pieces[: window.lead]]
        shown = [piece.entry for piece in window.pieces[window.lead :]]
        texts = [entry for entry in shown if entry.kind == "text"]
        chunks = [entry for entry in [*shown, *entering] if entry.kind == "chunk"]
        # Texts follow the chunks that are there; what enters has none yet.
        sizes = LoopSizes(
            chunk=round(sum(entry.tokens for entry in chunks) / len(chunks)),
            span=round(sum(entry.span for entry in chunks) / len(chunks)),
            text=round(sum(entry.tokens for entry in texts) / max(len(shown) - len(texts), 1)),
            lead=sum(entry.tokens for entry in lead),
            placeholder=None if self._placeholder is None else self._placeholder[1].length,
            modality=chunks[-1].modality or "mixed",
        )
        return compare_policies(
            sizes,
            keep.low,
            keep.high,
            costs=window.costs,
            devices=config.costs,
            promise=window.promise,
            goal=DEFAULT_GOAL if config.goal is None and certificate is not None else config.goal,
            certificate=certificate,
            uncertified=config.uncertified,
            keep_text=self._placeholder is not None,
            never=False,
        )


def _pair(keep: int | tuple[int, int] | None) -> tuple[int, int] | tuple[None, None]:
    """Returns the lowest and the highest number of chunks; None for both if all stay."""
    if keep is None:
        return None, None
    return keep if isinstance(keep, tuple) else (keep, keep)
