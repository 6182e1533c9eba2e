"""The rate at which one reader finds objects damaged, by which it comes to suspect itself.

Bad memory or a bad network card shows damage in good files, in one after the other, which a failing disk rarely does.
A reader that moved all of them away would empty a root that others share; what it leaves is a miss, no more.
"""

import time

MOST, SECONDS = 3, 600.0
"""Objects that a reader may find damaged within so many seconds before it suspects itself."""


class DamageRate:
    """Counts the objects that were found damaged of late. Any number of threads."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}

    def note(self, path: str) -> bool:
        """Notes a damaged object. Whether so few were found of late that it may be believed."""
        now = time.monotonic()
        found = {known: when for known, when in list(self._found.items()) if now - when < SECONDS}
        self._found = found | {path: now}
        return len(self._found) <= MOST
