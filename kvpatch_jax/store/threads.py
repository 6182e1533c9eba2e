"""Threads that stay for all to come."""

import concurrent.futures
import functools
import os
from collections.abc import Callable
from typing import Any


class Threads:
    """Made when they are first wanted, and anew in a forked process, into which threads do not follow.

    Args:
      count: how many. name: what theirs begin with.
    """

    def __init__(self, count: int, name: str):
        self._pool = functools.cache(functools.partial(concurrent.futures.ThreadPoolExecutor, count, name))
        os.register_at_fork(after_in_child=self._pool.cache_clear)

    def submit[T](self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Calls a function in one of them; or here, where the interpreter ends and they take no more."""
        try:
            return self._pool().submit(function, *arguments)
        except RuntimeError:
            done: concurrent.futures.Future[T] = concurrent.futures.Future()
            try:
                done.set_result(function(*arguments))
            except BaseException as error:
                done.set_exception(error)
            return done
