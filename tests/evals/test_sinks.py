"""A window that slides while its first tokens stay: what survivors remember, and what a re-prefill shows."""

import numpy as np
import pytest

from evals.harness.methods import REFERENCE
from evals.task.contexts import SIZES, sample
from evals.task.questions import ask
from evals.trained import ROOT
from evals.windows.contents import TaskPieces, TaskTail
from evals.windows.sinks import KEPT, measure_sink
from kvpatch_jax.models import load


@pytest.mark.nightly
@pytest.mark.parametrize("pinned", [0, 2])
def test_only_what_survivors_attended_to_and_left_makes_a_difference(pinned: int):
    """A window of one piece beside the first tokens shows each piece behind them alone, as a re-prefill does."""
    rng, backbone = np.random.default_rng(1), load(ROOT / "documents/qwen2_5_vl", dtype="float32")
    contexts = sample(rng, 4, SIZES["tiny"])
    images = TaskPieces.of(backbone, contexts, np.arange(4))
    tail = TaskTail(images.prefix, ask(contexts, rng, {"chain": 6}), np.zeros(6, int))
    first, valid = images.page.of_others(), tail.questions.valid

    def loss(*others):
        answers = measure_sink(backbone, [first, *others], tail, pinned)
        return np.abs(answers[KEPT].divergence_from(answers[REFERENCE])[valid]).max()

    sheets = [sheet.of_others() for sheet in images.sheets]
    assert loss(sheets[0], images.page) < 1e-6
    assert loss(*sheets, images.sheets[1], images.page) > 1e-5
