"""`PieceBook`: a session's window with the names, inputs and tokens of its pieces. Only here the window changes."""

import collections
import contextlib
import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..cache import Text, brief, encoded
from ..errors import InputError, PoolError, SessionError, ShapeError
from ..plan import Goal
from ..traces import Event, Op, Watcher
from ..window import Entry, Kind, Step, Window
from .config import LARGEST_IMAGE, LARGEST_TEXT, SessionConfig
from .inputs import EmbeddedInput, SessionInput, embedded, read_input
from .runtime import Runtime
from .stats import Counters, Stats, StepCounter

MOST_NAMES = 1 << 14
"""How many names are remembered: a few megabytes, however long a session lives."""
SINK = 4
"""Tokens at the front of a window that attention sinks on, and that never leave.

On prose SmolLM2-135M loses .77 nats a token without any, .026 with one, .022 with four and .020 with 16; document by
document one loses .005 (.001 to .010) more than 16, four .002 (−.002 to .005). See docs/tables/sinks.csv.
"""
_REST = " behind its sink"
"""End of the content of what follows the sink of a first text."""


@dataclasses.dataclass(eq=False)
class PieceRecord:
    """Record of a piece that a session was given.

    Attributes:
      entry: as the window has it.
      name: the session's name for it.
      input: what the caller gave. None once it was discarded.
      tokens: the embedded input, while the runtime has it.
    """

    entry: Entry
    name: str
    input: SessionInput | None = None
    tokens: EmbeddedInput | None = None

    @property
    def nbytes(self) -> int:
        """Bytes kept to bring the piece back."""
        return sum(part.nbytes for part in (self.input, self.tokens) if part is not None)


