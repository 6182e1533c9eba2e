"""Decoders whose layers are of unlike kinds: what their configurations may say, and what Gemma 3's files mean."""
# pyright: reportArgumentType=false

import dataclasses
from typing import Any

import pytest

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError, LayoutError
from kvpatch_jax.models import FAMILIES
from kvpatch_jax.models.decoder.config import DecoderConfig, LayerKind
from kvpatch_jax.models.decoder.costs import forward_costs
from kvpatch_jax.models.decoder.sharding import cache_specs, partition_specs
from tests.goldens.load_text import text_config

FULL, LOCAL = LayerKind("", Rope(1e6, 16), 16, 2), LayerKind("local", Rope(1e4, 16), 16, 2, 6)
SIZES: dict[str, Any] = {
    **{"vocabulary": 300, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96},
    **{"rope": FULL.rope, "kinds": (FULL, LOCAL), "kind_of": (1, 0, 1)},
}


def test_kinds_say_channels_windows_and_edges():
    config = DecoderConfig(**SIZES)
    assert config.window == 6
    assert [config.slides(layer) for layer in range(3)] == [True, False, True]
    assert config.kind_edges == (1, 2)
    assert config.rows == (0, 0, 1)
    assert {c.name: c.layers for c in config.layout.channels} == {
        **{"k": (1,), "v": (1,)},
        **{"k_local": (0, 2), "v_local": (0, 2)},
    }
    assert forward_costs(config).window == (6, 0, 6)
    assert dataclasses.replace(config, dtype="bfloat16").layout == config.layout


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind_of": (1, 0)}, "expected one of 2 kinds for each of 3 layers"),
        ({"kind_of": (1, 1, 1)}, "expected one of 2 kinds"),
        ({"window": 7}, "or a window beside them"),
        ({"rope": Rope(5.0, 16)}, "a first one unlike the decoder's own fields"),
        ({"kinds": (FULL, dataclasses.replace(LOCAL, kv_heads=3))}, "got 3 KV heads of width 16; expected a divisor"),
        ({"kinds": (FULL, dataclasses.replace(LOCAL, head_dim=8))}, "and the rope's width 16"),
        ({"kinds": (FULL, dataclasses.replace(LOCAL, reads=True))}, "layer 0: got one that reads the KV of no layer"),
        ({"kinds": (FULL, dataclasses.replace(LOCAL, name=""))}, "expected a name for each"),
        ({"norm_weight": "twice"}, "norm_weight: got 'twice'"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**SIZES | change)


@pytest.mark.usefixtures("unchecked")
def test_a_mesh_refuses_them_by_name():
    class OneDevice:
        axis_names, shape = ("tensor",), {"tensor": 1}

    config = DecoderConfig(**SIZES)
    for call in (lambda: partition_specs(config, {}, OneDevice()), lambda: cache_specs(config.layout, OneDevice())):
        with pytest.raises(LayoutError, match="mesh: got a layout whose channel 'k' has layers of its own"):
            call()


def read(raw: dict[str, Any]) -> DecoderConfig:
    return FAMILIES[raw["architectures"][0]].config(raw, "exact", None).text


def test_released_keys_of_gemma_3_mean_the_same():
    """`rope_local_base_freq`, `rope_scaling` and `sliding_window_pattern`, as released files have them."""
    newer = text_config("gemma3_text")
    older = {name: value for name, value in newer.items() if name not in ("rope_parameters", "layer_types")}
    older |= {"rope_theta": 5e2, "rope_local_base_freq": 3e1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    older |= {"sliding_window_pattern": 2, "cache_implementation": "hybrid"}
    assert read(older) == read(newer)
    six = read(older | {"sliding_window_pattern": None, "num_hidden_layers": 12})
    assert [six.slides(layer) for layer in range(12)] == [*[True] * 5, False] * 2
    plain = read({name: value for name, value in older.items() if "rope" not in name})
    assert [kind.rope.theta for kind in plain.kinds] == [1e6, 1e4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0, which is not built"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True, which is not built"),
        ({"layer_types": ["full_attention"] * 2}, "for each of 3 layers"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "for each of 3 layers"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: got"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "got rope type 'dynamic'"),
        ({"rope_parameters": {"full_attention": 3}}, "got full_attention 3; expected a table"),
        ({"sliding_window": None}, "got no 'sliding_window'"),
        ({"altup_num_inputs": 4}, "'altup_num_inputs': 4, which this library does not know"),
    ],
)
def test_what_is_not_built_of_gemma_3_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read(text_config("gemma3_text") | change)


def test_released_keys_of_gemma_4_mean_the_same():
    """`global_head_dim` and `num_global_key_value_heads`, where transformers writes `per_layer_config`."""
    for name, own in (
        ("gemma4_text", {"global_head_dim": 24}),
        ("gemma4_wide", {"global_head_dim": 24, "num_global_key_value_heads": 1}),
    ):
        newer = text_config(name)
        older = {key: value for key, value in newer.items() if key != "per_layer_config"} | own
        assert read(older) == read(newer), name
    shared = read(text_config("gemma4_text"))
    assert shared.sources == (0, 1, 2, 2, 2, 1)
    assert shared.rows == (0, 0, 1, 1, 1, 0)
    assert [stack.layers for stack in shared.stacks] == [(0, 2), (1,), (3, 4), (5,)]
    # Layers that read another's KV have no maps to keys and values, and an MLP twice as wide.
    costs, wide = forward_costs(shared), 2 * 3 * 64 * 96
    heads = 2 * 64 * 2 * 2 * 16
    assert costs.token[3] - costs.token[0] == wide - heads
    assert costs.pair == tuple(4 * 4 * width for width in (16, 24, 16, 16, 16, 24))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_moe_block": True}, "got no 'num_experts'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all', which is not built"),
        ({"num_kv_shared_layers": 6}, "6 shared; expected one of"),
        ({"num_kv_shared_layers": 5}, "reads the KV of no layer below"),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, "got head_dim 0 of layer 1"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "of layer 1; expected head_dim, num_key_value_heads"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "expected a table for sliding"),
    ],
)
def test_what_is_not_built_of_gemma_4_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read(text_config("gemma4_text") | change)
