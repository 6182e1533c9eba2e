"""A window loses nothing where its KV is what a re-prefill computes, and what it loses elsewhere is measured."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from evals.harness.lines import text_piece
from evals.harness.methods import BLIND, REFERENCE
from evals.harness.orders import orders_of
from evals.loops.costs import PrefixCache
from evals.task.contexts import SIZES, latest, sample
from evals.task.questions import ask
from evals.trained import MAIN, shipped
from evals.windows import operations, visits
from evals.windows.contents import TaskPieces, TaskTail
from evals.windows.operations import OPERATIONS
from evals.windows.tolerance import MENDED, SUM, History, ReusedChunk, histories, measure_tolerance
from evals.windows.visits import PIECES, PLACEHOLDER_TOKENS, Visit, counted_work, draw_visits
from kvpatch_jax.models import load

COUNT = 4


def tiny_images(instance: str) -> TaskPieces:
    """Loads tiny contexts' images on an instance that ships."""
    drawing = "documents" if instance.startswith("documents") else "plain"
    contexts = sample(np.random.default_rng(1), COUNT, SIZES["tiny"], drawing=drawing)
    return TaskPieces.of(load(shipped(instance), dtype="float32"), contexts, np.arange(COUNT))


@pytest.fixture(scope="module")
def hybrid() -> TaskPieces:
    return tiny_images("plain/qwen3_5")


@pytest.fixture(scope="module")
def transformer() -> TaskPieces:
    return tiny_images(MAIN)


def letters(history: History) -> str:
    """Writes a history as letters: capitals of its own context, small ones of another's."""
    return "".join("abcdefgh"[piece.place] if piece.other else "ABCDEFGH"[piece.place] for piece in history)


def test_histories_differ_from_the_truth_in_what_their_names_say():
    behind_four = histories(4)
    assert behind_four[BLIND] is None
    written = {arm: letters(history) for arm, history in behind_four.items() if history is not None}
    assert written == {
        REFERENCE: "ABCD",
        "far differ": "abcD",
        "farthest differs": "aBCD",
        "far missing": "D",
        "far moved": "BCAD",
        "nearest differs": "ABCd",
        "nearest missing": "ABC",
        "all differ": "abcd",
        "the lead alone": "",
        "all canonical": "ABCD",
        "all patched": "ABCD",
    }
    # Behind two pieces the farthest is all that is far, and cannot move.
    assert set(written) - set(histories(2)) == {"farthest differs", "far moved"}
    for count in (2, 3, 8):
        assert len(histories(count)) == len(set(histories(count).values()))


def test_kv_behind_the_true_history_loses_nothing(transformer: TaskPieces):
    """Two sheets and a page of four cells: patches have all directions, and mend what another history lacks."""
    images, rng = transformer, np.random.default_rng(1)
    asked = ask(sample(rng, COUNT, SIZES["tiny"]), rng, {"chain": 6})
    tail, lead = (
        TaskTail(images.prefix, asked, np.zeros(6, int)),
        text_piece(images.backbone, np.full((COUNT, 3), 30), "lead"),
    )
    chunk = ReusedChunk(images.backbone, lead, images.sheets, images.page, tail, images.clusters)
    measured = measure_tolerance(chunk, "documents.front=2")
    valid, reference = measured.questions.valid, measured.answers[REFERENCE]
    kl = {arm: answers.divergence_from(reference)[valid].max() for arm, answers in measured.answers.items()}
    for arm in (REFERENCE, "all patched", MENDED):
        assert kl[arm] < 1e-3
    # What another history lacks is lost, and so is what sums of single deficits have too much.
    for arm in (BLIND, "far differ", "all differ", SUM):
        assert kl[arm] > 0.01


def test_orders_are_all_up_to_four_and_a_sample_beyond():
    assert orders_of(4) == list(itertools.permutations(range(4)))
    drawn = orders_of(6)
    assert len(drawn) == len(set(drawn)) == len(orders_of(64)) == 24  # of 64! orders
    assert all(sorted(order) == list(range(6)) for order in drawn)
    # Orders that are held out are in no sample.
    assert not set(orders_of(6, hold_out=drawn[:5])) & set(drawn[:5])


