"""Host tier that the stores of several tenants of one root share: one budget, one order of eviction."""

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from ...errors import InputError
from ...utils.sizes import Size, size_of
from ..disk.counters import Counters
from ..io.thread_pool import register_fork_guard
from .memory import CacheEntry, MemoryTier


class SharedHostTier:
    """Host tier of several tenants: `ChunkStore(root, tenant=…, host_tier=tier)`. Thread-safe.

    Whoever reads evicts what was least recently used, whosever it is; a tenant can observe that another one's reads
    evict its objects. Evictions are counted by the oldest open store of the tenant. A store that is closed drops the
    copies of its tenant.

    Args:
      budget: bytes of all tenants together, as a number or such as "8 GiB".

    Attributes:
      budget: bytes.

    Raises:
      InputError: the budget is no size.
    """

    def __init__(self, budget: Size):
        self.budget = size_of(budget, "SharedHostTier.budget")
        self._root: str | None = None
        # Weakly: a store that nobody uses any more must not be kept by its part of the tier.
        self._parts: dict[str, list[weakref.ref[TenantHostTier]]] = {}
        self._nbytes: dict[str, int] = {}
        self._tier: MemoryTier[Any] = MemoryTier(self.budget, pinned=self._is_pinned, left=self._note_left)
        self._lock = threading.Lock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held for all tenants."""
        return self._tier.nbytes

    def clear(self) -> None:
        """Drops all copies of all tenants."""
        self._tier.clear()

    def of_tenant(self, root: str, space: str, pinned: Callable[[str], bool], counters: Counters) -> "TenantHostTier":
        """Returns the part of one tenant, which a store's reader takes for its host tier.

        Args:
          root: directory of the store; all tenants' is the same.
          space: the tenant's folder below it, with which the keys of its chunks begin.
          pinned: returns whether a chunk of the tenant must not be evicted.
          counters: counts the tenant's evictions and refusals.

        Raises:
          InputError: the tier is of another root.
        """
        with self._lock:
            self._root = self._root or os.path.realpath(root)
            if os.path.realpath(root) != self._root:
                raise InputError(f"store: host_tier: got root {root!r:.200}; expected {self._root!r:.200}, whose it is")
            part = TenantHostTier(self, self._tier, space, pinned, counters)
            parts: dict[str, list[weakref.ref[TenantHostTier]]] = {}
            for other, references in [*self._parts.items(), (space, [weakref.ref(part)])]:
                alive = [reference for reference in references if reference() is not None]
                if alive:
                    parts.setdefault(other, []).extend(alive)
            self._parts = parts
        return part

    def nbytes_of(self, space: str) -> int:
        """Returns the bytes held for one tenant."""
        return self._nbytes.get(space, 0)

    def note_entered(self, space: str, nbytes: int) -> None:
        """Counts an entry of a tenant that was put; a negative number one that has left."""
        with self._lock:
            total = self._nbytes.pop(space, 0) + nbytes
            if total:
                self._nbytes[space] = total

    def _parts_of(self, space: str) -> "list[TenantHostTier]":
        parts = [reference() for reference in self._parts.get(space, ())]
        return [part for part in parts if part is not None]

    def _is_pinned(self, chunk: str) -> bool:
        return any(part.pinned(chunk) for part in self._parts_of(_space_of(chunk)))

    def _note_left(self, entry: CacheEntry[Any], reason: str) -> None:
        space = _space_of(entry.chunk)
        self.note_entered(space, -entry.nbytes)
        for part in self._parts_of(space)[:1]:
            part.counters.add(f"host_evicted_{reason}")


class TenantHostTier:
    """One tenant's part of a `SharedHostTier`, with the calls of a `MemoryTier`.

    Attributes:
      budget: bytes of all tenants together.
      pinned: returns whether a chunk of the tenant must not be evicted.
      counters: the counters of the tenant's store.
    """

    def __init__(
        self,
        shared: SharedHostTier,
        tier: MemoryTier[Any],
        space: str,
        pinned: Callable[[str], bool],
        counters: Counters,
    ):
        self.budget, self.pinned, self.counters = shared.budget, pinned, counters
        self._shared, self._tier, self._space = shared, tier, space

    @property
    def nbytes(self) -> int:
        """Bytes held for the tenant."""
        return self._shared.nbytes_of(self._space)

    @property
    def room(self) -> int:
        """Bytes that are left of the budget of all tenants."""
        return self._tier.room

    def get(self, key: Hashable) -> CacheEntry[Any] | None:
        """Returns an entry and makes it the most recently used; None if it is absent or expired."""
        return self._tier.get(key)

    def put(self, key: Hashable, held: CacheEntry[Any]) -> bool:
        """Adds an entry, and evicts others of any tenant for it. Returns whether it was added."""
        # Counted first: it may leave again before this call returns, by another thread's put.
        self._shared.note_entered(self._space, held.nbytes)
        if self._tier.put(key, held):
            return True
        self._shared.note_entered(self._space, -held.nbytes)
        self.counters.add("host_refused")
        return False

    def note_version(self, key: Hashable, held: CacheEntry[Any], version: Any) -> None:
        """Replaces an entry's version, unless the entry was replaced."""
        self._tier.note_version(key, held, version)

    def drop(self, key: Hashable) -> None:
        """Drops one entry."""
        self._tier.drop(key)

    def drop_chunk(self, chunk: str) -> None:
        """Drops all entries of a chunk."""
        self._tier.drop_chunk(chunk)

    def clear(self) -> None:
        """Drops the tenant's entries."""
        self._tier.clear(f"{self._space}/")


def _space_of(chunk: str) -> str:
    """Returns the tenant's folder of a chunk's key: `obj/TENANT`."""
    return "/".join(chunk.split("/", 2)[:2])
