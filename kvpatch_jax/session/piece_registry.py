"""Registry of a session's pieces: its window, their names, and what is kept of their contents."""

import collections
import contextlib
import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..cache import brief, encoded
from ..errors import DtypeError, InputError, PoolLostError, SessionClosedError, SessionError, ShapeError
from ..traces import Event, Op, Watcher
from ..window import Drop, Edits, Entry, Kind, Prefill, Recompute, Rotate, Window
from .runtime import Runtime
from .session_config import SessionConfig
from .session_input import EmbeddedInput, SessionInput, embedded, read_input
from .stats import Counters, Stats

MOST_NAMES = 1 << 14
"""How many names are remembered: a few megabytes, however long a session lives."""


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
        return (0 if self.input is None else self.input.nbytes) + (0 if self.tokens is None else self.tokens.nbytes)


class RuntimeRefCount:
    """Reference count of a runtime that a session shares with its forks.

    Attributes:
      runtime: the shared runtime.
      private: whether it was created for these sessions, so that the last of them closes it.
      count: the number of open sessions.
    """

    def __init__(self, runtime: Runtime, private: bool):
        self.runtime, self.private, self.count = runtime, private, 0
        self._lock = threading.Lock()

    def acquire(self) -> None:
        """Registers an open session."""
        with self._lock:
            self.count += 1

    def release(self) -> None:
        """Unregisters a session. Closes a private runtime when no session is left."""
        with self._lock:
            self.count -= 1
            last = self.count == 0

        # Closing waits for pending patches, so the lock is released first.
        if last and self.private:
            self.runtime.close()


