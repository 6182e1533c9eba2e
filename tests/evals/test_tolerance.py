"""Histories of a chunk say what stood in front, and KV formed behind the true one loses nothing."""

import numpy as np
import pytest

from evals.harness.lines import text_piece
from evals.harness.methods import BLIND, REFERENCE
from evals.task.contexts import SIZES, sample
from evals.task.questions import ask
from evals.trained import ROOT
from evals.windows.contents import TaskPieces, TaskTail
from evals.windows.tolerance import MENDED, SUM, History, ReusedChunk, histories, measure_tolerance
from kvpatch_jax.models import load


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


@pytest.mark.nightly
def test_kv_behind_the_true_history_loses_nothing():
    """Two sheets and a page of four cells: patches have all directions, and mend what another history lacks."""
    rng, backbone = np.random.default_rng(1), load(ROOT / "documents/qwen2_5_vl", dtype="float32")
    contexts = sample(rng, 4, SIZES["tiny"])
    images = TaskPieces.of(backbone, contexts, np.arange(4))
    tail = TaskTail(images.prefix, ask(contexts, rng, {"chain": 6}), np.zeros(6, int))
    lead = text_piece(backbone, np.full((4, 3), 30), "lead")
    measured = measure_tolerance(
        ReusedChunk(backbone, lead, images.sheets, images.page, tail, images.clusters), "documents.front=2"
    )
    valid, reference = measured.questions.valid, measured.answers[REFERENCE]
    kl = {arm: answers.divergence_from(reference)[valid].max() for arm, answers in measured.answers.items()}
    for arm in (REFERENCE, "all patched", MENDED):
        assert kl[arm] < 1e-3
    # What another history lacks is lost, and so is what sums of single deficits have too much.
    for arm in (BLIND, "far differ", "all differ", SUM):
        assert kl[arm] > 0.01
