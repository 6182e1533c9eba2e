"""The sheets task on a hybrid: questions as rows of their own, pages with transitions."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvpatch_jax as kvp
from evals import sheets_task
from evals.arms import ReusedPage, arm_makers, make_arms, query_aware_names
from evals.results.costs import stored_bits
from evals.sheets_task import SIZES, VOCABULARY
from evals.sheets_task.hybrid_start import take_weights
from evals.sheets_task.instances import qwen3_5
from evals.sheets_task.reader import PackedReader, class_shares, energy_ranks, move_page
from evals.sheets_task.task_spec import SHEETS
from evals.sheets_task.training import SheetsRecipe, draw_batch, initialise
from evals.small_task.training import image_plan, make_tokenizer, run_branches
from evals.train import Trainer
from evals.trained import SHEETS as TRAINED
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import ConfigError
from models import ModelBackbone, load

SMALLEST = dataclasses.replace(SHEETS, backbones={"qwen3_5": functools.partial(qwen3_5, intermediate=64)})
"""The task on the hybrid with one full layer."""
RECIPE = SheetsRecipe(backbone="qwen3_5", batch=1, page=1, sheet=1, chain=2, override=1, aggregate=1, whole=1, tiny=0)


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    """A hybrid with fresh parameters, whose linear layers add something."""
    config, images = SMALLEST.instance("qwen3_5")
    model = initialise(RECIPE, SMALLEST)
    linear = model.decoder.layers_0.attention
    linear.output.kernel[...] = 0.2 * jax.random.normal(jax.random.key(5), linear.output.kernel.shape)
    return ModelBackbone(config, nnx.to_pure_dict(nnx.state(model)), images, make_tokenizer(VOCABULARY.names))


@pytest.mark.slow
def test_each_question_reads_what_it_would_alone(backbone: ModelBackbone):
    """Packed questions give what each gives as the end of a prompt of its own: of all that is there, or behind the
    page's rows and the page's own transition where the sheets have slid out.
    """
    drawn = draw_batch(RECIPE, 1, SMALLEST)
    batch, config = drawn.batch, backbone.config
    model = nnx.merge(nnx.graphdef(initialise(RECIPE, SMALLEST)), backbone.programs.state)
    found = run_branches(model, jax.tree.map(jnp.asarray, batch), image_plan(drawn, config))
    logits = np.asarray(model.decoder.logits(found))

    prefix = batch["input_ids"].shape[1] - len(batch["rows"])
    front, sheets_seen = prefix - len(batch["page"]), set()
    tokens = backbone.embed(batch["input_ids"], batch["positions"], **drawn.images)
    place = lambda some: kvp.to_engine(backbone.layout, backbone.prefill(some).kv, some.positions, 0)
    for row in range(2):
        own = Tokens(tokens.embeddings[row : row + 1], tokens.positions[row : row + 1])
        there = np.flatnonzero(batch["mask"][row, 0, prefix - 1, :prefix])
        shown = Tokens(own.embeddings[:, there], own.positions[:, there])
        inside = int((there < front).sum())
        before = place(shown.take(0, inside))
        page = shown.take(inside, len(there))
        of_page = kvp.to_engine(backbone.layout, backbone.prefill(page, before).kv, page.positions, 0)
        for question in (*range(0, len(batch["columns"]), 4), len(batch["columns"]) - 1):
            columns = batch["columns"][question]
            columns = prefix + columns[columns >= 0]
            sees = bool(batch["mask"][row, 0, columns[0], :front].any())
            context = kvp.joined(before, of_page) if sees else kvp.joined(of_page)
            asked = Tokens(own.embeddings[:, columns], own.positions[:, columns])
            expected = backbone.prefill(asked, context, logits="all").logits[0]
            np.testing.assert_allclose(logits[row, columns - prefix], expected, atol=2e-3)
            sheets_seen.add(sees)
    assert sheets_seen == {True, False}


@pytest.fixture(scope="module")
def page(backbone: ModelBackbone) -> ReusedPage:
    contexts = sheets_task.sample_contexts(np.random.default_rng(1), 2, SIZES["tiny"])
    return move_page(backbone, contexts, SMALLEST)


@pytest.fixture(scope="module")
def reader(page: ReusedPage) -> PackedReader:
    asked = {"page": 2, "chain": 2, "list": 1}
    return PackedReader("sheets.4", page, sheets_task.ask(page.contexts, np.random.default_rng(2), asked))


@pytest.mark.slow
def test_rows_and_transitions_are_repaired_apart(page: ReusedPage, reader: PackedReader):
    """All patches whole: re-prefill. Rows and transitions alone leave a part of what is lost."""
    truth = reader.read(page.reference)
    whole = page.cache_of_chunks({place: page.patch(64, place) for place in range(1, page.form.chunks)})
    assert np.abs(reader.read(whole).log_probabilities - truth.log_probabilities).max() < 2e-3

    names = ("blind", "patch.rank=64", "patch.rows_only.rank=64", "patch.transition_only.rank=64")
    made = dict(make_arms(page, [*names, "patch.transition_only.whole", "patch.whole_transition.rank=64"]))
    said = {name: reader.read(arm.cache).log_probabilities for name, arm in made.items()}
    apart = {name: np.abs(said[name] - said["patch.rank=64"]).max() for name in said}
    assert min(apart[name] for name in (names[0], names[2], names[3])) > 1e-3
    # 64 directions are all that a map or state of 64 rows has.
    assert apart["patch.whole_transition.rank=64"] < 1e-4
    np.testing.assert_allclose(said["patch.transition_only.whole"], said[names[3]], atol=1e-4)
    rows = [channel.name for channel in page.page.layout.token_channels]
    for name, value in made["patch.rows_only.rank=64"].cache.items():
        same = np.allclose(value, made["blind"].cache[name], atol=1e-6)
        assert same == (name not in rows), name


def test_the_reference_is_one_prefill_of_the_prompt():
    """Chunks prefilled behind one another are the prompt in one forward: rows, and the transition of every layer."""
    trained = load(TRAINED.parent / "sheets_qwen3_5" / "qwen3_5", dtype="float32")
    page = move_page(trained, sheets_task.sample_contexts(np.random.default_rng(1), 2, SIZES["tiny"]))
    expected = kvp.to_engine(trained.layout, trained.prefill(page.tokens).kv, page.tokens.positions, 0)
    assert set(page.reference) == set(expected) == {"k", "v", "map", "state", "tail"}
    for name, value in expected.items():
        np.testing.assert_allclose(page.reference[name], value, atol=2e-4)


@pytest.mark.slow
def test_a_hybrid_runs_first_tokens_or_upper_layers_again(page: ReusedPage):
    """First-k is the page's first tokens behind what is in front, and the rest of the map of the page alone; from a
    layer up, what lies below it stays as it is.
    """
    made = dict(make_arms(page, ["blind", "first_k.budget=0.5", "residual.layer=1", "residual.layer=3"]))
    backbone, layout, slots = page.backbone, page.page.layout, page.slots
    blind, first, count = made["blind"].cache, made["first_k.budget=0.5"], 3
    own = page.tokens.take(slots.start, slots.stop)
    again = kvp.to_engine(layout, backbone.prefill(own, page.context_in_front).kv, own.positions, 0)
    alone = backbone.prefill(page.alone.take(0, count)).kv
    behind = backbone.prefill(own.take(0, count), page.context_in_front).kv
    for name in ("k", "v"):
        rows = np.asarray(first.cache[name])
        np.testing.assert_allclose(rows[:, :, slots][:, :, :count], again[name][:, :, :count], atol=1e-5)
        np.testing.assert_allclose(rows[:, :, slots][:, :, count:], blind[name][:, :, slots][:, :, count:], atol=2e-5)

    # The map of the rest, out of those of the page and of its first tokens: M = M_rest M_first.
    def heads(kv, name):
        return np.moveaxis(np.asarray(kv[name], np.float64), 3, 2)

    canonical, front = page.page.kv, page.context_in_front
    rest_map = heads(canonical, "map") @ np.linalg.inv(heads(alone, "map"))
    rest_state = heads(canonical, "state") - rest_map @ heads(alone, "state")
    state = heads(behind, "map") @ heads(front, "state") + heads(behind, "state")
    np.testing.assert_allclose(heads(first.cache, "state"), rest_map @ state + rest_state, atol=1e-4)

    for layer in (1, 3):
        cache = made[f"residual.layer={layer}"].cache
        for name, value in blind.items():
            for row, at in enumerate(layout.layers_of(name)):
                same = np.allclose(cache[name][row], value[row], atol=1e-6)
                # The last inputs of the convolution at the layer itself are those of the residual, which was kept.
                assert same == (at < layer or (name, at) == ("tail", layer)), (name, at)
    cost = page.costs
    below = 4 * 64 * 64 * 2 + 3 * 768
    assert made["residual.layer=1"].cost.canonical == pytest.approx(below / cost.numbers)
    assert made["residual.layer=3"].cost.canonical == pytest.approx(1 - below / cost.numbers)
    assert first.cost.inputs == count + 3 * below / cost.input_width
    assert first.cost.moved_inputs == count


@pytest.mark.slow
def test_what_arms_of_a_hybrid_cost(page: ReusedPage):
    """Every number of rows and transition counts once; composing is work of placing."""
    costs, linear, full, tokens = page.costs, 3, 1, 6
    rows, map_, state, tail = 2 * 2 * 64 * tokens, 4 * 64 * 64, 4 * 64 * 64, 3 * 768
    assert costs.numbers == full * rows + linear * (map_ + state + tail)
    made = dict(make_arms(page, ["quantised.bits=4", "patch.transition_only.whole", "svd.rank=4"]))
    scales = 32 * (full * 2 * 2 * 64 + linear * 2 * 4 * 64)
    assert made["quantised.bits=4"].cost.stored == (
        4 * (full * rows + linear * (map_ + state)) + 16 * linear * tail + scales
    )
    assert made["patch.transition_only.whole"].cost.stored == 16 * linear * (map_ + state + tail)
    thin = full * 2 * 4 * (tokens + 128) + linear * 2 * 4 * (64 + 256) + linear * 3 * (3 + 768)
    assert made["svd.rank=4"].cost.stored == 16 * thin
    assert stored_bits(page.patch(2)) / 2 == 16 * (
        full * 2 * 2 * (tokens + 128) + linear * 2 * (2 * (64 + 256) + 3 + 768)
    )
    # Three FLOPs for each of 64 numbers of a key that turn; two matrices times M, two FLOPs for each multiplication.
    assert costs.rotation == 3 * full * tokens * 2 * 64 + linear * 4 * 2 * 2 * 64**3
    assert made["patch.transition_only.whole"].cost.serving == costs.rotation + linear * (map_ + state + tail)


def test_arms_that_choose_tokens_to_run_again_are_left_out():
    """A linear layer keeps nothing of one token; what a hybrid adds is asked of rows and transitions apart."""
    layout = SMALLEST.instance("qwen3_5").config.text.layout
    names = set(arm_makers(layout))
    assert not query_aware_names(layout)
    assert not [name for name in names if name.startswith(("oracle_delta", "cacheblend", "random_tokens"))]
    assert {"first_k.budget=0.15", "residual.layer=1"} <= names
    assert {"blind", "patch.map_only.rank=16", "patch.rows_only.rank=16", "patch.transition_only.whole"} <= names


@pytest.mark.slow
def test_shares_and_energies_are_of_rows_and_transitions(page: ReusedPage):
    assert set(next(iter(class_shares(page, SMALLEST).values()))) == {"k", "v"}
    assert {name: ranks.shape for name, ranks in energy_ranks(page).items()}["map"] == (2, 3)


@pytest.mark.parametrize(
    ("backbone", "begin_with", "said"),
    [("qwen2_5_vl", "qwen3_vl", "begin_with: got 'qwen3_vl'"), ("qwen3_5", "nope", "nope")],
)
def test_what_cannot_begin_leaves_no_folder(tmp_path: Path, backbone: str, begin_with: str, said: str):
    """A transformer that is to begin as another, and weights that there are not: the same --out serves what can."""
    with pytest.raises(ConfigError, match=said):
        Trainer(SheetsRecipe(backbone=backbone, begin_with=begin_with), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_hybrid_begins_as_the_transformer_it_takes_weights_of():
    """Logits are the transformer's, without the attention of the layers that are linear and what its tower sends to
    later layers.
    """
    trained = load(TRAINED.with_name("sheets_qwen3_vl") / "qwen3_vl", dtype="float32")
    config, images = qwen3_5()
    model = config.family.module(config, nnx.Rngs(0))
    take_weights(model, config.text, trained.parameters)
    taken = ModelBackbone(config, nnx.to_pure_dict(nnx.state(model)), images, make_tokenizer(VOCABULARY.names))

    parameters = jax.tree.map(np.array, trained.parameters)
    parameters["decoder"]["layers"]["attention"]["output"]["kernel"][[0, 1, 3]] = 0
    parameters["visual"]["deepstack"] = jax.tree.map(np.zeros_like, parameters["visual"]["deepstack"])
    without = ModelBackbone(trained.config, parameters, images, trained.tokenizer)
    contexts = sheets_task.sample_contexts(np.random.default_rng(3), 1, SIZES["tiny"])
    ids, arrays = SHEETS.inputs(config, images, contexts)
    found, wanted = (
        np.asarray(backbone.prefill(backbone.embed(ids, **arrays), logits="all").logits)
        for backbone in (taken, without)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
    assert found.std() > 1