class PieceBook:
    """A session's window, and what is known of its pieces. Callers hold `lock`.

    Attributes:
      name: the session's name in events.
      runtime: brings windows and answers questions.
      window: what the model reads now.
      config: options of the session. guard: of its goal, shared with forks and other sessions of the runtime.
      watchers: called with each event, after it has happened.
      records: by the id of the piece, in the window or evicted from it.
      ids: of the pieces in `records`, by name.
      used_names: names given out last, the oldest first, which callers may have written down: names of forgotten pieces
        too. The value is the number of the latest copy, if the name is a content's.
      counters, steps: of `Stats`.
    """

    def __init__(self, name: str, runtime: Runtime, window: Window, config: SessionConfig):
        """Registers a session with its runtime; `release` undoes that."""
        self.name, self.runtime, self.window, self.config = name, runtime, window, config
        self.guard = runtime.guard(Goal(config.policy, float(config.kl)), float(config.audit))
        self.watchers: list[Watcher] = []
        # Re-entrant, because events are notified under it, and a watcher may read the session.
        self.lock = threading.RLock()
        self.closed = False
        self.records: dict[str, PieceRecord] = {}
        self.ids: dict[str, str] = {}
        self.used_names: dict[str, int] = {}
        self.counters, self.steps = Counters(), StepCounter()
        runtime.acquire()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Holds the lock of an open session. Raises SessionError after `close`."""
        with self.lock:
            if self.closed:
                raise SessionError(f"session: {self.name!r:.80} was closed; expected an open one")
            yield

    def fork(self) -> "PieceBook":
        """Returns a book of the same pieces, on a branch of the window that shares its KV."""
        window = self.window.fork(secrets.token_hex(8))
        self.runtime.run(window)
        branch = PieceBook(f"{self.name}/{window.branch.rpartition('/')[2]}", self.runtime, window, self.config)
        branch.ids, branch.used_names = dict(self.ids), dict(self.used_names)
        # Records are copied, because each session releases its own tokens. The runtime has the arrays once.
        for id, record in self.records.items():
            branch.records[id] = PieceRecord(record.entry, record.name, record.input)
            if record.tokens is not None:
                branch.provide(branch.records[id], record.tokens)
        return branch

    def release(self) -> None:
        """Releases all KV and tokens, and the use of the runtime."""
        self.closed = True
        self.runtime.release(self.window.branch)
        for record in self.records.values():
            self.forget(record)
        # Only the last session of a private runtime closes it, which waits for pending patches.
        if self.runtime.acquire(-1) == 0 and self.runtime.private:
            self.runtime.close()

    # ---------------------------------------------------------------------------------------------------------- names

    def names(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of pieces."""
        return tuple(self.records[id].name if id in self.records else id for id in ids)

    def __contains__(self, name: object) -> bool:
        """Returns whether a piece of this name is in the window."""
        return isinstance(name, str) and self.ids.get(name, name) in self.window

    def knows(self, name: object) -> bool:
        """Returns whether a name, or the id of a piece, is that of a record."""
        return isinstance(name, str) and (name in self.ids or name in self.records)

    def was_used(self, name: object) -> bool:
        """Returns whether a name is that of a record, or of a piece that was forgotten a while ago."""
        return self.knows(name) or name in self.used_names

    def find(self, name: Any) -> PieceRecord:
        """Returns the record of a name, or of the id of a piece. Raises SessionError for an unknown one."""
        if isinstance(name, str) and self.knows(name):
            return self.records[self.ids.get(name, name)]
        shown = brief(name) if isinstance(name, str) else name
        known = ", ".join(repr(brief(own)) for own in self.names(self.window.ids)[-8:]) or "its pieces: there is none"
        raise SessionError(f"session: got piece {shown!r:.80}; expected one of {known}")

    def find_evicted(self, content: str, name: str | None = None) -> PieceRecord | None:
        """Returns the evicted chunk that shows a content, by this name if one is given, or None."""
        for entry in reversed(self.window.evicted):
            record = self.records.get(entry.id)
            if record is not None and entry.content == content and name in (None, record.name):
                return record
        return None

    def new_names(self, content: str, name: str | None) -> tuple[str, str]:
        """Returns a name and an id for a new piece. A name is never given to two pieces: that raises SessionError."""
        # A content that was forgotten may return under its id, by which stores know it.
        piece_id, number = content, 1
        while self.knows(piece_id):
            number += 1
            piece_id = f"{content}#{number}"
        if name is None:
            # Copies are counted on from the latest one, not from the first each time.
            name, number = piece_id, self.used_names.get(content, 1)
            while self.was_used(name):
                number += 1
                name = f"{content}#{number}"
            if number > 1:
                self.used_names.pop(content, None)
                self.used_names[content] = number
            return name, piece_id
        if not isinstance(name, str) or not name:
            raise InputError(f"session.id: got {name!r:.80}; expected a name")
        # A name without UTF-8, such as a lone surrogate, could not be saved.
        encoded(name)
        if self.was_used(name):
            raise SessionError(f"session.id: got {name!r:.80}, the name of another piece; expected a new name")
        return name, piece_id

    # --------------------------------------------------------------------------------------------------------- pieces

    def read(self, item: Any) -> SessionInput:
        """Reads a caller's input. Needs no lock."""
        return read_input(self.runtime.backbone, item, LARGEST_IMAGE)

    def text_items(self, *texts: str) -> list[Any]:
        """Returns texts of the session's options, or of a question, as `prepare` takes them."""
        items = [text if isinstance(text, Text) else Text(text) for text in texts if text]
        for text in items:
            # Raises InputError for a text without UTF-8, such as a lone surrogate.
            encoded(text)
        # In a chat, the lead has the token that begins a sequence. Token ids, unlike a text, add no second one.
        backbone: Any = self.runtime.backbone
        return [backbone.ids(items)] if self.config.chat else items

    def new_records(
        self, read: SessionInput, name: str | None, order_free: bool, kind: Kind | None, whole: bool
    ) -> tuple[list[PieceRecord], EmbeddedInput]:
        """Returns the records of a new piece, for the caller to place, and its embedded input.

        It is one record, or of the first text of a window, unless it is pinned as a `whole`, two: the tokens that
        attention sinks on, which never leave, and the rest.
        """
        if kind is None:
            kind = "text" if read.textual and not order_free else "chunk"
        name, piece_id = self.new_names(read.content, name)
        tokens = self.embed(read)
        if read.textual:
            check_length(tokens)
        entry = tokens.entry(piece_id, read, kind, order_free)
        first = not whole and not len(self.window) and self.window.lead == 1
        if not first or kind != "text" or not read.textual or tokens.length <= SINK:
            return [PieceRecord(entry, name, read)], tokens
        front = {"id": f"{piece_id} sink", "content": f"{entry.key} sink", "tokens": SINK, "span": SINK}
        # Not the id of the whole text, which another session of the runtime may show.
        back = {"id": f"{piece_id}{_REST}", "content": f"{entry.key}{_REST}"}
        back |= {"tokens": tokens.length - SINK, "span": entry.span - SINK}
        sink, rest = dataclasses.replace(entry, **front), dataclasses.replace(entry, **back)
        return [PieceRecord(sink, f"{name} sink", read), PieceRecord(rest, name, read)], tokens

    @contextlib.contextmanager
    def entering(self, records: Collection[PieceRecord], tokens: EmbeddedInput | None) -> Iterator[None]:
        """Provides the tokens of new pieces while they are placed, and remembers their names once they are."""
        try:
            # Provided first, because forwards read the tokens.
            for record in records:
                self.records[record.entry.id] = record
                self.provide(record, tokens)
            yield
        except BaseException:
            for record in records:
                self.records.pop(record.entry.id, None)
                self.forget(record)
            raise
        for record in records:
            self.ids[record.name] = record.entry.id
            for used in (record.entry.id, record.name):
                # Dictionaries keep the order of insertion, so a name that is used again becomes the latest.
                self.used_names[used] = self.used_names.pop(used, 1)
        while len(self.used_names) > MOST_NAMES:
            del self.used_names[next(iter(self.used_names))]

    def embed(self, read: SessionInput) -> EmbeddedInput:
        """Embeds an input. The output of the vision tower is read from the store, or computed and stored."""
        backbone: Any = self.runtime.backbone
        store: Any = self.runtime.store
        former = self.runtime.former
        # The former writes to the store in the background; without it, nothing would be stored. Stores other than
        # `ChunkStore` need not take outputs of vision towers.
        if read.textual or former is None or not hasattr(store, "get_encoder") or not hasattr(store, "put_encoder"):
            return embedded(backbone, read.items)
        prompt = backbone.prepare(list(read.items))
        features = store.get_encoder(read.content, backbone.fingerprint)
        if features is not None:
            # Another writer may have stored an output that does not fit the image. The tower then replaces it.
            with contextlib.suppress(InputError, ShapeError):
                tokens = embedded(backbone, read.items, prompt={**prompt, "features": features})
                self.counters["encoded"] += 1
                return tokens
        features = backbone.encode(**prompt)
        # A chunk of token ids that a saved session restored has none.
        if features is not None:
            former.keep_encoder(read.content, features)
        return embedded(backbone, read.items, prompt={**prompt, "features": features})

    def provide(self, record: PieceRecord, tokens: EmbeddedInput | None = None) -> EmbeddedInput:
        """Provides the runtime with a piece's tokens, if it has none, and returns them.

        `tokens` is the embedded input, if the caller has it. Raises SessionError if the content was discarded.
        """
        if record.tokens is None:
            if tokens is None:
                if record.input is None:
                    found = f"{brief(record.name)!r}, whose content was discarded beyond memory={self.config.memory}"
                    raise SessionError(f"session: got {found}; expected it given again")
                tokens = self.embed(record.input)
            entry = record.entry
            if entry.tokens != tokens.length:
                # A part of a first text: the tokens that attention sinks on, or those behind them.
                first = SINK if (entry.content or "").endswith(_REST) else 0
                part = tokens.take(first, first + entry.tokens).shift(-first)
                tokens = EmbeddedInput(part.pad(entry.tokens), entry.tokens, entry.span)
            self.runtime.provide(entry.id, tokens.tokens, tokens.length, entry.content)
            record.tokens = tokens
        return record.tokens

    def forget(self, record: PieceRecord) -> None:
        """Releases a piece's tokens, if the runtime has them for this session."""
        if record.tokens is not None:
            record.tokens = None
            self.runtime.forget(record.entry.id)

    def trim(self) -> None:
        """Forgets evicted pieces that cannot be recalled, and discards contents of evicted chunks beyond `memory`."""
        window, gone = self.window, dict.fromkeys(self.window.gone)
        for id in [id for id in self.records if id not in window and id not in gone]:
            # Its name stays in `used_names`, so that it is not given to another piece.
            record = self.records.pop(id)
            self.ids.pop(record.name, None)
            self.forget(record)

        evicted = [self.records[id] for id in gone if id in self.records]
        size, most = sum(record.nbytes for record in evicted), int(self.config.memory)
        # The oldest are discarded first. Tokens go first, because they can be embedded again from the input.
        for discard_inputs in (False, True):
            for record in evicted:
                if size <= most:
                    return
                size -= record.nbytes
                if discard_inputs:
                    record.input = None
                else:
                    self.forget(record)
                size += record.nbytes

    # --------------------------------------------------------------------------------------------------------- window

    def run(self, op: str, window: Window) -> Step:
        """Brings a window, which is the session's once that has succeeded."""
        # A chunk whose content was discarded can still be served by a patch: only forwards read tokens.
        made = {piece.made for piece in self.window.pieces}
        for piece in window.pieces:
            if piece.method == "prefill" and piece.made not in made and piece.id in self.records:
                self.provide(self.records[piece.id])
        step = self.runtime.run(window)
        counted, kinds = self.steps.add(op, self.window, window, step), [action.kind for action in step]
        counts = {"forwards": kinds.count("prefill"), "rotated": kinds.count("rotate"), "tokens": counted.computed}
        counts |= {name: getattr(counted, name) for name in ("bytes", "flops", "reprefill", "prefix_cache")}
        self.counters.update(counts | {"left": sum(piece.id not in window for piece in self.window.pieces)})
        self.window = window
        return step

    def evict(self, op: Op, window: Window, **fields: Any) -> tuple[str, ...]:
        """Brings a window that pieces have left, and returns the names of the chunks that left."""
        # Texts leave too, but only chunks have names that can be recalled. And maybe nothing has left.
        before = set(self.window.gone)
        if window is not self.window:
            self.run(op, window)
        left = self.names([id for id in window.gone if id not in before])
        self.trim()
        self.notify(op, **fields)
        return left

    def stats(self) -> Stats:
        """Returns the counts so far, with those of the window and the pool."""
        window, former, executor = self.window, self.runtime.former, self.runtime.executor

        def of_pool() -> dict[str, int]:
            # All numbers are of one moment, although other sessions may run windows.
            sizes = {"pages": executor.slots.pages, "free_pages": executor.slots.free_pages}
            return sizes | {"canonical_bytes": executor.sources.canonical_bytes, "state_bytes": executor.state_bytes}

        return Stats(
            **self.counters,
            **self.runtime.do(of_pool),
            steps=tuple(self.steps.steps),
            fidelity=dict(collections.Counter(standing.fidelity for standing in window.standings)),
            tokens_held=window.tokens,
            audits=self.guard.stats,
            formed=None if former is None else former.done,
        )

    def reprefill(self) -> None:
        """Brings the window again after its pool was lost. Survivors forget what was evicted."""
        with self.lock:
            # Tokens may have been discarded once the pieces were in the pool.
            for record in [self.records[id] for id in self.window.ids if id in self.records]:
                self.provide(record)
            self.window = self.runtime.reprefill(self.window)

    def notify(self, op: Op, record: PieceRecord | None = None, items: Sequence[Any] = (), **fields: Any) -> None:
        """Notifies the watchers of an event, with the items that it brought."""
        if not self.watchers:
            return
        # A trace has what it takes to replay an event: contents by digest, texts in full.
        if record is not None:
            fields["chunk"] = record.name
            if op not in ("recall", "evict"):
                entry = record.entry
                fields |= {"content": entry.content, "tokens": entry.tokens, "span": entry.span, "kind": entry.kind}
                fields["order_free"] = entry.order_free
                if items and all(isinstance(item, str) for item in items):
                    fields["text"] = "".join(items)
        event = Event(0.0, self.name, op, **fields)
        # Copied, because a watcher may remove itself.
        for watcher in list(self.watchers):
            watcher(event, items)


def check_length(text: EmbeddedInput) -> None:
    """Raises InputError for a text, or a question, of more tokens than sessions take."""
    if text.length > LARGEST_TEXT:
        raise InputError(f"session: got a text of {text.length} tokens; expected at most {LARGEST_TEXT} at a time")


def session_call[**Given, Result](
    guard: Callable[[], Any],
) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Wraps a method of a session: if the pool is lost, the window is prefilled again and the call repeated once.

    Args:
      guard: the context of the call. `interrupts_deferred` where the window changes: between the pool's change and the
        book's, an interrupt would leave a window that the pool does not hold.
    """

    def wrap(method: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(method)
        def call(*args: Given.args, **options: Given.kwargs) -> Result:
            with guard():
                try:
                    return method(*args, **options)
                except PoolError as error:
                    if not error.lost:
                        raise
                    session: Any = args[0]
                    session._book.reprefill()
                # Outside of the handler, so that the lost pool is not the context of an error of the second call.
                return method(*args, **options)

        return call

    return wrap
