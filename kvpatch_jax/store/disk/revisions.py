"""Revisions of names: one order of the writes and deletions of each name, among threads, processes and tiers.

A write or deletion takes a revision when it begins (an asynchronous put when it is queued): the time in nanoseconds, or
more, if the name already has a later one. A write takes place only if the name's revision is smaller by then; otherwise
a later write or deletion has replaced it. Objects state their revision in their header, deleted chunks in a tombstone:

    root/obj/<tenant>/<backbone>/xx/<chunk>.gone     revision of the chunk's deletion
    root/obj/<tenant>.gone                           revision of the tenant's deletion

A tombstone is signed with the tenant's key of names, so that nobody else can forbid later puts by one.
"""

import contextlib
import json
import os
import secrets
import threading
import time

from ...errors import StoreCorruptError, StoreVersionError
from ...utils import strict_json
from ..format.naming import Name, ObjectNames
from ..format.objects import check_name, read_header
from ..io.files import open_regular_in, read_small, rename, write_all
from ..io.thread_pool import register_fork_guard
from .root_config import replace_setting
from .shard import Shard

_RANDOM = 1 << 10
"""Lowest part of a revision, drawn at random, so that two machines do not take the same one."""
_LARGEST = 1 << 12
RETENTION = 86400.0
"""Seconds for which a tombstone stays: longer than any put is queued, in any process."""
GONE = ".gone"
"""End of a tombstone's file name."""
FUTURE = 10 * 365 * 86400 * 10**9
"""Nanoseconds. A revision further ahead is no clock's, and must not forbid all later puts."""


class RevisionClock:
    """Source of a process's revisions, which never repeat or go back. Thread-safe."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.Lock()

    def next(self, known: int = 0) -> int:
        """Returns a revision after a known one, if that is possible, and after all that this process has taken."""
        with self._lock:
            now = time.time_ns()
            least = max(now, self._last, known if known < now + FUTURE else 0) // _RANDOM + 1
            self._last = least * _RANDOM + secrets.randbelow(_RANDOM)
            return self._last


CLOCK = RevisionClock()
"""The process's clock."""


def revision_in(parent: int, file: str, name: str = "") -> int:
    """Returns the revision of an object in an open folder; -1 if there is none that can be read.

    Args:
      name: the object's own file name, if it has another one there.

    Raises OSError if it cannot be read.
    """
    try:
        os.stat(file, dir_fd=parent, follow_symlinks=False)  # most often there is none
        with open_regular_in(parent, file, noatime=True) as fd:
            header = read_header(fd)
            check_name(header, name or file)
            return header.revision if header.revision < time.time_ns() + FUTURE else 0
    except (FileNotFoundError, NotADirectoryError, StoreCorruptError, StoreVersionError):
        return -1


class Tombstones:
    """Tombstones of one tenant's chunks.

    Args:
      root: the store's directory.
      names: names of the tenant, whose key signs its tombstones.
    """

    def __init__(self, root: str, names: ObjectNames):
        self._root, self._names = root, names

    def of(self, name: Name, parent: int | None = None) -> int:
        """Returns the revision of the latest deletion of a name's chunk or tenant; 0: none.

        Args:
          parent: the open folder of the name, if it is open.
        """
        latest, file = 0, f"{name.chunk}{GONE}"
        for path, fd in ((f"{name.folder}/{file}", parent), (f"{self._names.space}{GONE}", None)):
            try:  # most often there is none
                os.stat(f"{self._root}/{path}" if fd is None else file, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue
            latest = max(latest, self._read(path, fd))
        return latest

    def _read(self, path: str, parent: int | None = None) -> int:
        try:
            if parent is None:
                text = read_small(self._root, path, _LARGEST, noatime=True)
            else:
                with open_regular_in(parent, os.path.basename(path), noatime=True) as fd:
                    text = os.pread(fd, _LARGEST, 0)
            tree = strict_json.loads(text)
        except (OSError, StoreCorruptError, ValueError):
            return 0
        revision = tree.get("revision") if isinstance(tree, dict) else None
        # One that was changed, is another chunk's or of the far future counts for nothing.
        if type(revision) is not int or revision >= time.time_ns() + FUTURE:
            return 0
        return revision if tree.get("signature") == self._signature(path, revision) else 0

    def _signature(self, path: str, revision: int) -> str:
        return self._names.signature("gone", path, str(revision))

    def _text(self, path: str, revision: int) -> bytes:
        return json.dumps({"revision": revision, "signature": self._signature(path, revision)}).encode() + b"\n"

    def put(self, shard: Shard, chunk: str, revision: int) -> None:
        """Writes the tombstone of a chunk into its locked shard. Its name is durable after a sync of the folder."""
        file = f"{chunk}{GONE}"
        _replace(shard.fd, file, self._text(f"{shard.path}/{file}", revision))

    def put_tenant(self, revision: int) -> None:
        """Writes the tombstone of the whole tenant durably."""
        path = f"{self._names.space}{GONE}"
        replace_setting(self._root, path, self._text(path, revision))


def _replace(parent: int, file: str, text: bytes) -> None:
    """Writes a small file of an open folder whole or not at all; its content is synced."""
    aside = f"{file}-{secrets.token_hex(4)}"
    try:
        with open_regular_in(parent, aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_all(fd, [text], 0)
            os.fsync(fd)
        rename(parent, aside, parent, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=parent)
        raise


def tombstones_in(parent: int) -> list[tuple[str, int]]:
    """Lists tombstones in an open folder, and unfinished ones: names and ages in nanoseconds since the epoch."""
    found: list[tuple[str, int]] = []
    with os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.partition("-")[0].endswith(GONE):
                found.append((entry.name, entry.stat(follow_symlinks=False).st_mtime_ns))
    return found
