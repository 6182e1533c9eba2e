"""GGUF files load as what they were converted from, and LoRA adapters merge as in peft; others are refused."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from kvpatch_jax import models
from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.models import FAMILIES, load, save
from kvpatch_jax.models.checkpoints import GgufFile, LoRASource, SafetensorsSource
from tests.goldens.load import GOLDENS, write_checkpoint
from tests.goldens.redraw import redraw, redraw_all, standard_values
from tests.models.gguf_files import (
    HEAD,
    HEADS,
    KV_HEADS,
    WIDTH,
    converted,
    in_pairs,
    metadata_of,
    tiny_tensors,
    write_gguf,
)

# ----------------------------------------------------------------------------------------------------------------- GGUF


HF: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": HEAD,
        "sliding_window": 24,
        "rope_local_base_freq": 10000.0,
    },
}


def config_of(architecture: str, tensors: dict[str, np.ndarray], **more: Any) -> Any:
    """The text part of the configuration that the file was converted from."""
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": 40,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    raw = HF[architecture] | sizes | more
    return FAMILIES[raw["architectures"][0]].config(raw, "exact", None).text


def write_model(path: Path, architecture: str = "llama", **more: Any) -> Path:
    return write_gguf(path, metadata_of(architecture, **more), converted(tiny_tensors(architecture), architecture))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"tied": True, "bias": True}), ("qwen2", {}), ("gemma3", {"tied": True})],
)
def test_a_file_loads_as_the_directory_it_was_converted_from(tmp_path, architecture, options):
    tensors = tiny_tensors(architecture, **options)
    more = {"attention__key_length": HEAD, "attention__value_length": HEAD, "rope__dimension_count": HEAD}
    more |= {"attention__sliding_window": 24} if architecture == "gemma3" else {}
    write_gguf(tmp_path / "model.gguf", metadata_of(architecture, **more), converted(tensors, architecture))
    expected = config_of(architecture, tensors, **({"attention_bias": True} if "bias" in options else {}))
    backbone = load(tmp_path)  # with this file alone
    saved = save(backbone, tmp_path / "saved")
    for same in (backbone, load(tmp_path / "model.gguf"), load(saved)):
        assert same.config.text == expected
    written = load_file(saved / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        # Gemma's norms are stored with 1 added, which rounds.
        np.testing.assert_allclose(written[name], value, rtol=0, atol=1e-6 if architecture == "gemma3" else 0)


def test_a_directory_of_two_files_is_refused(tmp_path):
    write_model(tmp_path / "model.gguf")
    write_model(tmp_path / "other.gguf")
    with pytest.raises(WeightsError, match=r"got 2 GGUF files \(model\.gguf, other\.gguf\); expected the name of one"):
        load(tmp_path)


@given(st.data())
def test_any_region_is_that_of_the_whole(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.getbasetemp() / "regions"
    architecture = data.draw(st.sampled_from(["llama", "qwen2"]))
    path = root / f"{architecture}.gguf"
    source = GgufFile(path if path.exists() else write_model(path, architecture))
    tensors = tiny_tensors(architecture)
    name = data.draw(st.sampled_from(sorted(tensors)))
    region = []
    for size in tensors[name].shape:
        start = data.draw(st.integers(0, size - 1))
        region.append(slice(start, data.draw(st.integers(start + 1, size))))
    assert np.array_equal(source.read(name, tuple(region)), tensors[name][tuple(region)])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_read_exactly(tmp_path, dtype):
    tensors = {name: value.astype(dtype) for name, value in tiny_tensors("llama").items()}
    source = GgufFile(write_gguf(tmp_path / "m.gguf", metadata_of("llama"), converted(tensors, "llama")))
    assert all(np.array_equal(source.read(name), value.astype(np.float32)) for name, value in tensors.items())


# ------------------------------------------------------------------------------------------------- ropes


def test_factors_divide_the_frequencies(tmp_path):
    factors = np.linspace(1, 8, HEAD // 2, dtype=np.float32)
    metadata, tensors = metadata_of("llama"), converted(tiny_tensors("llama"), "llama")
    more = tensors | {"rope_freqs.weight": factors}
    rope = load(write_gguf(tmp_path / "factors.gguf", metadata, more)).layout.rope
    plain = load(write_gguf(tmp_path / "plain.gguf", metadata, tensors)).layout.rope
    assert np.allclose(rope.inverse_frequencies * factors, plain.inverse_frequencies, rtol=1e-6)
    assert rope.attention_scaling == 1.0


@pytest.mark.parametrize(
    ("architecture", "kind", "factor", "original"), [("qwen2", "yarn", 4.0, 16), ("llama", "linear", 2.0, None)]
)
def test_scaling_of_the_metadata(tmp_path, architecture, kind, factor, original):
    more = {"rope__scaling__type": kind, "rope__scaling__factor": factor}
    more |= {"rope__scaling__original_context_length": original} if original else {}
    scaling = load(write_model(tmp_path / "m.gguf", architecture, **more)).layout.rope.scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == (kind, factor)
    assert original in (None, scaling.original)


# ------------------------------------------------------------------------------------------------- quantised types


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """Two float16 (scale, smallest), then 16 bytes: value i in the low half of byte i, value i + 16 in the high one."""
    out = np.zeros((len(blocks), 32), np.float32)
    for number, block in enumerate(blocks):
        scale, least = (np.float32(np.frombuffer(block[at : at + 2].tobytes(), np.float16)[0]) for at in (0, 2))
        for place in range(16):
            byte = int(block[4 + place])
            out[number, place] = scale * np.float32(byte & 15) + least
            out[number, place + 16] = scale * np.float32(byte >> 4) + least
    return out


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """A float16 scale, then 32 signed bytes."""
    out = np.zeros((len(blocks), 32), np.float32)
    for number, block in enumerate(blocks):
        scale = np.float32(np.frombuffer(block[:2].tobytes(), np.float16)[0])
        out[number] = scale * np.frombuffer(block[2:].tobytes(), np.int8).astype(np.float32)
    return out


@pytest.mark.parametrize(("kind", "size", "meant"), [(3, 20, q4_1), (8, 34, q8_0)])
def test_quantised_types_by_loops_over_their_bits(tmp_path, kind, size, meant):
    rng = np.random.default_rng(kind)
    blocks = rng.integers(0, 256, (HEADS * HEAD, size), np.uint8)
    blocks[:, :4] = rng.uniform(-1, 1, (len(blocks), 2)).astype(np.float16).view(np.uint8)[:, :4]
    tensors: dict[str, Any] = converted(tiny_tensors("llama"), "llama")
    tensors["blk.1.attn_q.weight"] = kind, (HEADS * HEAD, WIDTH), in_pairs(blocks, HEADS).tobytes()
    path = write_gguf(tmp_path / "m.gguf", metadata_of("llama"), tensors)
    name, expected = "model.layers.1.self_attn.q_proj.weight", meant(blocks)
    assert np.array_equal(GgufFile(path).read(name), expected)
    assert np.array_equal(GgufFile(path).read(name, (slice(3, 9), slice(5, 30))), expected[3:9, 5:30])
    half = load(path, dtype="bfloat16").parameters["decoder"]["layers"]["attention"]["query"]["kernel"]
    assert np.array_equal(half[1], expected.T.astype(ml_dtypes.bfloat16))


# ------------------------------------------------------------------------------------------------- refusals


TENSORS: dict[str, Any] = {
    "blk.0.ffn_up.weight": np.ones((2, 2), np.float32),
    "blk.0.attn_v.weight": (4096, (16, 32), b""),
    "rope_freqs.weight": np.ones(3, np.float32),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2'; expected one of llama, qwen2, gemma3"),
        ({"split.count": 3}, "got one of 3 files"),
        ({"llama.expert_count": 8}, r"got llama\.expert_count = 8, which this library does not know"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope', which is not read"),
        ("blk.0.ffn_up.weight", r"mlp\.up_proj\.weight' of shape \(2, 2\)"),
        ("blk.0.attn_v.weight", "4096.* is not a valid GGMLQuantizationType"),
        ("rope_freqs.weight", r"'rope_freqs\.weight' of shape \(3,\) .*expected 4"),
    ],
)
def test_metadata_and_tensors_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    metadata, tensors = metadata_of("llama"), converted(tiny_tensors("llama"), "llama")
    if isinstance(change, dict):
        metadata |= change
    else:
        tensors[change] = TENSORS[change]
    with pytest.raises((ConfigError, WeightsError), match=message):
        load(write_gguf(tmp_path / "m.gguf", metadata, tensors))


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    whole = write_model(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 4200, 397), *range(4200, len(whole) - 32, 19973)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"cut\.gguf"):
            GgufFile(cut)


# ----------------------------------------------------------------------------------------------------------------- LoRA


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
