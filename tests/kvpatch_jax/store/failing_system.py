"""A system whose calls fail: any one of them, once, or all that write."""

import builtins
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_cases import place_of

from kvpatch_jax.store.io import files

CALLS = (
    *("open", "close", "pread", "preadv", "pwritev", "posix_fallocate", "fsync", "fstat", "stat", "scandir", "utime"),
    *("rename", "link", "unlink", "mkdir"),
)
WRITES = ("pwritev", "posix_fallocate", "fsync", "rename", "link", "unlink", "mkdir", "utime")


class OneFailure:
    """Counts the system calls of a store, and fails number `at` with `code`. A call that fails does nothing, but for
    `close`, which the system has done even when it says otherwise."""

    def __init__(self, root: str, at: int, code: int):
        self.root, self.at, self.code = root, at, code
        self.count, self.failed = 0, ""

    def _due(self, name: str) -> bool:
        self.count += 1
        if self.count - 1 != self.at:
            return False
        self.failed = name
        return True

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted, where it concerns the store's files."""

        def counted(*arguments: Any, **more: Any) -> Any:
            named = bool(arguments) and isinstance(arguments[0], str | os.PathLike)
            outside = named and not place_of(arguments, more).startswith(self.root)
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


@contextlib.contextmanager
def read_only(code: int = errno.EROFS) -> Iterator[None]:
    """All calls that write fail, as on a file system mounted for reading; root, too, may not write there."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    opening = os.open

    def opened(path: Any, flags: int, *more: Any, **others: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refused()
        return opening(path, flags, *more, **others)

    with pytest.MonkeyPatch.context() as patched:
        for name in WRITES:
            patched.setattr(os, name, refused)
        patched.setattr(os, "open", opened)
        yield
