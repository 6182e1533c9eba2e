"""Memory tier: entries by key within a byte budget, evicted by LRU or SLRU, with ranks, pins and expiry.

SLRU separates entries that were requested once from those requested again, so that one pass over many chunks does not
evict those in use. A newcomer is admitted only if it was requested at least as often as all of its victims together,
which weighs a large object against many small ones (aggregated victims: Einziger, Eytan, Friedman, Manes, "Lightweight
Robust Size Aware Cache Management", 2021).

A call takes constant time on average, however many entries there are: recency is the order of linked lists, expired
entries are found by a heap, and bytes are counted and not summed. An eviction passes over pinned entries one by one.
"""

import collections
import dataclasses
import heapq
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal

from ..disk.counters import Counters
from ..io.thread_pool import register_fork_guard

Policy = Literal["lru", "slru"]
PROTECTED_SHARE = 0.8
"""Share of the budget that SLRU reserves for entries that were requested again."""

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


@dataclasses.dataclass(slots=True, eq=False)
class _Slot[V]:
    """Place of an entry: `list` is the number of its list, 2 * rank, and 1 more if it is protected."""

    held: CacheEntry[V]
    list: int


class MemoryTier[V]:
    """Cache of entries within a budget. Thread-safe.

    Args:
      word: the tier's name in the counters.
      budget: bytes; 0 keeps nothing.
      policy: "lru" or "slru".
      pinned: returns whether a chunk must not be evicted.
      counters: counts evictions and refusals.
      clock: returns seconds since the epoch.
      left: called with each entry that leaves and the reason, under the tier's lock, in place of counting it.

    Attributes:
      nbytes: bytes held.
    """

    def __init__(
        self,
        word: str,
        budget: int,
        policy: Policy = "lru",
        pinned: Callable[[str], bool] = lambda chunk: False,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
        left: Callable[[CacheEntry[V], str], None] | None = None,
    ):
        self.word, self.budget, self.policy, self._pinned, self._clock = word, budget, policy, pinned, clock
        self._counters, self._left = Counters() if counters is None else counters, left
        self._slots: dict[Hashable, _Slot[V]] = {}
        # Keys from the least to the most recently used, by rank and protection, in the order of eviction.
        self._lists: list[collections.OrderedDict[Hashable, None]] = [collections.OrderedDict() for _ in range(6)]
        self._protected = [0, 0, 0]  # bytes by rank
        self._chunks: dict[str, dict[Hashable, None]] = {}
        self._asked: collections.Counter[Hashable] = collections.Counter()
        # Times of expiry. An item whose entry is gone or was replaced stays until it is met, or most are such.
        self._expiries: list[tuple[float, int, Hashable, _Slot[V]]] = []
        self._number = 0  # of the item, so that no keys are compared
        self.nbytes = 0
        self._lock = threading.RLock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots

    def get(self, key: Hashable) -> CacheEntry[V] | None:
        """Returns an entry and makes it the most recently used; None if it is absent or expired."""
        with self._lock:
            # Requests of absent keys count too, for their admission. All counts are halved at times, so that old ones
            # fade.
            self._asked[key] += 1
            if len(self._asked) > 64 + 8 * len(self._slots):
                halved = {key: count // 2 for key, count in self._asked.items() if count > 1}
                self._asked = collections.Counter(halved)

            slot = self._slots.get(key)
            if slot is None:
                return None
            held = slot.held
            if held.expires is not None and self._clock() >= held.expires:
                self._drop(key, "expired")
                return None

            if self.policy == "lru" or slot.list % 2:
                self._lists[slot.list].move_to_end(key)
                return held

            # SLRU protects what is requested again; the least recently used beyond the share lose their protection.
            lower, upper = self._lists[2 * held.rank : 2 * held.rank + 2]
            del lower[key]
            upper[key] = None
            slot.list += 1
            self._protected[held.rank] += held.nbytes
            while self._protected[held.rank] > PROTECTED_SHARE * self.budget and len(upper) > 1:
                oldest, _ = upper.popitem(last=False)
                lower[oldest] = None
                self._slots[oldest].list -= 1
                self._protected[held.rank] -= self._slots[oldest].held.nbytes
            return held

    def put(self, key: Hashable, held: CacheEntry[V]) -> bool:
        """Adds an entry, and evicts others for it if necessary and possible. Returns whether it was added.

        Where room is needed, expired entries go first, even if the new one is refused then.
        """
        with self._lock:
            if key in self._slots:
                self._drop(key, "replaced")
            victims = self._victims(key, held)
            if victims is None:
                self._counters.add(f"{self.word}_refused")
                return False

            for victim in victims:
                self._drop(victim, "budget")
            slot = self._slots[key] = _Slot(held, 2 * held.rank)
            self._lists[slot.list][key] = None
            self._chunks.setdefault(held.chunk, {})[key] = None
            self.nbytes += held.nbytes

            if held.expires is not None:
                if len(self._expiries) > 64 + 2 * len(self._slots):
                    self._expiries = [item for item in self._expiries if self._slots.get(item[2]) is item[3]]
                    heapq.heapify(self._expiries)
                self._number += 1
                heapq.heappush(self._expiries, (held.expires, self._number, key, slot))
            return True

    def note_version(self, key: Hashable, held: CacheEntry[V], version: Any) -> None:
        """Replaces an entry's version, unless the entry was replaced."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None and slot.held is held:
                held.version = version

    def drop(self, key: Hashable) -> None:
        """Drops one entry."""
        if key in self._slots:
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
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        held = slot.held
        del self._lists[slot.list][key]
        self.nbytes -= held.nbytes
        self._protected[held.rank] -= held.nbytes * (slot.list % 2)
        own = self._chunks[held.chunk]
        del own[key]
        if not own:
            del self._chunks[held.chunk]
        if self._left is None:
            self._counters.add(f"{self.word}_evicted_{reason}")
        else:
            self._left(held, reason)

    def _victims(self, key: Hashable, newcomer: CacheEntry[V]) -> list[Hashable] | None:
        """Returns the entries to evict for a newcomer; None if there cannot be room, or SLRU prefers the victims.

        Lower ranks come first, then the least recently used. SLRU compares the newcomer's requests with those of all
        victims of its rank together.
        """
        if newcomer.nbytes > self.budget:
            return None
        if self.nbytes + newcomer.nbytes > self.budget:
            self._drop_expired(self.budget - newcomer.nbytes)
        missing = self.nbytes + newcomer.nbytes - self.budget
        if missing <= 0:
            return []

        chosen: dict[Hashable, None] = {}
        asked, rivals = self._asked[key], 0
        for number in range(2 * newcomer.rank + 2):
            for oldest in self._lists[number]:
                if oldest in chosen or self._pinned(self._slots[oldest].held.chunk):
                    continue
                for victim in self._group(oldest):
                    if victim in chosen:
                        continue
                    held = self._slots[victim].held
                    chosen[victim] = None
                    missing -= held.nbytes
                    rivals += held.rank == newcomer.rank and self._asked[victim]
                if self.policy == "slru" and rivals > asked:
                    return None
                if missing <= 0:
                    return list(chosen)
        return None

    def _group(self, key: Hashable) -> list[Hashable]:
        """Returns an entry's key, and with a canonical those of what was derived from it, of no use without it."""
        held = self._slots[key].held
        if held.rank != CANONICAL:
            return [key]
        return [key, *(other for other in self._chunks[held.chunk] if self._slots[other].held.rank == DERIVED)]

    def _drop_expired(self, enough: int) -> None:
        """Drops expired entries, the first to expire first, until `enough` bytes or fewer are held."""
        now, pinned = self._clock(), []
        while self.nbytes > enough and self._expiries and self._expiries[0][0] <= now:
            item = heapq.heappop(self._expiries)
            _, _, key, slot = item
            if self._slots.get(key) is not slot:
                continue
            if self._pinned(slot.held.chunk):
                pinned.append(item)
                continue
            for victim in self._group(key):
                self._drop(victim, "budget")
        for item in pinned:
            heapq.heappush(self._expiries, item)
