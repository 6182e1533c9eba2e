"""Train a small backbone on the documents drawing: `python -m evals.train --backbone=qwen2_5_vl --out=DIR`.

Every choice is a field of `evals.task.recipe.Recipe`, a flag here, and is written beside the weights. Interrupted runs
resume from the newest Orbax checkpoint in DIR/checkpoints. Leaves DIR/model (a Hugging Face directory) and
DIR/curve.jsonl.
"""

import dataclasses
from pathlib import Path
from typing import Any

from .harness import program


def main() -> None:
    """Trains, and saves the Hugging Face directory."""
    from absl import flags

    from .task.recipe import Recipe
    from .task.trainer import Trainer

    values: Any = flags.FLAGS
    recipe = Recipe(**{field.name: values[field.name].value for field in dataclasses.fields(Recipe)})
    trainer = Trainer(recipe, Path(values.out))
    began = trainer.resume()
    print(f"training from step {began} to {recipe.steps}; {trainer.folder}")
    trainer.train(recipe.steps)
    print(f"model in {trainer.export()}; curve in {trainer.folder / 'curve.jsonl'}")


def define_flags() -> None:
    """Defines --out and one flag per field of the recipe. Importing this module leaves absl's flags alone."""
    from absl import flags

    from .task.recipe import Recipe

    flags.DEFINE_string("out", "out/train", "folder for checkpoints, curve and the model; a used one resumes")
    define: dict[str, Any] = {"str": flags.DEFINE_string, "int": flags.DEFINE_integer, "float": flags.DEFINE_float}
    for field in dataclasses.fields(Recipe):
        define[type(field.default).__name__](field.name, field.default, field.metadata["help"])


if __name__ == "__main__":
    define_flags()
    program.start(main, "evals.train: drawing the first parameters")
