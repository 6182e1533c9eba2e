"""The training program: learns, resumes to the bit, refuses a folder of another recipe, saves what it trained."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from evals import small_task
from evals.small_task.instances import INSTANCES, instance
from evals.small_task.training import AUXILIARY, SmallTaskRecipe, draw_batch, initialise
from evals.train import Trainer, draw_curve
from kvpatch_jax.errors import ConfigError
from models import load, save
from models.checkpoints import flatten_params
from models.families.family import abstract, parameters

STEPS = 8
RECIPE = SmallTaskRecipe(
    steps=24, batch=2, warmup=3, learning_rate=3e-3, page=1, legend=1, chain=2, aggregate=1, override=1
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Eight steps without interruption."""
    trainer = Trainer(RECIPE, tmp_path_factory.mktemp("straight"))
    trainer.train(STEPS, every=1, save_every=100)
    return trainer


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """As many steps by its checkpoint, which holds drawn numbers in every parameter and moment: nothing is compiled."""
    trainer = Trainer(RECIPE, tmp_path_factory.mktemp("kept"))
    rng = np.random.default_rng(0)

    def drawn(leaf: jax.Array) -> jax.Array:
        return jax.device_put((10 * rng.standard_normal(leaf.shape)).astype(leaf.dtype), leaf.sharding)

    trainer.state, trainer.moments = jax.tree.map(drawn, (trainer.state, trainer.moments))
    trainer.step = STEPS
    trainer.save()
    return trainer


