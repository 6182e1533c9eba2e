"""Refusal of words and fields that objects do not have."""

import dataclasses
import functools
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from ...errors import StoreCorruptError


def expect_known(what: str, words: Iterable[Any], known: Collection[str]) -> None:
    """Raises StoreCorruptError for an unknown string. Other types are left to later checks."""
    for word in words:
        if isinstance(word, str) and word not in known:
            raise StoreCorruptError(f"object: got {what} {word[:60]!r}; expected one of the format")


def expect_fields(what: str, body: Any, kind: type) -> None:
    """Raises StoreCorruptError for a field that the dataclass lacks, or a word that the type of its field lacks."""
    if not isinstance(body, Mapping):
        return
    words = _words_of(kind)
    expect_known(f"{what} with a field", body, words)
    for name, value in body.items():
        if words[name]:
            expect_known(f"{what} whose {name} is", [value], words[name])


@functools.cache
def _words_of(kind: Any) -> dict[str, tuple[str, ...]]:
    """Maps each field of a dataclass to the words of its `Literal` type, optional or not; () for other types."""
    hints = typing.get_type_hints(kind)

    words: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(kind):
        options = [hints[field.name]]
        # Only of an optional type: a tuple of literals has no words of its own.
        if type(None) in typing.get_args(options[0]):
            options += typing.get_args(options[0])
        words[field.name] = ()
        for option in options:
            if typing.get_origin(option) is Literal:
                words[field.name] += typing.get_args(option)
    return words
