"""System calls that the store is built from: whole writes and reads, durable directories, locks, typed errors.

Whoever may write into a root, or made a snapshot, may have put anything there: a FIFO, a link that leads elsewhere, a
directory where a file should be. So everything below a root is opened by `folder` and `open_regular`, which wait for
nothing, follow no link and take nothing but regular files, and names are made, changed and taken away in an open
`folder`. The root itself may be a link: whoever names it means it.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...errors import StoreCorruptError, StoreError, StoreFullError, StoreIOError, StoreReadOnlyError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_MOST_BUFFERS = 512
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_REGULAR = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EOPNOTSUPP)
"""What the system says of links, FIFOs and sockets, directories and devices that are opened so."""


class NotRegularError(OSError):
    """A path leads to something other than a regular file."""


def typed(error: OSError, what: str) -> StoreError:
    """Converts a failed system call into the store's error; `what` says what was being done."""
    if error.errno in _FULL:
        return StoreFullError(f"{what}: {error.strerror}; expected room on the file system")
    if error.errno in _READ_ONLY:
        return StoreReadOnlyError(f"{what}: {error.strerror}; expected a directory that may be written")
    if isinstance(error, NotRegularError):
        return StoreIOError(f"{what}: {error.filename} is {error.strerror}; expected a file of the store's")
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
    """Opens a file and closes it at the end. What must be durable was synced before, so closing may fail."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


type Identity = tuple[int, int, int]
"""Of a file: inode, time of its last change in nanoseconds, size."""


def identity(stat: os.stat_result) -> Identity:
    """Returns the identity of a file. An inode alone is reused soon after its file is gone.

    A new link to a file, and a changed access time, change its identity too: a file with another identity is to be
    looked at again, and need not be another file.
    """
    return stat.st_ino, stat.st_ctime_ns, stat.st_size


def identity_of(fd: int) -> Identity:
    """Returns the identity of an open file; one that no file has where the system does not say."""
    try:
        return identity(os.fstat(fd))
    except OSError:
        return -1, -1, -1


def written(stat: os.stat_result) -> Identity:
    """Returns the identity of a file that its writer knows it by: inode, modification time, size.

    Links and reads do not change it. Two files of the same name have the same one only if they were given the same
    inode and were written in the same millisecond, or expire in the same moment.
    """
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def folder(root: str, path: str = "", *, make: bool = False) -> Iterator[int]:
    """Opens the directory at `path` below a root: names in it stay names in this one if its path is replaced.

    Args:
      make: makes what is missing on the way, private, and every new or old name on the way durable.

    Raises:
      FileNotFoundError: not there. NotADirectoryError: a link or a file on the way. OSError.
    """
    fd = os.open(root, _FOLDER)
    try:
        for part in path.split("/") if path else ():
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                os.fsync(fd)
            outer, fd = fd, _inner(fd, part)
            with contextlib.suppress(OSError):
                os.close(outer)
        yield fd
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def _inner(fd: int, part: str) -> int:
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise NotADirectoryError(errno.ENOTDIR, f"{part} is a link or a file, not a directory") from None


@contextlib.contextmanager
def open_regular(root: str, path: str, flags: int = os.O_RDONLY, *, noatime: bool = False) -> Iterator[int]:
    """Opens a regular file at `path` below a root and closes it at the end.

    Never waits, whatever lies there. What is made is its owner's alone.

    Args:
      noatime: leaves the access time as it is, where the file is ours.

    Raises:
      NotRegularError: a link, a directory, a FIFO, … lies there. As `folder`. OSError.
    """
    above, _, name = path.rpartition("/")
    with folder(root, above) as parent:
        fd = _opened_regular(parent, name, flags, noatime)
    with _closed_after(fd):
        yield fd


@contextlib.contextmanager
def open_regular_in(parent: int, name: str, flags: int = os.O_RDONLY, *, noatime: bool = False) -> Iterator[int]:
    """As `open_regular`, in an open directory."""
    fd = _opened_regular(parent, name, flags, noatime)
    with _closed_after(fd):
        yield fd


@contextlib.contextmanager
def _closed_after(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def _opened_regular(parent: int, name: str, flags: int, noatime: bool) -> int:
    quiet = getattr(os, "O_NOATIME", 0) if noatime else 0
    try:
        try:
            fd = os.open(name, flags | _REGULAR | quiet, 0o600, dir_fd=parent)
        except PermissionError:
            if not quiet:
                raise
            fd = os.open(name, flags | _REGULAR, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno not in _IRREGULAR:
            raise
        raise NotRegularError(error.errno, "a link, a FIFO, a directory or the like", name) from None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        raise NotRegularError(errno.EINVAL, "a FIFO, a directory or the like", name)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise


def read_small(root: str, path: str, most: int, *, noatime: bool = False) -> bytes:
    """Reads a whole regular file below a root; allocates nothing for one that is too long.

    Raises:
      StoreCorruptError: it has more than `most` bytes. As `open_regular`.
    """
    with open_regular(root, path, noatime=noatime) as fd:
        size = os.fstat(fd).st_size
        if size > most:
            raise StoreCorruptError(f"{root}/{path}: {size} bytes; expected at most {most}")
        parts: list[bytes] = []
        while part := os.pread(fd, 1 << 20, sum(map(len, parts))):
            parts.append(part)
            if sum(map(len, parts)) > most:
                raise StoreCorruptError(f"{root}/{path}: grows while it is read; expected at most {most} bytes")
        return b"".join(parts)


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


ReadInto = Callable[[int, Sequence[np.ndarray], int], None]
"""`read_into` or `read_again`."""

_APART, _BEFORE = 4093, 37


def read_again(fd: int, targets: Sequence[np.ndarray], offset: int) -> None:
    """Fills arrays as `read_into`, for a second opinion on the same bytes.

    They come through other memory, in calls that begin and end elsewhere, so that what a fault of the reader spoiled
    the first time is not spoiled in the same way again.

    Raises:
      StoreCorruptError: the file ends before.
    """
    first = offset - min(offset, _BEFORE)
    whole = np.empty(offset - first + sum(map(len, targets)), np.uint8)
    for at in range(0, len(whole), _APART):
        piece = np.empty(min(_APART, len(whole) - at), np.uint8)
        read_into(fd, [piece], first + at)
        whole[at : at + len(piece)] = piece
    at = offset - first
    for target in targets:
        target[:] = whole[at : at + len(target)]
        at += len(target)


def forget_pages(fd: int) -> None:
    """Has the system drop what it keeps of a file in memory, so that the next reading is one of the disk. A hint."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Drops the first `count` bytes of several buffers."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    return [parts[done][count:], *parts[done + 1 :]] if done < len(parts) else []


