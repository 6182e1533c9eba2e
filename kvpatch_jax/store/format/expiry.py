"""Expiry: checks of times given by callers, and the encoding of expiry in a file's modification time.

The header of an object states when it expires, and is authoritative. The modification time, set when the object is
written, encodes the same, so that expired objects are found without opening every file. A certain number of
microseconds marks objects that never expire; the rest of the time is then when the object was written.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...errors import InputError

Seconds = float | int | np.integer | np.floating | np.ndarray | jax.Array
"""A number of seconds, also as an array without axes."""

_SECOND, _MILLISECOND = 10**9, 10**6
_NEVER = 271_000
"""Nanoseconds within a millisecond that mark objects without expiry: whole microseconds, which file systems keep."""
_LATEST = (1 << 33) * _SECOND
"""Nanoseconds since the epoch, year 2242: the latest time that file systems support. Headers have later times."""
_NEAR = 2 * _SECOND
"""Nanoseconds: some file systems keep times with a resolution of two seconds."""


def seconds(value: Any, what: str, expected: str) -> float:
    """Converts a number of seconds of any numeric type to a float.

    Raises:
      InputError: it is not a finite number; the message ends in `expected`.
    """
    try:
        scalar = value.item() if isinstance(value, np.ndarray | np.generic | jax.Array) else value
        number = float(scalar) if type(scalar) in (float, int) else math.nan
    except (OverflowError, ValueError):  # an int beyond all floats, an array of several
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{what}: got {str(value)[:40]}; expected {expected}")
    return number


def checked_ttl(ttl: Seconds | None, what: str) -> float | None:
    """Returns a time to live in seconds as a float, or None. Raises InputError if it is not a finite number above 0."""
    if ttl is None:
        return None
    number = seconds(ttl, f"{what}.ttl", "finite seconds above 0, or None")
    if number <= 0:
        raise InputError(f"{what}.ttl: got {number}; expected finite seconds above 0, or None")
    return number


def expires_at(now: Seconds, ttl: Seconds | None, what: str) -> float | None:
    """Returns when an object that is put now expires, in seconds since the epoch, or None.

    Raises:
      InputError: as `checked_ttl`; or the clock or the sum is not finite.
    """
    ttl = checked_ttl(ttl, what)
    if ttl is None:
        return None
    now = seconds(now, f"{what}.clock", "finite seconds since the epoch")
    return seconds(now + ttl, f"{what}: expiry {ttl} s after {now}", "a finite time")


def is_before(first: float | None, second: float | None) -> bool:
    """Returns whether the first time of expiry is before the second; None means never."""
    return first is not None and (second is None or first < second)


def later(first: float | None, second: float | None) -> float | None:
    """Returns the later of two times of expiry."""
    return second if is_before(first, second) else first


def expiry_mtime(expires: float | None, now: int) -> int:
    """Returns the modification time, in nanoseconds, that encodes when an object expires. `now` is in nanoseconds."""
    if expires is None:
        return now // _MILLISECOND * _MILLISECOND + _NEVER
    shown = max(1, min(int(min(expires, 2.0**34) * _SECOND), _LATEST))
    # A microsecond earlier where it would be the mark of objects that never expire.
    return shown - 1000 if shown % _MILLISECOND == _NEVER else shown


def expiry_test(now: float) -> Callable[[int], bool]:
    """Returns a test of modification times: whether one says that its object has expired.

    It is true for every expired object that this library wrote. For old files, and files copied without times, it may
    be true by mistake: the header decides.
    """
    latest = int(min(now, 2.0**34) * _SECOND)
    return lambda mtime: mtime <= latest and mtime % _MILLISECOND != _NEVER


def mtime_agrees(mtime: int, expires: float | None) -> bool:
    """Returns whether a modification time agrees with the header, within the resolution of file systems."""
    if expires is None:
        return mtime % _MILLISECOND == _NEVER
    return mtime % _MILLISECOND != _NEVER and abs(mtime - expiry_mtime(expires, 0)) <= _NEAR


def expiry_from_mtime(mtime: int) -> float | None:
    """Returns when an object expires as its file's modification time says, in seconds; None: never, or unknown.

    For old files, and files copied without times, it may be too early: the header decides.
    """
    return None if mtime % _MILLISECOND == _NEVER else mtime / _SECOND
