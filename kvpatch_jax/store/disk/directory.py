"""What a directory shows of objects without opening them, and taking them away."""

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

from ..io.files import Identity, folder, identity


class DirectoryEntry(NamedTuple):
    """An object as the directory shows it: path from the root, bytes, when it was last used (seconds), which file, and
    when it expires (`expiry.expiry_look`)."""

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


def entry_of(path: str, stat: os.stat_result) -> DirectoryEntry:
    """An object by its path from the root and what the system says of its file."""
    return DirectoryEntry(path, stat.st_size, stat.st_atime, identity(stat), stat.st_mtime_ns)


Still = Callable[[int, str], bool]
"""Says of a name in an open directory, while nobody can put anything else there, whether the object that has it is the
one that is meant."""


class Removal:
    """Takes away objects of a root, by their paths from there; made by `Disk.removing`.

    Attributes:
      folders: where objects were, from the root; to be synced.
    """

    def __init__(self, root: str):
        self.root = root
        self.folders: set[str] = set()

    def is_there(self, path: str, still: Still | None = None) -> bool:
        """Whether there is an object, and the one that is meant."""
        above, _, file = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(self.root, above) as fd:
            return _is_meant(fd, file, still)
        return False

    def remove(self, path: str, still: Still | None = None) -> bool:
        """Takes an object away, if it is the one that is meant. Whether it did."""
        above, _, file = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(self.root, above) as fd:
            if _is_meant(fd, file, still):
                os.unlink(file, dir_fd=fd)
                self.folders.add(above)
                return True
        return False


def _is_meant(fd: int, file: str, still: Still | None) -> bool:
    os.stat(file, dir_fd=fd, follow_symlinks=False)
    return still is None or still(fd, file)


def same_file(file: Identity) -> Still:
    """Whether a name is that of the same file, which nobody has used or linked meanwhile."""
    return lambda fd, name: identity(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file
