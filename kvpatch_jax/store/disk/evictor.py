"""Eviction in the background: a thread per root keeps objects below their budget, so that puts need not wait for it."""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from ...errors import StoreError
from ..io.thread_pool import register_fork_guard
from .disk import Disk
from .eviction import make_room

HIGH = 0.95
"""Share of a budget above which the thread evicts, until `eviction.SLACK` of that is free."""
SMALL = 64
"""The thread works for objects of at most this share of the budget, 1/64; for larger ones a put evicts itself."""
_IDLE = 5.0
"""Seconds without work after which the thread ends."""


class _Work(NamedTuple):
    disk: Disk
    budget: int
    pinned: Callable[[str], bool]
    counted: str


class Evictor:
    """Thread that evicts from a root, started when there is work. Thread-safe."""

    def __init__(self) -> None:
        self._work: dict[str, _Work] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        register_fork_guard(self)

    def forked(self) -> None:
        """Forgets the thread of the parent process."""
        self._work, self._changed, self._thread = {}, threading.Condition(), None

    def wake(self, disk: Disk, below: str, budget: int, pinned: Callable[[str], bool], counted: str) -> None:
        """Has the thread evict from a folder, down below the high-water mark of its budget. Returns immediately."""
        with self._changed:
            self._work[below] = _Work(disk, int(HIGH * budget), pinned, counted)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpatch-evict", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._work, timeout=_IDLE):
                    self._thread = None
                    return
                below, work = self._work.popitem()
            # What it cannot evict, the next put reports.
            with contextlib.suppress(StoreError):
                make_room(work.disk, work.budget, 0, work.pinned, below, work.counted)
