"""The runner of data sets: tasks with packed questions, and data sets that are measured part by part.

`run` serves `python -m evals.run --task=sheets` or `--task=documents`: contexts of several sizes, every chunk of them
cached alone and moved. It leaves results.json, table.md, figures and report.html in the folder. Of several training
seeds the headline is the mean, with its spread; the control, which was trained without a sliding window, is no seed.
`run_recorded` serves real weights (`--suite=pretrained`).
"""

import fnmatch
import itertools
import json
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax import KVLayout
from models import ModelBackbone, load

from .arms import arm_makers, query_aware_names
from .datasets import PackedDataset, RecordedDataset
from .harness.environment import environment
from .harness.frame import Row, without_nan, write_rows
from .harness.parts import add_part, finished_parts, make_out, measure_parts
from .probes.comparison import read_arms
from .probes.results_table import ResultsTable
from .report.summary import NO_WINDOW
from .report.task_report import write_report
from .results.costs import METRICS
from .results.headline import headline_rows
from .rules import RULES
from .sheets_task.reader import class_shares, energy_ranks
from .task_language import check_language
from .trained import training_of

PARTS = "parts.jsonl"
"""The finished parts of a run, in its folder."""
SHOWN = RULES.arms.shown_rank
FIRST_PROBE = (
    "re-prefill",
    "blind",
    "patch.rank=*",
    "patch.?*_only.*",
    "patch.whole_transition.*",
    f"patch.every_chunk.rank={SHOWN}",
    "*.budget=0.15",
    "*.budget=0.5",
    "query_attention.*",
    "prophetkv.*",
    "prcr.*",
    "patch.int8.*",
    "pooled.*",
    "quantised.*",
    "svd.*",
    "shadowkv*",
    "residual.*",
)
"""Patterns of the arms that are tried with the contexts of a data set's first probe."""
OTHER_PROBES = (
    "re-prefill",
    "blind",
    "patch.rank=*",
    "patch.rows_only.*",
    "patch.transition_only.*",
    "patch.whole_transition.*",
    f"patch.every_chunk.rank={SHOWN}",
    "*.budget=0.15",
    "query_attention.*",
    "quantised.*",
    f"svd.rank={SHOWN}",
)
"""Patterns of the arms that are tried with contexts of the other probes."""
EVERY_CHUNK = tuple(f"patch.every_chunk.rank={rank}" for rank in RULES.arms.ranks if rank > SHOWN)
"""Larger ranks of it: a part of its own, with contexts of every probe."""
CONTROL_ARMS = ("re-prefill", "blind", f"patch.rank={SHOWN}")


class RunSizes(NamedTuple):
    """How much is measured: the seed of the contexts, how many of each probe, and how many at once."""

    seed: int
    contexts: int = 64
    batch: int = 16


