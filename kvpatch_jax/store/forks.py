"""Repair of locks, connections and threads in a forked process, where their holders do not exist."""

import os
import weakref
from typing import Any

_living: weakref.WeakSet[Any] = weakref.WeakSet()
_waiting: list[Any] = []


def register(owner: Any) -> None:
    """Has `owner.forked()` called in every process that is forked while the owner lives.

    If it has `before_fork` and `after_fork`, those are called around it in the process that forks.
    """
    _living.add(owner)


def _before() -> None:
    _waiting.extend(owner for owner in list(_living) if hasattr(owner, "before_fork"))
    for owner in _waiting:
        owner.before_fork()


def _in_parent() -> None:
    while _waiting:
        _waiting.pop().after_fork()


def _in_child() -> None:
    _waiting.clear()
    for owner in list(_living):
        owner.forked()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
