"""Objects that all users of a root share in a process."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .thread_pool import register_fork_guard


class _Shared:
    """Shared objects of the process by class and root, kept while they are used."""

    def __init__(self) -> None:
        self._living: weakref.WeakValueDictionary[tuple[Any, str], Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        register_fork_guard(self)

    def forked(self) -> None:
        """Replaces the lock in a forked process, where its holder may not exist."""
        self._lock = threading.Lock()

    def get[T](self, kind: Callable[[], T], root: str, word: Any) -> T:
        key = word, os.path.realpath(root)
        with self._lock:
            found = self._living.get(key)
            if found is None:
                self._living[key] = found = kind()
            return found


_shared = _Shared()


def shared[T](make: Callable[[], T], root: str, word: Any = None) -> T:
    """Returns the process's object for a root, created on first use.

    Args:
      make: a class, or a function that makes the object.
      word: what the object is known by; None: `make`.
    """
    return _shared.get(make, root, make if word is None else word)
