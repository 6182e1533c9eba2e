"""Engines that the connector supports: models, groups of caches, parallelism, versions; and whose weights they have."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import logging
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError
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

ROOT = Path(__file__).parents[3]


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
    # Llama 3.1's: the fastest stay, the slowest are an eighth.
    stretched = kvp.Rope(5e5, 64).inverse_frequencies / found.rope.inverse_frequencies
    np.testing.assert_allclose(stretched[[0, -1]], [1, 8])
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


def spread(executor="uni", strategy=None, **sizes):
    """Asks whether an engine of these sizes is served: `strategy` as tpu-inference keeps it, or None."""
    ones = dict.fromkeys(UNSUPPORTED_SIZES, 1)
    parallel = SimpleNamespace(tensor_parallel_size=8, distributed_executor_backend=executor, **{**ones, **sizes})
    mesh = None if strategy is None else SimpleNamespace(sharding_strategy=SimpleNamespace(**strategy))
    check_parallel(parallel, mesh)


def test_only_tensor_parallelism_is_supported():
    spread()
    spread(strategy={"tensor_parallelism": 8, "data_parallelism": 1})
    for given, words in (
        *(({name: 2}, f"{name}': 2") for name in UNSUPPORTED_SIZES),
        ({"strategy": {"tensor_parallelism": 2, "attention_data_parallelism": 2}}, "{'attention_data_parallelism': 2}"),
        ({"executor": "ray"}, "'ray'; expected 'uni'"),
        ({"executor": SimpleNamespace}, "SimpleNamespace"),
    ):
        with pytest.raises(ConfigError, match=words):
            spread(**given)


def test_models_with_several_groups_of_caches_are_refused_by_name():
    """Layers with a window, or with a recurrent state, beside full attention."""

    def caches(*kinds):
        groups = [SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds]
        return SimpleNamespace(kv_cache_groups=groups)

    check_groups("some/model", None)
    check_groups("some/model", caches("FullAttentionSpec"))
    for other in ("SlidingWindowSpec", "MambaSpec"):
        words = (
            f"got model 'some/model' with 2 groups of KV caches, FullAttentionSpec, {other}; expected a model with one"
        )
        with pytest.raises(ConfigError, match=words):
            check_groups("some/model", caches("FullAttentionSpec", other))


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
    own = tensors_of(1)
    first, second = dict(list(own.items())[:2]), dict(list(own.items())[2:])
    digest = weights_digest(config_of(checkpoint_of(tmp_path / "whole", own)))
    assert weights_digest(config_of(checkpoint_of(tmp_path / "split", second, first))) == digest
    last, middle = own["embed"].copy(), own["embed"].copy()
    assert last.nbytes > 2 * SAMPLE, "what is sampled, not read whole"
    last[-1, -1] += 1
    middle[32, 0] += 1
    changed = [own | {"embed": last}, own | {"embed": middle}, own | {"layer.0.norm": -own["layer.0.norm"]}, first]
    changed += [own | {"layer.0.k": own["layer.0.k"].reshape(16, 80)}, own | {"empty": np.zeros((0, 2), np.float32)}]
    changed += [{**first, **{f"{name}.": value for name, value in second.items()}}]
    found = [weights_digest(config_of(checkpoint_of(tmp_path / str(n), other))) for n, other in enumerate(changed)]
    found += [weights_digest(config_of(tmp_path / "whole", quantization="fp8"))]
    found += [weights_digest(config_of(tmp_path / "whole", additional_config={"quantization": {"qwix": {}}}))]
    assert len({digest, *found}) == len(found) + 1


def test_a_checkpoint_of_the_hub_is_found_in_its_cache(tmp_path):
    pytest.importorskip("huggingface_hub")
    own = checkpoint_of(tmp_path / "own", tensors_of(1))
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    checkpoint_of(cached / "snapshots" / ("0" * 40), tensors_of(1))
    config = config_of("some/model")
    config.load_config.download_dir = str(tmp_path / "cache")
    assert weights_digest(config) == weights_digest(config_of(own))


@pytest.mark.parametrize("fault", ["dummy", "no file", "damaged", "cut"])
def test_unknown_weights_cause_one_warning(tmp_path, fault, caplog):
    caplog.set_level(logging.WARNING)
    own = checkpoint_of(tmp_path / "own", tensors_of(1))
    file = own / "model-0.safetensors"
    config = config_of(own, "dummy" if fault == "dummy" else "auto")
    if fault == "no file":
        file.rename(own / "model.bin")
    elif fault == "damaged":
        file.write_bytes(file.read_bytes().replace(b"data_offsets", b"other_things"))
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    assert weights_digest(config) is None
    assert caplog.text.count("could not be identified") == 1
