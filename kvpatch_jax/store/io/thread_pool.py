"""Thread pools that are created on first use, and the repair of threads and locks in a forked process."""

import concurrent.futures
import functools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class ForkGuard(Protocol):
    """Interface of an object with its own threads or locks."""

    def forked(self) -> None:
        """Repairs the object in a forked process, which has no threads: locks that they held are never released."""
        ...


_living: weakref.WeakSet[Any] = weakref.WeakSet()  # weak, so that a registration keeps nothing alive


def register_fork_guard(owner: ForkGuard) -> None:
    """Registers `owner.forked` to be called in every process that is forked while the owner lives."""
    _living.add(owner)


def _repair_all() -> None:
    for owner in list(_living):
        owner.forked()


os.register_at_fork(after_in_child=_repair_all)


class ThreadPool:
    """Thread pool that is created on first use, also after a fork.

    Args:
      count: number of threads.
      name: prefix of their names.
    """

    def __init__(self, count: int, name: str):
        self._pool = functools.cache(functools.partial(concurrent.futures.ThreadPoolExecutor, count, name))
        os.register_at_fork(after_in_child=self._pool.cache_clear)  # the parent's threads do not exist there

    def submit[T](self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Calls a function in a thread; in the caller's if the interpreter ends and the pool accepts no more."""
        try:
            return self._pool().submit(function, *arguments)
        except RuntimeError:
            done: concurrent.futures.Future[T] = concurrent.futures.Future()
            try:
                done.set_result(function(*arguments))
            except BaseException as error:
                done.set_exception(error)
            return done

    def run_all[T](self, calls: Iterable[Callable[[], T]]) -> list[T]:
        """Runs several calls in the threads and returns their results. Waits for all before it raises the first error.

        Not to be called from a thread of the same pool.
        """
        jobs = [self.submit(call) for call in calls]
        concurrent.futures.wait(jobs)
        return [job.result() for job in jobs]
