"""Shards as tasks of Ray, for batches and for any work that is divided by number."""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError, SessionError
from ..utils.kinds import is_whole
from ..utils.optional_packages import require


def run_shards[T](
    task: Callable[[int, int], T], count: int, *, address: str | None = None, resources: Mapping[str, Any] | None = None
) -> list[T]:
    """Runs `task(index, count)` for every index below `count` on a Ray cluster, and returns the results by index.

    A task has to resume by itself: it begins again, up to three times, where its worker dies or the file system fails
    (OSError). The others go on when one has failed.

    Args:
      address: of the cluster, as of `ray.init`; None: what the environment variable RAY_ADDRESS names, or else a new
        one on this machine.
      resources: what a task occupies, as of `ray.remote`: {"num_cpus": 4}, {"num_gpus": 1}.

    Raises:
      InputError: a count below 1. MissingExtraError: Ray is not installed. SessionError: a shard failed.
    """
    if not is_whole(count, 1):
        raise InputError(f"run_shards: got count {count!r:.80}; expected a number of shards, 1 or more")
    ray = require("ray", "ray", "ray")
    if not ray.is_initialized():
        with warnings.catch_warnings():
            # jax warns of a process that forks. Ray's do nothing but become other programs.
            warnings.simplefilter("ignore", RuntimeWarning)
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)

    # A task's own errors are final, except those of files: a shared folder may be away for a moment.
    options = {"num_cpus": 1, **(resources or {}), "max_retries": 3, "retry_exceptions": [OSError]}
    remote, sent = ray.remote(**options)(lambda task, index: task(index, count)), ray.put(task)
    results, failures = [], dict[int, str]()
    for index, future in enumerate([remote.remote(sent, index) for index in range(count)]):
        try:
            results.append(ray.get(future))
        except ray.exceptions.RayError as error:
            failures[index] = " ".join(str(getattr(error, "cause", error)).split())
    if failures:
        index, reason = next(iter(failures.items()))
        raise SessionError(
            f"run_shards: got {len(failures)} of {count} shards that failed ({', '.join(map(str, failures))}): shard "
            f"{index}: {reason[:500]}; expected none: the same call does those again, and keeps the others"
        )
    return results


_results: dict[bytes, Any] = {}
"""Results of functions in this process, by their pickles: Ray sends a worker a new copy with every task."""


def once_in_this_process[T](function: Callable[[], T]) -> T:
    """Returns what a function returned when it was first called in this process, by whichever task of Ray."""
    key = require("ray.cloudpickle", "ray", "ray").dumps(function)
    if key not in _results:
        # One at a time: two models may not fit.
        _results.clear()
        _results[key] = function()
    return _results[key]
