"""Rate at which one reader finds damaged objects, by which it suspects itself.

Faulty memory or a faulty network card shows damage in many good files, which a failing disk rarely does. If the reader
moved all of them to quarantine, it would empty a root that others share; an object that it leaves is only a miss.
"""

import time

MOST, SECONDS = 3, 600.0
"""Number of damaged objects within this many seconds above which a reader suspects itself."""


class DamageRate:
    """Count of recently found damaged objects. Thread-safe."""

    def __init__(self) -> None:
        self._found: dict[str, float] = {}

    def note(self, path: str) -> bool:
        """Registers a damaged object. Returns whether there were so few recently that the reader can be trusted."""
        now = time.monotonic()
        found = {known: when for known, when in list(self._found.items()) if now - when < SECONDS}
        self._found = found | {path: now}
        return len(self._found) <= MOST
