"""What a session knows of its pieces: names, what was given, and how much of it is kept once it left."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ..backbone import Backbone
from ..cache import brief, encoded
from ..errors import DtypeError, InputError, PoolLostError, SessionClosedError, SessionError, ShapeError
from ..traces import Event, Op, Watcher
from ..window import Edits, Entry, PatchStore, Window
from .names import UsedNames
from .runtime import Runtime
from .session_input import EmbeddedInput, SessionInput, embedded
from .stats import SessionCounters


@dataclasses.dataclass(eq=False)
class PieceRecord:
    """A piece that a session was given.

    Attributes:
      entry: as the window has it. name: the session's own.
      thing: what was given; None where it was let go of.
      held: its tokens, while the runtime has them.
    """

    entry: Entry
    name: str
    thing: SessionInput | None = None
    held: EmbeddedInput | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept to bring it back."""
        return (0 if self.thing is None else self.thing.nbytes) + (0 if self.held is None else self.held.nbytes)


@runtime_checkable
class EncoderStore(Protocol):
    """A store that keeps what vision towers make of images, as `ChunkStore` does."""

    def get_encoder(self, id: str, backbone: str) -> Any:
        """Reads a tower's output; None where there is none."""
        ...

    def put_encoder(self, id: str, backbone: str, output: Any) -> None:
        """Stores one."""
        ...


class RuntimeRefCount:
    """How many sessions use a runtime; the last one closes it where it was made for them."""

    def __init__(self, runtime: Runtime, private: bool):
        self.runtime, self.private, self.count = runtime, private, 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """One more."""
        with self._lock:
            self.count += 1

    def leave(self) -> None:
        """One less."""
        with self._lock:
            self.count -= 1
            last = self.count == 0
        if last and self.private:
            self.runtime.close()


def outliving_the_pool[**Given, Made](call: Callable[Given, Made]) -> Callable[Given, Made]:
    """A session's method that has another try where the pool was lost: the window is placed again before."""

    @functools.wraps(call)
    def tried(*args: Given.args, **options: Given.kwargs) -> Made:
        try:
            return call(*args, **options)
        except PoolLostError:
            session: Any = args[0]
            session.place_anew()
        return call(*args, **options)

    return tried


