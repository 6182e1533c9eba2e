"""Authors' own formats: the tiny models of the goldens as OpenGVLab and DeepSeek store theirs are the same models."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file, save_file

import models
from kvpatch_jax.errors import ConfigError, WeightsError
from models.checkpoints import SafetensorsSource, TensorInfo, ViewSource, split_rows
from models.families import multi_modality
from models.families.registry import AUTHORS
from tests.goldens.load import write_checkpoint
from tests.goldens.redraw import redraw_all

WEIGHTS = "model.safetensors"
Tensors = dict[str, np.ndarray]
BLOCK = {
    "attention.projection_layer": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def joined(tensors: Tensors, names: list[str]) -> np.ndarray:
    return np.concatenate([tensors[name] for name in names])


def as_opengvlab(tensors: Tensors, blocks: int = 3) -> Tensors:
    """InternVL's tensors as `InternVLChatModel` names them; the language model stays as it is."""
    found = {name: value for name, value in tensors.items() if name.startswith("language_model.")}
    ours, theirs = "vision_tower.embeddings", "vision_model.embeddings"
    found[f"{theirs}.class_embedding"] = tensors[f"{ours}.cls_token"]
    found[f"{theirs}.position_embedding"] = tensors[f"{ours}.position_embeddings"]
    for kind in ("weight", "bias"):
        found[f"{theirs}.patch_embedding.{kind}"] = tensors[f"{ours}.patch_embeddings.projection.{kind}"]
        for number, name in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2")):
            found[f"mlp1.{number}.{kind}"] = tensors[f"multi_modal_projector.{name}.{kind}"]
        for layer in range(blocks):
            inner, outer = f"vision_tower.encoder.layer.{layer}", f"vision_model.encoder.layers.{layer}"
            for part, name in BLOCK.items():
                found[f"{outer}.{name}.{kind}"] = tensors[f"{inner}.{part}.{kind}"]
            qkv = [f"{inner}.attention.{part}_proj.{kind}" for part in "qkv"]
            found[f"{outer}.attn.qkv.{kind}"] = joined(tensors, qkv)
            for number in (1, 2):
                found[f"{outer}.ls{number}"] = tensors[f"{inner}.lambda_{number}"]
    return found


def chat_config(raw: dict[str, Any], architecture: str, **more: Any) -> dict[str, Any]:
    """`config.json` as OpenGVLab's releases have it, for a tiny InternVL's own."""
    vision = {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        "attention_dropout": 0.0,
        "drop_path_rate": 0.1,
        "initializer_factor": 0.1,
        "norm_type": "layer_norm",
        "qk_normalization": False,
        "qkv_bias": True,
        "use_flash_attn": True,
        "num_experts": 8,
        "use_moe": False,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": 16,
        "patch_size": 4,
        **{name: raw["vision_config"][name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": raw["vision_config"]["num_attention_heads"],
    }
    text = {name: value for name, value in raw["text_config"].items() if name not in ("model_type", "architectures")}
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": 16,
        "llm_config": {"architectures": [architecture], "moe_config": None, "pruned_heads": {}, **text, **more},
        "max_dynamic_patch": 4,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": vision,
    }


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": 301, "<image_placeholder>": 301}))
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, directory / WEIGHTS)
    return directory


