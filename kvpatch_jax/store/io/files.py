"""System calls of the store: complete writes and reads, durable directories, locks, typed errors.

A root or a snapshot may contain anything, if others can write it: a FIFO, a link to another place, a directory in place
of a file. So everything below a root is opened by `folder` and `open_regular`, which never wait, follow no links and
accept only regular files; names are created, changed and removed in an open `folder`. The root itself may be a link,
because the user names it.
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
from .folders import close, made_folder, open_beneath, open_folder

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_MOST_BUFFERS = 512
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE, which Python's `os` does not name
_REGULAR = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO would wait for its other end
_NOATIME = getattr(os, "O_NOATIME", 0)
_IRREGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EOPNOTSUPP)
"""Errors of the system for links, FIFOs and sockets, directories and devices that are opened in this way."""


class NotRegularError(OSError):
    """Error for a path that is not a regular file."""


def typed(error: OSError, what: str) -> StoreError:
    """Converts the error of a system call to the store's; `what` names the operation."""
    if error.errno in _FULL:
        return StoreFullError(f"{what}: {error.strerror}; expected room on the file system")
    if error.errno in _READ_ONLY:
        return StoreReadOnlyError(f"{what}: {error.strerror}; expected a directory that may be written")
    if isinstance(error, NotRegularError):
        return StoreIOError(f"{what}: {error.filename} is {error.strerror}; expected a file of the store's")
    return StoreIOError(f"{what}: {error.strerror or error}; expected the file system to do it")


@contextlib.contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Converts an OSError of the block to the store's error."""
    try:
        yield
    except OSError as error:
        raise typed(error, what) from error


