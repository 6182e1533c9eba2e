"""Arms that could win: each does what its name says, and a choice by the question is a true recompute."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals import small_task
from evals.arms import ReusedPage, make_query_aware, query_aware_names
from evals.arms.class_mean import class_means, explained, page_classes
from evals.arms.conditioned_kv import in_few_bits
from evals.arms.patches import project_in_halves
from evals.rules import RULES
from evals.small_task import KINDS, scenes
from evals.small_task.reader import SceneReader
from evals.trained import MAIN, shipped
from kvpatch_jax.repair import repair_everywhere
from models import load

CONTEXTS = 4


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> SceneReader:
    backbone = load(shipped(MAIN), dtype="float32")
    folder: Path = tmp_path_factory.mktemp("arms")
    scene, _ = scenes.scene_at(backbone, 78, 0, folder, CONTEXTS)
    return SceneReader(scene, small_task.ask(scene.contexts, np.random.default_rng(5), dict(RULES.questions)))


@pytest.mark.slow
def test_chosen_tokens_are_recomputed_in_context(reader: SceneReader):
    """Where every question chooses the same tokens, it reads what a repair of these tokens leaves in the cache."""
    page = reader.page
    index = np.sort(np.random.default_rng(0).permutation(page.page.tokens)[:5])[None].repeat(CONTEXTS, 0)
    repaired = repair_everywhere(page.backbone, page.splice(), jnp.asarray(index)).cache
    expected = np.exp(reader.read(dict(repaired)).log_probabilities)

    chosen = np.repeat(index[:, None], reader.questions.answer.shape[1], axis=1)
    found = np.exp(reader.read_recomputed(None, page.cache(), chosen))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    blind = np.exp(reader.read(page.cache()).log_probabilities)
    assert np.abs(blind - expected).max() > 0.1


@pytest.mark.slow
def test_a_question_attends_to_the_cell_that_it_asks_for(reader: SceneReader):
    """Probabilities; at the layers of the rules most questions about a cell look at that cell most, out of 102."""
    page, questions = reader.page, reader.questions
    found = reader.attention(None, page.cache())
    depth = len(found)
    assert found.shape == (depth, CONTEXTS, questions.answer.shape[1], page.page.tokens)
    assert found.min() >= 0
    assert found.sum(axis=-1).max() <= 2 + 1e-5
    first, last = (round(share * depth) for share in RULES.arms.query_layers)
    top = found[first : last + 1].sum(axis=0).argmax(axis=-1)
    asked = questions.valid & np.isin(questions.kind, [KINDS.index("page"), KINDS.index("chain")])
    inside = page.form.cells(small_task.LEGENDS).start - page.slots.start
    cell = inside + questions.row * (small_task.CELLS + 1) + 1 + questions.cell
    assert (top == cell)[asked].mean() > 0.5


@pytest.mark.slow
def test_what_choosing_by_the_question_costs(reader: SceneReader):
    """Nothing stored, every question pays again, more tokens cost more; what is not wanted is not made."""
    names = [*query_aware_names(reader.page.page.layout)[:2], "prcr.budget=0.15"]
    made = {arm.name: arm for arm in make_query_aware(reader, names)}
    assert list(made) == names
    shares = {name: reader.page.costs.shares(arm.cost) for name, arm in made.items()}
    assert all(share["stored_bytes"] == 0 for share in shares.values())
    one, five, none = shares.values()
    assert 0 < none["question_flops"] < one["question_flops"] < five["question_flops"] < 0.2
    assert one["serving_flops"] > one["question_flops"] > 1 / reader.page.page.tokens
    right = made[names[0]].answers.predicted == reader.questions.answer
    assert right.shape == reader.questions.valid.shape


@pytest.mark.slow
def test_a_class_mean_is_the_mean_of_its_tokens(reader: SceneReader):
    """Every token has the mean of its page's tokens that show the same, summed one by one."""
    page: ReusedPage = reader.page
    classes, means, delta = page_classes(page), class_means(page)["v"], np.asarray(page.delta["v"])
    glyphs = page.contexts.page_glyph
    first = page.form.cells(small_task.LEGENDS).start - page.slots.start
    for context, row, cell in ((0, 0, 0), (1, 9, 8), (3, 4, 2)):
        same = [
            first + r * (small_task.CELLS + 1) + 1 + c
            for r, c in np.argwhere(glyphs[context] == glyphs[context, row, cell])
        ]
        token = first + row * (small_task.CELLS + 1) + 1 + cell
        assert set(np.flatnonzero(classes[context] == classes[context, token])) == set(same)
        np.testing.assert_allclose(means[:, context, token], delta[:, context, same].mean(axis=1), atol=1e-5)
    share = np.asarray(explained(page.delta, class_means(page))["v"])
    assert share.shape == (CONTEXTS, delta.shape[0])
    assert (share[:, -1] > 0.5).all()
    assert (share[:, 1:] <= 1).all()


@pytest.mark.parametrize("bits", [2, 8])
def test_few_bits_are_within_half_a_step(bits: int):
    """As many levels as there are, each within half a step; a feature that is constant stays."""
    value = np.random.default_rng(1).normal(size=(2, 1, 40, 2, 3)).astype(np.float32)
    value[0, 0, :, 1, 2] = 0.75
    found = np.asarray(in_few_bits(jnp.asarray(value), bits))
    assert len(np.unique(found[1, 0, :, 0, 0])) <= 2**bits
    step = (value.max(axis=2) - value.min(axis=2)) / (2**bits - 1)
    # Scale and least value are kept in 16 bits: 2^-8 of their size.
    room = 0.5 * step + 2**-8 * (np.abs(value.min(axis=2)) + 2**bits * step) + 1e-6
    assert (np.abs(found - value).max(axis=2) <= room).all()
    np.testing.assert_allclose(found[0, 0, :, 1, 2], 0.75)


def test_a_pooled_basis_is_of_the_other_half():
    """Even contexts are projected on what the odd ones gave, and the reverse."""
    delta = jnp.ones((1, 4, 3, 1, 2), jnp.float32)
    along = lambda axis: jnp.asarray(np.eye(2, dtype=np.float32)[None, axis : axis + 1])
    found = np.asarray(project_in_halves(delta, odd=along(0), even=along(1)))
    assert (found[0, ::2, :, 0] == [1, 0]).all()
    assert (found[0, 1::2, :, 0] == [0, 1]).all()
    assert isinstance(delta, jax.Array)
