"""Running the parts of a measurement in one process or several, each with a file of its own in one folder.

A process that finds every part finished, in its own file and those of the others, writes the report: so does the last
one. A part is measured alike whichever shard has it, and records are put in the order of the plan; so answers and
report do not depend on shards or kills.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError

from ..datasets import RecordedDataset
from ..results.parts import ExpectedPace, make_out, measure_parts, read_parts
from .plan import Shard

PATTERN = "parts*.jsonl"


def check_out(out: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the parts that a folder has, by name, from the files of every shard; nothing is written.

    Raises:
      InputError: it is a file, or has parts of another configuration.
    """
    make_out(out)
    found = {}
    for file in sorted(out.glob(PATTERN)):
        for part in read_parts(file, config):
            found.setdefault(part["part"], part)
    return found


def run_shard(
    dataset: RecordedDataset, out: Path, shard: Shard, pace: ExpectedPace, patience: float = 0.0
) -> list[dict[str, Any]]:
    """Measures a shard's parts that no file in the folder has; returns all parts that are finished, of every shard.

    Args:
      patience: seconds to wait for another process that has this shard, as one does that is being stopped.

    Raises:
      InputError: the folder has parts of another configuration, or another process measures this shard.
    """
    config = json.loads(json.dumps(dataset.config))
    finished, own = check_out(out, config), dataset.parts[shard.index :: shard.count]
    file = out / shard.file
    with _alone(file, patience):
        # What another way of sharding has measured is not measured again.
        in_file = {part["part"] for part in read_parts(file, config)}
        missing = [part for part in own if part.name not in finished or part.name in in_file]
        measure_parts(file, config, missing, pace=pace)

    names = {part.name for part in dataset.parts}
    return [part for name, part in check_out(out, config).items() if name in names]


@contextlib.contextmanager
def _alone(file: Path, patience: float) -> Iterator[None]:
    """Keeps other processes from a shard's file, where the system has such locks; a lock ends with its process."""
    deadline = time.monotonic() + patience
    with (file.parent / f".{file.name}.lock").open("w") as lock:
        with contextlib.suppress(ImportError):
            import fcntl

            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= deadline:
                        raise InputError(
                            f"--out: got {file}, which another process is writing; expected another --shard, or one "
                            "process"
                        ) from None
                time.sleep(0.5)
        yield
