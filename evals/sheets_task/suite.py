"""What reuse does to the sheets task: `python -m evals.run --task=sheets`.

Contexts of 4, 8 and 16 chunks, every one of them cached alone and moved. Leaves results.json, table.md, figures and
report.html in the folder. Of several training seeds the headline is the mean, with its spread; the control, which was
trained without a sliding window, is no seed.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpatch_jax import deficit
from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

from ..results import intervals
from ..results.costs import METRICS
from ..results.environment import environment
from ..results.headline import headline_rows
from ..results.parts import add_part, finished_parts, make_out
from ..results.rows import Row, as_row
from ..rules import RULES
from ..task_language import check_language
from ..trained import SHEETS, training_of
from .arms import EVERY_CHUNK, arms_of, names_of
from .report import CONTROL_ENDS, write_report
from .reuse import Reuse
from .task import KINDS

CONTROL_ARMS = ("re-prefill", "blind", f"patch.rank={RULES.arms.shown_rank}")


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is measured of a task.

    Attributes:
      task: its name, that of the flag. folder: of its instances. probes: by what a probe is called behind the task's
      name, the size of its contexts, what it is called in the table, and what is handed to `TaskSpec.sample` besides.
      questions: asked of each context, by kind. visible: classes of a page's cells by what can be seen of them.
      reuse: makes a batch whose chunks are all reused.
    """

    task: str
    folder: Path
    probes: Mapping[str, tuple[str, str, Mapping[str, Any]]]
    questions: Mapping[str, int]
    visible: tuple[str, ...]
    reuse: type[Reuse] = Reuse


SHEETS_SUITE = Suite(
    task="sheets",
    folder=SHEETS,
    probes={size: (size, f"{size} chunks", {}) for size in ("4", "8", "16")},
    questions={"page": 4, "sheet": 4, "chain": 8, "override": 2, "aggregate": 5, "whole": 3, "list": 2},
    visible=("shape", "ink", "row mark", "column mark"),
)


class Tally:
    """Items of all batches of one size of context, by arm and kind."""

    def __init__(self, probe: str, model: str):
        self.probe, self.model = probe, model
        self.right: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.apart: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.shares: dict[str, dict[str, float]] = {}
        self.shape: dict[tuple[str, str], list[np.ndarray]] = {}

    def take(self, reuse: Reuse, first: int, arms: list[str]) -> None:
        """Adds one batch, whose contexts are numbered from `first`; `arms`: those to ask, re-prefill first."""
        questions, reference = reuse.questions, np.zeros(())
        asked = questions.answer >= 0
        for name, cost, said in arms_of(reuse, arms):
            if name == "re-prefill":
                reference = said
            self.shares[name] = reuse.costs.shares(cost)
            right = (said.argmax(axis=-1) == questions.answer) | ~asked
            wide = reference.astype(np.float64)
            apart = np.where(asked, np.sum(np.exp(wide) * (wide - said), axis=-1), 0.0)
            for number, kind in enumerate(questions.kind):
                mine = questions.own == number
                valid = asked[:, mine].any(axis=1)
                cluster = first + np.flatnonzero(valid)
                key = name, KINDS[kind]
                # An answer of several tokens is right where all of them are, as greedy decoding would have it.
                self.right.setdefault(key, []).append((right[:, mine].all(axis=1)[valid], cluster))
                self.apart.setdefault(key, []).append((apart[:, mine].sum(axis=1)[valid], cluster))
        self._take_shape(reuse)

    def _take_shape(self, reuse: Reuse) -> None:
        for classes, by_channel in reuse.class_shares().items():
            for channel, share in by_channel.items():
                self.shape.setdefault((f"class_mean_share.{classes}", channel), []).append(share)
        for channel in reuse.delta:
            by_context = [
                deficit.e90({channel: reuse.delta[channel][:, row]})[channel] for row in range(len(reuse.contexts))
            ]
            self.shape.setdefault(("e90", channel), []).append(np.stack([np.asarray(each) for each in by_context]))

    def rows(self) -> list[Row]:
        """Makes the rows: accuracy and KL by arm and kind, shares of cost, the deficit by layer."""
        found = []
        for metric, items in (("accuracy", self.right), ("kl", self.apart)):
            for (arm, kind), parts in items.items():
                values, cluster = (np.concatenate(column) for column in zip(*parts, strict=True))
                interval = intervals.mean(values, cluster)
                found.append(as_row(self.probe, self.model, arm, f"{metric}.{kind}", interval))
        for arm, shares in self.shares.items():
            for metric in METRICS:
                found.append(as_row(self.probe, self.model, arm, metric, shares[metric]))
        for (metric, channel), batches in self.shape.items():
            values = np.concatenate(batches)
            for layer in range(values.shape[1]):
                interval = intervals.mean(values[:, layer], np.arange(len(values)))
                found.append(as_row(self.probe, self.model, f"layer={layer}.{channel}", metric, interval))
        return found


class Sizes(NamedTuple):
    """How much is measured: the seed of the contexts, how many of each size, and how many at once."""

    seed: int
    contexts: int = 64
    batch: int = 16