def arm_names(layout: KVLayout, *, first: bool) -> list[str]:
    """Lists the arms that are tried with contexts of the first probe, or of the others."""
    names = [*arm_makers(layout), *query_aware_names(layout)]
    spared = RULES.arms.only_among_all if first else ()
    wanted = [name for name in names if _matches(name, FIRST_PROBE if first else OTHER_PROBES)]
    return [name for name in wanted if not _matches(name, spared)]


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def measure(
    backbone: ModelBackbone, model: str, sizes: RunSizes, dataset: PackedDataset, probe: str, arms: Sequence[str]
) -> list[Row]:
    """Measures arms of one instance over the contexts of one probe: accuracy and KL, cost, and the deficit by layer."""
    table = ResultsTable(model, metrics=("accuracy", "kl"))
    for number in range(-(-sizes.contexts // sizes.batch)):
        reader = dataset.reader(backbone, probe, sizes.seed, number, sizes.batch)
        clusters = number * sizes.batch + np.arange(sizes.batch)
        answers = read_arms(table, reader, arms)

        # Arms that choose tokens by the question were read in the first probe alone.
        for name in reader.probes:
            items = table.items(name)
            items.kinds = reader.kinds
            items.add(reader.asked(name), clusters, answers[name])

        shapes = {
            f"class_mean_share.{name}": shares for name, shares in class_shares(reader.page, dataset.spec).items()
        }

        for metric, by_channel in {**shapes, "e90": energy_ranks(reader.page)}.items():
            for channel, values in by_channel.items():
                for row, layer in enumerate(backbone.layout.layers_of(channel)):
                    arm = f"layer={layer}.{channel}"
                    table.sample(reader.probes[0], arm, metric, values[:, row], clusters)

    # Costs stand in the files of these tasks without an interval, and the share of bytes not at all.
    rows = [row for row in table.rows() if row["metric"] != "bytes"]
    bare = {"low": None, "high": None, "n": 1}
    return without_nan([{**row, **bare} if row["metric"] in METRICS else row for row in rows])


def measure_instance(
    path: Path, sizes: RunSizes, dataset: PackedDataset, file: Path, *, control: bool = False
) -> list[Row]:
    """Measures an instance over contexts of every probe; a control with few arms, over those of the first.

    What `file` has of it already (`results.parts`), of the same weights, is not measured again.
    """
    backbone, rows = load(path, dtype="float32"), []
    config = {"model": dataset.task, **sizes._asdict(), "questions": dataset.questions, "rules": RULES.digest}
    finished = {part["part"]: part["rows"] for part in finished_parts(file, config)}
    probes = list(dataset.probes.items())

    for number, (probe, described) in enumerate(probes[:1] if control else probes):
        arms = list(CONTROL_ARMS) if control else arm_names(backbone.layout, first=number == 0)
        groups = {f"{len(arms)} arms": arms}
        if not control:
            groups["every chunk"] = ["re-prefill", *EVERY_CHUNK]

        for group, names in groups.items():
            name = f"{path.name}, {described.title}, {group}, {backbone.fingerprint}"
            if name not in finished:
                finished[name] = measure(backbone, path.name, sizes, dataset, probe, names)
                add_part(file, {"part": name, "rows": finished[name]})
            # The second group has the reference again, and the deficit.
            rows += [row for row in finished[name] if names is arms or row["arm"] in EVERY_CHUNK]

        print(f"{path.name}: {described.title} measured", flush=True)

    return rows


def run(name: str, seed: int, folder: Path, dataset: PackedDataset, *, quick: bool = False) -> dict[str, Any]:
    """Measures the instances that `PackedDataset.instances` finds; writes results and report."""
    paths, contexts = dataset.instances(name), 16 if quick else 64
    shipped = [path.name for path in dataset.instances("all")]
    for path in paths:
        check_language(path, dataset.spec.vocabulary.names, dataset.task, shipped)
    make_out(folder)

    group = paths[0].parent
    controls = [path.name for path in paths if path.name.endswith(NO_WINDOW) and len(paths) > 1]
    sizes, file = RunSizes(seed, contexts), folder / PARTS
    tables = {path.name: measure_instance(path, sizes, dataset, file, control=path.name in controls) for path in paths}
    rows = list(itertools.chain.from_iterable(tables.values()))
    seeds = {model: table for model, table in tables.items() if model not in controls}
    if len(seeds) > 1:
        rows += headline_rows(seeds, "mean")

    results = {
        "config": {
            "task": dataset.task,
            # Shipped instances lie in a folder of their kind.
            "kind": group.name if len(paths) > 1 or group.parent == dataset.folder.parent else dataset.task,
            "probes": {probe: described.title for probe, described in dataset.probes.items()},
            "visible": list(dataset.visible),
            "model": "mean" if len(seeds) > 1 else next(iter(seeds)),
            "seeds": list(seeds),
            "seed": seed,
            "contexts": contexts,
            "questions": dataset.questions,
            "rules": {"version": RULES.version, "digest": RULES.digest},
            "command": shlex.join(["python", "-m", "evals.run", *sys.argv[1:]]),
            "training": {path.name: training_of(path) for path in paths},
        },
        "environment": environment(),
        "rows": rows,
    }
    write_rows(results, folder)
    print(write_report(results, folder))
    print(f"results: {folder / 'results.json'}; report: {folder / 'report.html'}", flush=True)
    return results


def run_recorded(dataset: RecordedDataset, out: Path, limit: int = 0) -> dict[str, Any]:
    """Measures the parts that a folder lacks and writes results.json; the same call resumes after them.

    Args:
      limit: at most so many parts now, besides those that are always measured; 0 for all.

    Raises:
      InputError: the folder holds parts of another configuration.
    """
    # Lists in place of tuples, as the file of parts has them.
    file, config = out / PARTS, json.loads(json.dumps(dataset.config))
    measure_parts(file, config, dataset.parts[: dataset.unlimited])
    finished = measure_parts(file, config, dataset.parts, limit)
    results = {
        "config": {**config, **dataset.shown, "parts_done": len(finished), "parts": len(dataset.parts)},
        "environment": environment(dataset.packages),
        "cpu_seconds": sum(part["cpu_seconds"] for part in finished),
        "rows": dataset.rows(finished),
    }
    return write_rows(results, out)