@pytest.fixture(scope="module")
def internvl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny InternVL under transformers' names. Read only."""
    return write_checkpoint("internvl", tmp_path_factory.mktemp("internvl") / "hf")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny DeepSeek-VL under transformers' names. Read only."""
    return write_checkpoint("deepseek_vl", tmp_path_factory.mktemp("deepseek") / "hf")


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def test_opengvlabs_internvl_is_the_same_model(internvl, tmp_path):
    tensors = as_opengvlab(load_file(internvl / WEIGHTS))
    directory = write(tmp_path / "chat", chat_config(read_config(internvl), "Qwen2ForCausalLM"), tensors)
    ours, theirs = models.load(internvl), models.load(directory)
    jax.tree.map(np.testing.assert_array_equal, theirs.parameters, ours.parameters)
    assert (theirs.config.vision, theirs.config.glue) == (ours.config.vision, ours.config.glue)
    assert (theirs.config.text, theirs.config.image_token) == (ours.config.text, 301)

    picture = Image.fromarray(np.arange(20 * 41 * 3, dtype=np.uint8).reshape(20, 41, 3))
    pixels = [np.asarray(backbone.prepare([picture])["pixel_values"]) for backbone in (ours, theirs)]
    assert pixels[0].shape == pixels[1].shape
    mean, std = (np.array(values).reshape(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    ours_mean, ours_std = (np.array(getattr(ours.image_config.pixels, f"image_{part}")).reshape(3, 1, 1)
                           for part in ("mean", "std"))  # fmt: skip
    np.testing.assert_allclose(pixels[1] * std + mean, pixels[0] * ours_std + ours_mean, atol=1e-5)

    # Saved in transformers' format, and the same model again.
    saved = models.save(theirs, tmp_path / "saved")
    assert read_config(saved)["architectures"] == ["InternVLForConditionalGeneration"]
    again = models.load(saved)
    jax.tree.map(np.testing.assert_array_equal, again.parameters, ours.parameters)
    assert again.fingerprint == theirs.fingerprint


def test_internlm2_is_llama_with_fused_groups(internvl, tmp_path):
    raw, tensors = read_config(internvl), load_file(internvl / WEIGHTS)
    raw["text_config"] |= {"model_type": "llama", "attention_bias": False, "layer_types": None}
    for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
        raw["text_config"].pop(name, None)
    plain = {name: value for name, value in tensors.items() if not (".self_attn." in name and name.endswith("bias"))}
    ours = tmp_path / "llama"
    ours.mkdir()
    for file in internvl.glob("*.json"):
        (ours / file.name).write_text(file.read_text())
    (ours / "config.json").write_text(json.dumps(raw))
    save_file(plain, ours / WEIGHTS)

    theirs = {name: value for name, value in as_opengvlab(plain).items() if not name.startswith("language_model.")}
    names = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm"}
    for layer in range(3):
        prefix = f"language_model.model.layers.{layer}"
        for name, other in names.items():
            theirs[f"{prefix}.{other}.weight"] = plain[f"{prefix}.{name}.weight"]
        query, key, value = (plain[f"{prefix}.self_attn.{part}_proj.weight"].reshape(-1, 16, 64) for part in "qkv")
        # Per KV head: its two query heads, its key, its value.
        heads = [head for kv in range(2) for head in (query[2 * kv], query[2 * kv + 1], key[kv], value[kv])]
        theirs[f"{prefix}.attention.wqkv.weight"] = np.concatenate(heads)
    theirs["language_model.model.tok_embeddings.weight"] = plain["language_model.model.embed_tokens.weight"]
    theirs["language_model.model.norm.weight"] = plain["language_model.model.norm.weight"]
    theirs["language_model.output.weight"] = plain["language_model.lm_head.weight"]
    config = chat_config(raw, "InternLM2ForCausalLM", bias=False, model_type="internlm2", attn_implementation="eager")
    del config["llm_config"]["attention_bias"]
    found = models.load(write(tmp_path / "chat", config, theirs))
    expected = models.load(ours)
    jax.tree.map(np.testing.assert_array_equal, found.parameters, expected.parameters)
    assert found.config.text == expected.config.text


def test_internvl_3_5_is_read_in_both_formats(internvl, tmp_path):
    raw = read_config(internvl)
    for name in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        raw["text_config"].pop(name, None)
    chat = chat_config(raw, "Qwen3ForCausalLM", head_dim=16, attention_bias=False)
    directory = write(tmp_path / "chat", chat, {"a": np.zeros(1, np.float32)})
    raw["text_config"] |= {"model_type": "qwen3", "head_dim": 16, "attention_bias": False}
    family = models.FAMILIES["InternVLForConditionalGeneration"]
    theirs = family.config(AUTHORS["InternVLChatModel"].config(chat, directory), "exact", None)
    ours = family.config(raw, "exact", None)
    assert theirs.text == ours.text
    names = {entry.pattern for entry in family.entries(ours, {})}
    assert "language_model.model.layers.{layer}.self_attn.q_norm.weight" in names
    assert "language_model.model.layers.{layer}.self_attn.q_proj.bias" not in names


def test_an_adapter_of_the_authors_modules_is_merged_before(internvl, tmp_path):
    tensors = as_opengvlab(load_file(internvl / WEIGHTS))
    directory = write(tmp_path / "chat", chat_config(read_config(internvl), "Qwen2ForCausalLM"), tensors)
    module = "vision_model.encoder.layers.1.attn.qkv"
    factors = redraw_all({f"base_model.model.{module}.lora_A.weight": (2, 32)})
    factors |= redraw_all({f"base_model.model.{module}.lora_B.weight": (96, 2)})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 1}))
    merged = models.load(directory, adapter=adapter).parameters["visual"]["blocks"]
    down, up = factors.values()
    whole = (tensors[f"{module}.weight"] + np.float32(0.5) * (up @ down)).T
    for number, part in enumerate(("query", "key", "value")):
        found = np.asarray(merged[part]["kernel"])[1]
        np.testing.assert_allclose(found, whole[:, 32 * number : 32 * (number + 1)], atol=1e-6, rtol=0)


# ---------------------------------------------------------------------------------------------------------- DeepSeek-VL


