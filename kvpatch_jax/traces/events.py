"""`Event`: one line of a trace, what happened in a session's window; checked whoever wrote it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ..cache import encoded
from ..errors import InputError, TraceError
from ..window import LIMIT, Entry, Kind

Op = Literal["add", "ask", "slide", "recall", "reorder", "fork", "replace", "evict", "close"]
OPS: tuple[str, ...] = get_args(Op)

_PLACED = frozenset({"chunk", "content", "tokens", "span", "kind", "order_free", "payload", "text", "keep"})
_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "add": (frozenset({"chunk"}), _PLACED),
    "ask": (frozenset({"text"}), frozenset({"text", "steps"})),
    "slide": (frozenset({"keep"}), frozenset({"keep"})),
    "recall": (frozenset({"chunk"}), frozenset({"chunk", "keep"})),
    "reorder": (frozenset({"order"}), frozenset({"order"})),
    "fork": (frozenset({"branch"}), frozenset({"branch"})),
    "replace": (frozenset({"chunk", "replaced"}), _PLACED | {"replaced"}),
    "evict": (frozenset({"chunk"}), frozenset({"chunk"})),
    "close": (frozenset(), frozenset()),
}
"""By operation: the fields that it must have, and those that it may have, beside time and session."""

LONGEST = {"session": 256, "chunk": 1024, "content": 1024, "branch": 256, "replaced": 1024, "text": 1 << 19}
"""Characters that a field may have."""
NAMES = 4096
"""Names that an order, or paths that a payload, may have."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened in one session's window at one time.

    Attributes:
      at: seconds since the trace began.
      session: whose window. A fork's is named by the `branch` of the event that made it.
      op: "add" a chunk or text behind the others; "ask" a question; "slide" to the last `keep` chunks; "recall" a chunk
        that left; "reorder" order-free chunks; "fork" a branch; "replace" a piece by another; "evict" one; "close".
      chunk: id of the piece that is added, recalled or evicted, or that takes another's place.
      content: digest of what it shows; None where nobody said.
      tokens, span: of the piece, for the backbone that it was recorded with; None where that is not known.
      kind: "chunk" or "text".
      order_free: whether its place among others of its kind means nothing.
      payload: files of what it shows, relative to the trace's folder, with forward slashes: one for an image, several
        for frames, none for a text or where they were not kept.
      text: the question, or the text that is added.
      keep: chunks that stay behind the lead. Of a piece that comes in or back: with it; where as many were there, those
        in front have left first. None: all stay.
      order: ids, as `Window.reorder` takes them.
      replaced: id of the piece that leaves.
      branch: name of the new session.
      steps: tokens that were asked for at most; None where nobody said.

    Raises:
      TraceError: a field of another type or out of range, one that the operation needs and does not have, or one that
        it does not take.
    """

    at: float | int
    session: str
    op: Op
    chunk: str | None = None
    content: str | None = None
    tokens: int | None = None
    span: int | None = None
    kind: Kind = "chunk"
    order_free: bool = False
    payload: tuple[str, ...] = ()
    text: str | None = None
    keep: int | None = None
    order: tuple[str, ...] = ()
    replaced: str | None = None
    branch: str | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.at, int | float) and not isinstance(self.at, bool)
        if not number or not math.isfinite(self.at) or self.at < 0:
            raise TraceError(f"event: at {self.at!r:.80}; expected seconds, 0 or more")
        if not isinstance(self.op, str) or self.op not in _FIELDS:
            raise TraceError(f"event: op {self.op!r:.80}; expected one of {OPS}")
        object.__setattr__(self, "at", float(self.at))
        _check_name(self.session, "session")
        for word in ("chunk", "content", "replaced", "branch"):
            if getattr(self, word) is not None:
                _check_name(getattr(self, word), word)
        if self.text is not None:
            _check_text(self.text, "text")
        for word, least in (("tokens", 1), ("span", 1), ("keep", 0), ("steps", 0)):
            _check_number(getattr(self, word), word, least)
        if self.kind not in ("chunk", "text"):
            raise TraceError(f"event: kind {self.kind!r:.80}; expected 'chunk' or 'text'")
        if not isinstance(self.order_free, bool) or (self.order_free and self.kind == "text"):
            raise TraceError(f"event: order_free {self.order_free!r:.80}; expected it of chunks alone")
        self._check_lists()
        self._check_fields()

    def _check_lists(self) -> None:
        for word in ("order", "payload"):
            names = getattr(self, word)
            if not isinstance(names, tuple) or len(names) > NAMES:
                raise TraceError(f"event: {word} {names!r:.80}; expected a tuple of at most {NAMES} names")
            for name in names:
                _check_name(name, word, LONGEST["chunk"])
        if len(set(self.order)) != len(self.order):
            raise TraceError(f"event: order {self.order!r:.80}; expected each once")
        for path in self.payload:
            check_path(path)

    def _check_fields(self) -> None:
        """Refuses an operation without a field that it needs, or with one that it does not take."""
        needed, taken = _FIELDS[self.op]
        given = {name for name, default in _DEFAULTS.items() if getattr(self, name) != default}
        if missing := sorted(needed - given):
            raise TraceError(f"event: {self.op} without {missing[0]}; expected one")
        if more := sorted(given - taken):
            raise TraceError(f"event: {self.op} with {more[0]}; expected {sorted(taken) or 'no further field'}")

    @property
    def entry(self) -> Entry:
        """The piece as a window takes it.

        Raises:
          TraceError: an event that places nothing, or a piece whose tokens or span nobody said.
        """
        if self.op not in ("add", "replace") or self.tokens is None or self.span is None or self.chunk is None:
            raise TraceError(
                f"event: {self.op} of {self.chunk!r:.80} with {self.tokens} tokens and span {self.span}; expected a "
                "piece that is placed, and both known"
            )
        return Entry(self.chunk, self.content, self.tokens, self.span, self.kind, self.order_free)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them, without those that say nothing."""
        found = {"at": self.at, "session": self.session, "op": self.op}
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                found[name] = getattr(self, name)
        return found

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Event":
        """Makes an event of what JSON had.

        Raises:
          TraceError: a field that is missing, unknown or of another type.
        """
        if strangers := sorted(set(fields) - _NAMES):
            raise TraceError(f"event: field {strangers[0]!r:.80}; expected some of {sorted(_NAMES)}")
        if missing := sorted({"at", "session", "op"} - set(fields)):
            raise TraceError(f"event: no {missing[0]}; expected one")
        given = dict(fields)
        for word in ("order", "payload"):
            if word in given:
                if not isinstance(given[word], list):
                    raise TraceError(f"event: {word} {given[word]!r:.80}; expected a list of names")
                given[word] = tuple(given[word])
        return cls(**given)


