"""Engines that the connector supports: models, groups of caches, parallelism, versions; and whose weights they have."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import logging
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from serving_sides import LAYOUT, PAGE

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, PoolError
from kvpatch_jax.serving.vllm import ConnectorConfig
from kvpatch_jax.serving.vllm.engine import (
    SAMPLE,
    TRIED,
    UNSUPPORTED_SIZES,
    check_groups,
    check_model,
    check_parallel,
    check_versions,
    layout_of,
    weights_digest,
)
from kvpatch_jax.serving.vllm.messages import blocks_from, slots_of
from kvpatch_jax.serving.vllm.worker_side import WorkerSide

ROOT = Path(__file__).parents[2]


TEXT = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
MROPE = {"rope_type": "mrope", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = ["LlamaForCausalLM"]


def test_layouts_are_read_from_supported_configurations_only():
    plain = layout_of({**TEXT, "rope_theta": 1e4}, LLAMA)
    assert plain == kvp.KVLayout.gqa(2, 2, 64, kvp.Rope(1e4, 64, angles="float32"))
    pictures = layout_of({**TEXT, "rope_parameters": MROPE}, ["Qwen2_5_VLForConditionalGeneration"])
    assert pictures.rope.sections == (8, 12, 12)
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    scaled = layout_of({**TEXT, "rope_theta": 5e5, "rope_scaling": scaling}, LLAMA)
    # Llama 3.1's: the fastest stay, the slowest are an eighth.
    stretched = kvp.Rope(5e5, 64).inverse_frequencies / scaled.rope.inverse_frequencies
    np.testing.assert_allclose(stretched[[0, -1]], [1, 8])
    for more, families in (
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3}, LLAMA),
        ({"rope_theta": 1e4}, ["KimiVL"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, LLAMA),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, LLAMA),
        ({}, LLAMA),
    ):
        with pytest.raises(ConfigError, match="connector"):
            layout_of({**TEXT, **more}, families)


def test_models_other_than_tpu_inferences_are_refused():
    """tpu-inference runs vLLM's torch models too, whose angles are rounded otherwise, if it lacks its own."""
    supported = type("LlamaForCausalLM", (), {"__module__": "tpu_inference.models.jax.llama3"})
    other = type("Wrapped", (), {"__module__": "tpu_inference.models.vllm.vllm_model_wrapper"})
    check_model(supported())
    with pytest.raises(ConfigError, match=r"models\.vllm"):
        check_model(other())


def spread(executor="uni", strategy=None, **sizes):
    """Asks whether an engine of these sizes is served: `strategy` as tpu-inference keeps it, or None."""
    ones = dict.fromkeys(UNSUPPORTED_SIZES, 1)
    parallel = SimpleNamespace(tensor_parallel_size=8, distributed_executor_backend=executor, **{**ones, **sizes})
    mesh = None if strategy is None else SimpleNamespace(sharding_strategy=SimpleNamespace(**strategy))
    check_parallel(parallel, mesh)


def test_only_tensor_parallelism_is_supported():
    spread()
    spread(strategy={"tensor_parallelism": 8, "data_parallelism": 1})
    for sizes, words in (
        *(({name: 2}, f"{name}': 2") for name in UNSUPPORTED_SIZES),
        ({"strategy": {"tensor_parallelism": 2, "attention_data_parallelism": 2}}, "{'attention_data_parallelism': 2}"),
        ({"executor": "ray"}, "'ray'; expected 'uni'"),
        ({"executor": SimpleNamespace}, "SimpleNamespace"),
    ):
        with pytest.raises(ConfigError, match=words):
            spread(**sizes)


@pytest.mark.parametrize("other", ["SlidingWindowSpec", "MambaSpec"])
def test_models_with_several_groups_of_caches_are_refused_by_name(other):
    """Layers with a window, or with a recurrent state, beside full attention."""
    full, more = (SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in ("FullAttentionSpec", other))
    for caches in (None, SimpleNamespace(kv_cache_groups=[full])):
        check_groups("some/model", caches)
    words = f"got model 'some/model' with 2 groups of KV caches, FullAttentionSpec, {other}; expected a model with one"
    with pytest.raises(ConfigError, match=words):
        check_groups("some/model", SimpleNamespace(kv_cache_groups=[full, more]))


def test_a_pool_of_another_format_is_refused(unchecked, tmp_path):
    worker = WorkerSide(ConnectorConfig.read({"store": str(tmp_path), "backbone": "tiny"}), LAYOUT, PAGE)
    for pages, words in (
        ([jnp.zeros((20, PAGE, 1, 1, 128))], "2 layers|1 layers"),
        ([jnp.zeros((20, 8, 1, 1, 128))] * 2, "8 tokens"),
        ([jnp.zeros((20, PAGE, 1, 4, 128), jnp.float8_e4m3fn)] * 2, "float8_e4m3fn pages; expected 16 or 32 bits"),
        ([jnp.zeros((20, PAGE, 2, 1, 128))] * 2, r"expected rows of \(1, 1, 128\)"),
    ):
        with pytest.raises(ValueError, match=words):
            worker.register(SimpleNamespace(kv_caches=pages))


