"""Lists objects by their directories, without opening them, and removes them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..format.header import Header
from ..format.naming import is_object, part_of
from ..format.objects import check_name, read_header
from ..io.files import Identity, folder, identity, locked, open_regular, typed, typed_errors, written

_DEPTH = 4
"""Folders above an object: obj/tenant/backbone/xx."""


class DirectoryEntry(NamedTuple):
    """An object as its directory lists it: path from the root, bytes, access time (seconds), identity of the file, and
    modification time (nanoseconds), which tells when it expires (`expiry.expiry_test`)."""

    path: str
    size: int
    used: float
    file: Identity
    mtime_ns: int

    @property
    def chunk(self) -> str:
        """The keyed name of the chunk it belongs to, with its folder: objects that agree in it go together."""
        return self.path.partition(".")[0]

    @property
    def part(self) -> str:
        """What of the chunk it is: "kv", "kv.int8", "enc", "p.…"."""
        return part_of(self.path)


def directory_entry(path: str, stat: os.stat_result) -> DirectoryEntry:
    """Makes an entry from an object's path and its file's `stat`."""
    return DirectoryEntry(path, stat.st_size, stat.st_atime, identity(stat), stat.st_mtime_ns)


def scan(root: str, below: str) -> list[DirectoryEntry]:
    """Lists every object below a folder of a root, in no order. Raises StoreError.

    Left out is what vanishes meanwhile, what has no object's name, and what lies deeper than objects do. A link, a FIFO
    or the like that has an object's name is listed, so that it can be seen and removed; nothing reads it.
    """
    found: list[DirectoryEntry] = []
    waiting = [below]
    while waiting:
        each = waiting.pop()
        try:
            with folder(root, each) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    path = f"{each}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting += [path] if path.count("/") < _DEPTH else []
                    elif is_object(path):
                        with contextlib.suppress(FileNotFoundError):
                            found.append(directory_entry(path, entry.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise typed(error, "store: list") from error
    return found


@contextlib.contextmanager
def reading(root: str, path: str) -> Iterator[tuple[int, Header]]:
    """Opens an object by its path below a root; yields its file and its header, checked against the file's name.

    Raises:
      StoreCorruptError: no object of that name. OSError: it cannot be read.
    """
    with open_regular(root, path, noatime=True) as fd:
        header = read_header(fd)
        check_name(header, os.path.basename(path))
        yield fd, header


Still = Callable[[int, str], bool]
"""Whether the object under a name in an open directory is the one that is meant; called while no name can change."""


class Removal:
    """Removes objects of a root, by their paths; made by `removing`.

    Attributes:
      folders: where objects were, from the root; to be synced.
    """

    def __init__(self, root: str):
        self.root = root
        self.folders: set[str] = set()

    @contextlib.contextmanager
    def _meant(self, path: str, still: Still | None) -> Iterator[tuple[int, str] | None]:
        """The open folder and the name of an object; None where it is gone or is not the one that is meant."""
        above, _, file = path.rpartition("/")
        with contextlib.ExitStack() as stack:
            found = None
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fd = stack.enter_context(folder(self.root, above))
                os.stat(file, dir_fd=fd, follow_symlinks=False)
                found = (fd, file) if still is None or still(fd, file) else None
            yield found

    def is_there(self, path: str, still: Still | None = None) -> bool:
        """Whether an object exists, and is the one that is meant."""
        with self._meant(path, still) as found:
            return found is not None

    def remove(self, path: str, still: Still | None = None) -> bool:
        """Removes an object, if it is the one that is meant. Whether it did."""
        with self._meant(path, still) as found, contextlib.suppress(FileNotFoundError):
            if found is not None:
                fd, file = found
                os.unlink(file, dir_fd=fd)
                self.folders.add(path.rpartition("/")[0])
                return True
        return False


@contextlib.contextmanager
def removing(root: str) -> Iterator[Removal]:
    """Removes objects of a root while no name can be added; durably when this is left.

    Raises:
      StoreReadOnlyError, StoreIOError: one could not be taken away.
    """
    removal = Removal(root)
    with typed_errors("store: delete"):
        with locked(f"{root}/names.lock", shared=False):
            yield removal
        for each in sorted(removal.folders):
            with contextlib.suppress(FileNotFoundError), folder(root, each) as fd:  # its tenant was deleted
                os.fsync(fd)


class NameState(NamedTuple):
    """What may tell, later, that a name was written or that anything of its root was deleted.

    Attributes:
      deletions: of the root so far.
      file: what the name has, as its writer knows it (`io.files.written`); None: nothing.
    """

    deletions: int
    file: Identity | None

    def allows(self, now: "NameState") -> bool:
        """Whether nothing was written or deleted since. What only went, damaged or evicted, may come again."""
        return now.deletions == self.deletions and now.file in (self.file, None)


def name_state(root: str, path: str) -> NameState:
    """Returns the state of an object's name."""
    deletions, file = 0, None
    with contextlib.suppress(OSError):
        deletions = os.lstat(f"{root}/names.lock").st_size
    with contextlib.suppress(OSError):
        file = written(os.lstat(f"{root}/{path}"))
    return NameState(deletions, file)


def note_deletion(lock: int) -> None:
    """Counts a deletion, so that what was read before comes too late to be written.

    The length of names.lock, which is held alone, is the count: a hole, for which a full disk has room.
    """
    os.ftruncate(lock, os.fstat(lock).st_size + 1)


def same_file(file: Identity) -> Still:
    """Checks for the same file, which nobody has used or linked meanwhile."""
    return lambda fd, name: identity(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file


def was_written(file: Identity) -> Still:
    """Checks for the file that was written, by `io.files.written`."""
    return lambda fd, name: written(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file
