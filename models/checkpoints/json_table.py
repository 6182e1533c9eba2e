"""Reading the JSON files that lie beside a checkpoint's tensors."""

import json
import stat
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that a clone without Git LFS has in place of the real one."""
_LARGEST = 1 << 28
"""Bytes of the largest file of JSON that is read; a trillion parameters' index has 20 MB."""


def read_table(path: Path, missing: str | None = None) -> dict[str, Any]:
    """Reads a JSON file's table.

    Args:
      missing: what was expected, for the error where there is no such file; None gives {} then.

    Raises:
      ConfigError: no file where one is needed, a link to nothing, a file that may not be read or is too large, or
        something else in it than a table in JSON.
    """
    # A link is looked at even where nothing is behind it: a hub's cache that was emptied is full of such.
    if missing is None and not path.is_file() and not path.is_symlink():
        return {}

    try:
        # Of a pipe or a device, which may have no end, nothing is read.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise ConfigError(f"{path}: got no plain file of at most {_LARGEST} bytes; expected one")
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise ConfigError(f"{path}: got a pointer of Git LFS; expected the file itself: `git lfs pull` fetches it")
        table = json.loads(content.decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        found = "a link to nothing" if path.is_symlink() else "no such file"
        raise ConfigError(f"{path}: got {found}; expected {missing or 'the file, or none'}") from error
    except OSError as error:
        raise ConfigError(f"{path}: got a file that cannot be read ({error.strerror}); expected JSON") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: got a file that is not JSON ({error}); expected JSON") from error

    if not isinstance(table, dict):
        raise ConfigError(f"{path}: got a {type(table).__name__}; expected a table")
    return table
