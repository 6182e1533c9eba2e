"""Journal of finished measurements, kept beside a certificate until that is written, so that a killed run resumes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..harness.parts import add_part, finished_parts


class Journal:
    """Finished parts by name, in a file; without a file, only in memory.

    Attributes:
      file: where the parts are kept, or None.
    """

    def __init__(self, file: Path | None = None, config: Mapping[str, Any] | None = None):
        """Reads what an earlier run measured.

        Args:
          config: everything that the parts depend on, "model" included, as JSON values.

        Raises:
          InputError: parts of another configuration, or a file of another kind.
        """
        self.file = file
        # A run that measured nothing has left its configuration alone, which refuses no other.
        if file is not None and file.is_file() and _is_empty(file):
            file.unlink()
        parts = [] if file is None else finished_parts(file, config or {})
        self._parts: dict[str, Mapping[str, Any]] = {part["part"]: part for part in parts}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def part(self, name: str) -> Mapping[str, Any] | None:
        """Returns a finished part, or None."""
        return self._parts.get(name)

    def add(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """Records a part, and returns it."""
        part = self._parts[name] = {"part": name, **fields}
        if self.file is not None:
            add_part(self.file, part)
        return part

    def delete(self) -> None:
        """Deletes the file, once the certificate is written."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _is_empty(file: Path) -> bool:
    """Returns whether a file has a configuration and no parts of it."""
    try:
        only = json.loads(file.read_bytes())
    except ValueError:  # several lines, or none of ours
        return False
    return isinstance(only, dict) and [*only] == ["config"]
