"""Memory tier: entries by key within a byte budget, evicted by LRU or SLRU, with ranks, pins and expiry.

SLRU separates entries that were requested once from those requested again, so that one pass over many chunks does not
evict those in use. A newcomer is admitted only if it was requested at least as often as all of its victims together,
which weighs a large object against many small ones (aggregated victims: Einziger, Eytan, Friedman, Manes, "Lightweight
Robust Size Aware Cache Management", 2021).
"""

import collections
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal

from ..disk.counters import Counters
from ..io.thread_pool import register_fork_guard

Policy = Literal["lru", "slru"]
PROTECTED_SHARE = 0.8
"""Share of the budget that SLRU reserves for entries that were requested again."""

DERIVED, ENCODER, CANONICAL = 0, 1, 2
"""Ranks in order of eviction: data that can be derived from a canonical is evicted before any canonical."""


@dataclasses.dataclass(frozen=True, eq=False)
class CacheEntry[V]:
    """An entry of a memory tier.

    Attributes:
      value: the decoded object.
      nbytes: its size in memory.
      rank: `DERIVED`, `ENCODER` or `CANONICAL`.
      chunk: key of its chunk; with a canonical, its chunk's patches are evicted too.
      expires: seconds since the epoch, or None.
      version: version of the object from which it was decoded; None if it is not on the disk.
    """

    value: V = dataclasses.field(repr=False)
    nbytes: int
    rank: int
    chunk: str
    expires: float | None
    version: Any = dataclasses.field(default=None, repr=False)


