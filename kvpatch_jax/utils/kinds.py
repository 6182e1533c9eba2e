"""Type checks of arguments, for calls in which the first use of a wrong type would raise a misleading error."""

import difflib
import types
from collections.abc import Collection, Iterable
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from ..errors import InputError, KVPatchError


def expect_kind(value: Any, kind: Any, what: str, expected: str, refused: type[KVPatchError] = InputError) -> None:
    """Raises `refused` unless a value is an instance of a type, or of one of a tuple or union of types."""
    if not isinstance(value, kind):
        raise refused(f"{what}: got a {type(value).__name__}; expected {expected}")


def expect_names(
    names: Iterable[str], known: Collection[str], what: str, refused: type[KVPatchError] = InputError
) -> None:
    """Raises `refused` for the first option that is not known, with the known one that is spelled most like it."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            expected = f"{close[0]!r}, or another of " if close else "one of " if known else "none"
            raise refused(f"{what}: got option {name!r:.80}; expected {expected}{', '.join(sorted(known))}")


def is_whole(value: Any, least: int) -> bool:
    """Returns whether a value is an integer, not a bool, with `least` <= value < 2**62."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) < 1 << 62


def is_of(value: Any, hint: Any) -> bool:
    """Returns whether a value is of a type hint: a class, a union of them, the class of a generic, text for a literal.

    Integers are floats, NumPy's numbers are numbers, and True and False are none.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any([is_of(value, part) for part in get_args(hint)])
    kind = str if origin is Literal else origin or hint
    if not isinstance(kind, type):
        return True
    if kind in (int, float):
        numbers = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, kind)


def all_of[T](kind: type[T], values: Iterable[T], what: str) -> list[T]:
    """Lists the values of a sequence after checking that all are of one type.

    Raises:
      InputError: `values` is a single value, or contains one of another type. The message begins with `what`.
    """
    word = kind.__name__
    if isinstance(values, kind) or not isinstance(values, Iterable):
        raise InputError(f"{what}: got a {type(values).__name__}; expected a sequence, each a {word}")

    result = list(values)
    for value in result:
        expect_kind(value, kind, what, f"a {word}")
    return result