def measure(backbone: ModelBackbone, model: str, sizes: Sizes, suite: Suite, probe: str, arms: list[str]) -> list[Row]:
    """Measures one instance over the contexts of one probe."""
    size, _, more = suite.probes[probe]
    tally, material = Tally(f"{suite.task}.{probe}", model), suite.reuse.material
    for number in range(-(-sizes.contexts // sizes.batch)):
        rng = np.random.default_rng([sizes.seed, number, material.sizes[size].sheets])
        drawn = material.sample(rng, sizes.batch, material.sizes[size], **more)
        reuse = suite.reuse(backbone, drawn, material.ask(drawn, rng, suite.questions))
        tally.take(reuse, number * sizes.batch, arms)
    return tally.rows()


def measure_all(path: Path, sizes: Sizes, suite: Suite, file: Path, *, control: bool = False) -> list[Row]:
    """Measures an instance over contexts of every probe; a control with few arms, over those of the first.

    What `file` has of it already (`results.parts`), of the same weights, is not measured again.
    """
    backbone, rows = load(path, dtype="float32"), []
    config = {"model": suite.task, **sizes._asdict(), "questions": suite.questions, "rules": RULES.digest}
    have = {part["part"]: part["rows"] for part in finished_parts(file, config)}
    for number, (probe, (_, title, _)) in enumerate(suite.probes.items()):
        if control and number:
            break
        arms = list(CONTROL_ARMS) if control else names_of(backbone.layout, number > 0)
        groups = {f"{len(arms)} arms": arms}
        if not control:
            groups["every chunk"] = ["re-prefill", *EVERY_CHUNK]
        for group, names in groups.items():
            name = f"{path.name}, {title}, {group}, {backbone.fingerprint}"
            if name not in have:
                have[name] = measure(backbone, path.name, sizes, suite, probe, names)
                add_part(file, {"part": name, "rows": have[name]})
            rows += have[name] if names is arms else [row for row in have[name] if row["arm"] in EVERY_CHUNK]
        print(f"{path.name}: {title} measured", flush=True)
    return rows


def run(name: str, seed: int, folder: Path, quick: bool = False, suite: Suite = SHEETS_SUITE) -> dict[str, Any]:
    """Measures instances, as `instances` finds them; writes results and report."""
    paths, contexts = instances(name, suite), 16 if quick else 64
    words, names = suite.reuse.material.vocabulary.names, [own.name for own in instances("all", suite)]
    for path in paths:
        check_language(path, words, suite.task, names)
    make_out(folder)
    is_control = {path.name: path.name.endswith(CONTROL_ENDS) and len(paths) > 1 for path in paths}
    sizes = Sizes(seed, contexts)
    tables = {
        path.name: measure_all(path, sizes, suite, folder / "parts.jsonl", control=is_control[path.name])
        for path in paths
    }
    rows = [row for table in tables.values() for row in table]
    seeds = {model: table for model, table in tables.items() if not is_control[model]}
    if len(seeds) > 1:
        rows += headline_rows(seeds, "mean")
    results = {
        "config": {
            "task": suite.task,
            "kind": paths[0].parent.name if len(paths) > 1 else suite.task,
            "probes": {probe: title for probe, (_, title, _) in suite.probes.items()},
            "visible": list(suite.visible),
            "model": "mean" if len(seeds) > 1 else next(iter(seeds)),
            "seeds": list(seeds),
            "seed": seed,
            "contexts": contexts,
            "questions": suite.questions,
            "rules": {"version": RULES.version, "digest": RULES.digest},
            "command": shlex.join(["python", "-m", "evals.run", *sys.argv[1:]]),
            "training": {path.name: training_of(path) for path in paths},
        },
        "environment": environment(),
        "rows": rows,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(write_report(results, folder))
    print(f"results: {folder / 'results.json'}; report: {folder / 'report.html'}", flush=True)
    return results


def instances(name: str, suite: Suite = SHEETS_SUITE) -> list[Path]:
    """Finds the directories of the instances asked for: one, all of the suite's first kind ("all"), or a folder's.

    Args:
      name: "all", a name in the suite's folder, a checkpoint directory, a folder of such directories, or the name of a
        folder beside the suite's: the instances of another architecture.

    Raises:
      InputError: there is none.
    """
    inside = lambda folder: sorted(path.parent for path in folder.glob("*/config.json"))
    shipped = inside(suite.folder)
    if name == "all" and shipped:
        return shipped
    for path in (suite.folder / name, Path(name)):
        if (path / "config.json").exists():
            return [path]
    # Only this suite's other kinds: the folder above holds other tasks' instances too.
    beside = [suite.folder.parent / name] if name.startswith(f"{suite.folder.name}_") else []
    for folder in (*beside, Path(name)):
        if found := inside(folder):
            return found
    names = ", ".join(path.name for path in shipped) or "none is shipped"
    raise InputError(
        f"backbone {name!r} of the {suite.task} task; expected a checkpoint directory, all, or one of: {names}"
    )
