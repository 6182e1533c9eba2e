"""Training: resumes to the bit, refuses a folder of another recipe, draws by seed and step, saves what it trained."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from evals.task.questions import KINDS
from evals.task.recipe import Recipe
from evals.task.trainer import Trainer
from evals.task.training import draw_batch
from evals.task.vocabulary import vocabulary
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import load

RECIPE = Recipe(steps=6, batch=1, tiny=3, small=2)


def curve(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_resumed_training_equals_a_straight_one(tmp_path: Path):
    """Parameters and optimiser state to the bit, over steps of two sizes; what is saved is what was trained."""
    straight = Trainer(RECIPE, tmp_path / "straight")
    straight.train(4, every=2)
    for until in (2, 4):
        resumed = Trainer(RECIPE, tmp_path / "resumed")
        assert resumed.resume() == until - 2
        resumed.train(until)
    for name in ("state", "moments"):
        leaves = (jax.tree.leaves(getattr(trainer, name)) for trainer in (resumed, straight))
        for ours, theirs in zip(*leaves, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert [line["step"] for line in curve(straight.folder)] == [2, 4]

    loaded = load(straight.export(), dtype="float32")
    assert loaded.config.text == straight.config.text
    assert loaded.answer_tokens == 1
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), straight.backbone().parameters)
    for got, expected in zip(jax.tree.leaves(loaded.parameters), jax.tree.leaves(rounded), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("change", [{"seed": 1}, {"window": 0.0}, {"steps": 25}])
def test_another_recipe_is_refused(tmp_path: Path, change: dict[str, float]):
    """A used folder keeps its recipe; the error names the file."""
    (tmp_path / "recipe.json").write_text(json.dumps(dataclasses.asdict(RECIPE), indent=2) + "\n")
    with pytest.raises(ConfigError, match=r"recipe\.json"):
        Trainer(dataclasses.replace(RECIPE, **change), tmp_path)  # type: ignore[arg-type]
    assert json.loads((tmp_path / "recipe.json").read_text()) == dataclasses.asdict(RECIPE)


def test_batches_follow_from_recipe_and_step():
    """The same step draws the same batch; seeds and steps differ; sizes and variety follow the recipe."""
    first = draw_batch(RECIPE, 1)
    jax.tree.map(np.testing.assert_array_equal, draw_batch(RECIPE, 1).arrays, first.arrays)
    # Two lists of a title and three cells, a page of a row of titles and two rows of two cells; four patches a cell.
    assert first.arrays["pixel_values"].shape == (4 * 4 * (2 * 4 + 6), 14 * 14 * 3)
    for other in (draw_batch(RECIPE, 2), draw_batch(dataclasses.replace(RECIPE, seed=1), 1)):
        assert (other.arrays["pixel_values"] != first.arrays["pixel_values"]).any()
    about_sheets = first.kinds == KINDS.index("sheet")
    assert first.sees[:, about_sheets].all()
    assert [Recipe().size(step) for step in (0, 1500, 2000, 2800, 2801, 2803)] == ["tiny", "small", "4", "4", "8", "16"]
    assert [Recipe(plain=10, varied=30).variety(step) for step in (0, 10, 20, 30, 99)] == [0, 0, 0.5, 1, 1]


def test_shares_are_asked_of_letters():
    """`proportions` is about aggregate questions alone, and the answer leads the shares."""
    drawn = draw_batch(dataclasses.replace(RECIPE, tiny=0, small=0), 0)
    aggregate, shares = drawn.kinds == KINDS.index("aggregate"), drawn.arrays["shares"]
    asked = shares.sum(axis=-1) > 0
    assert asked[:, aggregate].any()
    assert not asked[:, ~aggregate].any()
    answers = drawn.arrays["answer"][asked] - vocabulary().first["value"]
    np.testing.assert_array_equal(shares[asked].argmax(axis=-1), answers)


@pytest.mark.nightly
def test_the_program_names_every_choice_and_takes_two_steps(tmp_path: Path):
    """Every field of the recipe is a flag; fewer steps than the warm-up are a training too."""
    program = [sys.executable, "-m", "evals.train"]
    shown = subprocess.run([*program, "--help"], capture_output=True, text=True, check=False).stdout
    assert all(f"--{field.name}:" in shown for field in dataclasses.fields(Recipe))
    run = subprocess.run([*program, "--steps=2", "--batch=1", f"--out={tmp_path}"], capture_output=True, check=False)
    assert run.returncode == 0
    assert json.loads((tmp_path / "model" / "training.json").read_text())["steps_taken"] == 2
