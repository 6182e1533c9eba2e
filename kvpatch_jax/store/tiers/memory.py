"""Memory tier: entries by key within a byte budget, evicted by LRU, with ranks, pins and expiry.

A call takes constant time on average, however many entries there are: recency is the order of linked lists, expired
entries are found by a heap, and bytes are counted and not summed. An eviction passes over pinned entries one by one.
"""

import collections
import dataclasses
import heapq
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from ..disk.counters import Counters
from ..io.thread_pool import register_fork_guard

DERIVED, ENCODER, CANONICAL = 0, 1, 2
"""Ranks in order of eviction: data that can be derived from a canonical is evicted before any canonical."""


@dataclasses.dataclass(slots=True, eq=False)
class CacheEntry[V]:
    """An entry of a memory tier, of which `note_version` alone changes anything.

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
      budget: bytes; 0 keeps nothing.
      pinned: returns whether a chunk must not be evicted.
      counters: counts evictions and refusals.
      clock: returns seconds since the epoch.
      left: called with each entry that leaves and the reason, under the tier's lock, in place of counting it.

    Attributes:
      nbytes: bytes held.
    """

    def __init__(
        self,
        budget: int,
        pinned: Callable[[str], bool] = lambda chunk: False,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
        left: Callable[[CacheEntry[V], str], None] | None = None,
    ):
        self.budget, self._pinned, self._clock = budget, pinned, clock
        self._counters, self._left = Counters() if counters is None else counters, left
        self._entries: dict[Hashable, CacheEntry[V]] = {}
        # Keys from the least to the most recently used, by rank, in the order of eviction.
        self._lists: list[collections.OrderedDict[Hashable, None]] = [collections.OrderedDict() for _ in range(3)]
        self._chunks: dict[str, dict[Hashable, None]] = {}
        # Times of expiry. An item whose entry is gone or was replaced stays until it is met, or most are such.
        self._expiries: list[tuple[float, int, Hashable, CacheEntry[V]]] = []
        self._number = 0  # of the item, so that no keys are compared
        self.nbytes = 0
        self._lock = threading.RLock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def get(self, key: Hashable) -> CacheEntry[V] | None:
        """Returns an entry and makes it the most recently used; None if it is absent or expired."""
        with self._lock:
            held = self._entries.get(key)
            if held is None:
                return None
            if held.expires is not None and self._clock() >= held.expires:
                self._drop(key, "expired")
                return None

            self._lists[held.rank].move_to_end(key)
            return held

    def put(self, key: Hashable, held: CacheEntry[V]) -> bool:
        """Adds an entry, and evicts others for it if necessary and possible. Returns whether it was added.

        Where room is needed, expired entries go first, even if the new one is refused then.
        """
        with self._lock:
            if key in self._entries:
                self._drop(key, "replaced")
            victims = self._victims(held)
            if victims is None:
                self._counters.add("host_refused")
                return False

            for victim in victims:
                self._drop(victim, "budget")
            self._entries[key] = held
            self._lists[held.rank][key] = None
            self._chunks.setdefault(held.chunk, {})[key] = None
            self.nbytes += held.nbytes

            if held.expires is not None:
                if len(self._expiries) > 64 + 2 * len(self._entries):
                    self._expiries = [item for item in self._expiries if self._entries.get(item[2]) is item[3]]
                    heapq.heapify(self._expiries)
                self._number += 1
                heapq.heappush(self._expiries, (held.expires, self._number, key, held))
            return True

    def note_version(self, key: Hashable, held: CacheEntry[V], version: Any) -> None:
        """Replaces an entry's version, unless the entry was replaced."""
        with self._lock:
            if self._entries.get(key) is held:
                held.version = version

    def drop(self, key: Hashable) -> None:
        """Drops one entry."""
        if key in self._entries:
            with self._lock:
                self._drop(key, "dropped")

    def drop_chunk(self, chunk: str) -> None:
        """Drops all entries of a chunk."""
        with self._lock:
            for key in list(self._chunks.get(chunk, ())):
                self._drop(key, "dropped")

    def clear(self, below: str = "") -> None:
        """Drops all entries, or those of chunks whose keys begin with `below`."""
        with self._lock:
            for chunk in [chunk for chunk in self._chunks if chunk.startswith(below)]:
                self.drop_chunk(chunk)

    @property
    def room(self) -> int:
        """Bytes that are left of the budget."""
        return self.budget - self.nbytes

    # ---------------------------------------------------------------------------------------------------- inside

    def _drop(self, key: Hashable, reason: str) -> None:
        held = self._entries.pop(key, None)
        if held is None:
            return
        del self._lists[held.rank][key]
        self.nbytes -= held.nbytes
        own = self._chunks[held.chunk]
        del own[key]
        if not own:
            del self._chunks[held.chunk]
        if self._left is None:
            self._counters.add(f"host_evicted_{reason}")
        else:
            self._left(held, reason)

    def _victims(self, newcomer: CacheEntry[V]) -> list[Hashable] | None:
        """Returns the entries to evict for a newcomer, lower ranks first; None if there cannot be room."""
        if newcomer.nbytes > self.budget:
            return None
        if self.nbytes + newcomer.nbytes > self.budget:
            self._drop_expired(self.budget - newcomer.nbytes)
        missing = self.nbytes + newcomer.nbytes - self.budget
        if missing <= 0:
            return []

        chosen: dict[Hashable, None] = {}
        for number in range(newcomer.rank + 1):
            for oldest in self._lists[number]:
                if oldest in chosen or self._pinned(self._entries[oldest].chunk):
                    continue
                for victim in self._group(oldest):
                    if victim in chosen:
                        continue
                    chosen[victim] = None
                    missing -= self._entries[victim].nbytes
                if missing <= 0:
                    return list(chosen)
        return None

    def _group(self, key: Hashable) -> list[Hashable]:
        """Returns an entry's key, and with a canonical those of what was derived from it, of no use without it."""
        held = self._entries[key]
        if held.rank != CANONICAL:
            return [key]
        return [key, *(other for other in self._chunks[held.chunk] if self._entries[other].rank == DERIVED)]

    def _drop_expired(self, enough: int) -> None:
        """Drops expired entries, the first to expire first, until `enough` bytes or fewer are held."""
        now, pinned = self._clock(), []
        while self.nbytes > enough and self._expiries and self._expiries[0][0] <= now:
            item = heapq.heappop(self._expiries)
            _, _, key, held = item
            if self._entries.get(key) is not held:
                continue
            if self._pinned(held.chunk):
                pinned.append(item)
                continue
            for victim in self._group(key):
                self._drop(victim, "budget")
        for item in pinned:
            heapq.heappush(self._expiries, item)
