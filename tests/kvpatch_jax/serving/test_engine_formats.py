"""Engines, models, pools and parallelism that the connector supports; others are refused at the start."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, PoolError
from kvpatch_jax.serving.vllm import ConnectorConfig, parallel
from kvpatch_jax.serving.vllm.layouts import check_model, layout_of
from kvpatch_jax.serving.vllm.messages import (
    blocks_from,
    slots_of,
)
from kvpatch_jax.serving.vllm.worker_side import WorkerSide


def test_slots_of_tokens_follow_the_blocks():
    assert slots_of((5, 2, 9), 4, 3, 9).tolist() == [23, 8, 9, 10, 11, 36]
    assert blocks_from((5, 2, 9), 4, 4, 8) == {2}
    assert blocks_from((5, 2, 9), 4, 3, 9) == {5, 2, 9}
    with pytest.raises(PoolError, match="3 blocks of 4"):
        slots_of((5, 2, 9), 4, 3, 13)


def test_layouts_are_read_from_supported_configurations_only():
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    plain = layout_of({**text, "rope_theta": 1e4}, ["LlamaForCausalLM"])
    assert plain == kvp.KVLayout.gqa(2, 2, 64, kvp.Rope(1e4, 64, angles="float32"))
    table = {"rope_type": "mrope", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    found = layout_of({**text, "rope_parameters": table}, ["Qwen2_5_VLForConditionalGeneration"])
    assert found.rope.sections == (8, 12, 12)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    whole = scaled | {"original_max_position_embeddings": 8192}
    found = layout_of({**text, "rope_theta": 5e5, "rope_scaling": whole}, ["LlamaForCausalLM"])
    # Llama 3.1's: the fastest stay, the slowest are an eighth; wavelengths of 8192 / 4 to 8192 are between.
    stretched = kvp.Rope(5e5, 64).inverse_frequencies / found.rope.inverse_frequencies
    waves = 2 * np.pi / kvp.Rope(5e5, 64).inverse_frequencies
    np.testing.assert_allclose(stretched[waves < 2048], 1)
    np.testing.assert_allclose(stretched[waves > 8192], 8)
    between = stretched[(waves > 2048) & (waves < 8192)]
    assert between.size
    assert ((between > 1) & (between < 8)).all()
    for more, families in (
        ({"rope_theta": 1e4, "rope_scaling": scaled}, ["LlamaForCausalLM"]),
        ({"rope_theta": 1e4}, ["KimiVL"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["LlamaForCausalLM"]),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, ["LlamaForCausalLM"]),
        ({}, ["LlamaForCausalLM"]),
    ):
        with pytest.raises(ConfigError, match="connector"):
            layout_of({**text, **more}, families)


def test_models_other_than_tpu_inferences_own_are_refused():
    """tpu-inference runs vLLM's torch models too, whose angles are rounded otherwise: asked to, or lacking its own."""
    own = type("LlamaForCausalLM", (), {"__module__": "tpu_inference.models.jax.llama3"})
    other = type("Wrapped", (), {"__module__": "tpu_inference.models.vllm.vllm_model_wrapper"})
    check_model(own())
    with pytest.raises(ConfigError, match=r"models\.vllm"):
        check_model(other())


def test_a_pool_of_another_format_is_refused(unchecked, tmp_path):
    worker = WorkerSide(ConnectorConfig(store=str(tmp_path), backbone="tiny"), LAYOUT, PAGE)
    for pages, words in (
        ([jnp.zeros((20, PAGE, 1, 1, 128))], "2 layers|1 layers"),
        ([jnp.zeros((20, 8, 1, 1, 128))] * 2, "8 tokens"),
        ([jnp.zeros((20, PAGE, 1, 4, 128), jnp.float8_e4m3fn)] * 2, "float8_e4m3fn pages; expected 16 or 32 bits"),
        ([jnp.zeros((20, PAGE, 2, 1, 128))] * 2, r"expected rows of \(1, 1, 128\)"),
    ):
        with pytest.raises(ValueError, match=words):
            worker.register(SimpleNamespace(kv_caches=pages))


def spread(executor="uni", groups=1, strategy=None, **sizes):
    """Asks whether an engine of these sizes is served: `strategy` as tpu-inference keeps it, or None."""
    one = dict.fromkeys(parallel.UNSUPPORTED_SIZES, 1)
    own = SimpleNamespace(tensor_parallel_size=8, distributed_executor_backend=executor, **{**one, **sizes})
    mesh = None if strategy is None else SimpleNamespace(sharding_strategy=SimpleNamespace(**strategy))
    parallel.check_parallel(own, mesh, groups)


def test_only_tensor_parallelism_is_supported():
    spread()
    spread(strategy={"tensor_parallelism": 8, "data_parallelism": 1})
    for given, words in (
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size': 2"),
        ({"data_parallel_size": 4}, "data_parallel_size': 4"),
        ({"decode_context_parallel_size": 2}, "decode_context"),
        ({"prefill_context_parallel_size": 2}, "prefill_context"),
        ({"groups": 2}, "groups of caches': 2"),
        ({"strategy": {"tensor_parallelism": 2, "data_parallelism": 4}}, "{'data_parallelism': 4}"),
        ({"strategy": {"tensor_parallelism": 2, "attention_data_parallelism": 2}}, "attention_data_parallelism': 2"),
        ({"executor": "ray"}, "'ray'; expected 'uni'"),
        ({"executor": SimpleNamespace}, "SimpleNamespace"),
    ):
        with pytest.raises(ConfigError, match=words):
            spread(**given)


def test_neither_vllm_nor_torch_is_imported():
    assert not {"vllm", "torch"} & sys.modules.keys()
