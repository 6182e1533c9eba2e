"""Listing of objects by their directories, without opening them, and their removal."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ..format.header import Header
from ..format.naming import Name, is_object, part_of
from ..format.objects import check_name, read_header
from ..io.files import Identity, folder, identity, open_regular, typed, typed_errors, written
from ..io.locks import SECONDS
from .index import Changes, Index
from .revisions import GONE
from .shard import Shard, locked_shards

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


def files_of(parent: int, name: Name) -> list[str]:
    """Lists the file names of the objects of a chunk or entry in its open folder, unordered. Raises OSError."""
    files = [file for file in os.listdir(parent) if file.startswith(f"{name.chunk}.")]
    return [file for file in files if is_object(f"{name.folder}/{file}")]


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


def remove_objects(
    root: str, index: Index, paths: Mapping[str, Still | None], *, evicted: bool = True, seconds: float = SECONDS
) -> set[str]:
    """Removes objects durably, each if its test allows it. Returns the paths that were removed.

    Args:
      paths: paths below the root, with a test or None.
      evicted: whether an older put of a name must not bring back an older object (`Changes.evicted`).
      seconds: how long a shard's lock is tried.

    Raises:
      StoreBusyError, StoreReadOnlyError, StoreIOError: an object could not be removed.
    """
    folders: dict[str, dict[str, Still | None]] = {}
    for path, still in paths.items():
        folders.setdefault(os.path.dirname(path), {})[path] = still
    removed: set[str] = set()
    with typed_errors("store: delete"):
        for above, below in folders.items():
            changes = Changes(evicted=evicted)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with locked_shards(root, [above], seconds=seconds) as shards:
                    shard = shards[above]
                    try:
                        for path, still in below.items():
                            if unlink_if(shard, os.path.basename(path), still):
                                changes.removed.append(path)
                    finally:
                        index.record([shard], changes)
                        removed.update(changes.removed)
                if changes.removed:
                    with folder(root, above) as fd:  # its tenant may be deleted by now
                        os.fsync(fd)
    return removed


def unlink_if(shard: Shard, file: str, still: Still | None = None) -> bool:
    """Removes an object of a locked shard if it exists and passes a test. Returns whether it was removed."""
    try:
        os.stat(file, dir_fd=shard.fd, follow_symlinks=False)
        if still is not None and not still(shard.fd, file):
            return False
        os.unlink(file, dir_fd=shard.fd)
    except FileNotFoundError:
        return False
    return True


class NameState(NamedTuple):
    """State of a name, by which a later write or deletion of it is recognised.

    Attributes:
      file: identity of the name's file as its writer knows it (`io.files.written`); None: no file.
      gone: the same of its chunk's tombstone.
    """

    file: Identity | None
    gone: Identity | None

    def allows(self, now: "NameState") -> bool:
        """Returns whether nothing was written or deleted since. Evicted or damaged objects may be written again."""
        return now.gone == self.gone and now.file in (self.file, None)


def name_state(root: str, name: Name) -> NameState:
    """Returns the state of an object's name."""
    found: list[Identity | None] = [None, None]
    for number, path in enumerate((name.path, f"{name.chunk_key}{GONE}")):
        with contextlib.suppress(OSError):
            found[number] = written(os.lstat(f"{root}/{path}"))
    return NameState(*found)


def was_written(file: Identity) -> Still:
    """Returns a test for the file that was written, by `io.files.written`."""
    return lambda fd, name: written(os.stat(name, dir_fd=fd, follow_symlinks=False)) == file
