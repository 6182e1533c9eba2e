"""Decoded objects in memory: one least-recently-used cache for all stores of a root in a process."""

import collections
import threading
import weakref
from typing import Any

from . import forks


class Memory:
    """Cache of decoded objects, bounded in bytes. A value is returned only for the file that it came from."""

    def __init__(self) -> None:
        self.limit, self.nbytes = 0, 0
        self._values: collections.OrderedDict[tuple[str, str], tuple[str, Any, int]] = collections.OrderedDict()
        self._lock = threading.Lock()
        forks.register(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process."""
        self._lock = threading.Lock()

    def get(self, tenant: str, name: str, file: str) -> Any:
        """Returns the value of a name that was decoded from this file; None if it is not cached."""
        with self._lock:
            entry = self._values.get((tenant, name))
            if entry is None or entry[0] != file:
                return None
            self._values.move_to_end((tenant, name))
            return entry[1]

    def put(self, tenant: str, name: str, file: str, value: Any, nbytes: int) -> None:
        """Keeps a value, and drops the least recently used ones beyond the limit."""
        if nbytes > self.limit:
            return
        with self._lock:
            self.nbytes += nbytes - self._values.pop((tenant, name), ("", None, 0))[2]
            self._values[tenant, name] = file, value, nbytes
            while self.nbytes > self.limit:
                self.nbytes -= self._values.popitem(last=False)[1][2]

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._values.clear()
            self.nbytes = 0

    def drop(self, tenant: str, prefix: str = "") -> None:
        """Drops a tenant's values whose names have this prefix."""
        with self._lock:
            for key in [key for key in self._values if key[0] == tenant and key[1].startswith(prefix)]:
                self.nbytes -= self._values.pop(key)[2]


_memories: weakref.WeakValueDictionary[str, Memory] = weakref.WeakValueDictionary()


def memory_of(root: str, limit: int) -> Memory:
    """Returns the memory of a root in this process; its limit is the largest that an open store asked for."""
    memory = _memories.get(root)
    if memory is None:
        memory = _memories.setdefault(root, Memory())
    memory.limit = max(memory.limit, limit)
    return memory