class PieceRegistry:
    """A session's window with the names, inputs and tokens of its pieces.

    Only `run`, `reprefill` and a restore change the window. Callers hold `lock`.

    Attributes:
      name: the session's name in events.
      users: the reference count of the runtime.
      runtime: executes edits and answers questions.
      window: what the model reads now.
      config: options of the session.
      watchers: called with each event, after it has happened.
      records: by the id of the piece, in the window or evicted from it.
      ids: of the pieces in `records`, by name.
      used_names: names given out last, the oldest first, which callers may have written down: names of forgotten pieces
        too. The value is the number of the latest copy, if the name is a content's.
      counters, policy: of `Stats`.
    """

    def __init__(self, name: str, users: RuntimeRefCount, window: Window, config: SessionConfig):
        """Registers a session with its runtime; `release` undoes that."""
        self.name, self.users, self.window, self.config = name, users, window, config
        self.runtime = users.runtime
        self.watchers: list[Watcher] = []
        # Re-entrant, because events are notified under it, and a watcher may read the session.
        self.lock = threading.RLock()
        self.closed = False
        self.records: dict[str, PieceRecord] = {}
        self.ids: dict[str, str] = {}
        self.used_names: dict[str, int] = {}
        self.counters = Counters()
        users.acquire()

    def check_open(self) -> None:
        """Raises SessionClosedError after `close`."""
        if self.closed:
            raise SessionClosedError(f"session: {self.name!r:.80} was closed; expected an open one")

    def fork(self) -> "PieceRegistry":
        """Returns a registry of the same pieces, on a branch of the window that shares its KV."""
        window, edits = self.window.fork(secrets.token_hex(8))
        self.runtime.run(window, edits)

        name = f"{self.name}/{window.branch.rpartition('/')[2]}"
        branch = PieceRegistry(name, self.users, window, self.config)
        branch.ids, branch.used_names = dict(self.ids), dict(self.used_names)

        # Records are copied, because each session releases its own tokens. The runtime has the arrays once.
        for id, record in self.records.items():
            branch.records[id] = PieceRecord(record.entry, record.name, record.input)
            if record.tokens is not None:
                branch.provide_tokens(branch.records[id], record.tokens)

        return branch

    def release(self) -> None:
        """Releases all KV and tokens, and the use of the runtime."""
        self.closed = True
        self.runtime.release(self.window.branch)
        for record in self.records.values():
            self.release_tokens(record)
        self.users.release()

    # ------------------------------------------------------------------------------------------------ names

    def names(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of pieces."""
        return tuple(self.records[id].name if id in self.records else id for id in ids)

    def knows(self, name: object) -> bool:
        """Returns whether a name, or the id of a piece, is that of a record."""
        return isinstance(name, str) and (name in self.ids or name in self.records)

    def find(self, name: Any) -> PieceRecord:
        """Returns the record of a name, or of the id of a piece.

        Raises:
          SessionError: an unknown name.
        """
        if isinstance(name, str) and self.knows(name):
            return self.records[self.ids.get(name, name)]
        shown = brief(name) if isinstance(name, str) else name
        expected = self.list_names(self.names(self.window.ids))
        raise SessionError(f"session: got piece {shown!r:.80}; expected one of {expected}")

    def list_names(self, names: Sequence[str]) -> str:
        """Returns the last names as an error message shows them."""
        return ", ".join(repr(brief(name)) for name in names[-8:]) or "its pieces, of which there is none"

    def read(self, item: Any) -> SessionInput:
        """Reads a caller's input. Needs no lock."""
        return read_input(self.runtime.backbone, item, int(self.config.largest_image))

    def find_evicted(self, content: str, name: str | None = None) -> PieceRecord | None:
        """Returns the evicted chunk that shows a content, by this name if one is given, or None."""
        for piece in reversed(self.window.evicted):
            record = self.records.get(piece.entry.id)
            if record is not None and piece.entry.content == content and name in (None, record.name):
                return record
        return None

    def new_names(self, content: str, name: str | None) -> tuple[str, str]:
        """Returns a name and a piece's id for a new piece. A name is never given to two pieces.

        Raises:
          SessionError: a name of another piece. InputError: an invalid name.
        """
        # A content that was forgotten may return under its own id, by which stores know it.
        piece_id, number = content, 1
        while self.knows(piece_id):
            number += 1
            piece_id = f"{content}#{number}"

        if name is not None:
            if not isinstance(name, str) or not name:
                raise InputError(f"session.id: got {name!r:.80}; expected a name")
            # A name without UTF-8, such as a lone surrogate, could not be saved.
            encoded(name)
            if name in self.used_names or self.knows(name):
                raise SessionError(f"session.id: got {name!r:.80}, the name of another piece; expected a new name")
            return name, piece_id

        # Copies are counted on from the latest one, not from the first each time.
        name, number = piece_id, self.used_names.get(content, 1)
        while name in self.used_names or self.knows(name):
            number += 1
            name = f"{content}#{number}"
        if number > 1:
            self.used_names.pop(content, None)
            self.used_names[content] = number
        return name, piece_id

    # ------------------------------------------------------------------------------------------------ pieces

    @contextlib.contextmanager
    def admit(
        self, read: SessionInput, name: str | None, order_free: bool, kind: Kind | None = None
    ) -> Iterator[PieceRecord]:
        """Yields the record of a new piece, with its tokens provided, for the caller to place.

        The piece is registered once it is placed. Where that fails, its tokens are released.
        """
        if kind is None:
            kind = "text" if read.textual and not order_free else "chunk"
        name, piece_id = self.new_names(read.content, name)

        # Provided before it is placed, because edits of the placement read the tokens.
        tokens = self.embed(read)
        if read.textual:
            self.check_text_length(tokens.length)
        record = PieceRecord(tokens.entry(piece_id, read, kind, order_free), name, read)
        self.provide_tokens(record, tokens)

        try:
            yield record
        except BaseException:
            self.release_tokens(record)
            raise

        self.register(record)
        self.counters["added"] += 1
        self.trim_evicted()

    def register(self, record: PieceRecord) -> None:
        """Registers the record of a piece that was placed, and its name as one that was given out."""
        self.records[record.entry.id], self.ids[record.name] = record, record.entry.id
        for used in (record.entry.id, record.name):
            # Dictionaries keep the order of insertion, so a name that is used again becomes the latest.
            self.used_names[used] = self.used_names.pop(used, 1)
        while len(self.used_names) > MOST_NAMES:
            del self.used_names[next(iter(self.used_names))]

    def check_text_length(self, tokens: int) -> None:
        """Raises InputError for a text, or a question, of more tokens than the session takes."""
        if tokens > self.config.largest_text:
            raise InputError(
                f"session: got a text of {tokens} tokens; expected at most {self.config.largest_text} (largest_text=…)"
            )

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
            with contextlib.suppress(InputError, ShapeError, DtypeError):
                tokens = embedded(backbone, read.items, prompt={**prompt, "features": features})
                self.counters["encoded"] += 1
                return tokens

        features = backbone.encode(**prompt)
        # A chunk of token ids that a saved session restored has none.
        if features is not None:
            former.keep_encoder(read.content, features)
        return embedded(backbone, read.items, prompt={**prompt, "features": features})

    def provide_tokens(self, record: PieceRecord, tokens: EmbeddedInput | None = None) -> EmbeddedInput:
        """Provides the runtime with a piece's tokens, if it has none, and returns them.

        Args:
          tokens: the embedded input, if the caller has it.

        Raises:
          SessionError: both tokens and input were discarded.
        """
        if record.tokens is None:
            if tokens is None:
                if record.input is None:
                    found = f"{brief(record.name)!r}, whose content was discarded beyond memory={self.config.memory}"
                    raise SessionError(f"session: got {found}; expected it given again")
                tokens = self.embed(record.input)
            self.runtime.provide(record.entry.id, tokens.tokens, tokens.length, record.entry.content)
            record.tokens = tokens
        return record.tokens

    def release_tokens(self, record: PieceRecord) -> None:
        """Releases a piece's tokens, if the runtime has them for this session."""
        if record.tokens is not None:
            record.tokens = None
            self.runtime.forget(record.entry.id)

    def trim_evicted(self) -> None:
        """Forgets evicted pieces that cannot be recalled, and discards contents of evicted chunks beyond `memory`."""
        window = self.window
        for id in [id for id in self.records if id not in window and id not in window.evicted_by_id]:
            # Its name stays in `used_names`, so that it is not given to another piece.
            record = self.records.pop(id)
            self.ids.pop(record.name, None)
            self.release_tokens(record)

        evicted = [self.records[piece.entry.id] for piece in window.evicted if piece.entry.id in self.records]
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
                    self.release_tokens(record)
                size += record.nbytes

    # ------------------------------------------------------------------------------------------------ window

    def run(self, window: Window, edits: Edits) -> None:
        """Executes edits. The window is the session's once they have succeeded."""
        # Raises without changes, so that window and counters stay as they are.
        ledger = self.runtime.run(window, edits)

        counters = self.counters
        counters["bytes"] += ledger.total.bytes
        counters["flops"] += ledger.total.flops

        for edit in edits:
            if isinstance(edit, Prefill | Recompute):
                counters["forwards"] += 1
                counters["tokens"] += window.piece(edit.id).entry.tokens
            elif isinstance(edit, Rotate):
                counters["rotated"] += 1
            elif isinstance(edit, Drop):
                counters["left"] += 1

        self.window = window

    def evict(self, op: Op, window: Window, edits: Edits, **fields: Any) -> tuple[str, ...]:
        """Executes edits by which pieces leave, and returns the names of the chunks that left."""
        # Texts leave too, but only chunks have names that can be recalled.
        before = set(self.window.gone)
        # Nothing may have left; then nothing is executed, and the event is still one.
        if edits:
            self.run(window, edits)
        left = self.names([id for id in self.window.gone if id not in before])
        self.trim_evicted()
        self.notify(op, **fields)
        return left

    def stats(self) -> Stats:
        """Returns the counts so far, with those of the window and the pool."""
        window, former = self.window, self.runtime.former
        # Both numbers are of one moment, although other sessions may run edits.
        with self.runtime.locked():
            allocator = self.runtime.executor.books.allocator
            pages, free = allocator.pages, allocator.free_pages
            canonical_bytes = self.runtime.executor.sources.canonical_bytes
            transition_bytes = self.runtime.executor.transition_bytes

        return Stats(
            **self.counters,
            fidelity=dict(collections.Counter(piece.fidelity for piece in window.pieces)),
            tokens_held=window.tokens,
            pages=pages,
            free_pages=free,
            canonical_bytes=canonical_bytes,
            transition_bytes=transition_bytes,
            formed=None if former is None else former.done,
        )

    def reprefill(self) -> None:
        """Prefills the window again after its pool was lost. Survivors forget what was evicted."""
        with self.lock:
            # Tokens may have been discarded once the pieces were in the pool.
            for piece in self.window.pieces:
                record = self.records.get(piece.entry.id)
                if record is not None:
                    self.provide_tokens(record)
            self.window = self.runtime.reprefill(self.window)

    def notify(self, op: Op, record: PieceRecord | None = None, items: Sequence[Any] = (), **fields: Any) -> None:
        """Notifies the watchers of an event, with the items that it brought."""
        if not self.watchers:
            return

        # A trace has what it takes to replay an event: contents by digest, texts in full.
        if record is not None:
            fields["chunk"] = record.name
            if op in ("add", "replace"):
                entry = record.entry
                fields |= {"content": entry.content, "tokens": entry.tokens, "span": entry.span, "kind": entry.kind}
                fields["order_free"] = entry.order_free
                if items and all(isinstance(item, str) for item in items):
                    fields["text"] = "".join(items)

        event = Event(0.0, self.name, op, **fields)
        # Copied, because a watcher may remove itself.
        for watcher in list(self.watchers):
            watcher(event, items)


def retry_after_pool_loss[**Given, Result](method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wraps a method of a session: if the pool is lost, the window is prefilled again and the call repeated once."""

    @functools.wraps(method)
    def retried(*args: Given.args, **options: Given.kwargs) -> Result:
        try:
            return method(*args, **options)
        except PoolLostError:
            session: Any = args[0]
            session._registry.reprefill()

        # Outside of the handler, so that the lost pool is not the context of an error of the second call.
        return method(*args, **options)

    return retried
