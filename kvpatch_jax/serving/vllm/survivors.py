"""KV that requests left behind, for the next request of the same agent: chunks that stay in its window only rotate.

A survivor is conditioned on what was in front of it when it was prefilled, though some of that has left since. Behind
the rest of it, in its order, it is what a window that *remembers* promises (docs/guides/windows.md).
"""

import collections
import threading
from typing import NamedTuple

from ...cache import Chunk, Identities, Ways


class SurvivorKey(NamedTuple):
    """Names one survivor.

    Attributes:
      tenant: owner of the chunk. agent: whose window it is in, as its requests say.
      place: digest of the chunk, of the pinned lead, and of how often the chunk comes before.
    """

    tenant: str
    agent: str
    place: str


class Survivor(NamedTuple):
    """A chunk's KV as a request left it.

    Attributes:
      chunk: its KV, position-free, on the host.
      identity: of that KV.
      seen: identities of the KV that it was computed behind.
      ways: points and ranks of the approximate ones among those, other than survivors.
    """

    chunk: Chunk
    identity: str
    seen: Identities
    ways: Ways = ()


class Survivors:
    """Survivors of an engine, in memory within a budget; the least recently used ones go first. Thread-safe.

    Attributes:
      budget: bytes.
      nbytes: bytes that are held.
    """

    def __init__(self, budget: int):
        self.budget, self.nbytes = budget, 0
        self._held: collections.OrderedDict[SurvivorKey, Survivor] = collections.OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: SurvivorKey, survivor: Survivor) -> bool:
        """Keeps a survivor in place of an earlier version. Returns whether there was room for it at all."""
        nbytes = survivor.chunk.nbytes
        with self._lock:
            self._drop(key)
            if nbytes > self.budget:
                return False
            self._held[key] = survivor
            self.nbytes += nbytes
            while self.nbytes > self.budget:
                self._drop(next(iter(self._held)))
            return True

    def get(self, key: SurvivorKey) -> Survivor | None:
        """Returns a survivor, which counts as used; None if there is none."""
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
            return found

    def clear(self, tenant: str | None = None) -> int:
        """Drops all survivors, or those of one tenant. Returns how many there were."""
        with self._lock:
            keys = [key for key in self._held if tenant in (None, key.tenant)]
            for key in keys:
                self._drop(key)
            return len(keys)

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def _drop(self, key: SurvivorKey) -> None:
        survivor = self._held.pop(key, None)
        if survivor is not None:
            self.nbytes -= survivor.chunk.nbytes
