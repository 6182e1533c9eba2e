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
_HOW_BYTES = 24
_HERE = -100  # AT_FDCWD


def open_folder(root: str, path: str) -> int:
    """Opens the directory at `path` below a root, and returns its descriptor.

    Raises:
      FileNotFoundError: it does not exist.
      NotADirectoryError: there is a link or a file on the path.
      OSError: another error.
    """
    found = open_beneath(root, path) if path else -1
    return found if found >= 0 else _walked(os.open(root, _FOLDER), path, make=False)


def open_beneath(root: str, path: str, flags: int = _FOLDER) -> int:
    """Opens a folder, or by other flags a file, below a root by one call. Returns its descriptor.

    Returns:
      -1 if the system lacks the call or it fails: then the path is to be opened, or refused, name by name.

    Raises:
      FileNotFoundError: it does not exist. OSError: the root cannot be opened.
    """
    call, name = _call(), os.fsencode(path)
    if call is None or b"\0" in name:  # which would end the name
        return -1
    parent = os.open(root, _FOLDER)
    found = call(_NUMBER, parent, name, _how(flags), _HOW_BYTES)
    code = ctypes.get_errno() if found < 0 else 0
    close(parent)
    if code == errno.ENOENT:
        raise FileNotFoundError(code, os.strerror(code), path)
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
    try:
        os.close(fd)
    except OSError:
        return


@functools.cache
def _how(flags: int) -> bytes:
    """Returns `struct open_how`: no links (RESOLVE_NO_SYMLINKS), nothing above the folder (RESOLVE_BENEATH)."""
    return struct.pack("QQQ", flags, 0, 0x04 | 0x08)


@functools.cache
def _call() -> "ctypes._NamedFuncPointer | None":
    """Returns `syscall` of the C library; None if `openat2` fails: an older system, or a sandbox that refuses it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None) if sys.platform == "linux" else None
    if call is None:
        return None
    call.restype = ctypes.c_long
    call.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    found = call(_NUMBER, _HERE, b".", _how(_FOLDER), _HOW_BYTES)
    if found < 0:
        return None
    os.close(found)
    return call
