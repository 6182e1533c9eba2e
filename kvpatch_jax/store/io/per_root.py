"""Objects that all users of a root share within a process."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .thread_pool import tell_of_forks


class _Shared:
    """The shared objects of the process, by kind and root, for as long as somebody uses them."""

    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[tuple[Any, str], Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        tell_of_forks(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.Lock()

    def get[T](self, kind: Callable[[], T], root: str) -> T:
        key = kind, os.path.realpath(root)
        with self._lock:
            found = self._living.get(key)
            if found is None:
                self._living[key] = found = kind()
            return found


_shared = _Shared()


def shared[T](kind: Callable[[], T], root: str) -> T:
    """Returns the one object of a class that belongs to a root in this process; made where there is none."""
    return _shared.get(kind, root)
