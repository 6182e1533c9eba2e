"""Directories of quantised weights load as the plain ones that they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from kvpatch_jax.errors import ConfigError, WeightsError
from models import load
from models.checkpoints import flatten_params, open_source
from tests.models.quantised_arrays import (
    AWQ,
    FP8,
    KINDS,
    awq_arrays,
    awq_by_loops,
    blocks_by_loops,
    fp8_arrays,
    gptq,
    gptq_arrays,
    gptq_by_loops,
)

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "torch_dtype": "float32",
}


def plain_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A tiny Llama's tensors by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (40, 32),
        "lm_head.weight": (40, 32),
        "model.norm.weight": (32,),
    }
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
        rows = {"q": 32, "k": 16, "v": 16, "o": 32}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (rows[name], 32) for name in rows}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (64, 32) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (32, 64)
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_directory(root: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(TINY | config))
    header: dict[str, Any] = {}
    place = 0
    for name, value in tensors.items():
        kind, size = KINDS[value.dtype.name], value.nbytes
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    (root / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return root


def quantise_projections(method: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Quantised tensors of the tiny Llama, what they stand for by the loops above, and the configuration."""
    rng = np.random.default_rng(7)
    stored: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, value in plain_tensors().items():
        module = name.removesuffix(".weight")
        if "_proj" not in name:
            stored[name] = meant[name] = value
            continue
        outputs, inputs = value.shape
        if method == "fp8":
            arrays = fp8_arrays(rng, value.shape)
            arrays["a.weight_scale_inv"] /= 100
            meant[name] = blocks_by_loops(arrays)
        elif method == "awq":
            arrays = awq_arrays(rng, inputs, outputs)
            meant[name] = awq_by_loops(arrays)
        else:
            arrays = gptq_arrays(rng, 4, inputs, outputs, shuffled=True) | {"a.bias": np.zeros(outputs, np.float16)}
            meant[name] = gptq_by_loops(arrays, 4, 1)
        stored |= {f"{module}.{part.removeprefix('a.')}": array for part, array in arrays.items()}
    tables = {"fp8": FP8, "awq": AWQ | {"modules_to_not_convert": ["lm_head"]}, "gptq": gptq(desc_act=True)}
    return stored, meant, tables[method]


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_a_quantised_directory_loads_as_the_plain_one_it_stands_for(tmp_path: Path, method: str) -> None:
    stored, meant, table = quantise_projections(method)
    backbone = load(write_directory(tmp_path / "quantised", stored, quantization_config=table))
    plain = load(write_directory(tmp_path / "plain", meant))
    found, expected = (flatten_params(each.parameters) for each in (backbone, plain))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)
    assert backbone.fingerprint == plain.fingerprint
    assert backbone.fingerprint != load(write_directory(tmp_path / "other", plain_tensors())).fingerprint
    assert "quantization_config" not in backbone.config.to_dict()


def test_a_sharded_load_takes_its_regions(tmp_path: Path) -> None:
    stored, meant, table = quantise_projections("gptq")
    directory = write_directory(tmp_path / "quantised", stored, quantization_config=table)
    mesh = jax.make_mesh((1,), ("tensor",))
    found = flatten_params(load(directory, dtype="bfloat16", mesh=mesh).parameters)
    kernel = found["decoder", "layers", "attention", "query", "kernel"]
    assert np.array_equal(kernel[1], meant["model.layers.1.self_attn.q_proj.weight"].T.astype(ml_dtypes.bfloat16))


def test_older_releases_say_it_in_a_file_of_their_own(tmp_path: Path) -> None:
    stored, meant, _ = quantise_projections("awq")
    directory = write_directory(tmp_path, stored)
    with pytest.raises(WeightsError, match=r"of quantised weights; .*config\.json has no quantization_config"):
        open_source(directory)
    older = {"zero_point": True, "q_group_size": 8, "w_bit": 4, "version": "GEMM"}
    (directory / "quant_config.json").write_text(json.dumps(older))
    name = "model.layers.0.mlp.down_proj.weight"
    assert np.array_equal(open_source(directory).read(name), meant[name])


def test_a_refused_release_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    for config in (
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(TINY | config))
        with pytest.raises(ConfigError, match="quantised by 'mxfp4'"):
            load(tmp_path)


def test_a_scale_of_nan_is_told(tmp_path: Path) -> None:
    stored, _, table = quantise_projections("fp8")
    stored["model.layers.1.mlp.up_proj.weight_scale_inv"][2, 1] = np.nan
    with pytest.raises(WeightsError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight': got nan at \[8, 3\]"):
        load(write_directory(tmp_path, stored, quantization_config=table))
