"""The decoder's parts alone: routers, experts, latent attention, deepstack, and what a configuration refuses."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from kvpatch_jax.core import Rope
from kvpatch_jax.models.checkpoints import SafetensorsSource, flatten_params, load_weights, save_weights
from kvpatch_jax.models.decoder.config import DecoderConfig, ExpertConfig
from kvpatch_jax.models.decoder.decoder import Decoder
from kvpatch_jax.models.decoder.grouped import spread
from kvpatch_jax.models.decoder.layers import ACTIVATIONS
from kvpatch_jax.models.decoder.moe import choose_experts
from kvpatch_jax.models.decoder.weights import decoder_entries
from tests.shared.arrays import placed
from tests.shared.tolerances import assert_close_to_largest

EXPERTS = ExpertConfig(experts=6, chosen=2, intermediate=10, router="softmax", renormalise=True)
CONFIG = DecoderConfig(
    vocabulary=11, width=16, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=20, rope=Rope(100.0, 8)
)


pytestmark = pytest.mark.usefixtures("highest_precision")


def drawn(make, seed=0) -> Any:
    """The module that `make` builds, parameters drawn with NumPy: nothing to compile."""
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(make)
    draw = lambda leaf: placed(rng.normal(size=leaf.shape) * max(leaf.shape[-2:-1] or (1,)) ** -0.5, leaf.dtype)
    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def expected_weights(config: ExpertConfig, logits: np.ndarray, correction: np.ndarray) -> np.ndarray:
    """One token's weights, by sorting, as the papers say it."""
    scores = np.exp(logits) / np.exp(logits).sum() if config.router == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores + correction
    groups = np.split(np.arange(config.experts), config.groups)
    best = lambda group: choice[group].max() if config.router == "softmax" else np.sort(choice[group])[-2:].sum()
    kept = sorted(groups, key=best)[-config.chosen_groups :]
    chosen = sorted(np.concatenate(kept), key=lambda expert: choice[expert])[-config.chosen :]
    weights = np.zeros(config.experts)
    weights[chosen] = scores[chosen]
    return weights / (weights.sum() if config.renormalise else 1) * config.scaling


GELU_TANH = lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
FORMULAS = {
    "relu": lambda x: np.maximum(x, 0),
    **dict.fromkeys(("silu", "swish"), lambda x: x / (1 + np.exp(-x))),
    **dict.fromkeys(("gelu", "gelu_python"), lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))),
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"), GELU_TANH),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_follow_their_formulas(name):
    x = np.linspace(-6, 6, 241)
    assert_close_to_largest(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), FORMULAS[name](x), name, bar=1e-6)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2)])
def test_routers_choose_experts_by_their_definition(router, renormalise, groups, chosen_groups):
    config = ExpertConfig(12, 3, 8, router, renormalise, 2.5, groups, chosen_groups)
    rng = np.random.default_rng(0)
    logits, correction = rng.normal(size=(5, 7, 12)), rng.normal(size=12) * (router == "sigmoid")
    chosen = choose_experts(config, placed(logits, jnp.float32), placed(correction, jnp.float32))
    found = np.asarray(spread(*chosen, config.experts))
    expected = np.stack([expected_weights(config, token, correction) for token in logits.reshape(-1, 12)])
    np.testing.assert_allclose(found.reshape(-1, 12), expected, atol=2e-6)
    assert ((found > 0).sum(-1) == 3).all()


@pytest.mark.parametrize("fused", ["no", "rows", "columns"])
def test_fused_experts_and_projections_are_cut_and_put_together(tmp_path, fused):
    """The same parameters through a file with a tensor per expert, with rows, and with columns."""
    config = dataclasses.replace(CONFIG, attention_bias=True, experts=dataclasses.replace(EXPERTS, dense_layers=1))
    params = nnx.to_pure_dict(nnx.state(drawn(lambda: Decoder(config, nnx.Rngs(0))), nnx.Param))
    entries = decoder_entries(config, root=(), fused=("qkv", "gate_up"), fused_experts=fused)
    save_weights(tmp_path, params, entries)
    flat = flatten_params(params)
    expected = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat.items()}
    again = flatten_params(load_weights(SafetensorsSource(tmp_path), entries, expected))
    assert all(np.array_equal(again[path], leaf) for path, leaf in flat.items())
    file = load_file(tmp_path / "model.safetensors")
    kernel = lambda name: np.asarray(flat["layers", "attention", name, "kernel"][1]).T  # layer 2 of the file
    qkv = np.concatenate([kernel(name) for name in ("query", "key", "value")])
    assert np.array_equal(file["model.layers.2.self_attn.qkv_proj.weight"], qkv)
    gate, up = (np.asarray(flat["layers", "mlp", name][1]) for name in ("gate", "up"))  # [E, D, I]
    columns = np.concatenate([gate, up], axis=2)
    if fused == "no":
        assert np.array_equal(file["model.layers.2.mlp.experts.3.gate_proj.weight"], gate[3].T)
    else:
        found = file["model.layers.2.mlp.experts.gate_up_proj"]
        assert np.array_equal(found, columns if fused == "columns" else columns.transpose(0, 2, 1))
    save_file(file | {"model.layers.0.mlp.gate_up_proj.weight": np.zeros((39, 16), np.float32)}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "model.safetensors")
    with pytest.raises(Exception, match=r"gate_up_proj.weight' of shape \(39, 16\); expected \(40, 16\)"):
        load_weights(SafetensorsSource(tmp_path), entries, expected)
