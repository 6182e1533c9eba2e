"""The suite as a data set: a part per instance, operation and batch of contexts, kept when it is done."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import ModelBackbone, load

from ..datasets import RecordedDataset
from ..harness.frame import Row
from ..harness.parts import PlannedPart
from ..probes.item_records import Record, answer_records, items_from
from ..report.summary import NO_WINDOW
from ..results.headline import headline_rows
from ..sheets_task.dataset import SHEETS_DATASET
from ..sheets_task.packed_answers import items_of
from ..sheets_task.task import SIZES, sample_contexts
from ..sheets_task.task_spec import SHEETS
from ..task_language import check_language
from ..trained import training_of
from .image_window import WindowImages, load_images
from .operations import BLIND, OPERATIONS, REFERENCE

KINDS_OF_INSTANCES = ("sheets_qwen3_vl", "sheets_qwen3_5")
"""The transformer and the hybrid of the sheets task that have the same sizes."""
SIZE, CONTEXTS, BATCH, QUICK_CONTEXTS = "4", 32, 16, 16
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")


def instances(name: str) -> list[Path]:
    """Finds the instances that --backbone names; "all" are the transformer's and the hybrid's, without controls.

    Raises:
      InputError: none is found.
    """
    names = KINDS_OF_INSTANCES if name == "all" else (name,)
    found = [path for each in names for path in SHEETS_DATASET.instances(each)]
    return [path for path in found if len(found) == 1 or not path.name.endswith(NO_WINDOW)]


def dataset(found: Sequence[Path], seed: int, contexts: int) -> RecordedDataset:
    """Describes the parts of all instances; contexts are those of the main comparison."""
    loaded = functools.lru_cache(maxsize=1)(lambda path: load(path, dtype="float32"))
    # One batch's images at a time: its operations stand behind one another in the plan.
    drawn = functools.lru_cache(maxsize=1)(lambda path, number: images_of(loaded(path), seed, number))
    parts = []
    for path in found:
        check_language(path, SHEETS.vocabulary.names, "sheets", [each.name for each in found])
        fingerprint = loaded(path).fingerprint
        for number in range(-(-contexts // BATCH)):
            for operation in OPERATIONS:

                def measure(
                    _: Any, path: Path = path, number: int = number, operation: str = operation
                ) -> Iterator[Record]:
                    return records_of(drawn(path, number), path.name, operation, seed, number)

                name = f"{path.name}, {fingerprint}, batch {number}, {operation}"
                parts.append(PlannedPart(name, measure, 0))

    kinds = {path.name: path.parent.name for path in found}
    config = {"model": "sheet_windows", "seed": seed, "contexts": contexts}
    shown = {"kinds": kinds, "training": {path.name: training_of(path) for path in found}}

    def rows(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
        planned = {part.name for part in parts}
        return rows_of([part for part in finished if part["part"] in planned], kinds)

    return RecordedDataset(config, parts, rows, PACKAGES, shown)


def images_of(backbone: ModelBackbone, seed: int, number: int) -> WindowImages:
    """Draws a batch of contexts, the same for every instance, and prefills its images."""
    rng = np.random.default_rng([seed, number, SIZES[SIZE].sheets])
    contexts = sample_contexts(rng, BATCH, SIZES[SIZE])
    return load_images(backbone, contexts, number * BATCH + np.arange(BATCH))


def records_of(images: WindowImages, name: str, operation: str, seed: int, number: int) -> Iterator[Record]:
    """Measures an operation on one batch: what every arm answers in each of its settings."""
    rng = np.random.default_rng([seed, number, 100 + list(OPERATIONS).index(operation)])
    for measured in OPERATIONS[operation](images, rng):
        head = {"instance": name, "probe": operation, "part": measured.part, "kinds": list(measured.kinds)}
        yield from answer_records(head, items_of(measured.questions), images.clusters, measured.answers, REFERENCE)


def rows_of(finished: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> list[Row]:
    """Makes the rows of all finished parts, and the means over the training seeds of a kind.

    Args:
      kinds: of instances, by name.
    """
    records = [record for part in finished for record in part["records"]]
    tables: dict[str, dict[str, list[Row]]] = {}
    for name in dict.fromkeys(record["instance"] for record in records):
        own = [record for record in records if record["instance"] == name]
        tables.setdefault(kinds[name], {})[name] = [
            row
            for operation, part in dict.fromkeys((record["probe"], record["part"]) for record in own)
            for row in _rows_of_part(own, name, operation, part)
        ]

    rows = [row for group in tables.values() for table in group.values() for row in table]
    for kind, group in tables.items():
        if len(group) > 1:
            rows += headline_rows(group, mean_of(kind))
    return rows


def _rows_of_part(own: Sequence[Mapping[str, Any]], name: str, operation: str, part: str) -> Iterator[Row]:
    here = [record for record in own if (record["probe"], record["part"]) == (operation, part)]
    items = items_from(here, f"sheet_windows.{operation}", REFERENCE, BLIND, here[0]["kinds"])
    suffix = f".{part}" if part else ""
    for row in items.rows(name):
        yield {**row, "arm": f"{row['arm']}{suffix}"}


def mean_of(kind: str) -> str:
    """Names the rows that are means over the training seeds of a kind."""
    return f"mean.{kind}"