def divergences(images: TaskPieces, operation: str) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields an operation's settings with every arm's KL of each question that counts."""
    for measured in OPERATIONS[operation](images, np.random.default_rng(1)):
        valid, reference = measured.questions.valid, measured.answers[REFERENCE]
        assert valid.any()
        yield (
            measured.probe,
            {arm: answers.divergence_from(reference)[valid] for arm, answers in measured.answers.items()},
        )


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


def test_meaning_follows_the_sheets():
    """Reordered and foreign sheets define what the sheets that stand there do, the last one counting."""
    contexts = sample(np.random.default_rng(0), 4, SIZES["4"])
    order, replaced = np.array([2, 0, 1]), np.array([False, True, False])
    for changed, standing in (
        (operations.reordered(contexts, order), [(0, 2), (0, 0), (0, 1)]),
        (operations.with_foreign(contexts, replaced), [(0, 0), (1, 1), (0, 2)]),
    ):
        value, unit, times = latest(changed)
        for row in range(4):
            known: dict[int, tuple[int, ...]] = {item: (-1, -1, 0) for item in range(value.shape[1])}
            for by, sheet in standing:
                columns = (contexts.sheet_item, contexts.sheet_value, contexts.sheet_unit)
                for item, *last in zip(*(column[(row + by) % 4, sheet].tolist() for column in columns), strict=True):
                    known[item] = (*last, known[item][2] + 1)
            assert list(known.values()) == list(zip(value[row], unit[row], times[row], strict=True))
        np.testing.assert_array_equal(changed.page_item, contexts.page_item)


def flops(tokens: int, behind: int) -> int:
    """FLOPs that say what they are of."""
    return tokens * (1000 + behind)


@pytest.mark.parametrize(("contexts", "window", "revisits"), [(2, 4, 8), (4, 8, 16)])
def test_visits_differ_as_their_names_say(contexts: int, window: int, revisits: int):
    drawn, count = draw_visits(contexts, window, revisits, 0), contexts * PIECES
    first, again, moved, shuffled, fork = (visit.pieces for visit in drawn)
    for pieces in (first, again, moved, shuffled, fork):
        assert set(pieces[:count]) == set(range(count)) == set(pieces)
        # Nothing is revisited while it is in the window.
        assert all(piece not in pieces[max(step - window, 0) : step] for step, piece in enumerate(pieces))
    # Within a context nothing changes.
    assert all(b == a + 1 for a, b in zip(moved[:count:2], moved[1:count:2], strict=True))
    assert again == first != moved
    assert sum(b == a + 1 for a, b in itertools.pairwise(shuffled)) < count / 2
    # The branch goes back to what its parent goes back to.
    forked = drawn[-1].forked
    assert fork[:forked] == first[:forked]
    assert fork[forked:] != first[forked:]


def test_other_ways_prefill_what_they_do_not_have():
    visit, caches, sizes = Visit("a", (0, 1, 2, 0)), dict[str, PrefixCache](), [10, 100, 1000]
    work = {way: tokens for way, (tokens, _) in counted_work(visit, sizes, 4, 2, flops, caches).items()}
    # (0) (0 1) (1 2) (2 0), all of it each time.
    assert work[visits.REPREFILL] == 10 + 110 + 1100 + 1010
    assert work[visits.ONE_BY_ONE] == 10 + 100 + 1100 + 1010
    # (0) (0 1) (0 1 2) (0 1 2 0): nothing leaves before there are four.
    assert work[visits.BATCHED] == 10 + 100 + 1000 + 10
    # (0) (0 1) (… 1 2) (… … 2 0): what follows a placeholder is prefilled again, the one before is known.
    assert work[visits.PLACEHOLDER] == 10 + 100 + (PLACEHOLDER_TOKENS + 1100) + (PLACEHOLDER_TOKENS + 1010)
    # Every piece once, and 15 % of each piece of every window.
    assert work[visits.MPIC] == 1110 + 2 + (2 + 15) + (15 + 150) + (150 + 2)

    # What outlives the visit is known; what does not begins anew.
    again = {way: tokens for way, (tokens, _) in counted_work(visit, sizes, 4, 2, flops, caches).items()}
    assert again[visits.ONE_BY_ONE + visits.KEPT] == again[visits.BATCHED + visits.KEPT] == 0
    assert again[visits.ONE_BY_ONE] == work[visits.ONE_BY_ONE]
    assert again[visits.MPIC] == work[visits.MPIC] - 1110
    # FLOPs are counted behind the lead; what a fork's parent computed is in the branch's cache.
    assert counted_work(Visit("a", (0, 1)), sizes, 4, 2, flops, {})[visits.REPREFILL][1] == 20 * 1004 + 100 * 1014
    assert counted_work(Visit("a", (0, 1), forked=1), sizes, 4, 2, flops, {})[visits.ONE_BY_ONE][0] == 100
