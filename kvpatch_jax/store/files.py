"""System calls that the store is built from: whole writes and reads, durable directories, locks, typed errors."""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import StoreCorruptError, StoreError, StoreFullError, StoreIOError, StoreReadOnlyError

try:
    from zlib_ng import zlib_ng as _zlib  # the same sums, several times as fast
except ImportError:
    import zlib as _zlib

crc32 = _zlib.crc32
"""zlib's checksum of any bytes."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_MOST_BUFFERS = 512
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def typed(error: OSError, what: str) -> StoreError:
    """The store's error for a failed system call; `what` says what was being done."""
    if error.errno in _FULL:
        return StoreFullError(f"{what}: {error.strerror}; expected room on the file system")
    if error.errno in _READ_ONLY:
        return StoreReadOnlyError(f"{what}: {error.strerror}; expected a directory that may be written")
    return StoreIOError(f"{what}: {error.strerror or error}; expected the file system to do it")


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Turns an OSError inside into the store's."""
    try:
        yield
    except OSError as error:
        raise typed(error, what) from error


@contextlib.contextmanager
def opened(path: str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """A file descriptor, closed on the way out. What must be durable was synced before, so closing may fail."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


type Identity = tuple[int, int, int]
"""Of a file: inode, time of its last change in nanoseconds, size."""


def identity(stat: os.stat_result) -> Identity:
    """Which file it is. An inode alone is given out again, soon after its file is gone.

    A link to a file, and a note of its use, change its identity too: what has another one is to be looked at again,
    and is not on that ground another file.
    """
    return stat.st_ino, stat.st_ctime_ns, stat.st_size


def identity_of(fd: int) -> Identity:
    """Which file is open; one that is none where the system does not say."""
    try:
        return identity(os.fstat(fd))
    except OSError:
        return -1, -1, -1


def written(stat: os.stat_result) -> Identity:
    """Which file it is, for who wrote it: inode, time of writing or of expiry (`expiry.shown_time`), size.

    Links and reads leave it as it is. Two files of the same name have the same one only if they were given the same
    inode and were written in the same millisecond, or expire in the same moment.
    """
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def unnoticed(path: str) -> Iterator[int]:
    """A file opened to look at, not to use: its time of last use stays, where the file is ours. Links are refused."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        fd = os.open(path, flags)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, uint8 [n]; a view where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def write_all(fd: int, parts: Sequence[bytes | np.ndarray], offset: int) -> None:
    """Writes parts one after the other from `offset`, without joining them, however little a call may take."""
    waiting = [memoryview(part) for part in parts if len(part)]
    while waiting:
        written = os.pwritev(fd, waiting[:_MOST_BUFFERS], offset)
        offset += written
        waiting = _behind(waiting, written)


def read_into(fd: int, targets: Sequence[np.ndarray], offset: int) -> None:
    """Fills arrays of uint8 one after the other from `offset`, however little a call may give.

    Raises:
      StoreCorruptError: the file ends before.
    """
    waiting = [memoryview(target) for target in targets if len(target)]
    while waiting:
        count = os.preadv(fd, waiting[:_MOST_BUFFERS], offset)
        if count == 0:
            raise StoreCorruptError(f"object: ends at byte {offset}; expected {sum(map(len, waiting))} more")
        offset += count
        waiting = _behind(waiting, count)


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of parts whose first `count` bytes are done."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    return [parts[done][count:], *parts[done + 1 :]] if done < len(parts) else []


def reserve(fd: int, size: int) -> None:
    """Asks for the file's room beforehand, so that a full disk fails before anything is written."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def make_directories(root: str, relative: str) -> None:
    """Makes `root`/`relative`, every new or old name on the way durable."""
    path = root
    for part in relative.split("/"):
        parent, path = path, f"{path}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        sync_directory(parent)


def make_root(path: str) -> None:
    """Makes a directory with those above it, and the names of the new ones durable."""
    new = []
    while path != os.path.dirname(path) and not os.path.isdir(path):
        new.append(path)
        path = os.path.dirname(path)
    for each in reversed(new):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
        sync_directory(os.path.dirname(each))


def publish_once(path: str, text: bytes, temporary: str) -> None:
    """A small file, whole and durable, unless there is one of that name already; of several who make it one wins.

    Args:
      temporary: where it is written first: locked meanwhile, so that a sweep takes it only from the dead.
    """
    while True:
        with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                write_all(fd, [text], 0)
                os.fsync(fd)
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, path)
                sync_directory(os.path.dirname(path))
                return
            except FileNotFoundError:  # a sweep came before the lock
                continue
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


def replace_file(path: str, text: bytes, temporary: str) -> None:
    """A small file, whole and durable, in place of what may be there. `temporary`: where it is written first."""
    with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # a sweep takes it only from the dead
            write_all(fd, [text], 0)
            os.fsync(fd)
            os.rename(temporary, path)
            sync_directory(os.path.dirname(path))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


@functools.cache
def _call(name: str) -> "ctypes._NamedFuncPointer | None":
    """A function of the C library; None where it has none of that name."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def start_writing(fd: int) -> None:
    """Has the disk begin with what was written to a file, while the caller goes on. A hint: nothing is durable yet."""
    begin = _call("sync_file_range")
    if begin is not None:
        begin(fd, ctypes.c_int64(0), ctypes.c_int64(0), _RANGE_WRITE)


def sync_file_system(path: str) -> None:
    """Makes everything durable that was written to the file system of a directory, names included."""
    whole = _call("syncfs")
    if whole is None:
        os.sync()
        return
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if whole(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def link(source: str, target: str) -> bool:
    """Gives a file a second name. False where the file system does not do it: another one, or no more links.

    Raises:
      FileNotFoundError: no source. FileExistsError: the target is there. OSError: anything else.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def copy_into(fd: int, source: str) -> None:
    """Copies a file into an empty one, with its times. Links are not followed."""
    with unnoticed(source) as whole:
        stat = os.fstat(whole)
        reserve(fd, stat.st_size) if stat.st_size else None
        offset = 0
        while part := os.pread(whole, 4 << 20, offset):
            write_all(fd, [part], offset)
            offset += len(part)
        os.utime(fd, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def sync_files(fds: Sequence[int]) -> None:
    """Makes the contents of several files of one file system durable: in one call where the system has `syncfs`."""
    whole = _call("syncfs") if len(fds) > 1 else None
    if whole is None:
        for fd in fds:
            os.fsync(fd)
    elif whole(fds[0]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def locked(path: str, *, shared: bool) -> Iterator[None]:
    """Holds a lock file, among threads and processes; the system lets go of it when a process dies."""
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def try_lock(fd: int) -> bool:
    """Whether nobody holds the file; if so this descriptor holds it until it is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