def test_slots_of_tokens_follow_the_blocks():
    assert slots_of((5, 2, 9), 4, 3, 9).tolist() == [23, 8, 9, 10, 11, 36]
    assert [blocks_from((5, 2, 9), 4, *span) for span in ((4, 8), (3, 9))] == [{2}, {5, 2, 9}]
    with pytest.raises(PoolError, match="3 blocks of 4"):
        slots_of((5, 2, 9), 4, 3, 13)


def test_neither_vllm_nor_torch_is_imported():
    assert not {"vllm", "torch"} & sys.modules.keys()


# ------------------------------------------------------------------------------------------------------------ versions


def test_other_versions_than_those_of_the_extra_are_named_with_them(caplog):
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert dict(requirement.split("==") for requirement in extra).items() <= TRIED.items()
    others = {"vllm": "0.32.0+cpu", "tpu-inference": "0.32.0", "jax": "0.11.2+cuda"}
    assert check_versions(dict(TRIED).get) == check_versions(others.get) == {}
    assert check_versions({"vllm": "0.33.0", "jax": "0.11.2"}.get) == {"vllm": "0.33.0", "tpu-inference": "none"}
    (record,) = caplog.records
    for words in ("vllm 0.33.0", "tpu-inference none", *(f"{name} {version}" for name, version in TRIED.items())):
        assert words in record.getMessage()


# ------------------------------------------------------------------------------------------------------------- weights


def tensors_of(seed):
    rng = np.random.default_rng(seed)
    sizes = {"embed": (64, 80), "layer.0.k": (80, 16), "layer.0.norm": (16,), "empty": (0,)}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def checkpoint_of(folder, *shards):
    folder.mkdir()
    for place, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{place}.safetensors", metadata={"format": "pt"})
    return folder


def config_of(model, load_format="auto", quantization=None, **more):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), quantization=quantization),
        load_config=SimpleNamespace(load_format=load_format, download_dir=str(model)),
        **more,
    )


def test_the_digest_depends_on_the_tensors_alone(tmp_path):
    """Not on the path, or on files; any tensor's name, shape or values, and quantisation, make it another one."""
    tensors = tensors_of(1)
    first, second = dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])
    digest = weights_digest(config_of(checkpoint_of(tmp_path / "whole", tensors)))
    assert weights_digest(config_of(checkpoint_of(tmp_path / "split", second, first))) == digest
    last, middle = tensors["embed"].copy(), tensors["embed"].copy()
    assert last.nbytes > 2 * SAMPLE, "what is sampled, not read whole"
    last[-1, -1] += 1
    middle[32, 0] += 1
    others = [first, {**first, **{f"{name}.": value for name, value in second.items()}}]
    others += [tensors | {"embed": values} for values in (last, middle)]
    others += [tensors | {"layer.0.norm": -tensors["layer.0.norm"], "empty": np.zeros((0, 2), np.float32)}]
    others += [tensors | {"layer.0.k": tensors["layer.0.k"].reshape(16, 80)}]
    digests = [weights_digest(config_of(checkpoint_of(tmp_path / str(n), other))) for n, other in enumerate(others)]
    digests += [weights_digest(config_of(tmp_path / "whole", quantization="fp8"))]
    digests += [weights_digest(config_of(tmp_path / "whole", additional_config={"quantization": {"qwix": {}}}))]
    assert len({digest, *digests}) == len(digests) + 1


def test_a_checkpoint_of_the_hub_is_found_in_its_cache(tmp_path):
    pytest.importorskip("huggingface_hub")
    cached = tmp_path / "models--some--model"
    for folder in ("refs", "snapshots"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    snapshot = checkpoint_of(cached / "snapshots" / ("0" * 40), tensors_of(1))
    config = config_of("some/model")
    config.load_config.download_dir = str(tmp_path)
    assert weights_digest(config) == weights_digest(config_of(snapshot)) is not None


@pytest.mark.parametrize("fault", ["dummy", "no file", "damaged", "cut"])
def test_unknown_weights_cause_one_warning(tmp_path, fault, caplog):
    caplog.set_level(logging.WARNING)
    folder = checkpoint_of(tmp_path / "model", tensors_of(1))
    file = folder / "model-0.safetensors"
    config = config_of(folder, "dummy" if fault == "dummy" else "auto")
    if fault == "no file":
        file.rename(folder / "model.bin")
    elif fault == "damaged":
        file.write_bytes(file.read_bytes().replace(b"data_offsets", b"other_things"))
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    assert weights_digest(config) is None
    assert caplog.text.count("could not be identified") == 1
