"""Strict parsing of untrusted JSON: no repeated names in an object, no NaN or infinity."""

import json
from collections.abc import Callable
from typing import Any

from ..errors import KVPatchError


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


def first_value(text: str, at: int) -> tuple[Any, int]:
    """Parses the value that begins at a place in a text, as `loads` does. Also returns where it ends.

    Raises:
      ValueError: as `loads`.
    """
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def object_of(text: str | bytes, what: str, refused: type[KVPatchError]) -> dict[str, Any]:
    """Parses one JSON object, as `loads` does.

    Raises:
      `refused`: the text is no such JSON, or another value than an object. The message begins with `what`.
    """
    try:
        found = loads(text)
    except ValueError as error:
        raise refused(f"{what}: got no JSON of this kind ({error!s:.80}); expected one object") from None
    if not isinstance(found, dict):
        raise refused(f"{what}: got a {type(found).__name__}; expected an object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object, rejecting repeated names, of which json would keep the last."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is there twice")
    return result


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)
