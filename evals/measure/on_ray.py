"""A measurement on a Ray cluster: every shard a task, the model loaded once in each worker."""

import functools
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvpatch_jax.batch import once_in_this_process, run_shards
from kvpatch_jax.errors import InputError

from .plan import WorkShard
from .preparation import MeasureRequest, PreparedMeasurement, prepare
from .shards import check_out, run_shard

LOCAL = "local"
"""The address of a cluster that is started on this machine for the run."""


def measure_on_ray(
    request: MeasureRequest, prepared: PreparedMeasurement, out: Path, address: str, shards: int, resources: str | None
) -> list[dict[str, Any]]:
    """Measures all parts on a cluster; returns them.

    Model, data and `out` are seen by every worker under the same paths. What a worker measured before it was lost is
    kept.

    Args:
      address: as `ray.init` takes it, or "local".
      resources: what a task occupies, as JSON of `ray.remote`'s options.

    Raises:
      InputError: resources that are no table. ShardError: shards that failed more often than they are tried again.
    """
    task = functools.partial(_measure_shard, request, out.resolve())
    occupied = occupied_resources(resources)
    with _progress(prepared, out):
        run_shards(task, shards, address=None if address == LOCAL else address, resources=occupied)
    found = check_out(out, prepared.described.config)
    return [found[part.name] for part in prepared.described.parts]


def _measure_shard(request: MeasureRequest, out: Path, index: int, count: int) -> None:
    prepared = once_in_this_process(functools.partial(prepare, request))
    # The worker of a run that was killed may still be ending.
    run_shard(prepared.described, out, WorkShard(index, count), prepared.pace, patience=60.0)


def occupied_resources(text: str | None) -> Mapping[str, Any]:
    """Reads what a task occupies. Raises InputError for what is no table in JSON."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise InputError(f'--ray_resources: got {text!r:.80}; expected JSON such as {{"num_gpus": 1}}')
    return found


@contextmanager
def _progress(prepared: PreparedMeasurement, out: Path, seconds: float = 5.0) -> Iterator[None]:
    """Prints how many parts are finished, while workers measure them."""
    ended, total = threading.Event(), len(prepared.contexts)

    def watch() -> None:
        last = -1
        while not ended.wait(seconds):
            done = len(check_out(out, prepared.described.config))
            if done != last:
                print(f"{done} of {total} contexts are finished", flush=True)
            last = done

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
