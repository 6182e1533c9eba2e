"""Files that are replaced whole or not at all: whoever is killed meanwhile leaves the old file or the new one."""

import contextlib
import glob
import os
import secrets
from pathlib import Path


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
