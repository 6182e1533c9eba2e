"""A log of every write of a loaded store, in memory that its processes share, and the check of a read against it.

Writes of a name have numbers from 1 up, which the values carry. A write is known by when it began and when it was
acknowledged (ns of the machine's monotonic clock). A read is wrong only if no order of the operations explains it:

  unknown    a value of a number that was not written, or not yet
  torn       a value that is no write's: its bytes do not belong together
  stale      a value although a later write was acknowledged before the read began, and began after it was acknowledged
  deleted    the same of a deletion
  lost       nothing, although a write was acknowledged before the read began and no deletion may have followed; only
             of names that nothing may evict
"""

import dataclasses
import time
from multiprocessing.context import BaseContext
from typing import Any, Literal

import numpy as np

DEPTH = 1024
"""Writes of a name that are remembered."""
PUT, DELETE, FAILED_PUT, FAILED_DELETE = range(1, 5)
_NUMBER, _BEGIN, _END, _KIND = range(4)
Wrong = Literal["unknown", "torn", "stale", "deleted", "lost"]


@dataclasses.dataclass(frozen=True)
class LoadLog:
    """Writes of `names` names: [names, DEPTH, 4] of number, begin, end (0: not yet), kind; shared by processes.

    Attributes:
      names: number of names.
      memory: the array, flat.
      counters: the last number of each name.
      locks: one per name, held while its rows or its counter are used.
    """

    names: int
    memory: Any
    counters: Any
    locks: Any

    @classmethod
    def shared(cls, names: int, context: BaseContext) -> "LoadLog":
        """Allocates a log for processes of a context."""
        memory = context.RawArray("q", names * DEPTH * 4)
        return cls(names, memory, context.RawArray("q", names), [context.Lock() for _ in range(names)])

    def _rows(self, name: int) -> np.ndarray:
        whole = np.frombuffer(self.memory, np.int64).reshape(self.names, DEPTH, 4)
        return whole[name]

    def begin(self, name: int, kind: int) -> int:
        """Notes that a write begins. Returns its number, and is called before the store is."""
        with self.locks[name]:
            self.counters[name] += 1
            number = self.counters[name]
            row = self._rows(name)[number % DEPTH]
            row[_END] = 0
            row[:] = number, time.monotonic_ns(), 0, kind
        return number

    def end(self, name: int, number: int, kind: int | None = None) -> None:
        """Notes that a write was acknowledged, or, of a kind that failed, that it ended."""
        with self.locks[name]:
            row = self._rows(name)[number % DEPTH]
            if row[_NUMBER] == number:
                row[_END] = time.monotonic_ns()
                row[_KIND] = row[_KIND] if kind is None else kind

    def judge(self, name: int, number: int | None, began: int, *, evictable: bool) -> Wrong | None:
        """Judges a read of a name that began then (ns): the number that was read, None for a miss."""
        with self.locks[name]:
            rows, last = self._rows(name).copy(), self.counters[name]
        acknowledged = (rows[:, _END] > 0) & (rows[:, _END] < began) & (rows[:, _KIND] <= DELETE)

        if number is None:
            return "lost" if not evictable and _is_lost(rows, acknowledged) else None
        if not 0 < number <= last:
            return "unknown"
        (found,) = np.nonzero(rows[:, _NUMBER] == number)
        if not len(found):
            return "stale"  # more than `DEPTH` writes ago
        own_end = rows[found[0], _END]
        if not own_end:
            return None  # it is not acknowledged yet, so nothing has followed it
        later = acknowledged & (rows[:, _BEGIN] > own_end)
        if (later & (rows[:, _KIND] == DELETE)).any():
            return "deleted"
        return "stale" if later.any() else None


def _is_lost(rows: np.ndarray, acknowledged: np.ndarray) -> bool:
    """Returns whether some acknowledged put was followed by no deletion, not even one that is under way or failed."""
    puts = rows[acknowledged & (rows[:, _KIND] == PUT)]
    if not len(puts):
        return False
    latest = puts[:, _BEGIN].max()
    began = rows[:, _NUMBER] > 0
    deletions = rows[began & ((rows[:, _KIND] == DELETE) | (rows[:, _KIND] == FAILED_DELETE))]
    # A deletion that had ended before that put began cannot have removed what it stored.
    return not ((deletions[:, _END] == 0) | (deletions[:, _END] > latest)).any()
