"""The weights that an engine loads for measurements compute what the shipped model computes."""

import json

import numpy as np
import pytest

from evals.bench import engine_weights
from evals.task.contexts import sample
from evals.task.drawing import images_of
from kvpatch_jax import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return engine_weights.write(tmp_path_factory.mktemp("trained"))


def test_heads_are_as_wide_as_the_engine_assumes(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    assert config["vision_config"]["out_hidden_size"] == config["hidden_size"]


def test_a_map_into_the_stream_and_one_out_of_it_compose_to_the_same_map():
    random = np.random.default_rng(0)
    inner, outer = random.normal(size=(4, 3)).astype(np.float32), random.normal(size=(5, 4)).astype(np.float32)
    names = "model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    doubled = engine_weights.twice_as_wide(dict(zip(names, (inner, outer), strict=True)))
    assert [doubled[name].shape for name in names] == [(8, 3), (5, 8)]
    np.testing.assert_array_equal(doubled[names[1]] @ doubled[names[0]], outer @ inner)


@pytest.mark.nightly
def test_its_logits_are_the_shipped_models(folder):
    prices, *_, bill = images_of(sample(np.random.default_rng(7), 1))
    logits = []
    for path in (engine_weights.SHIPPED, folder):
        backbone = models.load(path, dtype="float32")
        tokens = backbone.embed(**backbone.prepare([prices, bill, "unit of C6?"]))
        logits.append(np.asarray(backbone.prefill(tokens).logits))
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-5)
