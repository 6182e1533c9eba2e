"""The runner of configurations: data sets × methods, part by part, and the rows made of the parts."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError, KVPatchError

from . import frame, metrics
from .config import RunConfig
from .datasets import Dataset, Run, find_dataset
from .environment import environment
from .methods import REFERENCE, Arm, parse
from .parts import WHOLE, Cluster, Part, Plan, Record, Shard, run_plan
from .program import repeated_command

PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "safetensors", "pillow")


@functools.lru_cache(maxsize=4)
def loaded(path: str, dtype: str = "float32", buckets: Any = None) -> Any:
    """Loads a model from a directory or a GGUF file, which pads to `buckets`; the last four stay in memory."""
    from kvpatch_jax.models import load

    return load(path, dtype=dtype, buckets=buckets)


def model_path(name: str) -> Path:
    """Finds a model: a shipped instance, real weights that are installed, a checkpoint directory, or a GGUF file.

    Raises:
      InputError: it is none of these.
    """
    from ..real_weights import REAL_WEIGHTS, weights_file
    from ..trained import shipped

    if name in REAL_WEIGHTS:
        return weights_file(name)
    return Path(name) if Path(name).is_file() else shipped(name)


def identity(path: Path) -> str:
    """Computes a digest of a model's files, which parts of a run are bound to."""
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def described(config: RunConfig) -> dict[str, Any]:
    """Describes what the parts of a run depend on, the models' files among it.

    Raises:
      InputError: a model is not found.
    """
    data = config.complete_data
    models = sorted({model for part in data for model in part.models})
    return {
        "model": ", ".join(models),
        "digests": {name: identity(model_path(name)) for name in models},
        "data": [dataclasses.asdict(part) for part in data],
        "seed": config.seed,
    }


DatasetPlans = list[tuple[Any, Run, list[Part]]]
"""Data sets, what each is asked for, and its parts."""


def plan(config: RunConfig) -> Plan:
    """Lists the parts of every data set of a run, in the order in which they are measured; its data are DatasetPlans.

    Raises:
      InputError: an unknown data set, probe, method or model.
    """
    plans = []
    for data in config.complete_data:
        dataset = find_dataset(data.dataset)
        models = {name: str(model_path(name)) for name in data.models}
        run = Run(models, data.probes, data.methods, data.n, data.batch, config.seed, data.settings)
        if hasattr(dataset, "parts"):
            parts = list(dataset.parts(run))
        else:
            parts = spliced_parts(dataset, run, data.dtype)
        plans.append((dataset, run, parts))
    parts = [part for *_, of_dataset in plans for part in of_dataset]
    return Plan(described(config), parts, plans, config.threads)


def spliced_parts(dataset: Dataset, run: Run, dtype: str) -> list[Part]:
    """Lists the parts of a data set of splices: a batch of contexts of one probe, read by one model."""
    arms = [parse(name) for name in run.methods]
    probes = run.probes_of(dataset)
    if not run.methods or run.methods[0] != REFERENCE:
        raise InputError(f"methods: got {list(run.methods)[:1]}; expected {REFERENCE} first, which others are held to")

    parts = []
    # Models alternate within a batch of contexts, so that its images are drawn once.
    for probe in probes:
        for number, size in run.batches:
            for model in run.models:
                measure = functools.partial(measure_batch, dataset, run, arms, dtype, model, probe, number, size)
                parts.append(Part(part_key(dataset, probe, model, number), measure, float(size * len(arms))))
    return parts


def part_key(dataset: Any, probe: str, model: str, number: int) -> str:
    """Names a part."""
    return f"{dataset.name}.{probe}, {model}, batch {number}"


