"""Eviction in the background: between puts, a thread per root makes room, so that the next ones need not evict."""

import contextlib
import threading
import time
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
_QUIET = 0.02
"""Seconds without a put that would wake it, after which the thread evicts: beside a put it would delay that by more
than the removal that the put itself makes."""
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
        register_fork_guard(self)
        self.forked()

    def forked(self) -> None:
        """Forgets the thread of the parent process."""
        self._work: dict[str, _Work] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy: Disk | None = None  # whose objects the thread removes, until it leaves
        self._idle, self._latest = True, 0.0

    def wake(self, disk: Disk, below: str, budget: int, pinned: Callable[[str], bool], counted: str) -> None:
        """Has the thread evict from a folder, once nobody puts, down below the high-water mark of its budget."""
        with self._changed:
            self._work[below], self._latest = _Work(disk, int(HIGH * budget), pinned, counted), time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpatch-evict", daemon=True)
                self._thread.start()

    def leave(self, disk: Disk) -> None:
        """Has the thread do no more by a store's disk, which is closed. Waits for the object that it removes."""
        with self._changed:
            self._work = {below: work for below, work in self._work.items() if work.disk is not disk}
            if self._busy is disk:
                self._busy = None
                self._changed.wait_for(lambda: self._idle)

    def _run(self) -> None:
        until = time.monotonic() + _IDLE
        while True:
            time.sleep(_QUIET)
            with self._changed:
                now = time.monotonic()
                if not self._work and now >= until:
                    self._thread = None
                    return
                latest = self._latest
                if not self._work or now - latest < _QUIET:
                    continue
                below, work = self._work.popitem()
                self._busy, self._idle = work.disk, False

            def goes_on(disk: Disk = work.disk, latest: float = latest) -> bool:
                return self._busy is disk and self._latest == latest

            # What it cannot evict, the next put reports.
            with contextlib.suppress(StoreError):
                make_room(work.disk, work.budget, 0, work.pinned, below, work.counted, background=goes_on)
            with self._changed:
                if self._busy is not None and self._latest != latest:  # a put came between
                    self._work.setdefault(below, work)
                self._busy, self._idle, until = None, True, time.monotonic() + _IDLE
                self._changed.notify_all()
