"""Recognition of what a later version of the library wrote, which is told from damage and left as it is.

The checksum of a header is the same in all versions and is checked first. So a text that it agrees with was written
like that: by another version where it names a version, a field, a leaf, a dtype or a word that this one does not know.
"""

import dataclasses
import functools
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from ...errors import StoreVersionError


def expect_known(what: str, found: Iterable[Any], known: Collection[str]) -> None:
    """Raises StoreVersionError where a text is none of those known; what is no text is for others to judge."""
    for word in found:
        if isinstance(word, str) and word not in known:
            raise StoreVersionError(
                f"object: {what} {word[:60]!r}; expected one that this version of the library knows"
            )


def expect_fields(what: str, body: Any, kind: type) -> None:
    """Raises StoreVersionError where a body has a field that a dataclass lacks, or a word that its field lacks."""
    if not isinstance(body, Mapping):
        return
    words = _words_of(kind)
    expect_known(f"{what} with a field", body, words)
    for name, value in body.items():
        if words[name]:
            expect_known(f"{what} whose {name} is", [value], words[name])


@functools.cache
def _words_of(kind: Any) -> dict[str, tuple[str, ...]]:
    """Maps the fields of a dataclass to the words that they may have; none where they are no literals."""
    hints = typing.get_type_hints(kind)
    return {field.name: tuple(_literals(hints[field.name])) for field in dataclasses.fields(kind)}


def _literals(hint: Any) -> Iterable[str]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return [word for inner in typing.get_args(hint) for word in _literals(inner)] if _is_union(hint) else []


def _is_union(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)  # of one literal and None: a tuple of literals has no words of its own
