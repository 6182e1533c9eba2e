"""The trained model as the engine loads it is the shipped one."""

import json

import numpy as np
import pytest
import trained_model

import models
from evals.task.contexts import sample
from evals.task.drawing import images_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained_model.write(tmp_path_factory.mktemp("trained"))


def test_heads_are_as_wide_as_the_engine_assumes(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    assert config["vision_config"]["out_hidden_size"] == config["hidden_size"]


def test_what_is_written_twice_is_read_once():
    """A linear map into the stream and one out of it, made twice as wide, compose to the same map."""
    random = np.random.default_rng(0)
    into, out = random.normal(size=(4, 3)).astype(np.float32), random.normal(size=(5, 4)).astype(np.float32)
    names = "model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    made = trained_model.twice_as_wide(dict(zip(names, (into, out), strict=True)))
    inner, outer = (made[name] for name in names)
    assert (inner.shape, outer.shape) == ((8, 3), (5, 8))
    np.testing.assert_array_equal(outer @ inner, out @ into)


@pytest.mark.slow
def test_it_says_what_the_shipped_model_says(folder):
    prices, *_, bill = images_of(sample(np.random.default_rng(7), 1))
    said = []
    for path in (trained_model.SHIPPED, folder):
        backbone = models.load(path, dtype="float32")
        tokens = backbone.embed(**backbone.prepare([prices, bill, "unit of C6?"]))
        said.append(np.asarray(backbone.prefill(tokens).logits))
    np.testing.assert_allclose(said[1], said[0], atol=2e-5)
