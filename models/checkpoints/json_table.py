"""Reading the JSON files that lie beside a checkpoint's tensors."""

import json
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError


def read_table(path: Path, missing: str | None = None) -> dict[str, Any]:
    """Reads a JSON file's table.

    Args:
      missing: what was expected, for the error where there is no such file; None gives {} then.

    Raises:
      ConfigError: no file where one is needed, or something else in it than a table in JSON.
    """
    if missing is None and not path.is_file():
        return {}

    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{path}: got no such file; expected {missing}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: got a file that is not JSON ({error}); expected JSON") from error

    if not isinstance(table, dict):
        raise ConfigError(f"{path}: got a {type(table).__name__}; expected a table")
    return table
