"""The suite of modalities as a data set: a part per instance and batch of contexts, kept when it is done."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

from ..arms import make_arms
from ..datasets import RecordedDataset
from ..probes.item_records import Record, answer_records, items_from
from ..probes.results_table import ProbeItems
from ..report.summary import NO_WINDOW
from ..results.headline import headline_rows
from ..results.parts import PlannedPart
from ..results.rows import Row
from ..rules import RULES
from ..sheets_task.reader import PackedReader, move_page
from ..sheets_task.task import KINDS
from ..sheets_task.task_spec import TaskSpec
from ..task_language import check_language
from ..trained import MODALITY, training_of
from .task import FULL
from .task_spec import MODALITIES

REFERENCE, BLIND = "re-prefill", "blind"
WITHOUT, BOUND = "without_antecedent", "page_of_re-prefill"
"""The page prefilled alone, and the page as re-prefill leaves it; questions do not look at what is in front."""
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy")
QUICK_CONTEXTS = 16


def instances(folder: Path = MODALITY) -> dict[str, Path]:
    """Finds the instances of a folder by name: a modality, and behind it a training seed or the control's mark.

    Raises:
      InputError: there is none, or one of no known modality.
    """
    found = {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}
    unknown = [name for name in found if modality_of(name) not in MODALITIES]
    if unknown or not found:
        raise InputError(
            f"--backbone: got {folder} with {unknown or 'no instance'}; expected instances of {', '.join(MODALITIES)}"
        )
    # In the order of the modalities.
    order = list(MODALITIES)
    return dict(sorted(found.items(), key=lambda item: order.index(modality_of(item[0]))))


def modality_of(name: str) -> str:
    """Returns the modality of an instance by its name."""
    return name.partition("_")[0]


def dataset(found: Mapping[str, Path], seed: int, contexts: int) -> RecordedDataset:
    """Describes the parts of all instances."""
    loaded = functools.lru_cache(maxsize=1)(lambda path: load(path, dtype="float32"))
    rules, parts = RULES.modality, []
    for name, path in found.items():
        check_language(path, MODALITIES[modality_of(name)].vocabulary.names, "modality", list(found))
        fingerprint = load(path, dtype="float32").fingerprint
        for number in range(-(-contexts // rules["batch"])):

            def measure(_: Any, name: str = name, path: Path = path, number: int = number) -> Iterator[Record]:
                return records_of(loaded(path), name, seed, number)

            # By its weights, so that a run with one more instance goes on from what the others have.
            parts.append(PlannedPart(f"{name}, {fingerprint}, batch {number}", measure, 0))

    config = {
        "model": "modality",
        "seed": seed,
        "contexts": contexts,
        "modality rules": dict(rules),
    }

    def rows(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
        planned = {part.name for part in parts}
        return rows_of([part for part in finished if part["part"] in planned])

    shown = {"instances": list(found), "training": {name: training_of(path) for name, path in found.items()}}
    return RecordedDataset(config, parts, rows, PACKAGES, shown)


def reader_of(backbone: ModelBackbone, spec: TaskSpec, seed: int, number: int) -> PackedReader:
    """Draws a batch of contexts and its questions, the same for every modality, and reuses the pages."""
    rng = np.random.default_rng([seed, number])
    contexts = spec.sample(rng, RULES.modality["batch"], spec.sizes[FULL])
    questions = spec.ask(contexts, rng, RULES.modality["questions"])
    return PackedReader("modality", move_page(backbone, contexts, spec), questions)


def records_of(backbone: ModelBackbone, name: str, seed: int, number: int) -> Iterator[Record]:
    """Measures every arm on one batch: whether each question is answered right, and its KL from re-prefill's answer."""
    reader = reader_of(backbone, MODALITIES[modality_of(name)], seed, number)
    page = reader.page
    answers = {
        REFERENCE: reader.read(page.reference),
        WITHOUT: reader.read_alone(page.cache()),
        BOUND: reader.read_alone(page.reference),
    }
    for arm, made in make_arms(page, RULES.modality["arms"]):
        if arm != REFERENCE:
            answers[arm] = reader.read(made.cache)
    clusters = number * len(page) + np.arange(len(page))
    yield from answer_records({"instance": name}, reader.asked(""), clusters, answers, REFERENCE)


def rows_of(finished: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Makes the rows of all finished parts: every instance's, and the means over the training seeds of a modality."""
    records = [record for part in finished for record in part["records"]]
    tables: dict[str, list[Row]] = {}
    for name in dict.fromkeys(record["instance"] for record in records):
        items = items_of([record for record in records if record["instance"] == name])
        tables[name] = list(items.rows(name))

    rows = [row for table in tables.values() for row in table]
    for modality in MODALITIES:
        seeds = {name: table for name, table in tables.items() if modality_of(name) == modality and is_seed(name)}
        if seeds:
            rows += headline_rows(seeds, mean_of(modality))
    return rows


def is_seed(name: str) -> bool:
    """Whether an instance is a training seed of its modality, and not the control."""
    return not name.endswith(NO_WINDOW)


def mean_of(modality: str) -> str:
    """Names the rows that are means over the training seeds of a modality."""
    return f"mean.{modality}"


def items_of(records: Sequence[Mapping[str, Any]]) -> ProbeItems:
    """Collects the answers to all batches of one instance."""
    label = f"modality.{modality_of(records[0]['instance'])}"
    return items_from(records, label, REFERENCE, BLIND, KINDS)
