"""Lines of JSON objects in files of others, plain or compressed by gzip."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError, TraceError
from kvpatch_jax.utils.strict_json import object_of


def numbered_objects(path: Path, longest: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of a file, each with its line's name for messages; empty lines are left out.

    Args:
      longest: bytes of a line at most.

    Raises:
      TraceError: a line that is too long, or no JSON object. InputError: no such file, or damaged compression.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as lines:
            number = 0
            while line := lines.readline(longest + 1):
                number += 1
                where = f"{path.name}, line {number}"
                if len(line) > longest:
                    raise TraceError(f"{where}: got more than {longest} bytes; expected at most so many")
                if line.strip():
                    yield where, object_of(line, where, TraceError)
    except (OSError, EOFError) as error:
        raise InputError(f"trace: got {str(path)!r:.300}, which cannot be read ({error}); expected a file") from error
