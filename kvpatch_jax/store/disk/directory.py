"""Listing of objects by their directories, without opening them, and their removal."""

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
    """An object as its directory lists it.

    Attributes:
      path: path below the root.
      size: bytes.
      used: access time in seconds.
      file: identity of the file.
      mtime_ns: modification time in nanoseconds, which encodes when the object expires (`expiry.expiry_test`).
    """

    path: str
    size: int
    used: float
    file: Identity
    mtime_ns: int

    @property
    def chunk(self) -> str:
        """Folder and keyed name of its chunk: equal for all objects of one chunk."""
        return self.path.partition(".")[0]

    @property
    def part(self) -> str:
        """Part of the chunk that it is: "kv", "kv.int8", "enc", "p.…"."""
        return part_of(self.path)


def directory_entry(path: str, stat: os.stat_result) -> DirectoryEntry:
    """Returns the entry of an object from its path and its file's `stat`."""
    return DirectoryEntry(path, stat.st_size, stat.st_atime, identity(stat), stat.st_mtime_ns)


def scan(root: str, below: str) -> list[DirectoryEntry]:
    """Lists every object below a folder of a root, unordered. Raises StoreError.

    Skips files that vanish in the meantime, have other names, or are nested deeper than objects. A link, a FIFO or the
    like with an object's name is listed, so that it can be removed; nothing reads it.
    """
    found: list[DirectoryEntry] = []
    waiting = [below]

    while waiting:
        current = waiting.pop()
        try:
            # Opened below the root again, so that a folder that is replaced by a link is not followed.
            with folder(root, current) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    path = f"{current}/{entry.name}"
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
    """Opens an object by its path below a root. Yields its file and its header, whose name is checked.

    Raises:
      StoreCorruptError: it is no object of that name.
      OSError: it cannot be read.
    """
    with open_regular(root, path, noatime=True) as fd:
        header = read_header(fd)
        check_name(header, os.path.basename(path))
        yield fd, header


Still = Callable[[int, str], bool]
"""Test whether the object under a name in an open directory is the expected one, called while no name can change."""


class Removal:
    """Removal of objects of a root by their paths; made by `removing`.

    Attributes:
      root: the root.
      folders: folders of removed objects below the root, to be synced.
    """

    def __init__(self, root: str):
        self.root = root
        self.folders: set[str] = set()

    @contextlib.contextmanager
    def _expected(self, path: str, still: Still | None) -> Iterator[tuple[int, str] | None]:
        """Yields the open folder and the name of an object; None if it is gone or not the expected one."""
        above, _, file = path.rpartition("/")
        with contextlib.ExitStack() as stack:
            found = None
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fd = stack.enter_context(folder(self.root, above))
                os.stat(file, dir_fd=fd, follow_symlinks=False)  # raises if it is gone, also without a test
                found = (fd, file) if still is None or still(fd, file) else None
            yield found

    def is_there(self, path: str, still: Still | None = None) -> bool:
        """Returns whether an object exists and is the expected one."""
        with self._expected(path, still) as found:
            return found is not None

    def remove(self, path: str, still: Still | None = None) -> bool:
        """Removes an object if it is the expected one. Returns whether it was removed."""
        with self._expected(path, still) as found, contextlib.suppress(FileNotFoundError):
            if found is not None:
                fd, file = found
                os.unlink(file, dir_fd=fd)
                self.folders.add(path.rpartition("/")[0])
                return True
        return False


@contextlib.contextmanager
def removing(root: str) -> Iterator[Removal]:
    """Context in which objects of a root are removed and no name can be added. At its end the removals are durable.

    Raises:
      StoreReadOnlyError, StoreIOError: an object could not be removed.
    """
    removal = Removal(root)
    with typed_errors("store: delete"):
        with locked(f"{root}/names.lock", shared=False):
            yield removal

        # Without the lock: it is not fair, so syncs under it could delay writers for long.
        for path in sorted(removal.folders):
            with contextlib.suppress(FileNotFoundError), folder(root, path) as fd:  # its tenant may be deleted by now
                os.fsync(fd)


class NameState(NamedTuple):
    """State of a name, by which a later write of it, or any deletion in its root, is recognised.

    Attributes:
      deletions: number of deletions in the root so far.
      file: identity of the name's file as its writer knows it (`io.files.written`); None: no file.
    """

    deletions: int
    file: Identity | None

    def allows(self, now: "NameState") -> bool:
        """Returns whether nothing was written or deleted since. Evicted or damaged objects may be written again."""
        return now.deletions == self.deletions and now.file in (self.file, None)


def name_state(root: str, path: str) -> NameState:
    """Returns the state of an object's name."""
    deletions, file = 0, None  # no lock file: nothing was ever deleted
    with contextlib.suppress(OSError):
        deletions = os.lstat(f"{root}/names.lock").st_size
    with contextlib.suppress(OSError):
        file = written(os.lstat(f"{root}/{path}"))
    return NameState(deletions, file)


def note_deletion(lock: int) -> None:
    """Counts a deletion, which invalidates copies of objects that were read before it.

    The count is the length of names.lock, which is held exclusively. The file is a hole, so it fits on a full disk.
    """
    os.ftruncate(lock, os.fstat(lock).st_size + 1)


def same_file(file: Identity) -> Still:
    """Returns a test for the same file, not used or linked in the meantime."""
    return lambda fd, name: identity(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file


def was_written(file: Identity) -> Still:
    """Returns a test for the file that was written, by `io.files.written`."""
    return lambda fd, name: written(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file
