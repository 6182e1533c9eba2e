"""Pool of host memory for reads: fresh pages cost more than the copy into them.

JAX may use an aligned host array without a copy (on the CPU it does), so a buffer returns to the pool only when its
last view is freed, whoever holds it.
"""

import collections
import errno
import os
import threading
import weakref
from collections.abc import Callable

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


IDLE_BYTES = 64 << 20
"""Limit of the idle buffers of a process, of all its pools together."""
SPARE_BYTES = 8 << 20
"""Idle buffers that a pool may keep even if its budget is used up: a full host tier still reads into warm memory."""


class _Process:
    """All pools of the process, whose idle buffers have one limit."""

    def __init__(self) -> None:
        self.pools: weakref.WeakSet[Buffers] = weakref.WeakSet()
        self.idle = 0
        self.lock = threading.RLock()  # garbage collection within the lock may return a buffer
        register_fork_guard(self)

    def largest(self, last: "Buffers") -> "Buffers":
        """Returns the pool with the most idle bytes; of several rather another than `last`, which is in use."""
        return max(list(self.pools), key=lambda pool: (pool.idle_bytes, pool is not last))

    def forked(self) -> None:
        """Replaces the lock in a forked process, and drops idle buffers, whose count may be inconsistent."""
        self.lock, self.idle = threading.RLock(), 0
        for pool in list(self.pools):
            pool.forked()


_process = _Process()


class Buffers:
    """Pool of aligned buffers. Thread-safe.

    Idle buffers take what the pool's budget has left (`bound_by`), and `SPARE_BYTES` in any case; all pools of a
    process together at most `IDLE_BYTES`. No buffer goes from one pool to another.

    Args:
      keep: largest number of bytes of idle buffers.
      wipe: whether a buffer is overwritten with zeros when it returns. One that is in use when the interpreter ends
        does not return.

    Attributes:
      wipes: whether buffers are overwritten.
      idle_bytes: bytes of idle buffers.
    """

    def __init__(self, keep: int = IDLE_BYTES, wipe: bool = False):
        self._keep, self.wipes, self.idle_bytes = keep, wipe, 0
        self._room: Callable[[], int] | None = None
        self._idle: collections.OrderedDict[int, list[np.ndarray]] = collections.OrderedDict()
        self._process = _process  # also at the end of the interpreter, which empties modules
        _process.pools.add(self)

    def __del__(self) -> None:
        self.close()

    def forked(self) -> None:
        """Drops idle buffers in a forked process."""
        self.idle_bytes = 0
        self._idle.clear()

    def bound_by(self, room: Callable[[], int]) -> None:
        """Bounds idle buffers by what `room` returns: bytes that are left of a budget."""
        self._room = room

    def close(self) -> None:
        """Frees idle buffers, and keeps none from now on. Buffers in use stay valid."""
        self._keep = 0
        self.trim()

    def trim(self) -> None:
        """Frees idle buffers beyond the limits, for instance after what uses the budget has grown."""
        limit = self._keep if self._room is None else min(self._keep, max(self._room(), SPARE_BYTES))
        with self._process.lock:
            while self.idle_bytes > limit and self._free_oldest():
                pass
            while self._process.idle > IDLE_BYTES and self._process.largest(self)._free_oldest():
                pass

    def _free_oldest(self) -> bool:
        """Frees an idle buffer of the size that was returned first. Returns whether there was one."""
        while self._idle:
            size, blocks = next(iter(self._idle.items()))
            if blocks:
                blocks.pop()
                self.idle_bytes -= size
                self._process.idle -= size
                return True
            del self._idle[size]
        return False

    def lease(self, size: int) -> np.ndarray:
        """Returns uint8 [size] of undefined content, aligned to 4096 bytes. It returns to the pool with its last view.

        Raises:
          OSError: ENOMEM, there is not enough memory.
        """
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        block: np.ndarray | None = None
        if room in self._idle:
            with self._process.lock:
                idle = self._idle.get(room)
                if idle:
                    block = idle.pop()
                    self.idle_bytes -= room
                    self._process.idle -= room

        if block is None:
            if room > _LARGE:
                expect_memory(room)
            try:
                raw = np.empty(room + _ALIGNMENT, np.uint8)
            except MemoryError as error:
                raise OSError(errno.ENOMEM, f"got no memory for {size} bytes; expected it") from error
            start = -raw.ctypes.data % _ALIGNMENT
            block = raw[start : start + room]

        # Views keep the lease alive, and not `block`: NumPy's bases end at what lends the memory.
        return np.frombuffer(_Lease(self, block), np.uint8, count=size)

    def take_back(self, block: np.ndarray) -> None:
        """Takes back a buffer that nobody uses any more."""
        if self.wipes:  # before it is idle, so that no other reader gets its content
            block.fill(0)
        if not self._keep:
            return
        size = len(block)
        with self._process.lock:
            self._idle.setdefault(size, []).append(block)
            self.idle_bytes += size
            self._process.idle += size
        if self.idle_bytes > min(self._keep, SPARE_BYTES) or self._process.idle > IDLE_BYTES:
            self.trim()


class _Lease:
    """Memory of a buffer while it is used."""

    __slots__ = ("_block", "_pool")

    def __init__(self, pool: Buffers, block: np.ndarray):
        self._pool, self._block = pool, block

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self._block)

    def __del__(self) -> None:
        self._pool.take_back(self._block)
