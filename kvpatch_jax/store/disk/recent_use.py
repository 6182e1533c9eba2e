"""When objects were last used, beyond their files' access times: a hit in memory opens no file.

Whoever evicts in this process asks here. Others see the access times, which hits in memory change now and then.
"""

import itertools

EVERY = 10.0
"""Seconds between two changes of an access time by hits in memory."""
_MOST = 1 << 16


class RecentUse:
    """Uses of a root's objects from memory, in seconds since the epoch. Safe among threads."""

    def __init__(self) -> None:
        self._uses: dict[str, tuple[float, float]] = {}  # by path: the last one, and the last that was written down

    def note(self, path: str, now: float, accessed: float) -> bool:
        """Records a use of an object whose file was accessed then. Whether its access time is to be changed."""
        _, written = self._uses.get(path, (0.0, 0.0))
        due = now - max(accessed, written) >= EVERY
        self._uses[path] = now, now if due else written
        if len(self._uses) > _MOST:  # what is forgotten here is in the access times, but for some seconds
            for old in list(itertools.islice(self._uses, _MOST // 2)):
                self._uses.pop(old, None)
        return due

    def last(self, path: str, accessed: float) -> float:
        """Returns when an object was used last, given its file's access time."""
        return max(accessed, self._uses.get(path, (0.0, 0.0))[0])
