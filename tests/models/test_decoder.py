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
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models.attention import Mask
from kvpatch_jax.models.checkpoints import SafetensorsSource, flatten_params, load_weights, save_weights
from kvpatch_jax.models.decoder.attention import LatentAttention
from kvpatch_jax.models.decoder.config import DecoderConfig, ExpertConfig, LatentConfig
from kvpatch_jax.models.decoder.decoder import Decoder
from kvpatch_jax.models.decoder.grouped import spread
from kvpatch_jax.models.decoder.layers import ACTIVATIONS
from kvpatch_jax.models.decoder.moe import Experts, choose_experts
from kvpatch_jax.models.decoder.weights import decoder_entries
from tests.arrays import placed
from tests.tolerances import assert_close_to_largest

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


def test_experts_equal_a_loop_over_tokens():
    config = dataclasses.replace(EXPERTS, router="sigmoid", shared=14)
    experts = drawn(lambda: Experts(config, 16, rngs=nnx.Rngs(0)))
    x = placed(np.random.default_rng(1).normal(size=(2, 5, 16)), jnp.float32)

    def parts_of(x):
        index, scale = experts.choose(x)
        return experts(x), spread(index, scale, config.experts), experts.shared(x)

    found, weights, shared = jax.jit(parts_of)(x)
    gate, up, down = (np.asarray(part[...], np.float64) for part in (experts.gate, experts.up, experts.down))
    silu = lambda x: x / (1 + np.exp(-x))
    each = lambda x, e: (silu(x @ gate[e]) * (x @ up[e])) @ down[e]
    mixed = sum(np.asarray(weights)[..., e : e + 1] * each(np.asarray(x), e) for e in range(config.experts))
    np.testing.assert_allclose(found, mixed + shared, atol=2e-5)


def test_latent_attention_in_absorbed_form_equals_expanded_heads():
    """From DeepSeek-V2's equations: every head's own key [plain | turned] and value, made from the latent."""
    latent = LatentConfig(latent=12, rope_dim=4, plain_dim=6, value_dim=5, query_rank=7, scale_factor=1.3)
    config = dataclasses.replace(CONFIG, latent=latent, rope=Rope(100.0, 4))
    attention = drawn(lambda: LatentAttention(config, nnx.Rngs(0), (), jnp.dtype("float32")))
    mask = jnp.tril(jnp.ones((5, 5), bool))[None, None].repeat(2, 0)

    @jax.jit
    def both(x):
        query, kv = attention.project(x)
        heads = attention.query(attention.query_norm(attention.query_down(x))).reshape(2, 5, 4, 10)
        expanded = attention.up(kv["ckv"][:, :, 0]).reshape(2, 5, 4, 11)
        scores = jnp.einsum("BTNU,BSNU->BNTS", heads[..., :6], expanded[..., :6])
        scores += jnp.einsum("BTNR,BSR->BNTS", heads[..., 6:], kv["kpe"][:, :, 0])
        weights = jax.nn.softmax(jnp.where(mask, scores * latent.scale, -jnp.inf), axis=-1)
        mixed = jnp.einsum("BNTS,BSNW->BTNW", weights, expanded[..., 6:])
        return attention.mix(query, kv, Mask(allowed=mask)), attention.output(mixed.reshape(2, 5, -1))

    found, expected = both(placed(np.random.default_rng(1).normal(size=(2, 5, 16)), jnp.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dense_layers", [0, 2])
def test_deepstack_is_added_behind_the_first_layers(dense_layers):
    experts = dataclasses.replace(EXPERTS, dense_layers=dense_layers) if dense_layers else None
    decoder = drawn(lambda: Decoder(dataclasses.replace(CONFIG, experts=experts), nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    hidden = placed(rng.normal(size=(2, 5, 16)), jnp.float32)
    deepstack = placed(rng.normal(size=(1, 2, 5, 16)), jnp.float32)
    positions, mask = jnp.arange(5)[None].repeat(2, 0), jnp.tril(jnp.ones((5, 5), bool))[None, None].repeat(2, 0)

    @jax.jit
    def runs(hidden):
        run = decoder.run(hidden, positions, mask, deepstack=deepstack, hidden_at=(1, 3))
        first = decoder.run(hidden, positions, mask, stop_layer=1).hidden + deepstack[0]
        return run, first, decoder.run(first, positions, mask, deepstack=deepstack, start_layer=1)

    run, first, rest = runs(hidden)
    np.testing.assert_allclose(run.taps[1], first, atol=2e-5)
    np.testing.assert_allclose(run.hidden, rest.hidden, atol=1e-4)
    assert np.array_equal(run.hidden, run.taps[3])
    assert run.kv["k"].shape == (3, 2, 5, 2, 8)
    np.testing.assert_allclose(run.kv["k"][1:], rest.kv["k"], atol=1e-4)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "expected a multiple of the 3 KV heads"),
        ({"activation": "mish"}, "hidden_act: got 'mish'"),
    ],
)
def test_a_configuration_refuses(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change)
    with pytest.raises(ConfigError, match="groups of equal size"):
        dataclasses.replace(EXPERTS, groups=4)
