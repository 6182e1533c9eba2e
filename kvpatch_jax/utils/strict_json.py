"""JSON as a stranger may have written it: each name of an object once, no constants that are no JSON numbers."""

import json
from collections.abc import Callable
from typing import Any


def loads(text: str | bytes, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Parses JSON whose objects say each name once.

    Args:
      parse_float: as `json.loads` takes it.

    Raises:
      ValueError: no JSON, a name that is there twice, NaN or infinity by name, or nesting that exhausts the stack. What
      `parse_float` raises.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=parse_float)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")
