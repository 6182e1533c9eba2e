"""A LoRA adapter merges at load as peft merges it, in float32, rounded once; any other adapter is refused by name."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.models.checkpoints import LoRASource, SafetensorsSource
from tests.goldens.load import GOLDENS, write_checkpoint
from tests.goldens.redraw import redraw, redraw_all, standard_values

ADAPTERS = GOLDENS / "adapters"
WEIGHTS = "adapter_model.safetensors"
QUERY, VALUE = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def write_adapter(directory: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    directory.mkdir()
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(plain | config))
    save_file(tensors, directory / WEIGHTS)
    return directory


def factors(*modules: str, rank: int = 2, prefix: str = "base_model.model.") -> dict[str, np.ndarray]:
    """Drawn factors of maps [64, 64] (value: [32, 64])."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in modules:
        rows = 32 if module == VALUE else 64
        shapes |= {f"{prefix}{module}.lora_A.weight": (rank, 64), f"{prefix}{module}.lora_B.weight": (rows, rank)}
    return redraw_all(shapes)


def opened(directory: Path, adapter: Path) -> Any:
    """The source of a directory's tensors with an adapter merged."""
    raw = json.loads((directory / "config.json").read_text())
    family = models.FAMILIES[raw["architectures"][0]]
    return family.opened(family.config(raw, "exact", None), SafetensorsSource(directory), adapter)[1]


