"""Expiry: checks of times that users give, and how the modification time of a file tells it.

An object's header says when it expires, and that counts. So that nobody need open every file to find those whose time
has come, the time of a file's last change shows the same: it is set when the object is written. Where the microseconds
say so, the object never expires, and the rest is when it was written.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...errors import InputError

Seconds = float | int | np.integer | np.floating | np.ndarray | jax.Array
"""A number of seconds; an array of no axes will do. Kept as a float."""

_SECOND, _MILLISECOND = 10**9, 10**6
_NEVER = 271_000
"""Nanoseconds within a millisecond of what never expires: microseconds, which file systems keep."""
_LATEST = (1 << 33) * _SECOND
"""Nanoseconds since the epoch, year 2242: what file systems can still say. Later times are told by headers alone."""
_NEAR = 2 * _SECOND
"""Some file systems keep times to two seconds."""


def seconds(value: Any, what: str, expected: str) -> float:
    """Converts a number of seconds to a float, whatever kind of number it is.

    Raises:
      InputError: no number, or not finite; the text ends in `expected`.
    """
    try:
        scalar = value.item() if isinstance(value, np.ndarray | np.generic | jax.Array) else value
        number = float(scalar) if type(scalar) in (float, int) else math.nan
    except (OverflowError, ValueError):  # an int beyond all floats, an array of several
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{what} {str(value)[:40]}; expected {expected}")
    return number


def checked_ttl(ttl: Seconds | None, what: str) -> float | None:
    """Checks a time to live in seconds, or None. Raises InputError where it is not a finite number above 0."""
    if ttl is None:
        return None
    number = seconds(ttl, f"{what}: ttl", "finite seconds above 0, or None")
    if number <= 0:
        raise InputError(f"{what}: ttl {number}; expected finite seconds above 0, or None")
    return number


def expires_at(now: Seconds, ttl: Seconds | None, what: str) -> float | None:
    """Adds a time to live to the clock: when what is put now expires, in seconds since the epoch.

    Raises:
      InputError: as `checked_ttl`; a clock that does not tell a time; a sum that is no time.
    """
    ttl = checked_ttl(ttl, what)
    if ttl is None:
        return None
    now = seconds(now, f"{what}: the clock tells", "finite seconds since the epoch")
    return seconds(now + ttl, f"{what}: ttl {ttl} from {now} on, which is", "a finite time")


def is_before(first: float | None, second: float | None) -> bool:
    """Whether what expires first, in seconds since the epoch, does so before the second; None never expires."""
    return first is not None and (second is None or first < second)


def later(first: float | None, second: float | None) -> float | None:
    """Returns the later of two times of expiry."""
    return second if is_before(first, second) else first


def expiry_mtime(expires: float | None, now: int) -> int:
    """Returns the modification time, in nanoseconds, that tells when an object expires. `now`: the time, likewise."""
    if expires is None:
        return now // _MILLISECOND * _MILLISECOND + _NEVER
    shown = max(1, min(int(min(expires, 2.0**34) * _SECOND), _LATEST))
    return shown - 1000 if shown % _MILLISECOND == _NEVER else shown


def expiry_test(now: float) -> Callable[[int], bool]:
    """Makes a test of modification times: whether one says that its object has expired.

    Old files, and copies without times, may say so wrongly, and then the header tells; what has expired and was written
    by this library does say so.
    """
    latest = int(min(now, 2.0**34) * _SECOND)
    return lambda mtime: mtime <= latest and mtime % _MILLISECOND != _NEVER


def mtime_agrees(mtime: int, expires: float | None) -> bool:
    """Whether a modification time agrees with the header, as far as file systems keep times."""
    if expires is None:
        return mtime % _MILLISECOND == _NEVER
    return mtime % _MILLISECOND != _NEVER and abs(mtime - expiry_mtime(expires, 0)) <= _NEAR
