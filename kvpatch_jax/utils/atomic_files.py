"""Files that are replaced whole or not at all: whoever is killed meanwhile leaves the old file or the new one."""

import contextlib
import glob
import os
import secrets
from pathlib import Path
from typing import Any

from ..errors import KVPatchError


def path_of(given: Any, what: str, refused: type[KVPatchError], kind: str = "a file's name") -> Path:
    """Returns the path that somebody names, with the user's folder for `~`. `kind` is what messages expect.

    Raises:
      The error that is given: what is no text or path, an empty one, or one that no file has (with a zero in it).
    """
    name = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise refused(f"{what} {given!r:.80}; expected {kind}, a str or pathlib.Path")
    return Path(os.path.expanduser(name))


def replace(path: Path, content: bytes) -> None:
    """Puts a file in place of another in one step, on the disk when this returns.

    What processes that were killed left beside it is swept up. Several may replace one file: the last one's stays.

    Raises:
      OSError: it cannot be written; then the old file is as it was, and nothing is left beside it.
    """
    _sweep(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    try:
        with new.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink()

    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sweep(path: Path) -> None:
    """Deletes what processes left that were killed while they wrote."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        process = left.name.removeprefix(f".{path.name}.").partition(".")[0]
        try:
            os.kill(int(process), 0)
        except (ProcessLookupError, ValueError, OverflowError):
            left.unlink(missing_ok=True)
        except PermissionError:
            continue