_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(Event) if field.default is not dataclasses.MISSING
}
_NAMES = {field.name for field in dataclasses.fields(Event)}


def check_path(path: str) -> None:
    """Refuses a path that leads anywhere but into the trace's own folder.

    Raises:
      TraceError: an absolute path, one with "..", a backslash, a drive or a control character.
    """
    parts = path.split("/")
    strange = any(ord(letter) < 32 or letter in '\\:*?"<>|' for letter in path)
    if strange or any(part in ("", ".", "..") for part in parts):
        raise TraceError(f"event: payload {path!r:.80}; expected a relative path below the trace's folder")


def _check_name(value: Any, word: str, longest: int | None = None) -> None:
    _check_text(value, word, LONGEST[word] if longest is None else longest)
    if not value:
        raise TraceError(f"event: {word} is empty; expected a name")


def _check_text(value: Any, word: str, longest: int | None = None) -> None:
    longest = LONGEST[word] if longest is None else longest
    if not isinstance(value, str) or len(value) > longest:
        found = f"of {len(value)} characters" if isinstance(value, str) else f"{value!r:.80}"
        raise TraceError(f"event: {word} {found}; expected a text of at most {longest}")
    try:
        encoded(value)
    except InputError as error:
        raise TraceError(f"event: {word}: {error}") from None


def _check_number(value: Any, word: str, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < LIMIT:
        raise TraceError(f"event: {word} {value!r:.80}; expected a whole number from {least} to 2**30")


def check_history(events: Sequence[Event]) -> None:
    """Refuses events that no run of sessions can have had.

    Which chunks a slide leaves in a window depends on its lead, so that only a chunk that a session never had is
    refused, not one that is still there.

    Raises:
      TraceError: naming the event by its number from 0: time that runs back, a session that was closed, a branch that
        has another's name, an id that is added twice, or one that its session never had.
    """
    known: dict[str, set[str]] = {}
    closed: set[str] = set()
    last = 0.0
    for number, event in enumerate(events):
        what = f"event {number}: {event.op} of session {event.session!r:.40}"
        if event.at < last:
            raise TraceError(f"{what} at {event.at} s; expected {last} or later")
        if event.session in closed:
            raise TraceError(f"{what}, which was closed; expected another session")
        last, own = event.at, known.setdefault(event.session, set())
        if event.op in ("add", "replace") and event.chunk in own and event.chunk != event.replaced:
            raise TraceError(f"{what}: {event.chunk!r:.80} was added before; expected a new id, or a recall")
        there = {"recall": (event.chunk,), "evict": (event.chunk,), "replace": (event.replaced,)}.get(event.op, ())
        for id in (*there, *event.order):
            if id not in own:
                raise TraceError(f"{what}: {id!r:.80} was never added; expected an id that was")
        if event.op == "fork" and event.branch is not None:
            if event.branch in known or event.branch in closed:
                raise TraceError(f"{what}: branch {event.branch!r:.80} is there; expected another name")
            known[event.branch] = set(own)
        if event.op in ("add", "replace") and event.chunk is not None:
            own.add(event.chunk)
        if event.op == "close":
            closed.add(event.session)
