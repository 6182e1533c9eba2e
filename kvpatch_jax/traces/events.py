"""Events of sessions: the lines of a trace, which anybody may have written and which are therefore checked."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import InputError
from ..window import LIMIT, Kind

Op = Literal["add", "insert", "ask", "slide", "recall", "reorder", "fork", "replace", "evict", "close"]
PLACING: tuple[Op, ...] = ("add", "insert", "replace")
"""Operations that bring a new piece."""

_PIECE = "chunk content tokens span kind order_free payload text keep"
_FIELDS: dict[str, tuple[str, str]] = {
    "add": ("chunk", _PIECE),
    "insert": ("chunk before", f"{_PIECE} before"),
    "ask": ("text", "text steps tokens"),
    "slide": ("keep", "keep"),
    "recall": ("chunk", "chunk keep"),
    "reorder": ("order", "order"),
    "fork": ("branch", "branch"),
    "replace": ("chunk replaced", f"{_PIECE} replaced"),
    "evict": ("chunk", "chunk"),
    "close": ("", ""),
}
"""By operation: required fields, and allowed fields, besides time and session."""


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
      payload: files of the content, relative to the trace's folder: one for an image, several for frames, none for a
        text, or where they are not stored.
      text: the question, or the text that is added.
      keep: the number of chunks that stay after the lead. When a piece enters, the oldest leave first, if needed. None:
        all stay.
      order: ids, as `Window.reorder` takes them.
      replaced: id of the piece that leaves.
      before: id of the piece that an inserted one precedes.
      branch: name of the new session.
      steps: the largest number of tokens of the answer; None if unknown.

    Raises:
      InputError: a field of another type or out of range, a missing field, or one that the operation does not take.
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
        fields = self.to_dict()
        for name, value in fields.items():
            fits, expected = _VALUES[name]
            if not fits(value):
                raise InputError(f"event.{name}: got {value!r:.80}; expected {expected}")

        required, allowed = (words.split() for words in _FIELDS[self.op])
        for name in required:
            if name not in fields:
                raise InputError(f"event.op: got {self.op!r} without {name}; expected one")
        for name in fields:
            if name not in ("at", "session", "op", *allowed):
                raise InputError(f"event.op: got {self.op!r} with {name}; expected {allowed or 'no other field'}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults, which most are."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Event":
        """Returns the event of a JSON object.

        Raises:
          InputError: an unknown field, or as the class.
        """
        # An unknown field may be one of a later version, whose meaning would be lost.
        if unknown := sorted(set(fields) - set(_VALUES)):
            raise InputError(f"event: got field {unknown[0]!r:.80}; expected some of {list(_VALUES)}")
        # JSON has lists where events have tuples. Fields that every event has are refused where they are None.
        values: dict[str, Any] = {"at": None, "session": None, "op": None}
        for name, value in fields.items():
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _is_text(value: Any) -> bool:
    # Digests need UTF-8, which lone surrogates are not.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_name(value: Any) -> bool:
    return _is_text(value) and value != "" and "\0" not in value


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < LIMIT


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "at": (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "seconds, 0 or more"),
    "session": (_is_name, "a name in UTF-8"),
    "op": (lambda value: isinstance(value, str) and value in _FIELDS, f"one of {list(_FIELDS)}"),
    "kind": (lambda value: value in ("chunk", "text"), "'chunk' or 'text'"),
    "order_free": (lambda value: isinstance(value, bool), "True or False"),
    "text": (_is_text, "a text in UTF-8"),
    **dict.fromkeys(("chunk", "content", "replaced", "before", "branch"), (_is_name, "a name in UTF-8")),
    **dict.fromkeys(("tokens", "span"), (lambda value: _is_whole(value) and value > 0, "a number from 1 to 2**30")),
    **dict.fromkeys(("keep", "steps"), (_is_whole, "a number from 0 to 2**30")),
    **dict.fromkeys(
        ("order", "payload"), (lambda value: isinstance(value, tuple) and all(map(_is_name, value)), "names in UTF-8")
    ),
}
"""By field: what fits, and in words."""
