"""Contexts follow from seed and number; answers follow from the images shown; a training resumes to the bit."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from evals.harness import config
from evals.harness.methods import parse
from evals.task import faces
from evals.task.contexts import SIZES, sample
from evals.task.dataset import DOCUMENTS, TaskBatch
from evals.task.drawing import images_of
from evals.task.instances import INSTANCES, instance
from evals.task.layout import prefix_of
from evals.task.preparation import NUMBER, prepared
from evals.task.questions import KINDS, ask
from evals.task.reading import place
from evals.task.recipe import Recipe
from evals.task.trainer import Trainer
from evals.task.training import draw_batch
from evals.task.vocabulary import CODE_NAMES, UNIT_NAMES, VALUE_NAMES, make_tokenizer, vocabulary
from evals.trained import shipped, shipped_names
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.models import ModelBackbone, load

COUNTS = {"page": 3, "sheet": 2, "chain": 4, "override": 2, "aggregate": 2, "list": 1}
RECIPE = Recipe(steps=6, batch=1, tiny=3, small=2)


@pytest.mark.parametrize("kind", ["documents", "plain"])
def test_a_context_is_drawn_alike_alone_and_in_a_batch(kind: str):
    """Pixels depend on the context's own meaning; with unseen faces nothing but the faces changes."""
    contexts = sample(np.random.default_rng(6), 3, SIZES["small"], drawing=kind)
    alone = images_of(contexts.take(np.array([2])))
    for image, expected in zip(alone, images_of(contexts)[2 * len(alone) :], strict=True):
        np.testing.assert_array_equal(image, expected)
    if kind == "documents":
        others = sample(np.random.default_rng(6), 3, SIZES["small"], unseen=True)
        np.testing.assert_array_equal(others.page_item, contexts.page_item)
        assert (contexts.face < len(faces.SEEN)).all()
        assert (others.face >= len(faces.SEEN)).all()


@pytest.mark.parametrize("kind", ["documents", "plain"])
def test_answers_follow_from_the_sheets_shown(kind: str):
    """Each question as words; its answer looked up by a reader of names, the later sheet counting."""
    rng = np.random.default_rng(7)
    contexts, shown = sample(rng, 6, drawing=kind), np.ones((6, 3), bool)
    shown[0, 1] = False
    questions, words = ask(contexts, rng, COUNTS, shown), vocabulary(kind)
    seen = set()
    for index in range(6):
        document, known, items = int(contexts.document[index]), {}, {}
        naming = words.names[words.first["item"] + 72 * document :][:72]
        for sheet in np.flatnonzero(shown[index]):
            columns = (contexts.sheet_item, contexts.sheet_value, contexts.sheet_unit)
            for item, value, unit in zip(*(column[index, sheet] for column in columns), strict=True):
                known[naming[item]] = VALUE_NAMES[value], UNIT_NAMES[unit]
        for code, item in zip(contexts.page_code[index], contexts.page_item[index], strict=True):
            items[CODE_NAMES[code]] = naming[item]
        for number, columns in enumerate(questions.columns()):
            asked = [words.names[token] for token in questions.ids[index, columns]]
            answers = [words.names[token] for token in questions.answer[index, columns] if token >= 0]
            if not answers:
                continue
            seen.add(KINDS[questions.kind[number]])
            match asked:
                case ["first" | "second" as part, code] if kind == "plain":
                    _, *marks = items[code].split("-")
                    name = f"row-{marks[0]}" if part == "first" else f"column-{marks[1]}"
                    assert answers == [name]
                case ["first", code]:
                    item = items[code]
                    assert answers == [(f"{item[0]}-", item.split("/")[0], f"{item.split('-')[0]}-icon")[document]]
                case ["second", code]:
                    item = items[code]
                    names = (f"-{item[1]}-", f"{item.split('/')[-1]}-edged", f"{item.split('-')[-1]}-icon")
                    assert answers == [names[document]]
                case ["letter" | "digit" as part, item]:
                    (code,) = (code for code, there in items.items() if there == item)
                    assert answers == [code[0] if part == "letter" else f"#{code[1]}"]
                case ["value" | "unit" as part, about]:
                    assert answers == [known[items.get(about, about)][part == "unit"]]
                case ["most", letter]:
                    values = Counter(known[item][0] for code, item in items.items() if code[0] == letter)
                    (leader, most), (_, next_most), *_ = values.most_common()
                    assert answers == [leader]
                    assert most - next_most >= 2
                case ["values", *codes]:
                    assert answers == [known[items[code]][0] for code in codes[::2]]
                    assert codes[1::2] == answers[:-1]
    assert seen == set(KINDS)


