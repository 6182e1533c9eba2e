"""Train a small backbone on the small task: `python -m evals.train --backbone=qwen2_5_vl --out=DIR`.

`--task=sheets` trains on version 2 of the task (`evals.sheets_task`), whose loss is that of answers alone, and
`--task=documents` on the same questions about drawn documents (`evals.documents_task`). Every choice is a field of
the task's recipe and is written beside the weights. Interrupted runs resume from the newest Orbax checkpoint in
DIR/checkpoints. Leaves DIR/model (a Hugging Face directory), DIR/curve.jsonl and DIR/curve.png.
"""

from . import extra as extra  # isort: split

import dataclasses
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import app, flags, logging
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.errors import ConfigError
from models import ModelBackbone, save

from .command_line import errors_as_one_line
from .documents_task.task_spec import DOCUMENTS_TRAINING
from .sheets_task.training import SHEETS_TRAINING
from .small_task.instances import INSTANCES
from .small_task.training import (
    SMALL_TRAINING,
    TrainingBatch,
    TrainingRecipe,
    TrainingTask,
    image_plan,
    make_optimiser,
    make_tokenizer,
)

TASKS: dict[str, TrainingTask] = {
    "small": SMALL_TRAINING,
    "sheets": SHEETS_TRAINING,
    "documents": DOCUMENTS_TRAINING,
}
Tally = dict[str, list[tuple[float, float]]]
"""By name of a curve: sums and counts since its last line."""


