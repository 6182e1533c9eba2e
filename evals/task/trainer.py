"""The training loop: jitted steps, checkpoints through Orbax, a curve, and the trained backbone."""

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import ModelBackbone, save

from .instances import instance
from .questions import KINDS
from .recipe import Recipe
from .training import TrainingBatch, draw_batch, image_plan, initialise, loss_of, make_optimiser
from .vocabulary import make_tokenizer, vocabulary

Tally = dict[str, list[tuple[float, float]]]
"""By name of a curve: sums and counts since its last line."""


class Trainer:
    """Parameters, optimiser state and the jitted step; checkpoints through Orbax.

    Args:
      recipe: every training choice.
      folder: of recipe.json, checkpoints and curve; one that was used resumes.

    Raises:
      ConfigError: the folder holds another recipe, or the recipe names an unknown backbone.
    """

    def __init__(self, recipe: Recipe, folder: Path):
        self.recipe, self.folder = recipe, folder
        self.config, self.images = instance(recipe.backbone)

        # A folder is of one recipe, so that what resumes is what began.
        folder.mkdir(parents=True, exist_ok=True)
        path, text = folder / "recipe.json", json.dumps(dataclasses.asdict(recipe), indent=2) + "\n"
        if path.exists() and path.read_text() != text:
            raise ConfigError(f"{path}: got another recipe; expected the one asked for, or an empty --out")
        path.write_text(text)

        self.graph, state = nnx.split(initialise(recipe))
        self.optimiser = make_optimiser(recipe)
        # Placed as a checkpoint's arrays are, so that a resumed run shares the program of one begun here.
        self.state, self.moments = jax.device_put((state, jax.jit(self.optimiser.init)(state)), jax.local_devices()[0])
        self.plans: dict[str, dict[str, Array]] = {}
        self.step = 0
        self._jitted = jax.jit(self._update, donate_argnums=(0, 1))
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.checkpoints = ocp.CheckpointManager((folder / "checkpoints").resolve(), options=options)

    def _update(self, state: Any, moments: Any, batch: dict[str, Any], plan: dict[str, Array]) -> Any:
        def loss(state: Any) -> Any:
            return loss_of(nnx.merge(self.graph, state), batch, plan)

        (value, right), gradients = jax.value_and_grad(loss, has_aux=True)(state)
        updates, moments = self.optimiser.update(gradients, moments, state)
        return optax.apply_updates(state, updates), moments, value, right

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
            ahead = pool.submit(draw_batch, self.recipe, self.step)
            bar = tqdm(range(self.step, until), initial=self.step, total=until, unit="step", mininterval=2)
            for step in bar:
                drawn = ahead.result()
                ahead = pool.submit(draw_batch, self.recipe, step + 1)
                if drawn.size not in self.plans:
                    self.plans[drawn.size] = image_plan(drawn, self.config)
                plan = self.plans[drawn.size]
                self.state, self.moments, loss, right = self._jitted(self.state, self.moments, drawn.arrays, plan)
                tally.setdefault("loss", []).append((float(loss), 1.0))
                _count(tally, np.asarray(right), drawn)
                self.step = step + 1

                if self.step % every == 0 or self.step == until:
                    sums = {name: np.sum(pairs, axis=0) for name, pairs in tally.items()}
                    means = {name: round(float(total / max(count, 1.0)), 4) for name, (total, count) in sums.items()}
                    line = {"step": self.step, **means, "seconds": round(time.perf_counter() - began, 1)}
                    curve.write(json.dumps(line) + "\n")
                    curve.flush()
                    bar.set_postfix({kind: f"{line.get(kind, 0.0):.3f}" for kind in ("chain", "aggregate")})
                    tally.clear()

                if self.step % save_every == 0 or self.step == until:
                    self.save()

    def backbone(self) -> ModelBackbone:
        """Makes the trained backbone with the task's image settings and words."""
        tokenizer = make_tokenizer(vocabulary().names)
        parameters = nnx.to_pure_dict(self.state)
        # Every question asks for one word, and nothing is trained to end behind it.
        return ModelBackbone(self.config, parameters, self.images, tokenizer, answer_tokens=1)

    def export(self) -> Path:
        """Saves the trained backbone in DIR/model, beside it how it was trained; returns the directory."""
        root = save(self.backbone(), self.folder / "model", dtype="bfloat16")
        versions = {"jax": jax.__version__, "numpy": np.__version__, "optax": optax.__version__}
        disclosure = {"recipe": dataclasses.asdict(self.recipe), "steps_taken": self.step, "versions": versions}
        (root / "training.json").write_text(json.dumps(disclosure, indent=2) + "\n")
        return root


def _count(tally: Tally, right: np.ndarray, drawn: TrainingBatch) -> None:
    """Adds a step's right answers to the curve, by kind of question, and those of the page alone besides."""
    for number, kind in enumerate(KINDS):
        asked = drawn.asked & (drawn.kinds == number)
        for name, where in ((kind, asked), (f"{kind}, page alone", asked & ~drawn.sees)):
            if where.any():
                tally.setdefault(name, []).append((float(right[where].sum()), float(where.sum())))