def measure_batch(
    dataset: Dataset, run: Run, arms: list[Arm], dtype: str, model: str, probe: str, number: int, size: int
) -> Iterator[Record]:
    """Measures every arm on one batch of contexts: predictions and KL of all its questions, and what the arm costs."""
    backbone = loaded(run.models[model], dtype)
    batch = dataset.batch(backbone, probe, number, size, run.seed)
    prepared = _prepared(dataset, run, run.models[model], dtype)
    reference, valid = batch.read(batch.reference), batch.questions.valid
    yield {
        **metrics.answer_record(REFERENCE, reference, reference, valid),
        **batch.questions.columns(batch.clusters),
        **({} if number else {"costs": metrics.reference_shares(backbone, batch.splice)}),
    }
    if run.settings.get("deficit"):
        yield metrics.deficit_record(batch.splice, backbone.layout)
    for arm in arms[1:]:
        splice = batch.asked() if arm.by_question else batch.splice
        try:
            repaired = arm.repair(backbone, splice, **prepared.get(arm.method, {}))
        except KVPatchError as error:
            # A form of which nothing fits so few bytes, or a method that does not serve this architecture.
            yield {"arm": arm.name, "unserved": str(error)}
            continue
        answers = batch.read_asked(repaired) if arm.by_question else batch.read(repaired.cache, repaired.visible)
        # Every batch costs the same, and to count FLOPs is to trace the method again.
        costs = {} if number else {"costs": metrics.cost_shares(repaired, backbone, splice)}
        record = metrics.answer_record(arm.name, answers, reference, valid)
        if repaired.estimate is not None:
            record["estimate"] = np.asarray(repaired.estimate, float).round(6).tolist()
        yield {**record, **costs}


_PREPARED: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}


def _prepared(dataset: Dataset, run: Run, path: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Fits what methods need ahead, once per model."""
    prepare = getattr(dataset, "prepare", None)
    if prepare is None:
        return {}
    key = (dataset.name, path, dtype, str(run.seed), *run.methods)
    if key not in _PREPARED:
        _PREPARED[key] = prepare(loaded(path, dtype), run)
    return _PREPARED[key]


def rows_of(
    config: RunConfig, plans: DatasetPlans, records: Mapping[str, list[Record]]
) -> tuple[list[frame.Row], dict[str, str]]:
    """Makes all rows of finished parts, and says which arms were not served and why.

    Rows do not depend on the order in which parts were finished.
    """
    rows: list[frame.Row] = []
    unserved: dict[str, str] = {}
    for dataset, run, parts in plans:
        keys = [part.key for part in parts if part.key in records]
        if hasattr(dataset, "rows"):
            rows += dataset.rows({key: records[key] for key in keys})
            continue
        for probe in run.probes_of(dataset):
            for model in run.models:
                batches = [records.get(part_key(dataset, probe, model, number), []) for number, _ in run.batches]
                flat = [record for batch in batches for record in batch]
                name = f"{dataset.name}.{probe}"
                unserved |= {f"{name}, {model}, {line['arm']}": line["unserved"] for line in flat if "unserved" in line}
                if flat:
                    measured = metrics.ProbeRecords(flat, dataset.kinds, getattr(dataset, "groups", {}))
                    rows += measured.rows(name, model, config.metrics)
    if config.seeds and set(config.seeds) <= {row["model"] for row in rows}:
        rows = [*metrics.mean_rows(rows, config.seeds), *rows]
    return rows, unserved


def run(config: RunConfig, out: Path, share: Shard | Cluster = WHOLE) -> dict[str, Any] | None:
    """Measures what a folder lacks of a run, and writes results.json once all parts of all shards are there.

    Returns:
      The results ({"config", "environment", "rows"}), or None while parts of other shards are missing.

    Raises:
      InputError: the configuration names what does not exist, or the folder has parts of another one.
    """
    planned = plan(config)
    records = run_plan(out, planned, share, functools.partial(plan, config))
    if {part.key for part in planned.parts} - set(records):
        return None
    rows, unserved = rows_of(config, planned.data, records)
    about = {**planned.config, "name": config.name, "title": config.title, "seeds": list(config.seeds)}
    results = {
        "config": {**about, "command": repeated_command("evals.run"), "unserved": unserved},
        "environment": environment(PACKAGES),
        "rows": rows,
    }
    return frame.write_rows(json.loads(json.dumps(results)), out)
