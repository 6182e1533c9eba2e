"""Checks of what kind an argument is, for calls where its first use would say something else."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import InputError, KVPatchError


def expect_kind(value: Any, kind: Any, what: str, expected: str, refused: type[KVPatchError] = InputError) -> None:
    """Raises `refused` where a value is not of a type, or of one of several."""
    if not isinstance(value, kind):
        raise refused(f"{what}: got a {type(value).__name__}; expected {expected}")


def is_whole(value: Any, least: int) -> bool:
    """Returns whether a value is a whole number from `least` on, and below 2**62."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) < 1 << 62


def all_of[T](kind: type[T], values: Iterable[T], what: str) -> list[T]:
    """Lists values, refusing a single one in place of a sequence, and any of another kind.

    Raises:
      InputError: either. `what` begins the message.
    """
    word = kind.__name__
    if isinstance(values, kind) or not isinstance(values, Iterable):
        raise InputError(f"{what}: a {type(values).__name__}; expected a sequence, each a {word}")
    found = list(values)
    for value in found:
        expect_kind(value, kind, what, f"a {word}")
    return found
