"""Pool of host memory for reads: fresh pages cost more than the copy into them.

JAX may use an aligned host array without a copy (on the CPU it does), so a buffer returns to the pool only when its
last view is freed, whoever holds it.
"""

import collections
import errno
import os
import threading
import weakref

import numpy as np

from ..io.thread_pool import register_fork_guard

_ALIGNMENT = 4096
_LARGE = 256 << 20
"""Bytes above which the available memory is checked before an allocation."""


def expect_memory(size: int) -> None:
    """Raises if the machine lacks memory for a size: a sparse file may claim any.

    Raises:
      OSError: ENOMEM, which counts as a failed read that may pass.
    """
    if size > _LARGE and size > (free := available_memory()):
        raise OSError(errno.ENOMEM, f"got {size} bytes to read; expected at most {free}, the free memory")


def available_memory() -> int:
    """Returns the bytes that can be allocated without swapping, in the machine or the process's control group."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = _text("/proc/meminfo").splitlines()
    free = min([free, *(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))])

    # A control group may allow less than the machine has.
    groups = [line[3:] for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")]
    for group in groups:
        most, used = (_text(f"/sys/fs/cgroup{group}/memory.{word}").strip() for word in ("max", "current"))
        if most.isdecimal() and used.isdecimal():
            free = min(free, max(0, int(most) - int(used)))
    return free


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


class Buffers:
    """Pool of aligned buffers. Thread-safe.

    Args:
      keep: largest number of bytes of idle buffers.
      wipe: whether a buffer is overwritten with zeros when it returns. One that is in use when the interpreter ends
        does not return.
    """

    def __init__(self, keep: int = 256 << 20, wipe: bool = False):
        self._keep, self._wipe = keep, wipe
        self._idle: collections.OrderedDict[int, list[np.ndarray]] = collections.OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()  # garbage collection within the lock may return a buffer
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, and drops idle buffers, whose count may be inconsistent."""
        self._lock, self._bytes = threading.RLock(), 0
        self._idle.clear()

    def lease(self, size: int) -> np.ndarray:
        """Returns uint8 [size] of undefined content, aligned to 4096 bytes. It returns to the pool with its last view.

        Raises:
          OSError: ENOMEM, there is not enough memory.
        """
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        block: np.ndarray | None = None
        with self._lock:
            if idle := self._idle.get(room):
                self._bytes -= room
                block = idle.pop()
                if not idle:
                    del self._idle[room]

        if block is None:
            expect_memory(room)
            try:
                raw = np.empty(room + _ALIGNMENT, np.uint8)
            except MemoryError as error:
                raise OSError(errno.ENOMEM, f"got no memory for {size} bytes; expected it") from error
            start = -raw.ctypes.data % _ALIGNMENT
            block = raw[start : start + room]

        # Views must keep `leased` alive, and not `block`: its memory comes from no array, so NumPy's bases end at it.
        leased = np.frombuffer(memoryview(block), np.uint8, count=size)
        weakref.finalize(leased, self._give, block).atexit = False
        return leased

    def _give(self, block: np.ndarray) -> None:
        if self._wipe:  # before it is idle, so that no other reader gets its content
            block.fill(0)
        with self._lock:
            self._idle.setdefault(len(block), []).append(block)
            self._bytes += len(block)
            while self._bytes > self._keep:
                size, blocks = next(iter(self._idle.items()))
                self._bytes -= size
                blocks.pop()
                if not blocks:
                    del self._idle[size]

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle buffers."""
        return self._bytes
