"""Events of sessions: the lines of a trace, which anybody may have written."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import InputError
from ..utils.kinds import expect_kind
from ..window import Kind, is_count

Op = Literal["add", "insert", "ask", "slide", "recall", "reorder", "fork", "replace", "evict", "close"]
PLACING: tuple[Op, ...] = ("add", "insert", "replace")
"""Operations that bring a new piece."""

_ALL, _PIECE = "at session", "content tokens span kind order_free payload text keep"
_FIELDS = {
    "add": (f"{_ALL} chunk", _PIECE),
    "insert": (f"{_ALL} chunk before", _PIECE),
    "ask": (f"{_ALL} text", "steps tokens"),
    "slide": (f"{_ALL} keep", ""),
    "recall": (f"{_ALL} chunk", "keep"),
    "reorder": (f"{_ALL} order", ""),
    "fork": (f"{_ALL} branch", ""),
    "replace": (f"{_ALL} chunk replaced", _PIECE),
    "evict": (f"{_ALL} chunk", ""),
    "close": (_ALL, ""),
}
"""By operation, the fields that it must have and may have."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Change of one session's window, or a question after it.

    Attributes:
      at: seconds since the trace began.
      session: whose window. A fork is named by the `branch` of the event that created it.
      op: "add" a piece after the others; "insert" one in front of another; "ask" a question; "slide" to the last `keep`
        chunks; "recall" an evicted chunk; "reorder" order-free chunks; "fork"; "replace" a piece; "evict" one; "close".
      chunk: id of the piece that enters or is evicted. replaced, before: of the piece whose place it takes, or in front
        of which it is inserted.
      content: digest of what it shows; None if unknown.
      tokens, span: of the piece, for the backbone that it was recorded with; None if unknown. A question has `tokens`
        where only its length is known: its `text` is then a name, and the same name asks the same.
      order_free: whether the chunk's place has no meaning.
      payload: files of the content, relative to the trace's folder: one for an image, several for frames.
      text: the question, or the text that is added.
      keep: the number of chunks that stay after the lead; the oldest leave before a piece enters. None: all stay.
      order: ids, as `Window.reorder` takes them.
      steps: the largest number of tokens of the answer; None if unknown.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are not at their defaults, which most are."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str = "event") -> "Event":
        """Makes the event of a JSON object. Null stands for a field that is absent.

        Raises:
          InputError: a field that is missing, that the operation does not take, or of another type or out of range. The
          message begins with `where`.
        """
        expect_kind(fields, Mapping, where, "an object")
        values: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        op: Any = values.pop("op", None)
        if op not in list(_FIELDS):
            raise InputError(f"{where}, op: got {op!r:.80}; expected one of {list(_FIELDS)}")
        required, optional = (words.split() for words in _FIELDS[op])
        for name in required:
            if name not in values:
                raise InputError(f"{where}, op: got {op!r} without {name}; expected one")
        for name, value in values.items():
            values[name] = value = tuple(value) if isinstance(value, list) else value
            if name not in required + optional:
                raise InputError(f"{where}, op: got {op!r} with {name!r:.80}; expected {required + optional}")
            fits, expected = _VALUES[name]
            if not fits(value):
                raise InputError(f"{where}, {name}: got {value!r:.80}; expected {expected}")
        return cls(op=op, **values)


def _is_text(value: Any) -> bool:
    # Digests need UTF-8, which lone surrogates are not.
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(_is_text(name) and "\0" not in name for name in value)


_VALUES = {
    "at": (lambda value: type(value) in (int, float) and 0 <= value < math.inf, "seconds, 0 or more"),
    "kind": (lambda value: value in ("chunk", "text"), "'chunk' or 'text'"),
    "order_free": (lambda value: isinstance(value, bool), "True or False"),
    **dict.fromkeys(
        ["session", "chunk", "content", "text", "replaced", "before", "branch"], (_is_text, "a text in UTF-8")
    ),
    **dict.fromkeys(("order", "payload"), (_are_names, "names in UTF-8")),
    **dict.fromkeys(("tokens", "span"), (is_count, "a number from 1 to 2**30")),
    **dict.fromkeys(("keep", "steps"), (lambda value: is_count(value, 0), "a number from 0 to 2**30")),
}
"""By field: what fits, and in words."""
