"""Adapter of a directory: one file per value, for tests and for file systems that several machines share."""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Literal

from ...errors import InputError, StoreIOError, StoreUnreachableError
from .adapter import ABSENT, ANY, Condition, Expected, RemoteValue, seconds_left

_WORD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_WAIT = 10.0
"""Seconds for which a lock is waited for outside of any time limit."""
_ABANDONED = 3600.0
"""Seconds after which the file of an unfinished write is deleted."""


class LocalAdapter:
    """A `RemoteAdapter` over a directory, with the paths below it as file names.

    A write is a new file, synced and renamed; reads take no lock. Writes and deletes take one of 256 locks (`flock`,
    in `.locks`), with which every modification time is made later than the one before, so that time, inode and size
    are a generation. The file system must keep times in nanoseconds, and its `flock` must hold on every machine that
    writes (NFS 4 and CephFS do; NFS 3 with `nolock` does not). Do not write to it through anything else.

    Args:
      root: the directory; it is created if it is missing.

    Raises:
      StoreIOError: it cannot be written, or the file system has no locks or rounds times.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.path.abspath(os.fspath(root))
        self._synced: set[str] = set()
        self._locks, self._unfinished = os.path.join(self.root, ".locks"), os.path.join(self.root, ".tmp")
        with _typed("open"):
            for folder in (self._locks, self._unfinished):
                os.makedirs(folder, exist_ok=True)
                self._expect_no_link(folder)
            self._sweep()
            with self._lock("probe"):
                mtime = int(time.time()) * 1_000_000_000 + 1  # now, or another process would sweep it as abandoned
                probe = self._new_file(b"", mtime)
                rounded = os.stat(probe).st_mtime_ns
                os.unlink(probe)
        if rounded != mtime:
            raise StoreIOError(f"remote store: open: got times of {mtime} ns kept as {rounded}; expected nanoseconds")

    def _expect_no_link(self, folder: str) -> None:
        """Raises StoreIOError if a folder below the root is reached by a link: what is old in it would be deleted."""
        relative = os.path.relpath(folder, self.root)
        if os.path.realpath(folder) != os.path.normpath(os.path.join(os.path.realpath(self.root), relative)):
            raise StoreIOError(f"remote store: got a link on the way to {relative[:200]!r}; expected folders")

    def _sweep(self) -> None:
        for entry in os.scandir(self._unfinished):
            with contextlib.suppress(FileNotFoundError):  # another process sweeps too
                if time.time() - entry.stat().st_mtime > _ABANDONED:
                    os.unlink(entry.path)

    def _file(self, path: str) -> str:
        if not all(_WORD.fullmatch(word) for word in path.split("/")):
            raise InputError(
                f"remote store: got path {path[:80]!r}; expected words of letters, digits, '.', '-' and '_'"
            )
        return os.path.join(self.root, path)

    @contextlib.contextmanager
    def _lock(self, path: str) -> Iterator[None]:
        """Holds the lock of a path. Raises StoreUnreachableError if another process does not release it in time."""
        name = hashlib.blake2b(path.encode(), digest_size=1).hexdigest()
        fd = os.open(os.path.join(self._locks, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            until = time.monotonic() + (_WAIT if (left := seconds_left()) is None else left)
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() + pause >= until:
                        raise StoreUnreachableError(
                            f"remote store: got lock {name} held by another process; expected it to be released"
                        ) from error
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
        finally:
            os.close(fd)

    def _new_file(self, data: bytes, mtime: int) -> str:
        """Writes and syncs a file without a name yet. Returns where it is."""
        temporary = os.path.join(self._unfinished, secrets.token_hex(16))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.utime(fd, ns=(mtime, mtime))
            os.fsync(fd)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        return temporary

    def read(self, path: str, start: int = 0, stop: int | None = None) -> RemoteValue | None:
        """Reads a range of a value; None if there is none. Raises StoreIOError."""
        file = self._file(path)
        with _typed("get"):
            try:
                fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise StoreIOError(f"remote store: get: got {path[:200]!r} of another kind; expected a file")
                start, stop, _ = slice(start, stop).indices(status.st_size)
                parts: list[bytes] = []
                while start < stop and (part := os.pread(fd, stop - start, start)):
                    parts.append(part)
                    start += len(part)
                return RemoteValue(b"".join(parts), _generation(status))
            finally:
                os.close(fd)

    def write(self, path: str, data: bytes, expected: Expected = ANY) -> bytes | None:
        """Writes a value if the path has what is expected. Raises StoreIOError."""
        file = self._file(path)
        with _typed("put"), self._lock(path):
            self._expect_no_link(os.path.dirname(file))
            status = _status(file)
            if not _meets(status, expected):
                return None
            mtime = max(time.time_ns(), 0 if status is None else status.st_mtime_ns + 1)
            temporary = self._new_file(data, mtime)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            os.rename(temporary, file)
            generation = _generation(os.stat(file, follow_symlinks=False))
            self._sync_above(path)
            return generation

    def _sync_above(self, path: str) -> None:
        """Syncs the folder of a path, and once those above it, which may be new."""
        folder = path = os.path.dirname(path)
        while path not in self._synced:
            self._sync(path)
            self._synced.add(path)
            path = os.path.dirname(path)
        self._sync(folder)

    def _sync(self, folder: str) -> None:
        fd = os.open(os.path.join(self.root, folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def delete(self, path: str, expected: bytes | Literal[Condition.ANY] = ANY) -> bool:
        """Deletes a value if it has the expected generation. Returns whether it had. Raises StoreIOError."""
        file = self._file(path)
        with _typed("delete"), self._lock(path):
            self._expect_no_link(os.path.dirname(file))
            status = _status(file)
            if not _meets(status, expected):
                return False
            if status is not None:
                os.unlink(file)
                self._sync_above(path)
            return True

    def paths(self, prefix: str) -> Iterator[str]:
        """Lists the paths that begin with a prefix. Raises StoreIOError."""
        above = prefix.rpartition("/")[0]
        top = self._file(above) if above else self.root
        with _typed("list"):
            for folder, folders, files in os.walk(top, onerror=_unless_gone):
                folders[:] = [name for name in folders if not name.startswith(".")]
                relative = os.path.relpath(folder, self.root)
                for name in files:
                    path = name if relative == "." else f"{relative}/{name}"
                    if path.startswith(prefix) and not name.startswith("."):
                        yield path


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreIOError(f"remote store: {what}: got {error!r:.200}; expected the file system to do it") from error


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _status(file: str) -> os.stat_result | None:
    try:
        return os.stat(file, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _generation(status: os.stat_result) -> bytes:
    return f"{status.st_mtime_ns}.{status.st_ino}.{status.st_size}".encode()


def _meets(status: os.stat_result | None, expected: Expected) -> bool:
    if expected is ANY:
        return True
    return status is None if expected is ABSENT else status is not None and _generation(status) == expected
