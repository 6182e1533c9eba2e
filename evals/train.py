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

from . import documents_task, sheets_task, small_task
from .command_line import errors_as_one_line
from .sheets_task import training as sheets
from .small_task.instances import INSTANCES, instance
from .small_task.training import (
    SmallTaskRecipe,
    draw_batch,
    image_plan,
    initialise,
    loss_of,
    make_optimiser,
    make_tokenizer,
)


class Trainer:
    """Parameters, optimiser state and the jitted step; checkpoints through Orbax."""

    kinds = small_task.KINDS

    def __init__(self, recipe: Any, folder: Path):
        self.recipe, self.folder = recipe, folder
        self.config, self.images = self._instance()
        folder.mkdir(parents=True, exist_ok=True)
        self._check_recipe()
        self.graph, state = nnx.split(self._initial())
        self.optimiser = make_optimiser(recipe)
        # Placed as what a checkpoint gives is, so that a resumed run shares the program of one begun here.
        self.state, self.moments = jax.device_put((state, jax.jit(self.optimiser.init)(state)), jax.local_devices()[0])
        self.plan = self._first_plan()
        self.step = 0
        self._jitted = jax.jit(self._update, donate_argnums=(0, 1))
        self.checkpoints = ocp.CheckpointManager(
            (folder / "checkpoints").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )

    def _instance(self) -> Any:
        return instance(self.recipe.backbone)

    def _initial(self) -> Any:
        return initialise(self.config, self.recipe)

    def _first_plan(self) -> Any:
        return image_plan(self.recipe)

    def _draw(self, step: int) -> Any:
        return draw_batch(self.recipe, step)

    def _take(self, drawn: Any) -> dict[str, Array]:
        """Takes one step; returns the parts for the curve."""
        self.state, self.moments, parts = self._jitted(self.state, self.moments, drawn.batch, drawn.labels)
        return parts

    def _note(self, tally: "Tally", parts: dict[str, Array], drawn: Any) -> None:
        _note(tally, parts, drawn.batch["weight"], drawn.kinds)

    def _tokenizer(self) -> Any:
        return make_tokenizer()

    def _check_recipe(self) -> None:
        path = self.folder / "recipe.json"
        mine = json.dumps(dataclasses.asdict(self.recipe), indent=2) + "\n"
        if path.exists() and path.read_text() != mine:
            raise ConfigError(f"{path} holds another recipe; expected the one asked for, or an empty --out")
        path.write_text(mine)

    def _update(self, state, moments, batch, labels):
        def whole(state):
            return loss_of(nnx.merge(self.graph, state), batch, labels, self.plan, self.recipe.auxiliary)

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
            ahead = pool.submit(self._draw, self.step)
            bar = tqdm(range(self.step, until), initial=self.step, total=until, unit="step", mininterval=2)
            for step in bar:
                drawn = ahead.result()
                ahead = pool.submit(self._draw, step + 1)
                self._note(tally, self._take(drawn), drawn)
                self.step = step + 1

                if self.step % every == 0 or self.step == until:
                    line = {"step": self.step, **_means(tally), "seconds": round(time.perf_counter() - began, 1)}
                    curve.write(json.dumps(line) + "\n")
                    curve.flush()
                    bar.set_postfix({kind: f"{line.get(kind, 0.0):.3f}" for kind in ("chain", "aggregate")})
                    tally.clear()

                if self.step % save_every == 0 or self.step == until:
                    self.save()

    def backbone(self) -> ModelBackbone:
        """Makes the trained backbone with the task's image settings and vocabulary."""
        return ModelBackbone(self.config, nnx.to_pure_dict(self.state), self.images, self._tokenizer())


