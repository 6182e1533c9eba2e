"""What a directory shows of objects without opening them, and taking them away."""

import dataclasses
import os
from collections.abc import Callable

from .files import Identity, identity


@dataclasses.dataclass(frozen=True)
class Entry:
    """An object as the directory shows it: path from the root, bytes, when it was last used (seconds), which file, and
    when it expires (`expiry.may_have_expired`)."""

    path: str
    size: int
    used: float
    file: Identity
    shown: int

    @property
    def chunk(self) -> str:
        """The keyed name of the chunk it belongs to, with its folder: objects that agree in it go together."""
        return self.path.partition(".")[0]

    @property
    def part(self) -> str:
        """What of the chunk it is: "kv", "kv.int8", "enc", "p.…"."""
        return self.path.partition(".")[2].removesuffix(".safetensors")


def entry_of(path: str, stat: os.stat_result) -> Entry:
    """An object by its path from the root and what the system says of its file."""
    return Entry(path, stat.st_size, stat.st_atime, identity(stat), stat.st_mtime_ns)


Still = Callable[[str], bool]
"""Says of a path, while nobody can put anything else there, whether the object there is the one that is meant."""


class Removal:
    """Takes away objects of a root, by their paths from there; made by `Disk.removing`.

    Attributes:
      folders: where objects were; to be synced.
    """

    def __init__(self, root: str):
        self.root = root
        self.folders: set[str] = set()

    def is_there(self, path: str, still: Still | None = None) -> bool:
        """Whether there is an object, and the one that is meant."""
        try:
            os.lstat(f"{self.root}/{path}")
            return still is None or still(f"{self.root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            return False

    def remove(self, path: str, still: Still | None = None) -> bool:
        """Takes an object away, if it is the one that is meant. Whether it did."""
        if not self.is_there(path, still):
            return False
        os.unlink(f"{self.root}/{path}")
        self.folders.add(os.path.dirname(f"{self.root}/{path}"))
        return True


def same_file(file: Identity) -> Still:
    """Whether a path leads to the same file, which nobody has used or linked meanwhile."""
    return lambda path: identity(os.lstat(path)) == file
