"""A file of finished parts, one JSON line each behind a line of what they are parts of; runs go on from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError


def make_out(folder: Path) -> None:
    """Makes the folder of --out. Raises InputError for one that is or lies below a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"--out={folder} is or lies below a file; expected a folder") from error


def finished_parts(file: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads the finished parts; begins the file where there is none, and drops a last line that was cut off.

    Args:
      config: what the parts depend on, "model" among it, of JSON's types.

    Raises:
      InputError: the folder is a file, or the file holds parts of another configuration, or something else.
    """
    make_out(file.parent)
    kept = file.read_bytes() if file.exists() else b""
    whole = kept[: kept.rfind(b"\n") + 1] or (json.dumps({"config": config}) + "\n").encode()
    try:
        first, *parts = (json.loads(line) for line in whole.splitlines())
        found = dict(first["config"])
        if not all(isinstance(part, dict) and "part" in part for part in parts):
            raise ValueError("a line is no part")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a file of parts ({error!r}): delete it, or choose another --out") from error
    other = [name for name in {**config, **found} if name not in found or found[name] != config.get(name)]
    if other:
        raise InputError(
            f"{file} holds parts of another {', '.join(other)}; expected {config['model']}'s of this configuration: "
            "choose another --out, or delete it"
        )
    if whole != kept:
        file.write_bytes(whole)
    return parts


def add_part(file: Path, part: Mapping[str, Any]) -> None:
    """Adds a finished part to a file that `finished_parts` has read."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(part) + "\n")
