"""What reuse does to the sheets task: `python -m evals.run --task=sheets`.

Contexts of 4, 8 and 16 chunks, every one of them cached alone and moved. Leaves results.json and table.md in the
folder; with several instances, a table of their means too.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax import deficit
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import REPAIRS, fraction_to_count
from models import ModelBackbone, load

from ..report.comparison import smallest_rank
from ..results import intervals
from ..results.costs import ArmCost
from ..results.environment import environment
from ..results.headline import headline_rows
from ..results.parts import make_out
from ..results.rows import Row, Rows, as_row
from ..results.tables import markdown_table
from ..rules import RULES
from ..trained import SHEETS
from .reuse import Reuse
from .task import KINDS

BUDGETS = (0.15, 0.50)


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is measured of a task.

    Attributes:
      task: its name, that of the flag. folder: of its instances. probes: by what a probe is called behind the task's
      name, the size of its contexts, what it is called in the table, and what is handed to `Material.sample` besides.
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


class Answered(NamedTuple):
    """One arm over one batch: what it costs, and log-probabilities [B,N,V] behind every token."""

    name: str
    cost: ArmCost
    said: np.ndarray


def arms_of(reuse: Reuse) -> Iterator[Answered]:
    """Yields every arm, re-prefill first."""
    costs, last = reuse.costs, reuse.form.chunks - 1
    yield Answered("re-prefill", costs.of_reprefill(), reuse.read(reuse.engine))
    yield Answered("blind", costs.of_blind(), reuse.read(reuse.cache()))
    for rank in RULES.arms.ranks:
        patch = reuse.patch(last, rank)
        yield Answered(f"patch.rank={rank}", costs.of_patch(patch), reuse.read(reuse.cache({last: patch})))
    shown = RULES.arms.shown_rank
    for name in reuse.backbone.layout.names:
        patch = reuse.patch(last, shown)
        part = kvp.Patch({name: patch.factors[name]}, patch.metadata)
        yield Answered(f"patch.{name}_only.rank={shown}", costs.of_patch(part), reuse.read(reuse.cache({last: part})))
    # The sheets absorb from one another too: their patches as well.
    every = {place: reuse.patch(place, shown) for place in range(1, last + 1)}
    yield Answered(f"patch.every_chunk.rank={shown}", costs.of_patch(every[last]), reuse.read(reuse.cache(every)))

    splice = reuse.splice()
    for method, repair in REPAIRS.items():
        for budget in BUDGETS:
            repaired = repair(reuse.backbone, splice, fraction_to_count(budget, reuse.page.tokens))
            cost = costs.of_tokens(np.asarray(repaired.chosen), np.asarray(splice.slots))
            yield Answered(f"{method}.budget={budget:g}", cost, reuse.read(dict(repaired.cache)))
    for budget in BUDGETS:
        cost, cache = reuse.random_tokens(budget)
        yield Answered(f"random_tokens.budget={budget:g}", cost, reuse.read(cache))
    for budget, (cost, said) in reuse.read_by_question(RULES.arms.query_budgets).items():
        yield Answered(f"query_attention.budget={budget:g}", cost, said)


class Tally:
    """Items of all batches of one size of context, by arm and kind."""

    def __init__(self, probe: str, model: str):
        self.probe, self.model = probe, model
        self.right: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.apart: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.shares: dict[str, dict[str, float]] = {}
        self.shape: dict[tuple[str, str], list[np.ndarray]] = {}

    def take(self, reuse: Reuse, first: int) -> None:
        """Adds one batch, whose contexts are numbered from `first`."""
        questions, reference = reuse.questions, np.zeros(())
        asked = questions.answer >= 0
        for name, cost, said in arms_of(reuse):
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
            for metric in ("stored_bytes", "serving_flops"):
                found.append(as_row(self.probe, self.model, arm, metric, shares[metric]))
        for (metric, channel), batches in self.shape.items():
            values = np.concatenate(batches)
            for layer in range(values.shape[1]):
                interval = intervals.mean(values[:, layer], np.arange(len(values)))
                found.append(as_row(self.probe, self.model, f"layer={layer}.{channel}", metric, interval))
        return found


def measure(backbone: ModelBackbone, model: str, seed: int, contexts: int, suite: Suite, batch: int = 16) -> list[Row]:
    """Measures one instance over `contexts` contexts of each probe."""
    rows, material = [], suite.reuse.material
    for name, (size, title, more) in suite.probes.items():
        tally = Tally(f"{suite.task}.{name}", model)
        for number in range(-(-contexts // batch)):
            rng = np.random.default_rng([seed, number, material.sizes[size].sheets])
            drawn = material.sample(rng, batch, material.sizes[size], **more)
            tally.take(suite.reuse(backbone, drawn, material.ask(drawn, rng, suite.questions)), number * batch)
        print(f"{model}: {title} measured", flush=True)
        rows += tally.rows()
    return rows


def run(name: str, seed: int, folder: Path, quick: bool = False, suite: Suite = SHEETS_SUITE) -> dict[str, Any]:
    """Measures a shipped instance, all of them ("all"), or a checkpoint directory; writes results.json and table.md."""
    make_out(folder)
    paths = {path.name: path for path in instances(name, suite)}
    contexts = 16 if quick else 64
    tables = {
        model: measure(load(path, dtype="float32"), model, seed, contexts, suite) for model, path in paths.items()
    }
    rows = [row for table in tables.values() for row in table]
    if len(tables) > 1:
        rows += headline_rows(tables, "mean")
    results = {
        "config": {
            "task": suite.task,
            "model": "mean" if len(tables) > 1 else next(iter(tables)),
            "seed": seed,
            "contexts": contexts,
            "questions": suite.questions,
            "rules": {"version": RULES.version, "digest": RULES.digest},
            "command": shlex.join(["python", "-m", "evals.run", *sys.argv[1:]]),
            "training": {model: json.loads((path / "training.json").read_text()) for model, path in paths.items()},
        },
        "environment": environment(),
        "rows": rows,
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "table.md").write_text(table(results, suite))
    print(table(results, suite))
    print(f"results: {folder / 'results.json'}; table: {folder / 'table.md'}", flush=True)
    return results


def instances(name: str, suite: Suite = SHEETS_SUITE) -> list[Path]:
    """Finds the directories of the instances asked for. Raises InputError where there is none."""
    shipped = sorted(path.parent for path in suite.folder.glob("*/config.json"))
    if name == "all" and shipped:
        return shipped
    for path in (suite.folder / name, Path(name)):
        if (path / "config.json").exists():
            return [path]
    names = ", ".join(path.name for path in shipped) or "none is shipped"
    raise InputError(
        f"backbone {name!r} of the {suite.task} task; expected a checkpoint directory, all, or one of: {names}"
    )


def table(results: dict[str, Any], suite: Suite = SHEETS_SUITE) -> str:
    """Writes the results as Markdown: a table by probe, the deficit, and the bars."""
    rows, parts, kinds = Rows(results), [], suite.questions
    metrics = [*(f"accuracy.{kind}" for kind in kinds), "stored_bytes", "serving_flops"]
    for name, (_, title, _) in suite.probes.items():
        probe = f"{suite.task}.{name}"
        arms = [arm for arm in rows.arms(probe) if not arm.startswith("layer=")]
        lines = [[arm, *(f"{rows.get(probe, arm, metric).value:.3f}" for metric in metrics)] for arm in arms]
        rank = smallest_rank(results, probe)
        said = f"{title}; smallest sufficient rank: {rank or 'none'}"
        parts.append(f"{said}\n\n{markdown_table(('arm', *kinds, 'stored bytes', 'serving FLOPs'), lines)}")
        worst = worst_class_share(rows, probe, suite.visible)
        parts.append(f"Means over what cells show explain at most {worst:.0%} of ΔV in the deeper half.")
        parts.append(_deficit(rows, probe))
    return "\n\n".join(parts) + "\n"


def _deficit(rows: Rows, probe: str) -> str:
    layers = rows.arms(probe, "layer=")
    metrics = list(dict.fromkeys(metric for where, arm, metric in rows.table if where == probe and arm in layers))
    head = ("of Δ", *layers)
    lines = [[metric, *(f"{rows.get(probe, layer, metric).value:.2f}" for layer in layers)] for metric in metrics]
    return markdown_table(head, lines)


def worst_class_share(rows: Rows, probe: str, visible: tuple[str, ...]) -> float:
    """Finds the largest share of ΔV's energy, in the deeper half, that means over cells that show the same explain."""
    values = [arm for arm in rows.arms(probe, "layer=") if arm.endswith(".v")]
    deeper = values[len(values) // 2 :]
    return max(rows.get(probe, arm, f"class_mean_share.{name}").value for arm in deeper for name in visible)