@contextlib.contextmanager
def opened(path: str, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Opens a file and closes it at the end, as `close`."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        close(fd)


type Identity = tuple[int, int, int]
"""Identity of a file: inode, time of its last change in nanoseconds, size."""


def identity(stat: os.stat_result) -> Identity:
    """Returns the identity of a file. An inode alone may be reused soon after its file was removed.

    A new link or access time changes the identity too: a file with another identity has to be examined again, but may
    be the same file.
    """
    return stat.st_ino, stat.st_ctime_ns, stat.st_size


def identity_of(fd: int) -> Identity:
    """Returns the identity of an open file; one that no file has if the system call fails."""
    try:
        return identity(os.fstat(fd))
    except OSError:
        return -1, -1, -1


def written(stat: os.stat_result) -> Identity:
    """Returns the identity that a file has for its writer: inode, modification time, size.

    Links and reads do not change it. Two files of one name have the same one only if they got the same inode and were
    written in the same millisecond, or expire at the same time.
    """
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


@contextlib.contextmanager
def folder(root: str, path: str = "", *, make: bool = False) -> Iterator[int]:
    """Opens the directory at `path` below a root. Operations in it are not affected if its path is replaced.

    Args:
      make: creates missing directories, private, and makes every name on the path durable.

    Raises:
      FileNotFoundError: it does not exist.
      NotADirectoryError: there is a link or a file on the path.
      OSError: another error.
    """
    fd = made_folder(root, path) if make else open_folder(root, path)
    try:
        yield fd
    finally:
        close(fd)


@contextlib.contextmanager
def open_regular(root: str, path: str, flags: int = os.O_RDONLY, *, noatime: bool = False) -> Iterator[int]:
    """Opens a regular file at `path` below a root and closes it at the end. Never waits. New files are private.

    Args:
      noatime: keeps the access time, if the file belongs to the user.

    Raises:
      NotRegularError: it is a link, a directory, a FIFO, ….
      OSError: as `folder`, or another error.
    """
    fd, _ = open_file(root, path, flags, noatime=noatime)
    try:
        yield fd
    finally:
        close(fd)


@contextlib.contextmanager
def open_regular_in(parent: int, name: str, flags: int = os.O_RDONLY, *, noatime: bool = False) -> Iterator[int]:
    """Opens a regular file in an open directory, as `open_regular`."""
    fd, _ = open_file_in(parent, name, flags, noatime=noatime)
    try:
        yield fd
    finally:
        close(fd)


def open_file(root: str, path: str, flags: int = os.O_RDONLY, *, noatime: bool = False) -> tuple[int, os.stat_result]:
    """Opens a regular file at `path` below a root, as `open_regular`. Returns its descriptor and its `stat`."""
    if flags == os.O_RDONLY:
        fd = open_beneath(root, path, _REGULAR | (_NOATIME if noatime else 0))
        if fd >= 0:
            return fd, _examined(fd, path)
    # What one call refuses, whatever the reason, is opened or refused name by name.
    above, _, name = path.rpartition("/")
    parent = open_folder(root, above)
    try:
        return open_file_in(parent, name, flags, noatime=noatime)
    finally:
        close(parent)  # before the file is used, so that an open object takes one descriptor


def open_file_in(
    parent: int, name: str, flags: int = os.O_RDONLY, *, noatime: bool = False
) -> tuple[int, os.stat_result]:
    """Opens a regular file in an open directory, as `open_regular`. Returns its descriptor and its `stat`."""
    quiet = _NOATIME if noatime else 0
    try:
        try:
            fd = os.open(name, flags | _REGULAR | quiet, 0o600, dir_fd=parent)
        except PermissionError:  # only the owner of a file may keep its access time
            if not quiet:
                raise
            fd = os.open(name, flags | _REGULAR, 0o600, dir_fd=parent)
    except OSError as error:
        if error.errno not in _IRREGULAR:
            raise
        raise NotRegularError(error.errno, "a link, a FIFO, a directory or the like", name) from None

    return fd, _examined(fd, name)


def _examined(fd: int, name: str) -> os.stat_result:
    """Returns the `stat` of an open file. Closes and refuses what is none: some FIFOs and devices can be opened.

    What was opened is examined, and not the path, which may change.
    """
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotRegularError(errno.EINVAL, "a FIFO, a directory or the like", name)
    except BaseException:
        close(fd)
        raise
    return found


def read_small(root: str, path: str, most: int, *, noatime: bool = False) -> bytes:
    """Reads a whole regular file below a root of at most `most` bytes.

    Raises:
      StoreCorruptError: it is longer. OSError: as `open_regular`.
    """
    with open_regular(root, path, noatime=noatime) as fd:
        size = os.fstat(fd).st_size
        if size > most:
            raise StoreCorruptError(f"{root}/{path}: got {size} bytes; expected at most {most}")

        # To the end and not to the size, because the file may grow in the meantime.
        parts: list[bytes] = []
        while part := os.pread(fd, 1 << 20, sum(map(len, parts))):
            parts.append(part)
            if sum(map(len, parts)) > most:
                raise StoreCorruptError(f"{root}/{path}: got a file that grows; expected at most {most} bytes")
        return b"".join(parts)


def write_all(fd: int, parts: Sequence[bytes | np.ndarray], offset: int) -> None:
    """Writes all parts consecutively from `offset`, without joining them."""
    waiting = [memoryview(part) for part in parts if len(part)]
    while waiting:
        # The system limits the buffers per call, and may write less than it was given.
        written = os.pwritev(fd, waiting[:_MOST_BUFFERS], offset)
        offset += written
        waiting = _behind(waiting, written)


def read_into(fd: int, targets: Sequence[np.ndarray | memoryview], offset: int) -> None:
    """Fills buffers of bytes consecutively with the bytes from `offset` on.

    Raises:
      StoreCorruptError: the file is too short.
    """
    waiting, left = targets, sum(map(len, targets))
    while left:
        count = os.preadv(fd, waiting[:_MOST_BUFFERS], offset)
        if count == 0:
            raise StoreCorruptError(f"object: got an end at byte {offset}; expected {left} more")
        offset, left = offset + count, left - count
        if left:
            waiting = _behind([memoryview(target) for target in waiting], count)


ReadInto = Callable[[int, Sequence[np.ndarray | memoryview], int], None]
"""`read_into` or `read_again`."""

_APART, _BEFORE = 4093, 37
"""Bytes per call of `read_again`, and bytes before the first: neither is a multiple of a page or of a leaf."""


def read_again(fd: int, targets: Sequence[np.ndarray | memoryview], offset: int) -> None:
    """Fills buffers as `read_into`, for a second attempt at the same bytes.

    It uses other memory, and calls with other offsets and lengths, so that a faulty reader does not see the same
    damage twice.

    Raises:
      StoreCorruptError: the file is too short.
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
    """Asks the system to drop a file from the page cache, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Returns the buffers without their first `count` bytes."""
    done = 0
    while done < len(parts) and count >= len(parts[done]):
        count -= len(parts[done])
        done += 1
    return [parts[done][count:], *parts[done + 1 :]] if done < len(parts) else []


def reserve(fd: int, size: int) -> None:
    """Allocates a file's blocks, so that a full disk fails before the first write."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # A file system that cannot reserve fails at a write instead.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def make_directories(root: str, relative: str) -> None:
    """Creates `root`/`relative` durably. Links below the root are not followed."""
    with folder(root, relative, make=True):
        pass


def make_private(path: str) -> None:
    """Removes the permissions of other users from a directory tree. Links are not followed."""
    os.chmod(path, 0o700)
    for _, folders, names, fd in os.fwalk(path):
        for name in folders + names:
            kind = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
            if not stat.S_ISLNK(kind) and kind & 0o077:
                os.chmod(name, 0o700 if stat.S_ISDIR(kind) else 0o600, dir_fd=fd)


def remove(parent: int, name: str) -> None:
    """Removes a file or a directory tree in an open directory. Links are not followed.

    Raises:
      FileNotFoundError: it does not exist. OSError: another error.
    """
    if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


def make_root(path: str) -> None:
    """Creates a directory with its parents durably."""
    new = []
    while path != os.path.dirname(path) and not os.path.isdir(path):
        new.append(path)
        path = os.path.dirname(path)

    # Parents first. A new directory is durable once the one that holds its name is synced.
    for directory in reversed(new):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        sync_directory(os.path.dirname(directory))


@contextlib.contextmanager
def locked_new_file(parent: int, name: str) -> Iterator[int]:
    """Creates a file in an open folder, locked while the context lasts: a sign to sweeps that its writer is alive."""
    while True:
        with open_regular_in(parent, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                yield fd
                return
        # A sweep removed it before it was locked.


def publish_once(root: str, path: str, text: bytes, temporary: str) -> None:
    """Writes a small file below a root atomically and durably, unless it exists. Of several writers one wins.

    Args:
      temporary: path below the root where it is written first.
    """
    with _written_aside(root, path, text, temporary, make=True) as (source, own, target, name):
        # A link does not replace, unlike a rename: the first writer wins.
        with contextlib.suppress(FileExistsError):
            os.link(own, name, src_dir_fd=source, dst_dir_fd=target)
        os.fsync(target)


def replace_file(root: str, path: str, text: bytes, temporary: str) -> None:
    """Writes or replaces a small file below a root atomically and durably. `temporary` is as for `publish_once`."""
    with _written_aside(root, path, text, temporary, make=False) as (source, own, target, name):
        rename(source, own, target, name)
        os.fsync(target)


@contextlib.contextmanager
def _written_aside(
    root: str, path: str, text: bytes, temporary: str, make: bool
) -> Iterator[tuple[int, str, int, str]]:
    """Writes a file's content under a temporary name. Yields its open folder and name, and those that it is to have."""
    (above, _, name), (aside, _, own) = path.rpartition("/"), temporary.rpartition("/")
    with (
        folder(root, above, make=make) as target,
        folder(root, aside, make=True) as source,
        locked_new_file(source, own) as fd,
    ):
        try:
            write_all(fd, [text], 0)
            os.fsync(fd)  # before it has its name, so that a crash leaves no short file under it
            yield source, own, target, name
        finally:
            with contextlib.suppress(OSError):
                os.unlink(own, dir_fd=source)


@functools.cache
def _call(name: str) -> "ctypes._NamedFuncPointer | None":
    """Returns a function of the C library; None if it does not exist."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def start_writing(fd: int) -> None:
    """Starts to write back a file's dirty pages, without waiting. Nothing is durable yet."""
    begin = _call("sync_file_range")
    if begin is not None:
        begin(fd, ctypes.c_int64(0), ctypes.c_int64(0), _RANGE_WRITE)


def sync_file_system(path: str) -> None:
    """Makes all data and names on the file system of a directory durable."""
    whole = _call("syncfs")
    if whole is None:
        os.sync()
        return
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if whole(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def link(source: int, name: str, target: int, new: str) -> bool:
    """Links a file of one open directory into another. Returns False if the file system does not support it.

    Raises:
      FileNotFoundError: the source does not exist.
      FileExistsError: the target exists.
      OSError: another error.
    """
    try:
        os.link(name, new, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        # Another file system, one without links, a protected file, or too many links: callers copy then.
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def rename(source: int, name: str, target: int, new: str) -> None:
    """Moves a file from one open directory to another, and replaces a file of that name."""
    os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)


def copy_into(fd: int, root: str, path: str) -> None:
    """Copies content and times of a regular file below a root into an empty file."""
    with open_regular(root, path, noatime=True) as whole:
        found = os.fstat(whole)
        if found.st_size:  # the system refuses to reserve nothing
            reserve(fd, found.st_size)

        offset = 0
        while part := os.pread(whole, 4 << 20, offset):
            write_all(fd, [part], offset)
            offset += len(part)
        os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))  # last, because writes change it


def sync_files(fds: Sequence[int]) -> None:
    """Syncs several files of one file system, with one call if the system has `syncfs`."""
    whole = _call("syncfs") if len(fds) > 1 else None
    if whole is None:
        for fd in fds:
            os.fsync(fd)
    elif whole(fds[0]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
