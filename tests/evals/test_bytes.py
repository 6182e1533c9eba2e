"""The configuration of bytes: pages behind several antecedents, and what is kept for all of them."""

import numpy as np
import pytest

from evals.harness.methods import parse
from evals.harness.metrics import cost_shares
from evals.harness.runner import loaded, model_path
from evals.task.contexts import SIZES, sample
from evals.task.versions import VERSIONS, revalued
from kvpatch_jax.repair import kv_bytes


def test_another_version_has_other_values_and_the_same_page():
    contexts = sample(np.random.default_rng(0), 3, SIZES["4"])
    other = revalued(contexts, np.random.default_rng(1))
    assert (other.sheet_value != contexts.sheet_value).all()
    assert (other.sheet_unit != contexts.sheet_unit).all()
    for name in ("sheet_item", "page_item", "page_code", "seed", "document", "face"):
        np.testing.assert_array_equal(getattr(other, name), getattr(contexts, name))


@pytest.mark.nightly
def test_a_base_is_kept_once_and_a_patch_for_each_antecedent():
    backbone = loaded(str(model_path("documents/qwen2_5_vl")))
    batch = VERSIONS.batch(backbone, "4", 0, 2, 0)
    splice = batch.splice
    assert len(splice.others) == 3
    assert splice.recorded is not None
    for other in splice.others:
        assert np.abs(np.asarray(other.kv["v"]) - np.asarray(splice.recorded["v"])).max() > 0.1

    reference = batch.read(batch.reference)
    found = {}
    for name in ("blind", "patch.rank=0.base=mean", "patch.base=mean.encoding=k4v4gall.bytes=0.07"):
        repaired = parse(name).repair(backbone, splice)
        kl = batch.read(repaired.cache).divergence_from(reference)[batch.questions.valid].mean()
        found[name] = kl, cost_shares(repaired, backbone, splice), repaired.bytes
    blind, base, patched = found.values()
    assert patched[0] < base[0] < blind[0]
    assert base[1]["kept.antecedents=4"] == base[1]["shared_bytes"] / 4 == 0.25
    size = patched[2]
    assert size.stored <= 0.07 * kv_bytes(backbone.layout, splice.slots.shape[1])
    assert patched[1]["kept.antecedents=16"] == pytest.approx(
        patched[1]["stored_bytes"] + patched[1]["shared_bytes"] / 16
    )