@pytest.mark.parametrize("case", ["plain", "patterns", "whole", "image"])
def test_every_tensor_is_as_peft_merges_it(case, tiny_directory, tmp_path):
    gold = json.loads((ADAPTERS / f"{case}.json").read_text())
    directory = tiny_directory(gold["config"]["base_model_name_or_path"])
    merged = opened(directory, write_adapter(tmp_path / "adapter", redraw_all(gold["shapes"]), **gold["config"]))

    assert sorted(merged.tensors) == gold["tensors"]
    before = SafetensorsSource(directory)
    changed = [name for name in gold["tensors"] if not np.array_equal(merged.read(name), before.read(name))]
    assert changed == gold["changed"]
    with np.load(ADAPTERS / f"{case}.npz") as arrays:
        for name, total in zip(gold["tensors"], arrays["sums"], strict=True):
            value = merged.read(name)
            found = value.reshape(-1).astype(float) @ standard_values(name, value.size)
            assert abs(found - total) <= 2e-6 * value.size**0.5 * max(1.0, np.abs(value).max()), name
        for name in set(arrays.files) - {"sums"}:
            np.testing.assert_allclose(merged.read(name), arrays[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_regions_are_those_of_the_formula(stored, tiny_directory, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    tensors = {
        name: value.astype(stored) for name, value in load_file(tiny_directory("qwen2") / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    source = LoRASource(SafetensorsSource(folder), write_adapter(tmp_path / "a", factors(QUERY, VALUE)), str)
    for module in (QUERY, VALUE):
        name = f"{module}.weight"
        up, down = (redraw(f"base_model.model.{module}.lora_{part}.weight", shape).astype(float) for part, shape in
                    (("B", (tensors[name].shape[0], 2)), ("A", (2, 64))))  # fmt: skip
        expected = tensors[name].astype(float) + 3 / 2 * up @ down
        assert (source.tensors[name].dtype, source.read(name).dtype) == ("F32", np.float32)
        for region in (None, (slice(3, 9),), (slice(0, 32), slice(5, 64)), (slice(2, 2), slice(1, 3))):
            np.testing.assert_allclose(source.read(name, region), expected[region or ()], atol=1e-6, rtol=0)
    untouched = "model.layers.0.self_attn.q_proj.weight"
    assert source.read(untouched).tobytes() == tensors[untouched].tobytes()


def test_a_merged_model_is_saved_as_a_model_of_its_own(tiny_directory, tmp_path):
    """Chunks of the base are not the merged model's; bfloat16 is rounded once."""
    adapter = write_adapter(tmp_path / "adapter", factors(QUERY), use_rslora=True)
    merged, half = (
        models.load(tiny_directory("qwen2"), dtype=dtype, adapter=adapter) for dtype in ("float32", "bfloat16")
    )
    tensors = load_file(tiny_directory("qwen2") / "model.safetensors")
    down, up = factors(QUERY).values()
    expected = (tensors[f"{QUERY}.weight"] + np.float32(3 / 2**0.5) * (up @ down)).T
    kernels = [
        np.asarray(one.parameters["decoder"]["layers"]["attention"]["query"]["kernel"]) for one in (merged, half)
    ]
    np.testing.assert_allclose(kernels[0][1], expected, atol=1e-6, rtol=0)
    np.testing.assert_array_equal(kernels[1], kernels[0].astype(ml_dtypes.bfloat16))

    assert merged.fingerprint != models.load(tiny_directory("qwen2")).fingerprint
    again = models.load(models.save(merged, tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, again.parameters, merged.parameters)
    assert again.fingerprint == merged.fingerprint


@pytest.mark.parametrize("prefix", ["base_model.model.model.language_model.", "base_model.model.model."])
def test_names_of_an_adapter_may_be_of_any_version(prefix, tiny_directory, tmp_path):
    adapter = write_adapter(tmp_path / "a", factors("layers.2.self_attn.q_proj", prefix=prefix))
    assert opened(tiny_directory("qwen2_5_vl"), adapter).changed == {"model.layers.2.self_attn.q_proj.weight"}


def test_a_head_that_was_trained_is_no_longer_tied(tiny_directory, tmp_path):
    directory = write_checkpoint("llama3_1", tmp_path / "tied")
    head = redraw_all({"base_model.model.lm_head.weight": (300, 64)})
    adapter = write_adapter(tmp_path / "a", head | factors(QUERY), modules_to_save=["lm_head"])
    backbone = models.load(directory, adapter=adapter)
    assert not backbone.config.text.tied_embeddings
    np.testing.assert_array_equal(backbone.parameters["decoder"]["head"]["kernel"], next(iter(head.values())).T)

    name = "base_model.model.model.embed_tokens"
    shapes = {f"{name}.lora_embedding_A": (2, 300), f"{name}.lora_embedding_B": (64, 2)}
    alone = write_adapter(tmp_path / "b", redraw_all(shapes))
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight', which is the output head too.*'lm_head\.weight'"):
        models.load(directory, adapter=alone)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOKR"}, "peft_type 'LOKR', which is not built; expected 'LORA'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"use_something_new": 1}, "use_something_new 1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base"),
        ({"rank_pattern": [3]}, r"rank_pattern \[3\]; expected a table"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(config, message, tiny_directory, tmp_path):
    adapter = write_adapter(tmp_path / "a", factors(QUERY), **config)
    with pytest.raises(ConfigError, match=message):
        LoRASource(SafetensorsSource(tiny_directory("qwen2")), adapter, str)


ALL = factors(QUERY)
LEFT, RIGHT = ALL
EMBEDDING = "base_model.model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("family", "tensors", "message"),
    [
        ("qwen2", {LEFT: ALL[LEFT]}, r"got only .*lora_A\.weight' of the factors of .*; expected two"),
        ("qwen2", factors(QUERY, rank=3), r"of shape \(3, 64\); expected a matrix with the rank, 2, on axis 0"),
        ("llama3_1", ALL | factors("lm_head"), r"lm_head\.lora_A\.weight', which matches none.* may be tied"),
        ("qwen2", {}, "got no tensors"),
        ("qwen2", ALL | {EMBEDDING: np.zeros((302, 64), np.float32)}, r"of shape \(302, 64\); expected \(300, 64\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(family, tensors, message, tiny_directory, tmp_path):
    saved = ["embed_tokens"] if any("embed_tokens" in name for name in tensors) else []
    adapter = write_adapter(tmp_path / "a", tensors, modules_to_save=saved)
    with pytest.raises(WeightsError, match=message):
        models.load(tiny_directory(family), adapter=adapter)


def test_directories_that_hold_no_adapter(tiny_directory, tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_config\.json: got no such file; expected an adapter's directory"):
        models.load(tiny_directory("qwen2"), adapter=tmp_path)
    adapter = write_adapter(tmp_path / "a", factors(QUERY))
    with pytest.raises(ConfigError, match=r"got an adapter .* and no model; expected the model's directory"):
        models.load(adapter)
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors: got .*No such file"):
        models.load(tiny_directory("qwen2"), adapter=adapter)
