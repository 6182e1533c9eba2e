"""Counters and latency histograms of a store. They contain no ids and no content."""

import bisect
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from ..io.thread_pool import register_fork_guard

BOUNDS = (25e-6, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)
"""Upper bounds of the latency buckets, in seconds; one more bucket is for longer calls."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Latencies of one operation.

    Attributes:
      counts: calls per bucket of `BOUNDS` (a bound belongs to the bucket below it), and of longer ones.
      total: seconds of all calls.
    """

    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of calls."""
        return sum(self.counts)


class Counters:
    """Named counts, and latencies by operation and tier. Thread-safe."""

    def __init__(self) -> None:
        self._values: collections.Counter[str] = collections.Counter()
        self._latencies: dict[tuple[str, str], list[float]] = {}
        self._lock = threading.Lock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1, **more: int) -> None:
        """Adds to a count, and to others by name."""
        with self._lock:
            self._values[name] += amount
            for other, number in more.items():
                self._values[other] += number

    def observe(self, operation: str, tier: str, seconds: float, count: str | None = None) -> None:
        """Records the latency of a call that `tier` answered, and adds 1 to a count."""
        bucket = bisect.bisect_left(BOUNDS, seconds)
        with self._lock:
            own = self._latencies.setdefault((operation, tier), [0.0] * (len(BOUNDS) + 2))
            own[bucket] += 1
            own[-1] += seconds
            if count is not None:
                self._values[count] += 1

    @contextlib.contextmanager
    def timed(self, operation: str, tier: str) -> Iterator[None]:
        """Records the latency of the block, unless it raises."""
        began = time.perf_counter()
        yield
        self.observe(operation, tier, time.perf_counter() - began)

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def read(self) -> dict[str, int]:
        """Returns all counts by name."""
        with self._lock:
            return dict(sorted(self._values.items()))

    def latencies(self) -> dict[tuple[str, str], Histogram]:
        """Returns all latencies by operation and tier."""
        with self._lock:
            copies = {key: list(own) for key, own in sorted(self._latencies.items())}
        return {key: Histogram(tuple(map(int, own[:-1])), own[-1]) for key, own in copies.items()}