class SheetsTrainer(Trainer):
    """Trains on the sheets task: contexts of several sizes, the loss that of answers alone."""

    kinds = sheets_task.KINDS
    spec, names = sheets.SHEETS, sheets_task.VOCABULARY.names

    def _instance(self) -> Any:
        return self.spec.instance(self.recipe.backbone)

    def _initial(self) -> Any:
        return sheets.initialise(self.recipe, self.spec)

    def _first_plan(self) -> dict[str, Any]:
        return {}  # one per size of context, made when it first comes

    def _draw(self, step: int) -> sheets.SheetsBatch:
        return sheets.draw_batch(self.recipe, step, self.spec)

    def _update(self, state, moments, batch, labels):
        def whole(state):
            return sheets.loss_of(nnx.merge(self.graph, state), batch, labels, self.spec)

        (loss, right), gradients = jax.value_and_grad(whole, has_aux=True)(state)
        updates, moments = self.optimiser.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, {"loss": loss, "right": right}

    def _take(self, drawn: sheets.SheetsBatch) -> dict[str, Array]:
        if drawn.size not in self.plan:
            self.plan[drawn.size] = sheets.image_plan(drawn, self.config)
        found = self._jitted(self.state, self.moments, drawn.batch, self.plan[drawn.size])
        self.state, self.moments, parts = found
        return parts

    def _note(self, tally: "Tally", parts: dict[str, Array], drawn: sheets.SheetsBatch) -> None:
        right, asked = np.asarray(parts["right"]), drawn.batch["answer"] >= 0
        tally.setdefault("loss", []).append((float(parts["loss"]), 1.0))
        for number, name in enumerate(self.kinds):
            here = asked & (drawn.kinds == number)
            for title, where in ((name, here), (f"{name}, page alone", here & ~drawn.sees)):
                if where.any():
                    tally.setdefault(title, []).append((float(right[where].sum()), float(where.sum())))

    def _tokenizer(self) -> Any:
        return make_tokenizer(self.names)


class DocumentsTrainer(SheetsTrainer):
    """Trains on the documents task, whose pages are drawn with fonts."""

    spec, names = documents_task.DOCUMENTS, documents_task.VOCABULARY.names


Tally = dict[str, list[tuple[float, float]]]


def _note(tally: Tally, parts: dict[str, Array], weight: np.ndarray, kinds: np.ndarray) -> None:
    right = np.asarray(parts["right"])
    for number, name in enumerate(small_task.KINDS):
        here = kinds == number
        tally.setdefault(name, []).append((float(right[here].sum()), float(weight[here].sum())))
    for name, value in parts.items():
        if name != "right":
            tally.setdefault(name, []).append((float(value), 1.0))


def _means(tally: Tally) -> dict[str, float]:
    return {
        name: round(sum(x for x, _ in pairs) / max(sum(n for _, n in pairs), 1.0), 4) for name, pairs in tally.items()
    }


def draw_curve(folder: Path, kinds: Sequence[str] = small_task.KINDS) -> Path:
    """Draws DIR/curve.jsonl: accuracy by kind and the losses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    # A resumed run writes some steps twice; the later line counts.
    lines = list({line["step"]: line for line in lines}.values())
    steps = [line["step"] for line in lines]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
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
    plt.close(figure)
    return folder / "curve.png"


_HELP = {
    "backbone": f"which architecture: one of {', '.join(INSTANCES)} (sheets: {', '.join(sheets.SHEETS.backbones)})",
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


TASKS: dict[str, tuple[type, type[Trainer]]] = {
    "small": (SmallTaskRecipe, Trainer),
    "sheets": (sheets.SheetsRecipe, SheetsTrainer),
    "documents": (documents_task.DocumentsRecipe, DocumentsTrainer),
}
"""Recipe and trainer of each task by name."""


def define_flags() -> None:
    """Defines --out, --task and one flag per field of the recipes. Importing this module leaves absl's flags alone."""
    flags.DEFINE_string("out", "out/train", "folder for checkpoints, curve and the trained model; a used one resumes")
    flags.DEFINE_enum("task", "small", list(TASKS), "which task to train on; flags of the other's recipe are refused")
    flags.DEFINE_integer("until", 0, "stop at this step of the recipe; 0: at its end", lower_bound=0)
    fields = {}
    for recipe, _ in reversed(TASKS.values()):
        fields |= {field.name: field for field in dataclasses.fields(recipe)}
    for name, field in fields.items():
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        _DEFINE[kind](name, field.default, _HELP.get(name, f"questions of kind {name} per context"))


def asked_recipe(task: str) -> Any:
    """Makes the task's recipe of the flags that were given. Raises app.UsageError for another task's flag."""
    recipe = TASKS[task][0]
    own = {field.name for field in dataclasses.fields(recipe)}
    given = {
        field.name: flags.FLAGS[field.name].value
        for other, _ in TASKS.values()
        for field in dataclasses.fields(other)
        if flags.FLAGS[field.name].present
    }
    if unknown := sorted(set(given) - own):
        raise app.UsageError(f"--{unknown[0]} is no part of the recipe of --task={task}")
    return recipe(**given)


def main(arguments: list[str]) -> None:
    """Trains, saves the Hugging Face directory, draws the curve."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")

    logging.set_verbosity(logging.WARNING)
    recipe, trainer_type = asked_recipe(flags.FLAGS.task), TASKS[flags.FLAGS.task][1]
    with errors_as_one_line():
        trainer = trainer_type(recipe, Path(flags.FLAGS.out))
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
    print(f"model in {root}; curve in {draw_curve(trainer.folder, trainer.kinds)}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
