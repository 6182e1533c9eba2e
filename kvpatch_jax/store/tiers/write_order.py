"""Order of the writes of each name within a process, over all store objects of a root.

An asynchronous put gets its place when it is queued, any other write when it begins. A write or deletion has exclusive
access to its names, on the disk and in the remote store, until it is done. A queued put is outdated once a write with a
later place was acknowledged: it is neither written nor read any more. A copy of an object that was read is outdated
once its name was written or deleted.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence

from ..format.naming import Name
from ..io.thread_pool import register_fork_guard


@dataclasses.dataclass(eq=False)
class Write:
    """A write of a name.

    Attributes:
      name: the name.
      place: its place in the order.
      copy: whether it copies an object that was read from another tier.
      outdated: whether a newer write or deletion has replaced it.
    """

    name: Name
    place: int
    copy: bool = False
    outdated: bool = False


class WriteOrder:
    """Order of a root's writes. Thread-safe; between processes the directory decides."""

    def __init__(self) -> None:
        self._places = itertools.count()
        self._open: dict[str, list[Write]] = {}  # queued puts and copies under way, by path
        self._busy: set[str] = set()  # paths that are being written
        self._closed: list[str] = []  # prefixes of paths that are being deleted
        self._changed = threading.Condition()
        register_fork_guard(self)

    def forked(self) -> None:
        """Forgets, in a forked process, the writes of its parent's threads."""
        self._open, self._busy, self._closed = {}, set(), []
        self._changed = threading.Condition()

    def begin(self, name: Name) -> Write:
        """Returns a write that is made immediately, with its place."""
        return Write(name, next(self._places))

    def queue(self, name: Name) -> Write:
        """Returns a write that is made later, with its place. Later writes outdate it until `end`."""
        return self._opened(Write(name, next(self._places)))

    def copy(self, name: Name) -> Write:
        """Registers a read whose object may be copied. Any write of its name outdates the copy until `end`."""
        return self._opened(Write(name, next(self._places), copy=True))

    def _opened(self, write: Write) -> Write:
        with self._changed:
            self._open.setdefault(write.name.path, []).append(write)
        return write

    def end(self, write: Write) -> None:
        """Removes a queued write or a copy from the order."""
        with self._changed:
            rest = [other for other in self._open.get(write.name.path, ()) if other is not write]
            if rest:
                self._open[write.name.path] = rest
            else:
                self._open.pop(write.name.path, None)

    # --------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def turn(self, writes: Sequence[Write]) -> Iterator[set[Write]]:
        """Waits for exclusive access to the names of writes, and holds it within the context.

        Yields the writes to be made: of each name the last one, unless it is outdated. If the block raises, queued
        writes of the same names are not outdated.
        """
        last = {write.name.path: write for write in writes}
        with self._changed:
            while any(map(self._is_taken, last)):
                self._changed.wait()
            self._busy |= last.keys()
        made = False
        try:
            yield {write for write in last.values() if not write.outdated}
            made = True
        finally:
            with self._changed:
                self._busy -= last.keys()
                for path, write in last.items():
                    self._outdate(path, write.place if made else -1)  # -1: copies alone
                self._changed.notify_all()

    @contextlib.contextmanager
    def turn_to_copy(self, copy: Write) -> Iterator[bool]:
        """Takes exclusive access to the name of a copy, if it is free. Yields whether the copy may be made."""
        path = copy.name.path
        with self._changed:
            free = not copy.outdated and not self._is_taken(path)
            self._busy |= {path} if free else set()
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._busy.discard(path)
                    self._changed.notify_all()

    @contextlib.contextmanager
    def turn_to_delete(self, prefix: str) -> Iterator[int]:
        """Waits for exclusive access to all paths with a prefix, and holds it within the context.

        Yields the deletion's place.
        """
        place = next(self._places)
        with self._changed:
            self._changed.wait_for(
                lambda: not any(other.startswith(prefix) or prefix.startswith(other) for other in self._closed)
            )
            self._closed.append(prefix)  # before waiting for writers, so that new ones cannot starve the deletion

        try:
            with self._changed:
                self._changed.wait_for(lambda: not any(path.startswith(prefix) for path in self._busy))
            yield place
        finally:
            with self._changed:
                self._closed.remove(prefix)
                for path in self._paths(prefix):
                    self._outdate(path, -1)
                self._changed.notify_all()

    def outdate(self, prefix: str, place: int) -> bool:
        """Outdates queued writes with a prefix and an earlier place. Returns whether there were any."""
        with self._changed:
            # A list, because every path has to be outdated, also behind the first.
            return any([self._outdate(path, place) for path in self._paths(prefix)])

    # ---------------------------------------------------------------------------------------------- inside

    def _is_taken(self, path: str) -> bool:
        return path in self._busy or path.startswith(tuple(self._closed))

    def _paths(self, prefix: str) -> list[str]:
        return [path for path in self._open if path.startswith(prefix)]

    def _outdate(self, path: str, place: int) -> bool:
        """Outdates copies, and queued writes before a place. Returns whether there were any of the latter."""
        queued = False
        for write in self._open.get(path, ()):
            if write.copy or write.place < place:
                queued |= not write.copy and not write.outdated
                write.outdated = True
        return queued
