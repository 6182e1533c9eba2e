"""One order of the writes of each name within a process, over all store objects of a root.

An asynchronous put has its place when it is queued, any other write when it begins. Whoever writes or deletes a name
has it alone, on the disk and in the remote store, until that is done. A queued put is outdated once a write of a later
place was acknowledged: it is not written, and not read any more. A copy of what was read is outdated once anybody has
written or deleted its name.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence

from ..format.naming import Name
from ..io.thread_pool import tell_of_forks


@dataclasses.dataclass(eq=False)
class Write:
    """A write of a name.

    Attributes:
      place: in the order.
      copy: whether it only repeats elsewhere what was read.
      outdated: whether something newer has taken its place.
    """

    name: Name
    place: int
    copy: bool = False
    outdated: bool = False


class WriteOrder:
    """The order of a root's writes. Safe among threads; among processes the directory decides."""

    def __init__(self) -> None:
        self._places = itertools.count()
        self._open: dict[str, list[Write]] = {}  # queued puts and copies under way, by path
        self._busy: set[str] = set()  # paths that are being written
        self._closed: list[str] = []  # beginnings of paths that are being deleted
        self._changed = threading.Condition()
        tell_of_forks(self)

    def forked(self) -> None:
        """Forgets, in a forked process, what the threads of its parent were at."""
        self._open, self._busy, self._closed = {}, set(), []
        self._changed = threading.Condition()

    def begin(self, name: Name) -> Write:
        """Gives a write that is made at once its place."""
        return Write(name, next(self._places))

    def queue(self, name: Name) -> Write:
        """Gives a write that is made later its place. It is outdated by later ones until `end`."""
        return self._opened(Write(name, next(self._places)))

    def copy(self, name: Name) -> Write:
        """Registers that a name is being read, to be written elsewhere. Any other write outdates it until `end`."""
        return self._opened(Write(name, next(self._places), copy=True))

    def _opened(self, write: Write) -> Write:
        with self._changed:
            self._open.setdefault(write.name.path, []).append(write)
        return write

    def end(self, write: Write) -> None:
        """Takes a queued write or a copy off the books."""
        with self._changed:
            rest = [other for other in self._open.get(write.name.path, ()) if other is not write]
            if rest:
                self._open[write.name.path] = rest
            else:
                self._open.pop(write.name.path, None)

    # --------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def turn(self, writes: Sequence[Write]) -> Iterator[set[Write]]:
        """Waits until nobody else is at these names, and has them alone until it is left.

        Yields the writes that are to be made: of each name the last, unless it is outdated. Where they fail, queued
        writes of the same names are not outdated by them.
        """
        last = {write.name.path: write for write in writes}
        with self._changed:
            self._changed.wait_for(lambda: not any(self._is_taken(path) for path in last))
            self._busy |= last.keys()
        made = False
        try:
            yield {write for write in last.values() if not write.outdated}
            made = True
        finally:
            with self._changed:
                self._busy -= last.keys()
                for path, write in last.items():
                    self._outdate(path, write.place if made else -1)
                self._changed.notify_all()

    @contextlib.contextmanager
    def turn_to_copy(self, copy: Write) -> Iterator[bool]:
        """Has the name of a copy alone until it is left, without waiting. Yields whether the copy may be made."""
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
    def turn_to_delete(self, beginning: str) -> Iterator[int]:
        """Waits until nobody is at names whose paths begin so, and keeps all others from them until it is left.

        Yields the deletion's place.
        """
        place = next(self._places)
        with self._changed:
            self._changed.wait_for(
                lambda: not any(each.startswith(beginning) or beginning.startswith(each) for each in self._closed)
            )
            self._closed.append(beginning)  # at once, so that no stream of writes holds this up
        try:
            with self._changed:
                self._changed.wait_for(lambda: not any(path.startswith(beginning) for path in self._busy))
            yield place
        finally:
            with self._changed:
                self._closed.remove(beginning)
                for path in self._paths(beginning):
                    self._outdate(path, -1)
                self._changed.notify_all()

    def outdate(self, beginning: str, place: int) -> bool:
        """Outdates the queued writes before a place whose paths begin so. Whether there were any."""
        with self._changed:
            return any([self._outdate(path, place) for path in self._paths(beginning)])

    # ---------------------------------------------------------------------------------------------- inside

    def _is_taken(self, path: str) -> bool:
        return path in self._busy or any(path.startswith(beginning) for beginning in self._closed)

    def _paths(self, beginning: str) -> list[str]:
        return [path for path in self._open if path.startswith(beginning)]

    def _outdate(self, path: str, place: int) -> bool:
        """Outdates copies, and queued writes before a place. Whether there were any of the latter."""
        queued = False
        for write in self._open.get(path, ()):
            if write.copy or write.place < place:
                queued |= not write.copy and not write.outdated
                write.outdated = True
        return queued
