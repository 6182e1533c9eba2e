"""Every method of reuse is served by its name, at the bytes and FLOPs that a hand counts."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from evals.harness import runner
from evals.harness.config import read_config
from evals.harness.frame import Lookup
from evals.harness.methods import parse
from evals.harness.metrics import cost_shares, reference_shares
from evals.task.preparation import pooled_basis
from evals.task.versions import VERSIONS
from evals.trained import MAIN
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import METHODS, kv_bytes

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
    methods = "re-prefill,blind,patch.bytes=0.15,first_k.budget=0.15,quantised.bytes=0.01"
    results = runner.run(read_config("repairs", [f"methods={methods}"]), tmp_path)
    assert results is not None
    assert results == json.loads((tmp_path / "results.json").read_text())
    lookup = Lookup(results["rows"])

    def measured(metric: str) -> list[float]:
        arms = ("re-prefill", "patch.bytes=0.15", "first_k.budget=0.15", "blind")
        return [lookup.get("documents.4", MAIN, arm, metric).value for arm in arms]

    reference, patch, tokens, blind = measured("kl.chain")
    assert 0 == reference < patch < tokens < blind
    reference, patch, tokens, blind = measured("stored_bytes")
    assert reference == tokens == blind == 0
    assert 0.1 < patch <= 0.15
    reference, patch, tokens, blind = measured("serving_flops")
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