def as_deepseek(tensors: Tensors, blocks: int) -> Tensors:
    """DeepSeek-VL's tensors as `MultiModalityCausalLM` names them, with timm's pooling that nothing reads."""
    ours, theirs, found = "model.vision_model", "vision_model.vision_tower", dict[str, np.ndarray]()
    for name, value in tensors.items():
        if name.startswith("model.language_model."):
            found[name.replace("model.language_model.", "language_model.model.", 1)] = value
    found["language_model.lm_head.weight"] = tensors["lm_head.weight"]
    found[f"{theirs}.pos_embed"] = tensors[f"{ours}.embeddings.position_embedding.weight"][None]
    found[f"{theirs}.attn_pool.latent"] = np.zeros((1, 1, 32), np.float32)
    for kind in ("weight", "bias"):
        found[f"{theirs}.patch_embed.proj.{kind}"] = tensors[f"{ours}.embeddings.patch_embedding.{kind}"]
        found[f"{theirs}.norm.{kind}"] = tensors[f"{ours}.post_layernorm.{kind}"]
        found[f"aligner.layers.0.{kind}"] = tensors[f"model.aligner.linear1.{kind}"]
        found[f"aligner.layers.2.{kind}"] = tensors[f"model.aligner.linear2.{kind}"]
        for layer in range(blocks):
            inner, outer = f"{ours}.encoder.layers.{layer}", f"{theirs}.blocks.{layer}"
            qkv = [f"{inner}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            found[f"{outer}.attn.qkv.{kind}"] = joined(tensors, qkv)
            found[f"{outer}.attn.proj.{kind}"] = tensors[f"{inner}.self_attn.out_proj.{kind}"]
            for number in (1, 2):
                found[f"{outer}.norm{number}.{kind}"] = tensors[f"{inner}.layer_norm{number}.{kind}"]
                found[f"{outer}.mlp.fc{number}.{kind}"] = tensors[f"{inner}.mlp.fc{number}.{kind}"]
    return found


def multi_modality_config(raw: dict[str, Any]) -> dict[str, Any]:
    language = {name: value for name, value in raw["text_config"].items() if name != "architectures"}
    return {
        "architectures": ["MultiModalityCausalLM"],
        "model_type": "multi_modality",
        "aligner_config": {
            "cls": "MlpProjector",
            "model_type": "aligner",
            "params": {"depth": 2, "input_dim": 32, "n_embed": 64, "projector_type": "mlp_gelu"},
        },
        "language_config": language,
        "torch_dtype": "float32",
        "vision_config": {
            "cls": "CLIPVisionTower",
            "model_type": "vision",
            "params": {"image_size": 16, "model_name": "tiny", "select_feature": "same", "select_layer": -1},
        },
    }


@pytest.fixture
def tiny_tower(monkeypatch):
    monkeypatch.setitem(multi_modality.TOWERS, "tiny", (32, 48, 3, 2, 4))


def test_deepseeks_own_format_is_the_same_model(deepseek, tiny_tower, tmp_path):
    raw = read_config(deepseek)
    tensors = as_deepseek(load_file(deepseek / WEIGHTS), raw["vision_config"]["num_hidden_layers"])
    directory = write(tmp_path / "theirs", multi_modality_config(raw), tensors)
    settings = {"image_size": 16, "min_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
    settings["image_processor_type"] = "VLMImageProcessor"
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    ours, theirs = models.load(deepseek), models.load(directory)
    jax.tree.map(np.testing.assert_array_equal, theirs.parameters, ours.parameters)
    assert theirs.config.text == ours.config.text
    assert (theirs.config.image_token, theirs.config.vision.activation) == (
        301,
        "gelu",
    )  # timm's, not tanh's

    # 16 · 19 / 41 is 7.41, 16 · 23 / 41 is 8.98: the authors cut the second off, transformers rounds it.
    for height, rows in ((19, 7), (23, 8)):
        black = Image.fromarray(np.zeros((height, 41, 3), np.uint8))
        pixels = np.asarray(theirs.prepare([black])["pixel_values"])[0]
        assert (pixels[0, :, 0] == -1).sum() == rows
    saved = models.load(models.save(theirs, tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, saved.parameters, ours.parameters)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("ps_version", "v1", "ps_version 'v1'; expected 'v2'"),
        ("use_llm_lora", 16, "use_llm_lora 16; expected 0"),
        ("pad2square", True, "pad2square True"),
        ("force_image_size", 224, "force_image_size 224; expected None or 16"),
        ("use_thumbnail", False, "use_thumbnail False; expected True"),
        ("fork_token_id", 7, "'fork_token_id': 7, which this library does not know"),
        (
            "llm_config.architectures",
            ["Phi3ForCausalLM"],
            "'Phi3ForCausalLM'; expected one of .*InternLM2",
        ),
        ("llm_config.residual_multiplier", 1, "'residual_multiplier': 1, which this library does not know for qwen2"),
        ("something", 1, "'something': 1, which this library does not know for internvl_chat"),
        ("vision_config.norm_type", "group", "norm_type 'group'; expected 'layer_norm' or 'rms_norm'"),
        ("vision_config.use_moe", True, "use_moe True"),
        ("tokens", None, "no tokenizer file that names <IMG_CONTEXT>"),
    ],
)
def test_what_is_not_built_of_internvl_chat_is_refused(path, value, message, internvl, tmp_path):
    config = chat_config(read_config(internvl), "Qwen2ForCausalLM")
    *parts, key = path.split(".")
    table = config
    for part in parts:
        table = table[part]
    table[key] = value
    directory = write(tmp_path / "chat", config, as_opengvlab(load_file(internvl / WEIGHTS)))
    if path == "tokens":
        del config["tokens"]
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "added_tokens.json").unlink()
    with pytest.raises(ConfigError, match=message):
        models.load(directory)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gen_vision_config", {"cls": "VQ-16"}, "'gen_vision_config': .*which this library does not know"),
        ("vision_config.cls", "SigLIP", "cls 'SigLIP'; expected 'CLIPVisionTower' or 'HybridVisionTower'"),
        ("vision_config.cls", "HybridVisionTower", r"got image_size 16, which is not built; .*'high_res_cfg'"),
        (
            "vision_config.params.model_name",
            "sam_b_downsample",
            "'sam_b_downsample'; expected 'siglip_large_patch16_384'",
        ),
        ("vision_config.params.select_layer", -2, "select_layer -2; expected -1"),
        ("vision_config.params.pixel_mean", [0.5], r"pixel_mean \[0\.5\], which is not built"),
        ("aligner_config.params.projector_type", "linear", "projector_type 'linear'; expected 'mlp_gelu'"),
        ("aligner_config.params.depth", 3, "depth 3; expected 2"),
    ],
)
def test_what_is_not_built_of_multi_modality_is_refused(path, value, message, deepseek, tiny_tower, tmp_path):
    config = multi_modality_config(read_config(deepseek))
    *parts, key = path.split(".")
    table = config
    for part in parts:
        table = table[part]
    table[key] = value
    with pytest.raises(ConfigError, match=message):
        models.load(write(tmp_path / "theirs", config, {"a": np.zeros(1)}))


