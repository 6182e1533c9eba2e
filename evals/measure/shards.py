"""Running the parts of a measurement in one process or several, each with a file of its own in one folder.

A process that finds every part finished, in its own file and those of the others, writes the report: so does the last
one. A part is measured alike whichever shard has it, and records are put in the order of the plan; so answers and
report do not depend on shards or kills.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..datasets import RecordedDataset
from ..harness.parts import ExpectedPace, alone, make_out, measure_parts, read_parts
from .plan import WorkShard

PATTERN = "parts*.jsonl"


def check_out(out: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the parts that a folder has, by name, from the files of every shard; nothing is written.

    Raises:
      InputError: it is a file, or has parts of another configuration.
    """
    make_out(out)
    # Lists in place of tuples, as the files have them.
    config, found = json.loads(json.dumps(config)), {}
    for file in sorted(out.glob(PATTERN)):
        for part in read_parts(file, config):
            found.setdefault(part["part"], part)
    return found


def run_shard(
    dataset: RecordedDataset, out: Path, shard: WorkShard, pace: ExpectedPace, patience: float = 0.0
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
    with alone(file, patience):
        # What another way of sharding has measured is not measured again.
        in_file = {part["part"] for part in read_parts(file, config)}
        missing = [part for part in own if part.name not in finished or part.name in in_file]
        measure_parts(file, config, missing, pace=pace)

    names = {part.name for part in dataset.parts}
    return [part for name, part in check_out(out, config).items() if name in names]
