"""Parsing of sizes in bytes: `10 << 30`, `"10 GB"`, `"1.5 GiB"`."""

import decimal
import re
from typing import Any

import numpy as np

from ..errors import InputError, KVPatchError

Size = int | float | str
"""Size in bytes: a whole number, or a string such as "10 GB" or "1.5 GiB"."""

_MOST = 1 << 62
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_WRITTEN = re.compile(r"([\d_]+(?:\.\d+)?)\s*([kmgtp]?)(i?)(?:b|bytes?)?", re.IGNORECASE | re.ASCII)


def size_of(given: Any, what: str, least: int = 0, refused: type[KVPatchError] = InputError) -> int:
    """Converts a whole number, or a string with a unit, to a size in bytes.

    `kB`, `MB`, `GB`, `TB` and the letters `K`, `M`, `G`, `T` alone are powers of 1000; `KiB`, `MiB`, `GiB`, `TiB` are
    powers of 1024. Case and spaces are ignored.

    Raises:
      `refused`: the size cannot be parsed, is below `least`, or is 2**62 or more. The message begins with `what`.
    """
    size: Any = _read(given.strip()) if isinstance(given, str) else given
    whole = isinstance(size, int | np.integer) or (isinstance(size, float | np.floating) and float(size).is_integer())
    if isinstance(size, bool) or not whole or not least <= size < _MOST:
        expected = f"bytes, {least} or more, such as 1 << 30, '10 GB' or '1.5 GiB'"
        raise refused(f"{what}: got {given!r:.80}; expected {expected}")
    return int(size)


def _read(text: str) -> int | None:
    """Parses a written size to bytes, rounded down; None if it is invalid."""
    match = _WRITTEN.fullmatch(text)
    if len(text) > 40 or match is None:
        return None

    # An "i" without a prefix ("10 iB") is no unit.
    digits, prefix, binary = match[1].replace("_", ""), match[2], match[3]
    if not digits or (binary and not prefix):
        return None
    return int(decimal.Decimal(digits) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])
