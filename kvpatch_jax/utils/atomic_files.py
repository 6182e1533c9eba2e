"""Atomic replacement of files: a process killed meanwhile leaves either the old file or the new one."""

import glob
import os
import secrets
from pathlib import Path
from typing import Any

from ..errors import KVPatchError


def path_of(name: Any, what: str, refused: type[KVPatchError], kind: str = "a file's name") -> Path:
    """Converts a caller's argument to a path, with `~` expanded. Messages expect a `kind`.

    Raises:
      `refused`: the argument is not a str or path, is empty, or contains a NUL character, which no file name has.
    """
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise refused(f"{what}: got {name!r:.80}; expected {kind}, a str or pathlib.Path")
    return Path(os.path.expanduser(text))


def replace(path: Path, content: bytes) -> None:
    """Replaces a file atomically and durably: the content is on the disk when this returns.

    Temporary files of processes that were killed are deleted. If several processes replace one file, the last wins.

    Raises:
      OSError: the file cannot be written. The old file is unchanged, and no temporary file remains.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        process = left.name.removeprefix(f".{path.name}.").partition(".")[0]
        try:
            # Signal 0 only checks whether the process exists.
            os.kill(int(process), 0)
        except PermissionError:
            continue  # it does, and is another user's
        except (ProcessLookupError, ValueError, OverflowError):
            left.unlink(missing_ok=True)

    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    try:
        with new.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)

    # The rename itself is durable only once the folder is synchronised.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
