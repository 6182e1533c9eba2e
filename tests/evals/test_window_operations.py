"""A window's operations on the task: what is placed, what is meant, and what exact patches must give back."""

import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.harness.methods import BLIND, REFERENCE
from evals.task.contexts import SIZES, latest, sample
from evals.trained import ROOT
from evals.windows import operations
from evals.windows.contents import TaskPieces
from evals.windows.operations import OPERATIONS, SLIDE_KINDS, slide_questions
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load

CONTEXTS = 3
HYBRID, TRANSFORMER = "plain/qwen3_5", "documents/qwen2_5_vl"


def tiny_images(instance: str) -> TaskPieces:
    """Loads tiny contexts' images on an instance that ships."""
    drawing = "documents" if instance.startswith("documents") else "plain"
    contexts = sample(np.random.default_rng(3), CONTEXTS, SIZES["tiny"], drawing=drawing)
    return TaskPieces.of(load(ROOT / instance, dtype="float32"), contexts, np.arange(CONTEXTS))


@pytest.fixture(scope="module")
def hybrid() -> TaskPieces:
    return tiny_images(HYBRID)


@pytest.fixture(scope="module")
def transformer() -> TaskPieces:
    return tiny_images(TRANSFORMER)


@pytest.mark.nightly
def test_pieces_one_by_one_are_one_prompt(hybrid: TaskPieces):
    """KV of pieces prefilled behind one another, joined at their places, is what one forward over all leaves."""
    line = hybrid.line(*hybrid.sheets, hybrid.page)
    parts = line.conditioned()
    joined = kvp.joined(*line.placed(parts))

    tokens = [piece.tokens.shift(start) for piece, start in zip(line.pieces, line.starts, strict=True)]
    whole = jax.tree.map(lambda *columns: np.concatenate(columns, axis=1), *tokens)
    expected = kvp.to_engine(hybrid.backbone.layout, hybrid.backbone.prefill(whole).kv, whole.positions, 0)
    assert set(joined) == set(expected) == {"k", "v", "map", "state", "tail"}
    for name, value in expected.items():
        np.testing.assert_allclose(joined[name], value, atol=2e-4)

    # The page prefilled behind sheets that are kept is the same once more.
    front = hybrid.line(*hybrid.sheets)
    for name, value in front.behind(front.placed(parts[:-1]), hybrid.page).items():
        np.testing.assert_allclose(value, parts[-1][name], atol=2e-4)


def divergences(images: TaskPieces, operation: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields an operation's settings with every arm's KL of each question that counts."""
    for measured in OPERATIONS[operation](images, np.random.default_rng(1)):
        valid, reference = measured.questions.valid, measured.answers[REFERENCE]
        assert valid.any()
        yield measured.probe, {arm: said.divergence_from(reference)[valid] for arm, said in measured.answers.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("operation", ["reorder", "slide", "recall"])
@pytest.mark.parametrize("instance", ["hybrid", "transformer"])
def test_patches_of_full_rank_give_re_prefill_back(instance: str, operation: str, request: pytest.FixtureRequest):
    """Tiny images have fewer tokens than a patch has directions: the context's own patch leaves no difference."""
    images, settings = request.getfixturevalue(instance), 0
    for probe, kl in divergences(images, operation):
        settings += 1
        assert ("orbit, rows" in kl) == (instance == "hybrid" and operation == "reorder")
        # In a reordered window sheets are canonicals, and behind a turnover they remember what left.
        if operation == "slide" or probe == "recall.turnover=0":
            assert kl["own"].max() < 1e-4 < kl[BLIND].max()
        assert kl["own"].mean() < kl[BLIND].mean()
        if operation == "recall":
            np.testing.assert_allclose(kl["updated"], kl["fresh"], atol=1e-4)
        if probe == "recall.turnover=0":
            np.testing.assert_array_equal(kl["stale"], kl["fresh"])
    assert settings == {"reorder": 2, "slide": 1, "recall": 3}[operation]


@pytest.mark.nightly
def test_a_hybrid_needs_both_parts_and_a_transformer_has_one(hybrid: TaskPieces, transformer: TaskPieces):
    """Rows and transition mended apart leave a part of what blind reuse loses, both together nothing."""
    ((_, kl),) = divergences(hybrid, "parts")
    both = kl["rows.rank=16, transition.whole"]
    np.testing.assert_allclose(both, kl["patch.rank=32"], atol=1e-3)
    for part in ("rows.rank=32", "transition.whole"):
        assert both.mean() < kl[part].mean()
    with pytest.raises(InputError, match="got a transformer; expected a hybrid"):
        list(operations.measure_parts(transformer, np.random.default_rng(0)))


def test_meaning_follows_the_sheets():
    """Reordered and foreign sheets define what the sheets that stand there do, the last one counting."""
    contexts = sample(np.random.default_rng(0), 4, SIZES["4"])
    order, replaced = np.array([2, 0, 1]), np.array([False, True, False])
    sources = {
        "reordered": (operations.reordered(contexts, order), [(0, 2), (0, 0), (0, 1)]),
        "foreign": (operations.with_foreign(contexts, replaced), [(0, 0), (1, 1), (0, 2)]),
    }
    for changed, standing in sources.values():
        value, unit, times = latest(changed)
        for row in range(4):
            known: dict[int, tuple[int, int, int]] = {}
            for by, sheet in standing:
                source = (row + by) % 4
                columns = (contexts.sheet_item, contexts.sheet_value, contexts.sheet_unit)
                for item, *meaning in zip(*(column[source, sheet].tolist() for column in columns), strict=True):
                    known[item] = (meaning[0], meaning[1], known.get(item, (0, 0, 0))[2] + 1)
            for item in range(value.shape[1]):
                expected = known.get(item, (-1, -1, 0))
                assert (value[row, item], unit[row, item], times[row, item]) == expected
        np.testing.assert_array_equal(changed.page_item, contexts.page_item)


@pytest.mark.parametrize("gone", [1, 2])
def test_questions_after_a_slide_are_sorted_by_what_they_need(gone: int):
    """Survivors are answered by the sheets that stayed, evicted facts by none of them."""
    contexts = sample(np.random.default_rng(5), 16, SIZES["4"])
    questions, kinds = slide_questions(contexts, np.random.default_rng(6), gone)
    stays = np.broadcast_to(np.arange(3) >= gone, (16, 3))
    known = np.take_along_axis(latest(contexts, stays)[2], contexts.page_item, axis=1) > 0
    valid = np.stack([(questions.answer[:, columns] >= 0).any(axis=1) for columns in questions.columns()], axis=1)
    counts = dict.fromkeys(SLIDE_KINDS, 0)
    for row, question in itertools.product(range(16), range(len(kinds))):
        kind = SLIDE_KINDS[kinds[question]]
        if valid[row, question]:
            counts[kind] += 1
            if kind in ("survivor", "evicted"):
                assert known[row, questions.cell[row, question]] == (kind == "survivor")
    assert all(counts.values())