class Trainer:
    """Parameters, optimiser state and the jitted step; checkpoints through Orbax.

    Args:
      recipe: every training choice; its class says which task is trained on.
      folder: of recipe.json, checkpoints and curve; one that was used resumes.

    Raises:
      ConfigError: the folder holds another recipe, or the recipe names an unknown backbone or start.
    """

    def __init__(self, recipe: TrainingRecipe, folder: Path):
        self.recipe, self.folder = recipe, folder
        self.task = next(task for task in TASKS.values() if task.recipe is type(recipe))
        self.config, self.images = self.task.instance(recipe.backbone)

        # A recipe that cannot begin leaves no folder behind, which would refuse the corrected one.
        self.graph, state = nnx.split(self.task.initialise(recipe))

        # A folder is of one recipe, so that what resumes is what began.
        folder.mkdir(parents=True, exist_ok=True)
        path, text = folder / "recipe.json", json.dumps(dataclasses.asdict(recipe), indent=2) + "\n"
        if path.exists() and path.read_text() != text:
            raise ConfigError(f"{path}: got another recipe; expected the one asked for, or an empty --out")
        path.write_text(text)

        self.optimiser = make_optimiser(recipe)
        # Placed as what a checkpoint gives is, so that a resumed run shares the program of one begun here.
        self.state, self.moments = jax.device_put((state, jax.jit(self.optimiser.init)(state)), jax.local_devices()[0])
        self.plans: dict[str, dict[str, Array]] = {}
        self.step = 0
        self._jitted = jax.jit(self._update, donate_argnums=(0, 1))
        self.checkpoints = ocp.CheckpointManager(
            (folder / "checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def _update(self, state: Any, moments: Any, batch: dict[str, Any], plan: dict[str, Array]) -> Any:
        def whole(state: Any) -> Any:
            return self.task.loss(nnx.merge(self.graph, state), batch, plan, self.recipe)

        (_, parts), gradients = jax.value_and_grad(whole, has_aux=True)(state)
        updates, moments = self.optimiser.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, parts

    @property
    def _tree(self) -> dict[str, Any]:
        return {"parameters": nnx.to_pure_dict(self.state), "moments": jax.tree.leaves(self.moments)}

    def resume(self) -> int:
        """Takes up the newest checkpoint, where there is one; returns the step to go on from."""
        newest = self.checkpoints.latest_step()
        if newest is None:
            return 0

        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._tree)
        tree = self.checkpoints.restore(newest, args=ocp.args.StandardRestore(target))
        nnx.replace_by_pure_dict(self.state, tree["parameters"])
        self.moments = jax.tree.unflatten(jax.tree.structure(self.moments), tree["moments"])
        self.step = newest
        return newest

    def save(self) -> None:
        """Checkpoints the present step."""
        self.checkpoints.save(self.step, args=ocp.args.StandardSave(self._tree))
        self.checkpoints.wait_until_finished()

    def train(self, until: int, every: int = 50, save_every: int = 200) -> None:
        """Runs to step `until`, one curve line per `every` steps and a checkpoint per `save_every`."""
        from tqdm import tqdm

        tally: Tally = {}
        began = time.perf_counter()

        with ThreadPoolExecutor(1) as pool, (self.folder / "curve.jsonl").open("a") as curve:
            # The next batch is drawn on the host while the device takes a step.
            ahead = pool.submit(self.task.draw, self.recipe, self.step)
            bar = tqdm(range(self.step, until), initial=self.step, total=until, unit="step", mininterval=2)
            for step in bar:
                drawn = ahead.result()
                ahead = pool.submit(self.task.draw, self.recipe, step + 1)
                if drawn.size not in self.plans:
                    self.plans[drawn.size] = image_plan(drawn, self.config)
                plan = self.plans[drawn.size]
                self.state, self.moments, parts = self._jitted(self.state, self.moments, drawn.batch, plan)
                _count(tally, parts, drawn, self.recipe.kinds)
                self.step = step + 1

                if self.step % every == 0 or self.step == until:
                    means = {}
                    for name, pairs in tally.items():
                        total, count = np.sum(pairs, axis=0)
                        means[name] = round(float(total / max(count, 1.0)), 4)
                    line = {"step": self.step, **means, "seconds": round(time.perf_counter() - began, 1)}
                    curve.write(json.dumps(line) + "\n")
                    curve.flush()
                    bar.set_postfix({kind: f"{line.get(kind, 0.0):.3f}" for kind in ("chain", "aggregate")})
                    tally.clear()

                if self.step % save_every == 0 or self.step == until:
                    self.save()

    def backbone(self) -> ModelBackbone:
        """Makes the trained backbone with the task's image settings and vocabulary."""
        return ModelBackbone(
            self.config,
            nnx.to_pure_dict(self.state),
            self.images,
            make_tokenizer(self.task.words[: self.config.text.vocabulary]),
        )


def _count(tally: Tally, parts: dict[str, Array], drawn: TrainingBatch, kinds: Sequence[str]) -> None:
    """Adds a step to the curve: losses, and right answers by kind; where batches say so, those of the page alone."""
    right = np.asarray(parts["right"])
    for number, kind in enumerate(kinds):
        here = {kind: drawn.asked & (drawn.kinds == number)}
        if drawn.sees is not None:
            here[f"{kind}, page alone"] = here[kind] & ~drawn.sees
        for name, where in here.items():
            # The small task asks every kind of every batch, whether or not a context has an answer.
            if where.any() or drawn.sees is None:
                tally.setdefault(name, []).append((float(right[where].sum()), float(where.sum())))
    for name, value in parts.items():
        if name != "right":
            tally.setdefault(name, []).append((float(value), 1.0))


def draw_curve(folder: Path, kinds: Sequence[str] = SMALL_TRAINING.recipe.kinds) -> Path:
    """Draws DIR/curve.jsonl: accuracy by kind and the losses."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    # A resumed run writes some steps twice; the later line counts.
    lines = list({line["step"]: line for line in lines}.values())
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in kinds:
        left.plot(steps, [line.get(name, np.nan) for line in lines], label=name)
    for name in lines[-1]:
        if name == "loss" or "." in name:
            right.plot(steps, [line[name] for line in lines], label=name)

    left.set(title="accuracy on training batches", xlabel="step", ylim=(0, 1))
    right.set(title="losses (layer.label: auxiliary)", xlabel="step", yscale="log")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "curve.png", dpi=110)
    return folder / "curve.png"


_HELP = {
    "backbone": f"which architecture: one of {', '.join(INSTANCES)} (sheets: qwen2_5_vl, qwen3_vl, qwen3_5)",
    "seed": "of the initial parameters and of every batch",
    "steps": "optimiser steps; the cosine schedule ends there",
    "batch": "contexts per step",
    "learning_rate": "peak learning rate",
    "warmup": "steps of linear warm-up",
    "weight_decay": "on matrices",
    "beta2": "of AdamW",
    "clip": "largest global gradient norm",
    "window": "share of page questions that see only the page; 0 trains the control without a sliding window",
    "auxiliary": "weight of the auxiliary loss on image tokens",
    "tied_init": "start query projections as copies of key projections",
    "start_range": "contexts start at a random position below this",
    "tiny": "sheets: steps with pages of four cells to begin with",
    "small": "sheets: steps with pages of sixteen cells after those",
    "longer": "sheets: the step from which every second batch has 7 or 15 sheets in place of 3",
    "proportions": "sheets: steps at first in which an aggregate question asks how often an ink's cells have each fill",
    "cells_apart": "sheets: whether a tower that lets an image's cells see each other starts with none of it",
    "begin_with": "sheets: the shipped instance of Qwen3-VL whose weights a hybrid begins with",
    "ink_likeness": "sheets: cosine of an ink's token at the start and what is seen of the ink",
    "reading": "documents: steps at first that ask most of all what the page alone tells",
    "plain": "documents: the step until which all documents look alike",
    "varied": "documents: the step from which they vary in full",
    "named_by_sight": "sheets: whether tokens that name something drawn start as the tower's mean features of it",
}
_DEFINE = {
    "str": flags.DEFINE_string,
    "int": flags.DEFINE_integer,
    "float": flags.DEFINE_float,
    "bool": flags.DEFINE_boolean,
}


def define_flags() -> None:
    """Defines --out, --task and one flag per field of the recipes. Importing this module leaves absl's flags alone."""
    flags.DEFINE_string("out", "out/train", "folder for checkpoints, curve and the trained model; a used one resumes")
    flags.DEFINE_enum("task", "small", list(TASKS), "which task to train on; flags of the other's recipe are refused")
    flags.DEFINE_integer("until", 0, "stop at this step of the recipe; 0: at its end", lower_bound=0)
    fields = {}
    for task in reversed(TASKS.values()):
        fields |= {field.name: field for field in dataclasses.fields(task.recipe)}
    for name, field in fields.items():
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        _DEFINE[kind](name, field.default, _HELP.get(name, f"questions of kind {name} per context"))


def asked_recipe(task: str) -> TrainingRecipe:
    """Makes the task's recipe of the flags that were given. Raises app.UsageError for another task's flag."""
    recipe, given = TASKS[task].recipe, {}
    for other in TASKS.values():
        names = [field.name for field in dataclasses.fields(other.recipe)]
        given |= {name: flags.FLAGS[name].value for name in names if flags.FLAGS[name].present}
    if unknown := sorted(set(given) - {field.name for field in dataclasses.fields(recipe)}):
        raise app.UsageError(f"--{unknown[0]} is no part of the recipe of --task={task}")
    return recipe(**given)


def main(arguments: list[str]) -> None:
    """Trains, saves the Hugging Face directory, draws the curve."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")

    logging.set_verbosity(logging.WARNING)
    recipe = asked_recipe(flags.FLAGS.task)
    with errors_as_one_line():
        trainer = Trainer(recipe, Path(flags.FLAGS.out))
    began = trainer.resume()
    taken = min(flags.FLAGS.until or recipe.steps, recipe.steps)
    print(f"training from step {began} to {taken}; {trainer.folder}")
    trainer.train(taken)
    backbone = trainer.backbone()
    backbone.answer_tokens = 1  # every task asks for one word, and trains nothing to end behind it
    root = save(backbone, trainer.folder / "model", dtype="bfloat16")
    versions = {"jax": jax.__version__, "numpy": np.__version__, "optax": optax.__version__}
    disclosure = {"recipe": dataclasses.asdict(recipe), "steps_taken": taken, "versions": versions}
    (root / "training.json").write_text(json.dumps(disclosure, indent=2) + "\n")
    print(f"model in {root}; curve in {draw_curve(trainer.folder, recipe.kinds)}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