@pytest.mark.parametrize("name", INSTANCES)
def test_a_prefix_is_what_the_family_makes_of_the_images(name: str):
    """Ids and positions of a context equal those that `prepare` makes of its images."""
    contexts = sample(np.random.default_rng(1), 1, SIZES["tiny"])
    config, images = instance(name)
    model = ModelBackbone(config, {}, images, make_tokenizer(vocabulary().names))
    prepared, prefix = model.prepare(list(images_of(contexts))), prefix_of(config, images, contexts.size)
    np.testing.assert_array_equal(prepared["input_ids"][0], prefix.ids)
    positions, _ = prefix.positions(np.ones((1, 3), bool), np.zeros(1, int))
    np.testing.assert_array_equal(prepared["position_ids"][0], positions[0])


def fresh(name: str) -> ModelBackbone:
    """A small backbone with drawn parameters."""
    config, images = instance(name)
    return ModelBackbone(config, nnx.to_pure_dict(nnx.state(config.family.module(config, nnx.Rngs(0)))), images)


def test_rows_of_questions_read_what_packed_questions_do():
    """A whole patch gives back re-prefill though all moved; a row per question answers as the packed ones."""
    rng, backbone = np.random.default_rng(2), fresh("qwen2_5_vl")
    contexts = sample(rng, 2, SIZES["tiny"])
    batch = TaskBatch(backbone, contexts, ask(contexts, rng, {"page": 1, "chain": 2, "list": 1}))
    conditioned = place(backbone.layout, batch.prefix, (*batch.alone[:-1], batch.conditioned[-1]), 37)
    for channel, value in batch.reference.items():
        np.testing.assert_array_equal(conditioned[channel][:, :, batch.prefix.page], value[:, :, batch.prefix.page])
    packed, asked = batch.read(batch.reference), batch.asked()
    rows = {channel: np.repeat(value, 4, axis=1) for channel, value in batch.reference.items()}
    single = batch.read_asked(parse("blind").repair(backbone, asked.replace(cache=rows)))
    np.testing.assert_allclose(single.log_probabilities, packed.log_probabilities, atol=1e-4)
    assert asked.question is not None
    assert asked.question.embeddings.shape[:2] == (8, 2)
    assert float(packed.divergence_from(packed).max()) == 0


def test_batches_are_numbered_and_settings_are_fitted_on_none_that_is_measured():
    """The same number is the same batch; a model without the task's words is refused by name."""
    backbone = fresh("qwen2_5_vl")
    with pytest.raises(InputError, match="words"):
        DOCUMENTS.batch(backbone, "4", 0, 1, 0)
    backbone.tokenizer = make_tokenizer(vocabulary().names)
    first, again, other = (DOCUMENTS.batch(backbone, "4", number, 2, 0) for number in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first.splice.cache, again.splice.cache)
    assert not set(first.clusters) & set(other.clusters)
    assert (first.contexts.page_item != other.contexts.page_item).any()

    drawn = []

    def draw(*batch: int) -> Any:
        drawn.append(batch)
        return first

    assert set(prepared(draw, backbone, ("blind", "pooled.rank=8"))) == {"pooled"}
    ((number, _),) = drawn
    runs = [config.read_config(name, variants=["all"]) for name in config.names()]
    assert number == NUMBER > max(data.n for run in runs for data in run.complete_data)


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
    lines = (straight.folder / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]

    loaded = load(straight.export(), dtype="float32")
    assert loaded.config.text == straight.config.text
    assert loaded.answer_tokens == 1
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), straight.backbone().parameters)
    for got, expected in zip(jax.tree.leaves(loaded.parameters), jax.tree.leaves(rounded), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_another_recipe_is_refused(tmp_path: Path):
    """A used folder keeps its recipe; the error names the file."""
    (tmp_path / "recipe.json").write_text(json.dumps(dataclasses.asdict(RECIPE), indent=2) + "\n")
    with pytest.raises(ConfigError, match=r"recipe\.json"):
        Trainer(dataclasses.replace(RECIPE, window=0.0), tmp_path)
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


def test_shipped_directories_are_small_and_disclose_their_training():
    """At most 4 MB each and 25 MB together, in bf16, found by name or path, no other training than the name says."""
    total = 0
    for name in shipped_names():
        root = shipped(name)
        assert root == shipped(str(root))
        size = sum(path.stat().st_size for path in root.iterdir())
        assert size <= 4_000_000
        total += size
        training = json.loads((root / "training.json").read_text())
        backbone, _, seed = root.name.removesuffix("_no_window").partition("_seed")
        assert training["recipe"]["seed"] == int(seed or 0)
        assert training["recipe"].get("backbone", "qwen2_5_vl") == backbone
        assert (training["recipe"]["window"] == 0) == ("no_window" in name)
        assert training["steps_taken"] == training["recipe"]["steps"]
        # Rates of linear attention and corrections of routers, a number a head or an expert, are kept in float32.
        tensors = load_file(root / "model.safetensors").values()
        assert {str(tensor.dtype) for tensor in tensors if tensor.size > 64} == {"bfloat16"}
        assert all(np.isfinite(tensor.astype(np.float32)).all() for tensor in tensors)
    assert 5_000_000 < total <= 25_000_000
    with pytest.raises(InputError, match="plain/qwen3_5"):
        shipped("nowhere")