class MemoryTier[V]:
    """Cache of entries within a budget. Thread-safe.

    Args:
      word: the tier's name in the counters.
      budget: bytes; 0 keeps nothing.
      policy: "lru" or "slru".
      pinned: returns whether a chunk must not be evicted.
      counters: counts evictions and refusals.
      clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        word: str,
        budget: int,
        policy: Policy = "lru",
        pinned: Callable[[str], bool] = lambda chunk: False,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.word, self.budget, self.policy, self._pinned, self._clock = word, budget, policy, pinned, clock
        self._counters = Counters() if counters is None else counters
        self._segments: dict[tuple[int, bool], collections.OrderedDict[Hashable, CacheEntry[V]]] = {
            (rank, protected): collections.OrderedDict()
            for rank, protected in itertools.product((DERIVED, ENCODER, CANONICAL), (False, True))
        }
        self._chunks: dict[str, set[Hashable]] = {}
        self._asked: collections.Counter[Hashable] = collections.Counter()
        self._bytes = 0
        self._lock = threading.RLock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._bytes

    def __len__(self) -> int:
        return sum(map(len, self._segments.values()))

    def __contains__(self, key: Hashable) -> bool:
        return self._find(key) is not None

    def get(self, key: Hashable) -> CacheEntry[V] | None:
        """Returns an entry and makes it the most recently used; None if it is absent or expired."""
        with self._lock:
            # Requests of absent keys count too, for their admission. All counts are halved at times, so that old ones
            # fade.
            self._asked[key] += 1
            if len(self._asked) > 64 + 8 * len(self):
                halved = {key: count // 2 for key, count in self._asked.items() if count > 1}
                self._asked = collections.Counter(halved)

            place = self._find(key)
            if place is None:
                return None
            held = self._segments[place][key]
            if held.expires is not None and self._clock() >= held.expires:
                self._drop(key, "expired")
                return None

            rank, protected = place
            if self.policy == "lru" or protected:
                self._segments[place].move_to_end(key)
                return held

            # SLRU protects what is requested again; the least recently used beyond the share lose their protection.
            upper, lower = self._segments[rank, True], self._segments[rank, False]
            upper[key] = lower.pop(key)
            protected_bytes = sum(entry.nbytes for entry in upper.values())
            while protected_bytes > PROTECTED_SHARE * self.budget and len(upper) > 1:
                oldest, entry = upper.popitem(last=False)
                lower[oldest] = entry
                protected_bytes -= entry.nbytes
            return held

    def put(self, key: Hashable, held: CacheEntry[V]) -> bool:
        """Adds an entry, and evicts others for it if necessary and possible. Returns whether it was added."""
        with self._lock:
            if self._find(key) is not None:
                self._drop(key, "replaced")
            victims = self._victims(held)
            if victims is None or not self._admits(key, held, victims):
                self._counters.add(f"{self.word}_refused")
                return False

            for victim in victims:
                self._drop(victim, "budget")
            self._segments[held.rank, False][key] = held
            self._chunks.setdefault(held.chunk, set()).add(key)
            self._bytes += held.nbytes
            return True

    def note_version(self, key: Hashable, held: CacheEntry[V], version: Any) -> None:
        """Replaces an entry's version, unless the entry was replaced."""
        with self._lock:
            place = self._find(key)
            if place is not None and self._segments[place][key] is held:
                self._segments[place][key] = dataclasses.replace(held, version=version)

    def drop(self, key: Hashable) -> None:
        """Drops one entry."""
        with self._lock:
            self._drop(key, "dropped")

    def drop_chunk(self, chunk: str) -> None:
        """Drops all entries of a chunk."""
        with self._lock:
            for key in list(self._chunks.get(chunk, ())):
                self._drop(key, "dropped")

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            for chunk in list(self._chunks):
                self.drop_chunk(chunk)

    # ---------------------------------------------------------------------------------------------------- inside

    def _find(self, key: Hashable) -> tuple[int, bool] | None:
        for place, segment in self._segments.items():
            if key in segment:
                return place
        return None

    def _drop(self, key: Hashable, reason: str) -> None:
        place = self._find(key)
        if place is None:
            return
        held = self._segments[place].pop(key)
        self._bytes -= held.nbytes
        own = self._chunks[held.chunk]
        own.discard(key)
        if not own:
            del self._chunks[held.chunk]
        self._counters.add(f"{self.word}_evicted_{reason}")

    def _in_order(self, rank: int) -> Iterator[tuple[Hashable, CacheEntry[V]]]:
        """Yields entries in the order of eviction for a newcomer of this rank: expired ones, lower ranks, then LRU."""
        now = self._clock()
        for segment in self._segments.values():
            for key, held in list(segment.items()):
                if held.expires is not None and now >= held.expires:
                    yield key, held
        for (own, _), segment in self._segments.items():
            if own <= rank:
                yield from list(segment.items())

    def _victims(self, newcomer: CacheEntry[V]) -> list[Hashable] | None:
        """Returns the entries to evict for a newcomer; None if there cannot be room."""
        if newcomer.nbytes > self.budget:
            return None

        missing = self._bytes + newcomer.nbytes - self.budget

        chosen: dict[Hashable, None] = {}
        for key, held in self._in_order(newcomer.rank) if missing > 0 else ():
            if missing <= 0:
                break
            if key in chosen or self._pinned(held.chunk):
                continue
            group = [key]
            if held.rank == CANONICAL:  # without it, what is derived from it is of no use
                group += [other for other in self._chunks[held.chunk] if self._held(other).rank == DERIVED]
            for other in group:
                if other not in chosen:
                    chosen[other] = None
                    missing -= self._held(other).nbytes
        return None if missing > 0 else list(chosen)

    def _held(self, key: Hashable) -> CacheEntry[V]:
        place = self._find(key)
        assert place is not None
        return self._segments[place][key]

    def _admits(self, key: Hashable, newcomer: CacheEntry[V], victims: list[Hashable]) -> bool:
        """Returns whether a newcomer was requested as often as the victims of its rank together, as SLRU demands."""
        if self.policy == "lru":
            return True
        rivals = [other for other in victims if self._held(other).rank == newcomer.rank]
        return not rivals or self._asked[key] >= sum(self._asked[other] for other in rivals)
