"""What a run has measured, kept beside its certificate until that is written, for a run that was killed to go on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..results.parts import add_part, finished_parts


class Journal:
    """Finished parts by name, in a file; without a file, nothing is kept and nothing was done before.

    Attributes:
      file: where they are, or None.
    """

    def __init__(self, file: Path | None = None, config: Mapping[str, Any] | None = None):
        """Reads what an earlier run measured.

        Args:
          config: all that the parts depend on, "model" among it, of JSON's types.

        Raises:
          InputError: parts of another configuration, or a file of something else.
        """
        self.file = file
        parts = [] if file is None else finished_parts(file, config or {})
        self._parts: dict[str, Mapping[str, Any]] = {part["part"]: part for part in parts}

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def part(self, name: str) -> Mapping[str, Any] | None:
        """A part that was measured, or None."""
        return self._parts.get(name)

    def add(self, name: str, **fields: Any) -> Mapping[str, Any]:
        """Keeps a part, and returns it."""
        part = self._parts[name] = {"part": name, **fields}
        if self.file is not None:
            add_part(self.file, part)
        return part

    def delete(self) -> None:
        """Takes the file away, once what it was kept for is there."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
