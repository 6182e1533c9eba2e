"""Times of last use of objects, including hits in memory, which do not open the file.

Evictions of this process use these times. Other processes see the access times, which hits in memory update now and
then.
"""

import itertools

EVERY = 10.0
"""Least number of seconds between two updates of an access time by hits in memory."""
_MOST = 1 << 16


class RecentUse:
    """Times of use of a root's objects from memory, in seconds since the epoch. Thread-safe."""

    def __init__(self) -> None:
        self._uses: dict[str, tuple[float, float]] = {}  # by path: the last use, and the last one written to the file

    def note(self, path: str, now: float, accessed: float) -> bool:
        """Records a use of an object. Returns whether its file's access time has to be updated."""
        _, written = self._uses.get(path, (0.0, 0.0))
        due = now - max(accessed, written) >= EVERY
        self._uses[path] = now, now if due else written
        if len(self._uses) > _MOST:  # the access times have these uses too, except for the last seconds
            for old in list(itertools.islice(self._uses, _MOST // 2)):
                self._uses.pop(old, None)
        return due

    def last(self, path: str, accessed: float) -> float:
        """Returns the time of an object's last use, given its file's access time."""
        return max(accessed, self._uses.get(path, (0.0, 0.0))[0])
