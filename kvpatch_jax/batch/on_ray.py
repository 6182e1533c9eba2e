"""Shards as tasks of Ray: `run_shards` for any work that is divided by number, `answer_batch_on_ray` for batches.

A shard resumes from its own file, so what a lost worker had finished is not done again. Ray schedules, restarts and
retries; what belongs to a worker, such as a model, is made once in it.
"""

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..backbone import Backbone
from ..errors import InputError, ShardError
from ..utils.optional_packages import require
from ..window import PatchStore
from .answer_batch import BatchReport, answer_batch

RETRIES = 3
"""How often a shard is begun again whose worker was lost."""

Opened = tuple[Backbone, PatchStore | None]
"""A backbone, and the store of its chunks."""


def run_shards[T](
    task: Callable[[int, int], T],
    count: int,
    *,
    address: str | None = None,
    retries: int = RETRIES,
    resources: Mapping[str, Any] | None = None,
) -> list[T]:
    """Runs `task(index, count)` for every index below `count` on a Ray cluster, each in a process of a worker.

    The process that Ray runs in is connected first, unless it is already. A task begins again, up to `retries` times,
    where its worker dies or the file system fails (OSError). The others go on when one has failed.

    Args:
      task: a function that Ray can send to another machine. It has to resume by itself.
      count: of shards.
      address: of the cluster, as `ray.init` takes it: "auto", "ray://host:10001"; None for the one that the environment
        variable RAY_ADDRESS names, or else a new one on this machine.
      retries: of one shard.
      resources: what a task occupies, as `ray.remote` takes it: {"num_cpus": 4}, {"num_gpus": 1},
        {"resources": {"TPU": 4}}.

    Returns:
      What the tasks returned, by index.

    Raises:
      InputError: a count below 1. MissingExtraError: Ray is not installed. ShardError: a shard failed; those that are
      finished stay, and the same call does the others.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"run_shards: got count {count!r:.80}; expected a number of shards, 1 or more")
    ray = require("ray", "ray", "ray")
    if not ray.is_initialized():
        with warnings.catch_warnings():
            # jax warns of a process that forks. Ray's do nothing but become other programs.
            warnings.simplefilter("ignore", RuntimeWarning)
            # Workers print for themselves; what they say is otherwise repeated here by every one of them.
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)

    # A task's own errors are final, except those of files: a shared folder may be away for a moment.
    options = {"num_cpus": 1, **(resources or {}), "max_retries": retries, "retry_exceptions": [OSError]}
    remote = ray.remote(**options)(_run)
    sent = ray.put(task)
    futures = [remote.remote(sent, index, count) for index in range(count)]

    results, failed = [], dict[int, str]()
    for index, future in enumerate(futures):
        try:
            results.append(ray.get(future))
        except ray.exceptions.RayTaskError as error:
            failed[index] = " ".join(str(error.cause).split())
        except ray.exceptions.RayError as error:
            failed[index] = " ".join(str(error).split())
    if failed:
        index, reason = next(iter(failed.items()))
        raise ShardError(
            f"run_shards: got {len(failed)} of {count} shards that failed ({', '.join(map(str, failed))}): shard "
            f"{index}: {reason[:500]}; expected none: the same call does those again, and keeps the others"
        )
    return results


def _run[T](task: Callable[[int, int], T], index: int, count: int) -> T:
    return task(index, count)


def answer_batch_on_ray(
    opening: Callable[[], Opened],
    items: Iterable[Any],
    *,
    out: str | os.PathLike[str],
    shards: int,
    address: str | None = None,
    retries: int = RETRIES,
    resources: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[BatchReport]:
    """Answers a batch as `answer_batch` does, its shards as tasks of Ray.

        def opening():
            return load("/models/qwen2_5_vl"), kvp.ChunkStore("/shared/chunks")

        answer_batch_on_ray(opening, items, out="/shared/answers.jsonl", shards=16)

    Every worker sees `out`, the files that items name and the store, by a shared path or by the store's remote.
    Answers do not depend on the number of shards: `batch.read_answers` puts their files together.

    Args:
      opening: loads the backbone and opens the store; called once in each worker. It has to return the same ones
        everywhere.
      items, out: as of `answer_batch`.
      shards: how many. More of them than workers even out items that take longer.
      address, retries, resources: as of `run_shards`.
      options: fields of `BatchConfig`, but for the shard.

    Returns:
      The report of each shard.

    Raises:
      InputError: `shard` among the options, or what `answer_batch` refuses. ShardError: as of `run_shards`.
    """
    if "shard" in options:
        raise InputError(f"answer_batch_on_ray: got shard {options['shard']!r:.80}; expected `shards`, their number")
    return run_shards(
        functools.partial(_answer_shard, opening, list(items), os.fspath(out), options),
        shards,
        address=address,
        retries=retries,
        resources=resources,
    )


def _answer_shard(
    opening: Callable[[], Opened], items: list[Any], out: str, options: Mapping[str, Any], index: int, count: int
) -> BatchReport:
    backbone, store = once_in_this_process(opening)
    return answer_batch(backbone, store, items, out=out, shard=(index, count), **options)


_made: dict[bytes, Any] = {}
"""What functions returned in this process, by their pickles: Ray sends a worker a new copy with every task."""


def once_in_this_process[T](make: Callable[[], T]) -> T:
    """Returns what `make()` returned when it was first called in this process, by whichever task of Ray."""
    key = require("ray.cloudpickle", "ray", "ray").dumps(make)
    if key not in _made:
        # One at a time: two models may not fit.
        _made.clear()
        _made[key] = make()
    return _made[key]