@pytest.mark.parametrize("change", ["missing", "unexpected", "rows", "twice"])
def test_strictness_stays(change, internvl, tmp_path):
    tensors = as_opengvlab(load_file(internvl / WEIGHTS))
    name = "vision_model.encoder.layers.1.attn.qkv.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["vision_model.encoder.layers.1.ls3"] = tensors["vision_model.encoder.layers.1.ls2"]
    elif change == "rows":
        tensors[name] = tensors[name][:-1]
    else:
        tensors["vision_tower.encoder.layer.1.attention.q_proj.weight"] = tensors[name][:32]
    directory = write(tmp_path / "chat", chat_config(read_config(internvl), "Qwen2ForCausalLM"), tensors)
    messages = {
        "missing": r"InternVLChatModel, here as InternVLForConditionalGeneration.*no tensor .*layer\.1\.attention\.",
        "unexpected": r"ls3' \(\d+ such in all\)",
        "rows": r"layers\.1\.attn\.qkv\.weight' of shape \(95, 32\); expected 96 rows",
        "twice": r" for 'vision_tower\.encoder\.layer\.1\.attention\.q_proj\.weight'; expected one",
    }
    with pytest.raises(WeightsError, match=messages[change]):
        models.load(directory)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_any_rows_of_a_split_tensor_are_read_as_numpy_cuts_them(groups, sizes, data):
    names = [f"part{number}" for number in range(len(sizes))]
    pieces = split_rows(groups, **dict(zip(names, sizes, strict=True)))
    whole = np.arange(groups * sum(sizes) * 2, dtype=np.float32).reshape(-1, 2)

    class Source(SafetensorsSource):
        def __init__(self) -> None:
            self.origin, self.tensors, self.unused = "memory", {"whole": TensorInfo(whole.shape, "F32")}, frozenset()

        def read(self, name: str, region: Any = None) -> np.ndarray:
            return whole[region or ()]

    source = ViewSource(Source(), [("whole", pieces)], "split")
    for number, name in enumerate(names):
        start = sum(sizes[:number])
        expected = whole.reshape(groups, -1, 2)[:, start : start + sizes[number]].reshape(-1, 2)
        np.testing.assert_array_equal(source.read(name), expected)
        low = data.draw(st.integers(0, len(expected)))
        high = data.draw(st.integers(low, len(expected)))
        np.testing.assert_array_equal(source.read(name, (slice(low, high), slice(1, 2))), expected[low:high, 1:2])
