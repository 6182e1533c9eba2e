"""System call `openat2` of Linux 5.6: opens a folder below another in one call that follows no link."""

import ctypes
import functools
import os
import struct
import sys

_NUMBER = 437  # the same on all architectures but Alpha
_HOW = struct.pack("QQQ", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, 0x04 | 0x08)
"""`struct open_how`: no links (RESOLVE_NO_SYMLINKS), nothing above the folder (RESOLVE_BENEATH)."""
_HERE = -100  # AT_FDCWD


def open_beneath(parent: int, path: str) -> int:
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
