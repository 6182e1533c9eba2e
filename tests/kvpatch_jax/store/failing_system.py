"""A system whose calls fail: any one of them, once, or all that write."""

import builtins
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from store_cases import place_of

from kvpatch_jax.store.io import files

OPENS = ("open", "scandir", "listdir")
"""Calls that need a descriptor."""
GROWING = ("pwrite", "pwritev", "write", "posix_fallocate", "rename", "replace", "link", "mkdir")
"""Calls that may need room on the disk."""
WRITES = (*GROWING, "ftruncate", "truncate", "fsync", "fdatasync", "unlink", "remove", "rmdir", "utime", "chmod")
READS = ("close", "read", "pread", "preadv", "fstat", "stat", "lstat", "readlink")
CALLS = (*OPENS, *WRITES, *READS)
OF_CODE = {
    errno.EMFILE: OPENS,
    errno.ENOSPC: (*GROWING, "ftruncate", "open", "syncfs", "fsync"),
    errno.EROFS: (*WRITES, "open"),
    errno.EINTR: ("syncfs",),  # of the others, Python tries again by itself
}
"""Calls that fail with an error's number; with another number, all do."""


class OneFailure:
    """Counts the system calls of a store, and fails number `at` with `code`. A call that fails does nothing, but for
    `close`, which the system has done even when it says otherwise.

    Args:
      root: the store's; calls that name files elsewhere succeed.
      at: number of the call, among those that are counted.
      code: number of the error.
      calls: names of the calls that are counted; None: all.
      lasting: whether all counted calls after it fail too, as on a disk that stays full.
    """

    def __init__(self, root: str, at: int, code: int, calls: Collection[str] | None = None, lasting: bool = False):
        self.root, self.at, self.code, self.calls, self.lasting = root, at, code, calls, lasting
        self.count, self.failed, self.off = 0, "", False
        self._lock = threading.Lock()

    def _due(self, name: str) -> bool:
        if self.off or (self.calls is not None and name not in self.calls):
            return False
        with self._lock:
            self.count += 1
            if not (self.lasting and self.count > self.at) and self.count - 1 != self.at:
                return False
            self.failed = self.failed or name
        return True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Calls of the test itself, which do not fail."""
        self.off = True
        yield
        self.off = False

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted, where it concerns the store's files."""

        def counted(*arguments: Any, **more: Any) -> Any:
            named = bool(arguments) and isinstance(arguments[0], str | os.PathLike)
            outside = named and not place_of(arguments, more).startswith(self.root)
            if name == "open" and self.code in (errno.ENOSPC, errno.EROFS):
                flags = arguments[1] if len(arguments) > 1 else more.get("flags", 0)
                outside |= isinstance(flags, int) and not flags & os.O_CREAT
            if outside or not self._due(name):
                return call(*arguments, **more)
            if name == "close":
                call(*arguments, **more)
            raise OSError(self.code, os.strerror(self.code))

        return counted

    @contextlib.contextmanager
    def installed(self) -> Iterator["OneFailure"]:
        """The calls fail inside."""
        with pytest.MonkeyPatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, self.wrapped(name, getattr(os, name)))
            patched.setattr(fcntl, "flock", self.wrapped("flock", fcntl.flock))
            patched.setattr(builtins, "open", self.wrapped("open", open))
            # The hint to begin writing fails without a word, whatever fails besides.
            patched.setattr(files, "_call", {"syncfs": self._sync, "sync_file_range": lambda *_: -1}.get)
            yield self

    def _sync(self, fd: int) -> int:
        """`syncfs` as C has it: -1, and why in errno."""
        if self._due("syncfs"):
            ctypes.set_errno(self.code)
            return -1
        return 0


class OneKill(OneFailure):
    """Kills this process before the system call number `at`."""

    def __init__(self, root: str, at: int):
        super().__init__(root, at, 0)

    def _due(self, name: str) -> bool:
        if super()._due(name):
            os.kill(os.getpid(), signal.SIGKILL)
        return False
