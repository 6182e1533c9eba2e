"""Parsing of sizes in bytes: `10 << 30`, `"10 GB"`, `"1.5 GiB"`."""

import decimal
import re
from typing import Any

from ..errors import InputError, KVPatchError
from .kinds import is_whole

Size = int | float | str
"""Size in bytes: a whole number, or a string such as "10 GB" or "1.5 GiB"."""

_WRITTEN = re.compile(r"(\d[\d_]{0,30}(?:\.\d{1,30})?)\s*(?:([kmgtp])(i?))?(?:b|bytes?)?", re.IGNORECASE | re.ASCII)


def size_of(value: Any, what: str, least: int = 0, refused: type[KVPatchError] = InputError) -> int:
    """Converts a whole number, or a string with a unit, to a size in bytes, rounded down.

    `kB`, `MB`, `GB`, `TB` and the letters `K`, `M`, `G`, `T` alone are powers of 1000; `KiB`, `MiB`, `GiB`, `TiB` are
    powers of 1024. Case and spaces are ignored.

    Raises:
      `refused`: the size cannot be parsed, is below `least`, or is 2**62 or more. The message begins with `what`.
    """
    size = value
    match = _WRITTEN.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        unit = (1024 if match[3] else 1000) ** " kmgtp".index((match[2] or " ").lower())
        size = int(decimal.Decimal(match[1].replace("_", "")) * unit)
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    if not is_whole(size, least):
        expected = f"bytes, {least} or more, such as 1 << 30, '10 GB' or '1.5 GiB'"
        raise refused(f"{what}: got {value!r:.80}; expected {expected}")
    return int(size)
