"""The configuration of repairs: every method of reuse, and what is fitted ahead for some."""
# pyright: reportArgumentType=false

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evals.harness import runner
from evals.harness.config import read_config
from evals.harness.frame import Lookup
from evals.harness.methods import parse
from evals.task.preparation import pooled_basis, schedules
from kvpatch_jax.repair import METHODS
from tests.shared.splices import LAYERS, error, make_splice, tiny_backbone

ELSEWHERE = {
    *("mpic", "two_step_reuse", "full_reprefill", "prefix_caching"),  # whole prompts, and the reference itself
    *("shadowkv", "cachegen", "gear", "block_differences", "anchored", "joint_pair"),  # `bytes` has them
}


class Questions:
    """A batch whose answers are the cache itself: near where the cache is near."""

    clusters = questions = None

    def __init__(self, chunk: int = 40):
        self.splice, expected = make_splice(tiny_backbone(), chunk=chunk)
        self.reference = {name: jnp.asarray(value) for name, value in expected.items()}

    def read(self, cache, visible=None):
        values = np.concatenate([np.asarray(value).reshape(-1) for value in cache.values()])
        questions = SimpleNamespace(answer=np.zeros(len(values), int))
        return SimpleNamespace(log_probabilities=values, questions=questions)

    def asked(self):
        raise NotImplementedError

    def read_asked(self, repaired):
        raise NotImplementedError


def test_the_configuration_names_every_method_for_one_chunk():
    config = read_config("repairs", variants=["all"])
    named = {parse(name).method for name in config.methods if name != "re-prefill"}
    assert named == set(METHODS) - ELSEWHERE
    assert set(read_config("repairs").methods) <= set(config.methods)


@pytest.mark.nightly
def test_schedules_spend_their_share_and_never_rise_with_depth():
    with jax.default_matmul_precision("highest"):
        found = schedules(tiny_backbone(), Questions(), (0.1, 0.2, 0.5))
    assert set(found) == {0.1, 0.2}  # the ratios of the source end below a half
    for share, schedule in found.items():
        assert len(schedule) == LAYERS
        assert list(schedule) == sorted(schedule, reverse=True)
        assert sum(schedule) <= share * LAYERS + 1e-9


def test_a_basis_of_full_rank_holds_the_deficits_it_was_fitted_on():
    batch, backbone = Questions(), tiny_backbone()
    with jax.default_matmul_precision("highest"):
        basis = pooled_basis(backbone, batch.splice)
        repaired = METHODS["pooled"](backbone, batch.splice, 1.0, basis=basis, rank=32)
    for name, value in batch.reference.items():
        assert error(repaired.cache[name], value) <= 1e-4


@pytest.mark.nightly
def test_a_run_measures_methods_at_the_same_bytes_and_tokens(tmp_path):
    methods = "re-prefill,blind,patch.bytes=0.15,first_k.budget=0.15,quantised.bytes=0.01"
    config = read_config("repairs", ["n=2", "batch=2", f"methods={methods}"])
    results = runner.run(config, tmp_path)
    assert results is not None
    assert results == json.loads((tmp_path / "results.json").read_text())
    lookup = Lookup(results["rows"])
    place = {"probe": "documents.4", "model": config.models[0]}

    def measured(arm: str) -> dict[str, float]:
        wanted = ("kl.chain", "stored_bytes", "serving_flops")
        return {name: lookup.get(**place, arm=arm, metric=name).value for name in wanted}

    patch, first = measured("patch.bytes=0.15"), measured("first_k.budget=0.15")
    assert patch["kl.chain"] < first["kl.chain"] < lookup.get(**place, arm="blind", metric="kl.chain").value
    assert 0.1 < patch["stored_bytes"] <= 0.15
    assert first["stored_bytes"] == 0
    assert patch["serving_flops"] < 0.1 < first["serving_flops"] < 0.2
    (reason,) = results["config"]["unserved"].values()
    assert "bytes; expected at least" in reason
