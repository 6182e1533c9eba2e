"""Folders below a root, opened without following a link: by `openat2` of Linux 5.6, or name by name."""

import contextlib
import ctypes
import errno
import functools
import os
import struct
import sys

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NUMBER = 437  # the same on all architectures but Alpha
_HOW = struct.pack("QQQ", _FOLDER, 0, 0x04 | 0x08)
"""`struct open_how`: no links (RESOLVE_NO_SYMLINKS), nothing above the folder (RESOLVE_BENEATH)."""
_HERE = -100  # AT_FDCWD


def open_folder(root: str, path: str) -> int:
    """Opens the directory at `path` below a root, and returns its descriptor.

    Raises:
      FileNotFoundError: it does not exist.
      NotADirectoryError: there is a link or a file on the path.
      OSError: another error.
    """
    fd = os.open(root, _FOLDER)
    # What one call refuses, whatever the reason, is opened or refused name by name.
    found = _open_beneath(fd, path) if path else -1
    if found < 0:
        return _walked(fd, path, make=False)
    close(fd)
    return found


def made_folder(root: str, path: str) -> int:
    """Opens a directory as `open_folder`. Creates missing ones, private, and makes every name on the path durable."""
    return _walked(os.open(root, _FOLDER), path, make=True)


def _walked(fd: int, path: str, *, make: bool) -> int:
    """Opens a directory below an open one, which it closes, name by name. Raises as `open_folder`."""
    try:
        for part in path.split("/") if path else ():
            if part == "..":
                raise NotADirectoryError(errno.ENOTDIR, "got a path that leads out; expected one below the root")
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                os.fsync(fd)  # also of an existing directory: its maker may not have synced its name yet

            outer = fd
            try:
                fd = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=outer)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise NotADirectoryError(errno.ENOTDIR, f"{part} is a link or a file, not a directory") from None
            close(outer)
    except BaseException:
        close(fd)
        raise
    return fd


def close(fd: int) -> None:
    """Closes a file. Errors are ignored: data that must be durable was synced."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _open_beneath(parent: int, path: str) -> int:
    """Opens a folder below an open one. Returns its descriptor; -1 if it cannot, or the system lacks the call."""
    call = _call()
    return -1 if call is None else call(_NUMBER, parent, os.fsencode(path), _HOW, len(_HOW))


@functools.cache
def _call() -> "ctypes._NamedFuncPointer | None":
    """Returns `syscall` of the C library; None if `openat2` fails: an older system, or a sandbox that refuses it."""
    call = getattr(ctypes.CDLL(None), "syscall", None) if sys.platform == "linux" else None
    if call is None:
        return None
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    found = call(_NUMBER, _HERE, b".", _HOW, len(_HOW))
    if found < 0:
        return None
    os.close(found)
    return call
