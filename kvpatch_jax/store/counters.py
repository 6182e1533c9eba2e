"""Counts of what a store did: no ids, no content, only numbers."""

import collections
import threading


class Counters:
    """Named sums, safe among threads."""

    def __init__(self) -> None:
        self._values: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Adds to one count."""
        with self._lock:
            self._values[name] += amount

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def read(self) -> dict[str, int]:
        """All counts, by name."""
        with self._lock:
            return dict(sorted(self._values.items()))