class PieceRegistry:
    """A session's window, and what it knows of its pieces.

    Attributes:
      name: of the session, for those who watch it.
      runtime: what it runs on.
      watchers: told of each event once it has happened, with what it brought; forks have the same.
    """

    name: str
    runtime: Runtime
    memory: int
    watchers: list[Watcher]

    def _hold_nothing(self, name: str, owners: RuntimeRefCount, window: Window) -> None:
        self.name, self.runtime, self.watchers = name, owners.runtime, []
        self._owners, self._window, self._closed = owners, window, False
        self._lock = threading.RLock()
        self._known: dict[str, PieceRecord] = {}
        self._names: dict[str, str] = {}
        self._used = UsedNames()
        self._counts = SessionCounters()
        owners.enter()

    @property
    def backbone(self) -> Backbone:
        """Who reads the window."""
        return self.runtime.backbone

    @property
    def store(self) -> PatchStore | None:
        """Where canonicals and patches are kept, or None."""
        return self.runtime.store

    @property
    def window(self) -> Window:
        """What the model reads now, a value."""
        return self._window

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the pieces, from the front."""
        return tuple(self._name(piece.entry.id) for piece in self._window.pieces)

    @property
    def gone(self) -> tuple[str, ...]:
        """Names of the chunks that left and can be recalled, the last one to leave last; the last 512 at most."""
        return tuple(self._name(piece.entry.id) for piece in self._window.evicted)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def _expect_open(self) -> None:
        if self._closed:
            raise SessionClosedError(f"session {self.name!r:.80} was closed; expected an open one")

    # ------------------------------------------------------------------------------------------------ names

    def _name(self, piece_id: str) -> str:
        known = self._known.get(piece_id)
        return piece_id if known is None else known.name

    def _piece(self, name: Any) -> str:
        """The piece's id of a name, or of what is a piece's id itself.

        Raises:
          SessionError: an unknown one.
        """
        if isinstance(name, str):
            found = self._names.get(name, name)
            if found in self._known:
                return found
            name = brief(name)
        raise SessionError(f"session: {name!r:.80} is no piece of it; expected one of {self._listed(self.ids)}")

    def _listed(self, names: Sequence[str]) -> str:
        return ", ".join(repr(brief(name)) for name in names[-8:]) or "none, for there is none"

    def _left(self, read: SessionInput, name: str | None) -> PieceRecord | None:
        """The chunk that left and shows this, under this name where one is asked for; None where there is none."""
        for piece in reversed(self._window.evicted):
            known = self._known.get(piece.entry.id)
            if known is not None and piece.entry.content == read.content and name in (None, known.name):
                return known
        return None

    def _names_for(self, read: SessionInput, name: str | None) -> tuple[str, str]:
        """The name and the piece's id of something new. No name is used twice.

        Raises:
          SessionError: a name that is taken. InputError: what is no name.
        """
        piece_id, number = read.content, 1
        while piece_id in self._known or piece_id in self._names:  # what was forgotten may come under its id again
            number += 1
            piece_id = f"{read.content}#{number}"
        if name is None:
            own, number = piece_id, self._used.number(read.content)
            while self._is_used(own):
                number += 1
                own = f"{read.content}#{number}"
            self._used.numbered(read.content, number)
            return own, piece_id
        if not isinstance(name, str) or not name:
            raise InputError(f"session: id {name!r:.80}; expected a name")
        encoded(name)
        if self._is_used(name):
            raise SessionError(f"session: {name!r:.80} is the name of another piece; expected a new name")
        return name, piece_id

    def _is_used(self, name: str) -> bool:
        return name in self._used or name in self._names or name in self._known

    def _enter(self, known: PieceRecord) -> None:
        """Enters a piece that came in."""
        self._known[known.entry.id], self._names[known.name] = known, known.entry.id
        self._used.add(known.entry.id, known.name)

    # ----------------------------------------------------------------------------------------- what is held

    def _run(self, window: Window, edits: Edits) -> None:
        """Executes edits; the window is the session's once they were."""
        ledger = self.runtime.run(window, edits)
        self._counts.executed(ledger, window, edits)
        self._window = window

    def _count_branch(self, counts: SessionCounters) -> None:
        """Counts what a fork did for a question as this session's own."""
        for word in ("forwards", "questions", "tokens", "hits", "misses", "encoded", "bytes", "flops"):
            self._counts.add(word, counts.words[word])

    def place_anew(self) -> None:
        """Places the window again where the pool was lost; survivors forget what has left."""
        with self._lock:
            for piece in self._window.pieces:
                known = self._known.get(piece.entry.id)
                if known is not None:
                    self._hold(known)
            self._window = self.runtime.anew(self._window)

    def _hold(self, known: PieceRecord, tokens: EmbeddedInput | None = None) -> EmbeddedInput:
        """Sees to it that the runtime has a piece's tokens, and returns them.

        Raises:
          SessionError: neither they nor what was given are here any more.
        """
        if known.held is not None:
            return known.held
        if tokens is None:
            if known.thing is None:
                raise SessionError(
                    f"session: what {brief(known.name)!r} shows was let go of ({self.memory} bytes are kept of what "
                    "has left); expected it given again"
                )
            tokens = self._embedded(known.thing)
        self.runtime.provide(known.entry.id, tokens.tokens, tokens.length, known.entry.content)
        known.held = tokens
        return tokens

    def _embedded(self, thing: SessionInput) -> EmbeddedInput:
        """Embeds what was given, by the tower's output as the store has it; where it has none, it is stored."""
        store, former = self.store, self.runtime.former
        if thing.textual or former is None or not isinstance(store, EncoderStore):
            return embedded(self.backbone, thing.items)
        backbone: Any = self.backbone
        prompt = backbone.prepare(list(thing.items))
        features = store.get_encoder(thing.content, backbone.fingerprint)
        if features is not None:
            # What somebody else put under this name may not fit the image; then the tower runs, and replaces it.
            with contextlib.suppress(InputError, ShapeError, DtypeError):
                found = embedded(backbone, thing.items, prompt={**prompt, "features": features})
                self._counts.add("encoded")
                return found
        features = backbone.encode(**prompt)
        former.keep_encoder(thing.content, features)
        return embedded(backbone, thing.items, prompt={**prompt, "features": features})

    def _let_go(self, known: PieceRecord) -> None:
        if known.held is not None:
            known.held = None
            self.runtime.forget(known.entry.id)

    def _settled(self) -> None:
        """Forgets what left and cannot be recalled, and the oldest of what left beyond what is kept of it."""
        window = self._window
        for id in [id for id in self._known if id not in window and id not in window.evicted_by_id]:
            known = self._known.pop(id)
            self._names.pop(known.name, None)
            self._let_go(known)
        left = [self._known[piece.entry.id] for piece in self._window.evicted if piece.entry.id in self._known]
        size = sum(known.nbytes for known in left)
        for forget in (self._let_go, _without_thing):  # tokens can be made again of what was given
            for known in left:
                if size <= self.memory:
                    return
                size -= known.nbytes
                forget(known)
                size += known.nbytes

    # -------------------------------------------------------------------------------------------- who watches

    def _tell(self, op: Op, known: PieceRecord | None = None, things: Sequence[Any] = (), **fields: Any) -> None:
        """Tells the watchers of an event, of a piece where one is named."""
        if not self.watchers:
            return
        if known is not None and op in ("add", "replace"):
            entry = known.entry
            fields |= {"content": entry.content, "tokens": entry.tokens, "span": entry.span, "kind": entry.kind}
            fields["order_free"] = entry.order_free
        if known is not None:
            fields["chunk"] = known.name
        event = Event(0.0, self.name, op, **fields)
        for told in list(self.watchers):
            told(event, things)


def _without_thing(known: PieceRecord) -> None:
    known.thing = None
