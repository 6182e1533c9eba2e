"""Lazily created thread pools, and the repair of threads and locks in a forked process."""

import concurrent.futures
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ForkGuard(Protocol):
    """An object with threads or locks of its own."""

    def forked(self) -> None:
        """Called in a forked process, into which threads do not follow: locks that they held stay held for ever."""
        ...


_living: weakref.WeakSet[Any] = weakref.WeakSet()


def tell_of_forks(owner: ForkGuard) -> None:
    """Calls `owner.forked` in every process that is forked while the owner lives."""
    _living.add(owner)


def _tell() -> None:
    for owner in list(_living):
        owner.forked()


os.register_at_fork(after_in_child=_tell)


class ThreadPool:
    """Lazily created thread pool, rebuilt after a fork.

    Args:
      count: of threads. name: prefix of their names.
    """

    def __init__(self, count: int, name: str):
        self._pool = functools.cache(functools.partial(concurrent.futures.ThreadPoolExecutor, count, name))
        os.register_at_fork(after_in_child=self._pool.cache_clear)

    def submit[T](self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Calls a function in a thread; in the caller's where the interpreter ends and the pool takes no more."""
        try:
            return self._pool().submit(function, *arguments)
        except RuntimeError:
            done: concurrent.futures.Future[T] = concurrent.futures.Future()
            try:
                done.set_result(function(*arguments))
            except BaseException as error:
                done.set_exception(error)
            return done
