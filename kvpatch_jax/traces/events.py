"""`Event`: one line of a trace, which is checked, for anybody may have written it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ..cache import encoded
from ..errors import InputError, TraceError
from ..window import LIMIT, Entry, Kind

Op = Literal["add", "insert", "ask", "slide", "recall", "reorder", "fork", "replace", "evict", "close"]
OPS: tuple[str, ...] = get_args(Op)

_PLACED = frozenset({"chunk", "content", "tokens", "span", "kind", "order_free", "payload", "text", "keep"})
_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "add": (frozenset({"chunk"}), _PLACED),
    "insert": (frozenset({"chunk", "before"}), _PLACED | {"before"}),
    "ask": (frozenset({"text"}), frozenset({"text", "steps", "tokens"})),
    "slide": (frozenset({"keep"}), frozenset({"keep"})),
    "recall": (frozenset({"chunk"}), frozenset({"chunk", "keep"})),
    "reorder": (frozenset({"order"}), frozenset({"order"})),
    "fork": (frozenset({"branch"}), frozenset({"branch"})),
    "replace": (frozenset({"chunk", "replaced"}), _PLACED | {"replaced"}),
    "evict": (frozenset({"chunk"}), frozenset({"chunk"})),
    "close": (frozenset(), frozenset()),
}
"""By operation: required fields, and allowed fields, besides time and session."""
PLACING: tuple[Op, ...] = ("add", "insert", "replace")
"""Operations that bring a new piece."""

LONGEST = {
    "session": 256, "chunk": 1024, "content": 1024, "branch": 256, "replaced": 1024, "before": 1024, "text": 1 << 19
}  # fmt: skip
"""The largest number of characters of a field."""
NAMES = 4096
"""The largest number of names of an order, or paths of a payload."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Change of one session's window, or a question after it.

    Attributes:
      at: seconds since the trace began.
      session: whose window. A fork is named by the `branch` of the event that created it.
      op: "add" a chunk or text after the others; "insert" one in front of another; "ask" a question; "slide" to the
        last `keep` chunks; "recall" an evicted chunk; "reorder" order-free chunks; "fork" a branch; "replace" a piece
        by another; "evict" one; "close".
      chunk: id of the piece that is added, inserted, recalled or evicted, or that takes another's place.
      content: digest of what it shows; None if unknown.
      tokens, span: of the piece, for the backbone that it was recorded with; None if unknown. A question has `tokens`
        where only its length is known: its `text` is then a name, and the same name asks the same.
      kind: "chunk" or "text".
      order_free: whether the chunk's place has no meaning.
      payload: files of the content, relative to the trace's folder, with forward slashes: one for an image, several for
        frames, none for a text, or where they were not kept.
      text: the question, or the text that is added.
      keep: the number of chunks that stay after the lead. When a piece enters, the oldest leave first, if needed. None:
        all stay.
      order: ids, as `Window.reorder` takes them.
      replaced: id of the piece that leaves.
      before: id of the piece that an inserted one precedes.
      branch: name of the new session.
      steps: the largest number of tokens of the answer; None if unknown.

    Raises:
      TraceError: a field of another type or out of range, a missing field, or one that the operation does not take.
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
    before: str | None = None
    branch: str | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        # Fields that every event has.
        number = isinstance(self.at, int | float) and not isinstance(self.at, bool)
        if not number or not math.isfinite(self.at) or self.at < 0:
            raise TraceError(f"event.at: got {self.at!r:.80}; expected seconds, 0 or more")

        object.__setattr__(self, "at", float(self.at))
        if not isinstance(self.op, str) or self.op not in _FIELDS:
            raise TraceError(f"event.op: got {self.op!r:.80}; expected one of {OPS}")

        _check_text(self.session, "session")

        # Types and ranges of the others; what an operation needs of them comes last.
        for field in ("chunk", "content", "replaced", "before", "branch"):
            if getattr(self, field) is not None:
                _check_text(getattr(self, field), field)

        if self.text is not None:
            _check_text(self.text, "text", empty=True)
        for field, least in (("tokens", 1), ("span", 1), ("keep", 0), ("steps", 0)):
            value = getattr(self, field)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and (not whole or not least <= value < LIMIT):
                raise TraceError(f"event.{field}: got {value!r:.80}; expected a whole number from {least} to 2**30")

        if self.kind not in ("chunk", "text"):
            raise TraceError(f"event.kind: got {self.kind!r:.80}; expected 'chunk' or 'text'")
        if not isinstance(self.order_free, bool) or (self.order_free and self.kind == "text"):
            raise TraceError(f"event.order_free: got {self.order_free!r:.80}; expected True of chunks alone")

        for field in ("order", "payload"):
            names = getattr(self, field)
            if not isinstance(names, tuple) or len(names) > NAMES:
                raise TraceError(f"event.{field}: got {names!r:.80}; expected a tuple of at most {NAMES} names")
            for name in names:
                _check_text(name, field, longest=LONGEST["chunk"])

        if len(set(self.order)) != len(self.order):
            raise TraceError(f"event.order: got {self.order!r:.80}; expected each name once")

        for path in self.payload:
            check_path(path)

        # What the operation requires and allows; a field at its default counts as not given.
        required, allowed = _FIELDS[self.op]
        given = {name for name, default in _DEFAULTS.items() if getattr(self, name) != default}
        if missing := sorted(required - given):
            raise TraceError(f"event.op: got {self.op!r} without {missing[0]}; expected one")
        if more := sorted(given - allowed):
            expected = sorted(allowed) or "no other field"
            raise TraceError(f"event.op: got {self.op!r} with {more[0]}; expected {expected}")

    @property
    def entry(self) -> Entry:
        """The piece as a window takes it.

        Raises:
          TraceError: an event that places nothing, or a piece whose tokens or span are unknown.
        """
        if self.op not in PLACING or self.tokens is None or self.span is None or self.chunk is None:
            raise TraceError(
                f"event: got {self.op!r} of {self.chunk!r:.80} with {self.tokens} tokens and span {self.span}; "
                "expected a piece that is placed, with both known"
            )
        return Entry(self.chunk, self.content, self.tokens, self.span, self.kind, self.order_free)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON has them, without those at their defaults."""
        # Short lines: most events have few of the fields.
        found = {"at": self.at, "session": self.session, "op": self.op}
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default:
                found[name] = getattr(self, name)
        return found

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Event":
        """Returns the event of a JSON object.

        Raises:
          TraceError: a field that is missing, unknown or of another type.
        """
        # An unknown field may be one of a later version, whose meaning would be lost.
        if unknown := sorted(set(fields) - _NAMES):
            raise TraceError(f"event: got field {unknown[0]!r:.80}; expected some of {sorted(_NAMES)}")
        if missing := sorted({"at", "session", "op"} - set(fields)):
            raise TraceError(f"event.{missing[0]}: got none; expected one")

        # JSON has lists where events have tuples.
        values = dict(fields)
        for field in ("order", "payload"):
            if field in values:
                if not isinstance(values[field], list):
                    raise TraceError(f"event.{field}: got {values[field]!r:.80}; expected a list of names")
                values[field] = tuple(values[field])

        return cls(**values)


_DEFAULTS = {
    field.name: field.default for field in dataclasses.fields(Event) if field.default is not dataclasses.MISSING
}
_NAMES = {field.name for field in dataclasses.fields(Event)}


def check_path(path: str) -> None:
    """Refuses a path that leads out of the trace's own folder.

    Raises:
      TraceError: an absolute path, one with "..", a backslash, a drive or a control character.
    """
    # Names that are special on any system, because traces travel.
    parts = path.split("/")
    special = any(ord(letter) < 32 or letter in '\\:*?"<>|' for letter in path)
    if special or any(part in ("", ".", "..") for part in parts):
        raise TraceError(f"event.payload: got {path!r:.80}; expected a relative path below the trace's folder")


def _check_text(value: Any, field: str, empty: bool = False, longest: int | None = None) -> None:
    """Raises TraceError for a value that is no text of at most `longest` characters."""
    longest = LONGEST[field] if longest is None else longest
    if not isinstance(value, str) or len(value) > longest:
        found = f"a text of {len(value)} characters" if isinstance(value, str) else f"{value!r:.80}"
        raise TraceError(f"event.{field}: got {found}; expected a text of at most {longest}")

    # Digests need UTF-8, which lone surrogates are not.
    try:
        encoded(value)
    except InputError as error:
        raise TraceError(f"event.{field}: {error}") from None

    if not value and not empty:
        raise TraceError(f"event.{field}: got an empty text; expected a name")


def check_history(events: Sequence[Event]) -> None:
    """Refuses events that cannot have happened in this order.

    Which chunks a slide evicts depends on the lead, so that a chunk is refused only if its session never had it, not if
    it is still in the window.

    Raises:
      TraceError: naming the event by its number from 0: time that runs backwards, a closed session, a branch with the
        name of another, an id that is added twice, or one that its session never had.
    """
    # {session: ids that it ever had}.
    known: dict[str, set[str]] = {}
    closed: set[str] = set()
    last = 0.0

    for number, event in enumerate(events):
        found = f"event {number}: got {event.op!r} of session {event.session!r:.40}"
        if event.at < last:
            raise TraceError(f"{found} at {event.at} s; expected {last} or later")
        if event.session in closed:
            raise TraceError(f"{found}, which was closed; expected another session")

        # Branches know the ids of the session that they were forked from.
        last, ids = event.at, known.setdefault(event.session, set())
        if event.op in PLACING and event.chunk in ids and event.chunk != event.replaced:
            raise TraceError(f"{found}, which adds {event.chunk!r:.80} again; expected a new id, or a recall")

        referenced = [*event.order]
        if event.op in ("recall", "evict"):
            referenced.append(str(event.chunk))
        elif event.op == "replace":
            referenced.append(str(event.replaced))
        elif event.op == "insert":
            referenced.append(str(event.before))

        for id in referenced:
            if id not in ids:
                raise TraceError(f"{found}, where {id!r:.80} was never added; expected an id that was")

        if event.op == "fork" and event.branch is not None:
            if event.branch in known or event.branch in closed:
                raise TraceError(f"{found}, which begins branch {event.branch!r:.80} again; expected another name")
            known[event.branch] = set(ids)

        if event.op in PLACING and event.chunk is not None:
            ids.add(event.chunk)
        if event.op == "close":
            closed.add(event.session)
