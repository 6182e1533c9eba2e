"""A patch of rank 8 restores what blind reuse loses, by two implementations, on contexts that nothing was fitted on.

The second one is `numpy_model`. The library draws contexts and embeds images here; forwards, chunks, patches, few bits,
placing and KL are NumPy's.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.harness.frame import Lookup
from evals.harness.methods import parse
from evals.task.dataset import MOVED, TaskBatch, drawn
from evals.task.questions import KINDS, Questions
from evals.task.reading import image_tokens
from evals.trained import MAIN, shipped, shipped_names
from kvpatch_jax.models import load
from tests.evals.numpy_model import Decoder, cut, few_bits, joined, rank_patch

SEED = 20_261
CONTEXTS, PUBLISHED = 32, 256
"""Of the image task: contexts drawn here, and those of the published run."""
ARMS = ("re-prefill", "blind", "patch.rank=8", "patch.rank=8.encoding=k4v4g32.dtype=int4", "quantised.bits=3")
OTHERS = [name for name in shipped_names() if name != MAIN and "no_window" not in name]


def accuracy(batch: TaskBatch, answers: Any, kind: str) -> float:
    asked = batch.questions.valid & (batch.questions.kind == KINDS.index(kind))
    return float(answers.predicted[asked].mean())


@pytest.mark.parametrize("name", [MAIN, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_a_patch_brings_back_what_blind_reuse_loses(task_batch: Any, name: str):
    """Chain questions: answered by re-prefill, fewer blind, again with a patch of rank 8.

    What the page alone tells loses less: pages between lists were met in training, so reading depends on them a little.
    """
    batch = task_batch(name)
    exact, blind = batch.read(batch.reference), batch.read(batch.splice.cache)
    patched = batch.read(parse("patch.rank=8").repair(batch.backbone, batch.splice).cache)
    assert accuracy(batch, exact, "chain") > 0.75
    assert accuracy(batch, blind, "chain") < accuracy(batch, exact, "chain") - 0.3
    assert accuracy(batch, patched, "chain") > accuracy(batch, exact, "chain") - 0.15
    lost = {kind: accuracy(batch, exact, kind) - accuracy(batch, blind, kind) for kind in ("page", "chain")}
    assert abs(lost["page"]) < 0.5 * lost["chain"]
    assert patched.divergence_from(exact).mean() < 0.2 * blind.divergence_from(exact).mean()


def kl(truth: np.ndarray, read: np.ndarray) -> float:
    """Computes the mean of KL(truth ‖ read) in nats over tokens."""
    return float((np.exp(truth) * (truth - read)).sum(-1).mean())


def second_answers(
    decoder: Decoder, prefix: Any, x: np.ndarray, positions: np.ndarray, asked: Questions, ids: np.ndarray
) -> Iterator[np.ndarray]:
    """Yields for each of the arms the log-probabilities of what is asked of a context's images.

    Args:
      x, positions: of the images as one prompt [T,D], [T,3]. ids: of the questions' tokens.
    """
    # Every image alone, from position 0, and all of them as one prompt.
    local = [positions[part] - positions[part][0] for part in prefix.slices]
    alone = [decoder.run(x[part], places)[1] for part, places in zip(prefix.slices, local, strict=True)]
    prompt = decoder.run(x, positions)[1]
    page, truth = alone[-1], cut(prompt, prefix.page.start)
    packed = {"k": few_bits(page["k"], 4, 32, axis=1), "v": few_bits(page["v"], 4, 32, axis=-1)}
    three_bits = {name: few_bits(value, 3, None, axis=1) for name, value in truth.items()}
    pages = (page, rank_patch(page, truth, 8), rank_patch(packed, truth, 8, bits=4), three_bits)

    moved = positions + MOVED
    places = np.repeat((moved.max() + 1 + asked.step)[:, None], 3, axis=1)
    among = (asked.number[:, None] == asked.number) & np.tri(asked.number.size, dtype=bool)
    seen = np.concatenate([np.ones((len(ids), len(x)), bool), among], axis=1)
    for kv in (prompt, *(joined([*alone[:-1], form]) for form in pages)):
        left, _ = decoder.run(decoder.embed(ids), places, decoder.place(kv, moved), seen)
        yield decoder.log_probabilities(left)


def test_two_implementations_read_the_same_of_images(task_batch: Any):
    """Log-probabilities of every answer, of re-prefill, blind reuse, patches, and KV in few bits."""
    batch, decoder = task_batch(MAIN), Decoder.of_directory(shipped(MAIN))
    tokens, splice = image_tokens(batch.backbone, batch.contexts)[1], batch.splice
    caches = [batch.reference, *(parse(arm).repair(batch.backbone, splice).cache for arm in ARMS[1:])]
    library = [np.asarray(batch.read(cache).log_probabilities, np.float64) for cache in caches]
    for row in range(2):
        x, positions = (np.asarray(value[row]) for value in (tokens.embeddings, tokens.positions))
        ids = batch.packed.ids[row]
        second = second_answers(decoder, batch.prefix, x.astype(np.float64), positions, batch.packed, ids)
        for arm, expected, answers in zip(ARMS, second, library, strict=True):
            # Between codes of few bits the rounding of a forward decides.
            most = 1e-4 if "bits" in arm or "int4" in arm else 1e-7
            assert abs(kl(expected, answers[row])) < most, arm


@pytest.mark.nightly
def test_the_published_accuracy_is_that_of_the_second_implementation() -> None:
    """README's table of ways of reuse: right answers to chain and aggregate questions about images.

    Each of five rows is within three standard errors of what is published, and so is rank 8 of re-prefill.
    """
    rows = Lookup(json.loads((Path(__file__).parents[2] / "docs/main.json").read_text())["rows"])
    decoder, backbone = Decoder.of_directory(shipped(MAIN)), load(shipped(MAIN), dtype="float32")
    contexts, asked = drawn("documents", "4", 0, CONTEXTS, SEED)
    prefix, tokens, _ = image_tokens(backbone, contexts)
    right = {(arm, kind): list[np.ndarray]() for arm in ARMS for kind in ("chain", "aggregate")}
    embeddings, positions = np.asarray(tokens.embeddings, np.float64), np.asarray(tokens.positions)
    for x, places, ids, answer in zip(embeddings, positions, asked.ids, asked.answer, strict=True):
        answers = second_answers(decoder, prefix, x, places, asked, ids)
        for arm, log_probabilities in zip(ARMS, answers, strict=True):
            hits = log_probabilities.argmax(-1) == answer
            for kind in ("chain", "aggregate"):
                right[arm, kind].append(hits[(asked.kind[asked.number] == KINDS.index(kind)) & (answer >= 0)])

    for kind in ("chain", "aggregate"):
        shares = {arm: float(np.concatenate(right[arm, kind]).mean()) for arm in ARMS}
        published = {arm: rows.get("documents.4", MAIN, arm, f"accuracy.{kind}") for arm in ARMS}
        # Standard errors of one sample of as many contexts as the published run's.
        errors = {arm: (row.high - row.low) / 2 / 1.96 for arm, row in published.items()}
        for arm, share in shares.items():
            error = errors[arm] * (1 + PUBLISHED / CONTEXTS) ** 0.5
            assert abs(share - published[arm].value) <= 3 * error, (arm, kind)
        error = errors["re-prefill"] * (PUBLISHED / CONTEXTS) ** 0.5
        assert shares["patch.rank=8"] >= shares["re-prefill"] - 3 * error
        assert shares["blind"] < 0.5 * shares["re-prefill"]