def reserve(fd: int, size: int) -> None:
    """Allocates a file's blocks, so that a full disk fails before anything is written."""
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
    """Makes `root`/`relative`, every new or old name on the way durable. Links are not followed below the root."""
    with folder(root, relative, make=True):
        pass


def make_private(path: str) -> None:
    """Removes the permissions of others from a directory and all below it. Links are not followed."""
    os.chmod(path, 0o700)
    for _, folders, names, fd in os.fwalk(path):
        for name in folders + names:
            kind = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            if not stat.S_ISLNK(kind) and kind & 0o077:
                os.chmod(name, 0o700 if stat.S_ISDIR(kind) else 0o600, dir_fd=fd)


def remove(parent: int, name: str) -> None:
    """Removes whatever lies under a name in an open directory, with all that is below it. Links are not followed.

    Raises:
      FileNotFoundError: nothing is there. OSError.
    """
    if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


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


def publish_once(root: str, path: str, text: bytes, temporary: str) -> None:
    """Writes a small file below a root, whole and durable, unless it exists; of several writers one wins.

    Args:
      temporary: where it is written first, below the root: locked meanwhile, so that a sweep takes it only from the
        dead.
    """
    (above, _, name), (aside, _, own) = path.rpartition("/"), temporary.rpartition("/")
    with folder(root, above, make=True) as target, folder(root, aside, make=True) as source:
        while True:
            with open_regular_in(source, own, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX)
                    write_all(fd, [text], 0)
                    os.fsync(fd)
                    with contextlib.suppress(FileExistsError):
                        os.link(own, name, src_dir_fd=source, dst_dir_fd=target)
                    os.fsync(target)
                    return
                except FileNotFoundError:  # a sweep came before the lock
                    continue
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(own, dir_fd=source)


def replace_file(root: str, path: str, text: bytes, temporary: str) -> None:
    """Writes a small file below a root, whole and durable, in place of another. `temporary`: as `publish_once`."""
    (above, _, name), (aside, _, own) = path.rpartition("/"), temporary.rpartition("/")
    with (
        folder(root, above) as target,
        folder(root, aside, make=True) as source,
        open_regular_in(source, own, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd,
    ):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # a sweep takes it only from the dead
            write_all(fd, [text], 0)
            os.fsync(fd)
            rename(source, own, target, name)
            os.fsync(target)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(own, dir_fd=source)


@functools.cache
def _call(name: str) -> "ctypes._NamedFuncPointer | None":
    """Looks up a function of the C library; None where it has none of that name."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def start_writing(fd: int) -> None:
    """Starts writing a file's dirty pages back and returns at once. A hint: nothing is durable yet."""
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


def link(source: int, name: str, target: int, new: str) -> bool:
    """Links a file of one open directory into another. False where the file system cannot.

    Raises:
      FileNotFoundError: no source. FileExistsError: the target is there. OSError: anything else.
    """
    try:
        os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def rename(source: int, name: str, target: int, new: str) -> None:
    """Moves a file from one open directory into another, in place of what has that name there."""
    os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)


def copy_into(fd: int, root: str, path: str) -> None:
    """Copies a regular file below a root into an empty one, with its times."""
    with open_regular(root, path, noatime=True) as whole:
        found = os.fstat(whole)
        reserve(fd, found.st_size) if found.st_size else None
        offset = 0
        while part := os.pread(whole, 4 << 20, offset):
            write_all(fd, [part], offset)
            offset += len(part)
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))


def sync_files(fds: Sequence[int]) -> None:
    """Syncs the contents of several files of one file system: in one call where the system has `syncfs`."""
    whole = _call("syncfs") if len(fds) > 1 else None
    if whole is None:
        for fd in fds:
            os.fsync(fd)
    elif whole(fds[0]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def locked(path: str, *, shared: bool, below: str = "") -> Iterator[int]:
    """Holds a lock file, which it yields open, among threads and processes; the system releases it when a process dies.

    Args:
      below: where `path` leads on, without links: `path` is then the root.
    """
    root, name = (path, below) if below else os.path.split(path)
    with open_regular(root, name, os.O_RDWR | os.O_CREAT) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        try:
            yield fd
        finally:  # closing is not enough where a process was forked meanwhile: it has the descriptor too
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


def try_lock(fd: int) -> bool:
    """Tries to lock an open file, until it is closed. Whether it did."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