def curve(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_loss_falls(straight: Trainer, tmp_path: Path):
    """On the first step's own batch, the questions' loss and the mean auxiliary one are lower after training."""
    lines = curve(straight.folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(np.isfinite(list(line.values())).all() for line in lines)
    names = [f"{layer}.{label}" for layer, label, *_ in AUXILIARY]
    assert set(lines[0]) == {"step", "seconds", "loss", *names, *small_task.KINDS}
    again = Trainer(RECIPE, tmp_path)  # which asks the first step's batch of what was trained
    copied = jax.tree.map(np.array, (straight.state, straight.moments))
    again.state, again.moments = jax.device_put(copied, jax.local_devices()[0])
    again.train(1, every=1, save_every=100)
    [after] = curve(tmp_path)
    mean = lambda parts: float(np.mean([float(parts[name]) for name in names]))
    assert float(after["loss"]) < lines[0]["loss"] - 0.8
    assert mean(after) < mean(lines[0]) - 0.5


@pytest.mark.slow
def test_gradients_reach_every_parameter(straight: Trainer):
    """Adam's running mean of squared gradients: finite everywhere, and not zero in any parameter."""
    adam = next(part for part in jax.tree.leaves(straight.moments, is_leaf=is_adam) if is_adam(part))
    squares = flatten_params(jax.tree.map(np.asarray, dict(adam.nu)))
    assert len(squares) == len(jax.tree.leaves(straight.state)) > 20
    for path, value in squares.items():
        assert np.isfinite(value).all(), path
        assert value.max() > 0, path


def is_adam(part: object) -> bool:
    return hasattr(part, "nu")


def test_a_checkpoint_is_taken_up_to_the_bit(kept: Trainer):
    """Parameters, optimiser state and step, by another Trainer: what a step makes of them follows from its number."""
    again = Trainer(RECIPE, kept.folder)
    assert again.step == 0
    assert again.resume() == again.step == STEPS
    for name in ("state", "moments"):
        got, expected = (jax.tree.leaves(getattr(trainer, name)) for trainer in (again, kept))
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.slow
def test_resumed_equals_straight(straight: Trainer, tmp_path: Path):
    """Stopped at step 3 and taken up by another Trainer: parameters and optimiser state equal to the bit."""
    first = Trainer(RECIPE, tmp_path)
    assert first.resume() == 0
    first.train(3, every=3, save_every=100)
    second = Trainer(RECIPE, tmp_path)
    assert second.resume() == 3
    second.train(STEPS, every=STEPS, save_every=100)
    assert second.step == straight.step == STEPS
    for name in ("state", "moments"):
        got, expected = (jax.tree.leaves(getattr(trainer, name)) for trainer in (second, straight))
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert [line["step"] for line in curve(tmp_path)] == [3, STEPS]
    assert draw_curve(tmp_path).stat().st_size > 10_000


@pytest.mark.parametrize("change", [{"seed": 1}, {"window": 0.0}, {"steps": 25}])
def test_another_recipe_is_refused(kept: Trainer, change: dict[str, float]):
    """A used folder keeps its recipe; the error names the file."""
    before = (kept.folder / "recipe.json").read_text()
    with pytest.raises(ConfigError, match=r"recipe\.json"):
        Trainer(dataclasses.replace(RECIPE, **change), kept.folder)  # type: ignore[arg-type]
    assert (kept.folder / "recipe.json").read_text() == before
    assert json.loads(before) == dataclasses.asdict(RECIPE)


def test_batches_follow_from_seed_and_step():
    """The same step draws the same batch, whichever was drawn before; seeds, steps and splits differ."""
    whole = lambda drawn: jax.tree.leaves(drawn)
    first = draw_batch(RECIPE, 7)
    draw_batch(RECIPE, 8)
    for got, expected in zip(whole(draw_batch(RECIPE, 7)), whole(first), strict=True):
        np.testing.assert_array_equal(got, expected)
    others = [draw_batch(RECIPE, 8), draw_batch(dataclasses.replace(RECIPE, seed=1), 7), draw_batch(RECIPE, 7, "eval")]
    for other in others:
        assert (other.batch["pixel_values"] != first.batch["pixel_values"]).any()


@pytest.mark.slow
def test_saved_directory_gives_the_same_logits(straight: Trainer, tmp_path: Path):
    """Saved in bf16 and loaded: to the bit the trained parameters rounded to bf16, close to the unrounded ones."""
    backbone = straight.backbone()
    directory = save(backbone, tmp_path / "model", dtype="bfloat16")
    loaded = load(directory, dtype="float32")
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), backbone.parameters)
    for got, expected in zip(jax.tree.leaves(loaded.parameters), jax.tree.leaves(rounded), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    assert loaded.config == instance(RECIPE.backbone).config
    assert loaded.image_config == backbone.image_config
    contexts = small_task.sample_contexts(np.random.default_rng(0), 1)
    legends, pages = small_task.render(contexts)
    items = [*legends[0], pages[0], "glyph? r0t0"]
    ours, theirs, near = (
        np.asarray(each.prefill(each.embed(**each.prepare(items)), logits="all").logits)
        for each in (backbone.replaced(rounded), loaded, backbone)
    )
    np.testing.assert_array_equal(theirs, ours)
    assert np.abs(theirs - near).max() < 2**-5 * np.abs(near).max()
    assert np.abs(near).max() > 0.1


@pytest.mark.parametrize("name", INSTANCES)
def test_small_backbones_are_small(name: str):
    """One to two million parameters: under 4 MB in bf16."""
    sizes = [leaf.size for leaf in jax.tree.leaves(parameters(abstract(instance(name).config)))]
    assert 1_000_000 < sum(sizes) < 1_900_000


def test_an_unknown_backbone_is_refused():
    """The error names it and the known ones."""
    with pytest.raises(ConfigError, match="nowhere") as found:
        instance("nowhere")
    assert all(name in str(found.value) for name in INSTANCES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.slow) for name in INSTANCES],
)
def test_tied_queries_meet_their_own_keys(name: str):
    """With the tied start each token's score against itself is above the mean over other tokens, in every layer."""
    config = instance(name).config
    model = initialise(SmallTaskRecipe(backbone=name))
    x = jax.random.normal(jax.random.key(0), (1, 64, config.text.width))
    for stack in (model.decoder.dense_layers, model.decoder.layers):
        if stack is None:
            continue
        graph, state = nnx.split(stack.attention)
        first = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
        query, kv = first.project(x)
        query = jnp.concatenate([query[name] for name in sorted(query)], axis=-1)[0]
        keys = jnp.concatenate([kv[name] for name in ("ckv", "kpe") if name in kv] or [kv["k"]], axis=-1)[0]
        scores = jnp.einsum("TNH,SNH->NTS", query, jnp.repeat(keys, query.shape[1] // keys.shape[1], axis=1))
        own = jnp.diagonal(scores, axis1=1, axis2=2).mean()
        assert own > scores.mean() + 3 * scores.std()


@pytest.mark.slow
def test_help_names_every_choice():
    """Every field of the recipe is a flag."""
    done = subprocess.run([sys.executable, "-m", "evals.train", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1)
    for field in dataclasses.fields(SmallTaskRecipe):
        assert f"--{'[no]' if field.type in (bool, 'bool') else ''}{field.name}:" in done.stdout


@pytest.mark.slow
def test_training_reads_the_page(tmp_path: Path):
    """A hundred and twenty steps of the shipped recipe's batch: cells' glyphs and frames are read off the image."""
    trainer = Trainer(dataclasses.replace(SmallTaskRecipe(), steps=120), tmp_path)
    trainer.train(120, every=20, save_every=1000)
    last = curve(tmp_path)[-1]
    assert last["0.seen"] < 0.7
    assert last["0.tag"] < 0.3
