"""Sizes in bytes as people write them: `10 << 30`, `"10 GB"`, `"1.5 GiB"`."""

import decimal
import re
from typing import Any

import numpy as np

from ..errors import InputError, KVPatchError

Size = int | float | str
"""Bytes: a whole number, or a text such as "10 GB" or "1.5 GiB"."""

_MOST = 1 << 62
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_WRITTEN = re.compile(r"([\d_]+(?:\.\d+)?)\s*([kmgtp]?)(i?)(?:b|bytes?)?", re.IGNORECASE | re.ASCII)


def size_of(given: Any, what: str, least: int = 0, refused: type[KVPatchError] = InputError) -> int:
    """Reads a size in bytes: a whole number, or a text with a unit. `kB`, `MB`, `GB`, `TB` count by 1000, `KiB`, `MiB`,
    `GiB`, `TiB` by 1024; `K`, `M`, `G`, `T` alone by 1000. Case and spaces do not matter.

    Raises:
      `refused`: anything else, below `least`, or 2**62 and more. `what` begins the message.
    """
    size: Any = _read(given.strip()) if isinstance(given, str) else given
    whole = isinstance(size, int | np.integer) or (isinstance(size, float | np.floating) and float(size).is_integer())
    if isinstance(size, bool) or not whole or not least <= size < _MOST:
        expected = f"bytes, {least} or more, such as 1 << 30, '10 GB' or '1.5 GiB'"
        raise refused(f"{what}: got {given!r:.80}; expected {expected}")
    return int(size)


def _read(text: str) -> int | None:
    """Bytes of a written size, rounded down; None where it is none."""
    found = _WRITTEN.fullmatch(text)
    if len(text) > 40 or found is None or not found[1].replace("_", "") or (found[3] and not found[2]):
        return None
    factor = (1024 if found[3] else 1000) ** _POWERS[found[2].lower()]
    return int(decimal.Decimal(found[1].replace("_", "")) * factor)
