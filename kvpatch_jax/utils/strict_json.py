"""Strict parsing of untrusted JSON: no repeated names in an object, no NaN or infinity."""

import json
from collections.abc import Callable
from typing import Any


def loads(text: str | bytes, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Parses JSON whose objects have distinct names.

    Args:
      parse_float: as in `json.loads`.

    Raises:
      ValueError: the text is not JSON, repeats a name, contains NaN or an infinity, or is nested so deeply that it
      exhausts the stack. Also whatever `parse_float` raises.
    """
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=parse_float)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object, rejecting repeated names, of which json would keep the last."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is there twice")
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")
