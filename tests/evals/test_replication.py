"""Methods of reuse are served by name at bytes counted by hand, and a second implementation gets the same answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from evals.harness import runner
from evals.harness.config import read_config
from evals.harness.frame import Lookup
from evals.harness.methods import parse
from evals.harness.metrics import cost_shares, reference_shares
from evals.task.dataset import MOVED, TaskBatch, drawn
from evals.task.preparation import pooled_basis
from evals.task.questions import KINDS, Questions
from evals.task.reading import image_tokens
from evals.task.versions import VERSIONS
from evals.trained import MAIN, shipped, shipped_names
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from kvpatch_jax.repair import METHODS, kv_bytes
from tests.evals.numpy_model import Decoder, cut, few_bits, joined, rank_patch

# ---------------------------------------------------------------------------------------------------- methods and costs

ELSEWHERE = {
    *("mpic", "two_step_reuse", "full_reprefill", "prefix_caching"),  # whole prompts, and the reference itself
    *("shadowkv", "cachegen", "gear", "block_differences", "anchored", "joint_pair"),  # `bytes` has them
}
PACKED = "patch.rank=8.encoding=k4v4g32.dtype=int4"


def test_the_configuration_names_every_method_for_one_chunk():
    config = read_config("repairs", variants=["all"])
    named = {parse(name).method for name in config.methods if name != "re-prefill"}
    assert named == set(METHODS) - ELSEWHERE
    assert set(read_config("repairs").methods) <= set(config.methods)


def test_a_name_has_method_budget_and_settings():
    arm = parse("cacheblend.budget=0.15")
    assert (arm.method, arm.tokens, arm.bytes, dict(arm.settings)) == ("cacheblend", 0.15, None, {})
    arm = parse("quantised.bits=3.axes=token")
    assert (arm.tokens, dict(arm.settings)) == (None, {"bits": 3, "axes": "token"})  # the method's own default
    assert parse("low_rank.bytes=0.05").bytes == 0.05
    for wrong in ("nothing", "blind.rank", "cacheblend.budget="):
        with pytest.raises(InputError, match="method"):
            parse(wrong)


def test_bytes_are_those_counted_by_hand_and_published(task_batch):
    """All bytes kept for each of 1, 4 and 16 antecedents, over the page's KV: of each method here, and in README."""
    batch = task_batch(MAIN)
    tokens, layers, features, rank, group = 74, 4, 128, 8, 32
    numbers = layers * tokens * features
    least_and_scale, direction = 2 * 2, sum(size / 2 + 2 * -(-size // group) for size in (tokens, features))
    keys = numbers / 2 + layers * features * -(-tokens // group) * least_and_scale
    values = numbers / 2 + numbers // group * least_and_scale
    forms = {
        "re-prefill": (tokens * 128 * 2, 0),
        "blind": (4 * numbers, 0),
        "patch.rank=8": (4 * numbers, 2 * layers * rank * (tokens + features) * 2),
        PACKED: (keys + values, 2 * layers * rank * direction),
        "quantised.bits=3": (0, 2 * (numbers * 3 / 8 + layers * features * least_and_scale)),
    }
    rows = Lookup(json.loads((Path(__file__).parents[2] / "docs/main.json").read_text())["rows"])
    for arm, (shared, stored) in forms.items():
        costs = reference_shares(batch.backbone, batch.splice)
        if arm != "re-prefill":
            costs = cost_shares(parse(arm).repair(batch.backbone, batch.splice), batch.backbone, batch.splice)
        for count in (1, 4, 16):
            share = pytest.approx((shared / count + stored) / (4 * numbers), rel=1e-4)
            published = rows.get("documents.4", MAIN, arm, f"kept.antecedents={count}").value
            assert (costs[f"kept.antecedents={count}"], published) == (share, share), (arm, count)


@pytest.mark.nightly
def test_a_run_measures_methods_at_the_same_bytes_and_tokens(tmp_path):
    arms = ("re-prefill", "patch.bytes=0.15", "first_k.budget=0.15", "blind")
    methods = ",".join([*arms, "quantised.bytes=0.01"])
    results = runner.run(read_config("repairs", [f"methods={methods}"]), tmp_path)
    assert results is not None
    lookup, measured = Lookup(results["rows"]), {}
    for metric in ("kl.chain", "stored_bytes", "serving_flops"):
        measured[metric] = [lookup.get("documents.4", MAIN, arm, metric).value for arm in arms]
    reference, patch, tokens, blind = measured["kl.chain"]
    assert 0 == reference < patch < tokens < blind
    reference, patch, tokens, blind = measured["stored_bytes"]
    assert reference == tokens == blind == 0
    assert 0.1 < patch <= 0.15
    reference, patch, tokens, blind = measured["serving_flops"]
    assert 0 <= blind <= patch < 0.1 < tokens < 0.2
    assert reference == 1
    (reason,) = results["config"]["unserved"].values()
    assert "bytes; expected at least" in reason


def test_a_pooled_basis_of_full_rank_holds_the_deficits_it_was_fitted_on(task_batch):
    batch = task_batch(MAIN)
    with jax.default_matmul_precision("highest"):
        basis = pooled_basis(batch.backbone, batch.splice)
        repaired = METHODS["pooled"](batch.backbone, batch.splice, 1.0, basis=basis, rank=128)
    for name, value in batch.reference.items():
        page = (slice(None), slice(None), batch.prefix.page)
        difference = np.abs(np.asarray(repaired.cache[name])[page] - np.asarray(value)[page]).max()
        assert difference <= 1e-4 * np.abs(np.asarray(value)[page]).max()


@pytest.mark.nightly
def test_a_base_is_kept_once_and_a_patch_for_each_antecedent(task_batch):
    backbone = task_batch(MAIN).backbone
    batch = VERSIONS.batch(backbone, "4", 0, 2, 0)
    splice, served = batch.splice, []
    assert len(splice.others) == 3
    assert splice.recorded is not None
    for other in splice.others:
        assert np.abs(np.asarray(other.kv["v"]) - np.asarray(splice.recorded["v"])).max() > 0.1

    reference = batch.read(batch.reference)
    for name in ("blind", "patch.rank=0.base=mean", "patch.base=mean.encoding=k4v4gall.bytes=0.07"):
        repaired = parse(name).repair(backbone, splice)
        kl = batch.read(repaired.cache).divergence_from(reference)[batch.questions.valid].mean()
        served.append((kl, cost_shares(repaired, backbone, splice), repaired.bytes))
    (blind, *_), (base, shared, _), (patched, costs, size) = served
    assert patched < base < blind
    assert shared["kept.antecedents=4"] == shared["shared_bytes"] / 4 == 0.25
    assert size.stored <= 0.07 * kv_bytes(backbone.layout, splice.slots.shape[1])
    assert costs["kept.antecedents=16"] == pytest.approx(costs["stored_bytes"] + costs["shared_bytes"] / 16)


# ---------------------------------------------------------------------------------------------- a second implementation

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
    # Of one context, not the first.
    x, positions = (np.asarray(value)[1] for value in (tokens.embeddings, tokens.positions))
    ids = batch.packed.ids[1]
    second = second_answers(decoder, batch.prefix, x.astype(np.float64), positions, batch.packed, ids)
    for arm, expected, answers in zip(ARMS, second, library, strict=True):
        # Between codes of few bits the rounding of a forward decides.
        most = 1e-4 if "bits" in arm or "int4" in arm else 1e-7
        assert abs((np.exp(expected) * (expected - answers[1])).sum(-1).mean()) < most, arm


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
