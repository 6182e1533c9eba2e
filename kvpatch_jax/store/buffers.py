"""Host memory that reads land in, kept and given out again: fresh pages cost more than the copy into them.

jax may use an aligned host array as it stands (on the CPU it does), so a buffer comes back only when the last array
that looks into it is gone, whoever holds it.
"""

import collections
import threading
import weakref

import numpy as np

_ALIGNMENT = 4096


class Buffers:
    """A pool of buffers.

    Args:
      keep: bytes of idle ones that are kept at most.
      wipe: whether a buffer is overwritten with zeros when it comes back. One that is in use at the interpreter's end
        does not come back.
    """

    def __init__(self, keep: int = 256 << 20, wipe: bool = False):
        self._keep, self._wipe = keep, wipe
        self._idle: collections.OrderedDict[int, list[np.ndarray]] = collections.OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()  # a collection inside may give a buffer back

    def lease(self, size: int) -> np.ndarray:
        """uint8 [size], aligned to 4096 bytes, of unknown content; it comes back by itself."""
        room = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        block = self._take(room)
        if block is None:
            raw = np.empty(room + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            block = raw[start : start + room]
        # Views of `leased` keep it alive and not `block`: its memory belongs to no array, so that numpy stops there.
        leased = np.frombuffer(memoryview(block), np.uint8, count=size)
        weakref.finalize(leased, self._give, block).atexit = False
        return leased

    def _take(self, room: int) -> np.ndarray | None:
        with self._lock:
            idle = self._idle.get(room)
            if not idle:
                return None
            self._bytes -= room
            block = idle.pop()
            if not idle:
                del self._idle[room]
            return block

    def _give(self, block: np.ndarray) -> None:
        if self._wipe:
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
        """Bytes kept for the next reads."""
        return self._bytes
