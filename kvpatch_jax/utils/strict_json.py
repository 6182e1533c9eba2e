"""Strict parsing of untrusted JSON: no repeated names in an object, no NaN or infinity."""

import json
from typing import Any

from ..errors import InputError


def loads(text: str | bytes) -> Any:
    """Parses JSON whose objects have distinct names.

    Raises:
      ValueError: the text is not JSON, repeats a name, contains NaN or an infinity, or is nested so deeply that it
      exhausts the stack.
    """

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name is there twice")
        return dict(pairs)

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no number")

    try:
        return json.loads(text, object_pairs_hook=distinct, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def object_of(text: str | bytes, what: str) -> dict[str, Any]:
    """Parses one JSON object, as `loads` does.

    Raises:
      InputError: the text is no such JSON, or another value than an object. The message begins with `what`.
    """
    try:
        value = loads(text)
    except ValueError as error:
        raise InputError(f"{what}: got no JSON of this kind ({error!s:.80}); expected one object") from None
    if not isinstance(value, dict):
        raise InputError(f"{what}: got a {type(value).__name__}; expected an object")
    return value
