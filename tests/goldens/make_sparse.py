"""Make the goldens of sparse configurations with transformers (5.23) and torch. See README.md beside this file.

Every family from a `config.json` that holds only the keys a tiny model cannot do without, so that all others take the
defaults of transformers' classes; and those defaults themselves. Run it in an environment that has them:
`python tests/goldens/make_sparse.py`, with names to make these alone. It rewrites `sparse/`.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from redraw import redraw_all
from safetensors import safe_open
from safetensors.numpy import save_file
from vlm_golden import IMAGE, VIDEO, draw_pixels, tokens_of

OUT = Path(__file__).parent / "sparse"
VOCABULARY, TOKENS = 320, 14
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MANY = {"n_routed_experts": 16, "moe_intermediate_size": 16}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
# A window of SAM's 14 patches is larger than the image, and its layers are those of the class but two.
SAM = {**{key: value for key, value in TOWER.items() if key != "intermediate_size"}, "image_size": 32}
SAM |= {"output_channels": 8, "global_attn_indexes": [1]}
LARGE = dict.fromkeys(("deepseek_vl_hybrid", "deepseek_vl_hybrid_bare"), (1, 3, 32, 32))
QWEN_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 303, "vision_end_token_id": 304}

# name -> keys of the text part. A pad token past the vocabulary is what some classes default to: it must be named.
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 16, "moe_intermediate_size": 16}),
    "glm": ("Glm", {"pad_token_id": None}),
    "glm4": ("Glm4", {"pad_token_id": None}),
    "phi3": ("Phi3", {"pad_token_id": None, "num_key_value_heads": 2}),
    "ernie4_5": ("Ernie4_5", {"num_key_value_heads": 2}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"num_key_value_heads": 2, "moe_num_experts": 16, "moe_intermediate_size": 16}),
    "deepseek_v2": ("DeepseekV2", {**MANY, "num_experts_per_tok": 3}),
    "deepseek_v3": ("DeepseekV3", {**MANY, "num_hidden_layers": 4, "num_key_value_heads": 4}),
    "qwen3_next": ("Qwen3Next", {"num_hidden_layers": 5, "num_key_value_heads": 2, "num_experts": 11}),
    "qwen3_5_text": ("Qwen3_5", {"num_hidden_layers": 4, "num_key_value_heads": 2}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", {"num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 9}),
    "gemma3_text": ("Gemma3", {"num_hidden_layers": 7}),  # the sixth sees all
    "gemma4_text": ("Gemma4", {"num_hidden_layers": 7, "vocab_size_per_layer_input": VOCABULARY}),  # and the last
}
TEXTS["qwen3_moe"][1]["num_key_value_heads"] = 4


def only(kind: str) -> dict[str, Any]:
    """A text part of this `model_type`."""
    return {**SIZES, **TEXTS[kind][1], "model_type": kind}


# name -> (class, config.json's own keys, shape of pixel_values, further inputs, image tokens)
QWEN_GRID = {"image_grid_thw": [[1, 4, 8]]}
QWEN25_TOWER = {**QWEN_TOWER, "fullatt_block_indexes": [1]}
QWEN3_TOWER = {**QWEN_TOWER, "deepstack_visual_indexes": [0, 2]}
HYBRID = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {"num_hidden_layers": 4}
MIXTURE = {"num_experts": 8, "moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 128}
IMAGES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], dict[str, Any], int]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {"text_config": {**SIZES, "hidden_size": 512, "num_key_value_heads": 2}}
        | {"vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 512}, **IDS},
        (32, 3 * 2 * 14 * 14),
        QWEN_GRID,
        8,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"text_config": {**SIZES, "hidden_size": 512, "num_key_value_heads": 2}}
        | {"vision_config": {**QWEN25_TOWER, "out_hidden_size": 512}, **IDS},
        (32, 3 * 2 * 14 * 14),
        QWEN_GRID,
        8,
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": {**SIZES, "num_key_value_heads": 2}, "vision_config": QWEN3_TOWER, **IDS},
        (32, 3 * 2 * 16 * 16),
        QWEN_GRID,
        8,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"text_config": {**SIZES, **MIXTURE}, "vision_config": QWEN3_TOWER, **IDS},
        (32, 3 * 2 * 16 * 16),
        QWEN_GRID,
        8,
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2},
            "vision_config": QWEN_TOWER,
            **IDS,
        },
        (32, 3 * 2 * 16 * 16),
        QWEN_GRID,
        8,
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"text_config": {**HYBRID, "num_key_value_heads": 2, "num_experts": 9}, "vision_config": QWEN_TOWER, **IDS},
        (32, 3 * 2 * 16 * 16),
        QWEN_GRID,
        8,
    ),
    "llava": (
        "Llava",
        {"text_config": only("llama"), "vision_config": TOWER, "image_token_index": IMAGE},
        (1, 3, 16, 16),
        {},
        16,
    ),
    "llava_mistral": (
        "Llava",
        {"text_config": only("mistral"), "vision_config": TOWER, "image_token_index": IMAGE},
        (1, 3, 16, 16),
        {},
        16,
    ),
    "llava_next": (
        "LlavaNext",
        {"text_config": only("mistral"), "vision_config": {**TOWER, "image_size": 336, "patch_size": 84}}
        | {"image_token_index": IMAGE},
        (1, 3, 3, 336, 336),
        {"image_sizes": [[200, 400]]},
        16 + 4 * (8 + 1),
    ),
    "internvl": (
        "InternVL",
        {"text_config": {**SIZES, "num_key_value_heads": 2}, "vision_config": TOWER, "image_token_id": IMAGE},
        (2, 3, 16, 16),
        {},
        8,
    ),
    "deepseek_vl": (
        "DeepseekVL",
        {"text_config": only("llama"), "vision_config": TOWER, "image_token_id": IMAGE},
        (1, 3, 16, 16),
        {},
        16,
    ),
    "deepseek_vl_hybrid": (
        "DeepseekVLHybrid",
        {"text_config": only("llama"), "vision_config": TOWER, "high_res_vision_config": SAM, "image_token_id": IMAGE},
        (1, 3, 16, 16),
        {},
        16,
    ),
    "smolvlm": (
        "SmolVLM",
        {"text_config": only("llama"), "vision_config": TOWER, "image_token_id": IMAGE},
        (1, 1, 3, 16, 16),
        {},
        4,
    ),
    "gemma3": (
        "Gemma3",
        {"text_config": only("gemma3_text"), "vision_config": {**TOWER, "image_size": 64, "vision_use_head": False}}
        | {"image_token_index": IMAGE},
        (1, 3, 64, 64),
        {},
        256,
    ),
    "kimi_vl": (
        "Kimi_K25",
        {"text_config": only("deepseek_v3")}
        | {"vision_config": {key: TOWER[key] for key in list(TOWER)[:4]}}
        | {"projection_hidden_size": 32, "image_token_id": IMAGE, "vision_start_token_id": 303}
        | {"vision_end_token_id": 304, "video_token_id": VIDEO},
        (32, 3, 14, 14),
        QWEN_GRID,
        8,
    ),
}
# Its class has no default for the kinds of layers, and queries for images of 48 and 64 patches a side.
OCR_SAM = {**{key: value for key, value in SAM.items() if key != "patch_size"}, "patch_size": 1, "image_size": 64}
OCR_ENCODER = {key: TOWER[key] for key in list(TOWER)[:4]} | {"num_key_value_heads": 2, "vocab_size": 4}
IMAGES["deepseek_ocr2"] = (
    "DeepseekOcr2",
    {"text_config": {**SIZES, **MANY, "num_experts_per_tok": 3, "mlp_layer_types": ["dense", "sparse"]}}
    | {"vision_config": {"sam_config": {**OCR_SAM, "downsample_channels": [12, 32]}, "encoder_config": OCR_ENCODER}}
    | {"image_token_id": IMAGE},
    (1, 3, 64, 64),
    {"num_local_patches": [0]},
    257,
)
# The default sections of a rope fill a head of 64 or (GLM-4.5V, of which half rotates) of 128.
GLM_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 256}
GLM_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": 303, "image_end_token_id": 304}
GLM_TEXT = {**SIZES, "hidden_size": 256, "num_key_value_heads": 2}
GLM_PIXELS = ((32, 3 * 2 * 14 * 14), QWEN_GRID, 8)
IMAGES["glm4v"] = ("Glm4v", {"text_config": GLM_TEXT, "vision_config": GLM_TOWER, **GLM_IDS}, *GLM_PIXELS)
IMAGES["glm4v_moe"] = (
    "Glm4vMoe",
    {"text_config": {**GLM_TEXT, "head_dim": 128, **MANY}, "vision_config": GLM_TOWER, **GLM_IDS},
    *GLM_PIXELS,
)
IMAGES["glm46v"] = ("Glm46V", {"text_config": GLM_TEXT, "vision_config": GLM_TOWER, **GLM_IDS}, *GLM_PIXELS)
IMAGES["glm46v_moe"] = (
    "Glm46V",
    {"text_config": {**IMAGES["glm4v_moe"][1]["text_config"], "model_type": "glm4v_moe_text"}, **GLM_IDS}
    | {"vision_config": {**GLM_TOWER, "model_type": "glm4v_moe_vision"}},
    *GLM_PIXELS,
)

# Pixtral's processor gives pixels; what is stored are their patches, in raster order.
PIXTRAL = {"model_type": "pixtral", **{key: TOWER[key] for key in list(TOWER)[:4]}}
PIXTRAL_SIZE = {"image_sizes": [[32, 64]]}
IMAGES["mistral3"] = (
    "Mistral3",
    {"text_config": only("mistral"), "vision_config": PIXTRAL, "image_token_index": IMAGE},
    (8, 3, 16, 16),
    PIXTRAL_SIZE,
    2,
)
IMAGES["llava_pixtral"] = (
    "Llava",
    {"text_config": only("mistral"), "vision_config": PIXTRAL, "image_token_index": IMAGE}
    | {"vision_feature_select_strategy": "full"},
    (8, 3, 16, 16),
    PIXTRAL_SIZE,
    8,
)

# Ropes that must be read whole: scaled under M-RoPE, and the towers' own bases.
AUDIO_TOWER = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32}
OMNI_TEXT = {**SIZES, "hidden_size": 512, "num_key_value_heads": 2}
# name -> (class, text part, vision part, pixels of a patch, mel frames)
OMNI: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, int]] = {
    "qwen2_5_omni": ("Qwen2_5OmniThinker", OMNI_TEXT, QWEN25_TOWER, 3 * 2 * 14 * 14, 230),
    "qwen3_omni": (
        "Qwen3OmniMoeThinker",
        {**OMNI_TEXT, "num_experts": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 3},
        QWEN3_TOWER,
        3 * 2 * 16 * 16,
        130,
    ),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
BASE = {"rope_parameters": {"rope_type": "axial", "rope_theta": 30.0}}


def with_part(name: str, part: str, more: dict[str, Any]) -> tuple[str, dict[str, Any], tuple[int, ...], dict, int]:
    """A case whose text or vision part says more."""
    kind, raw, shape, extra, count = IMAGES[name]
    return kind, {**raw, part: {**raw[part], **more}}, shape, extra, count


IMAGES["qwen2_5_vl_yarn"] = with_part(
    "qwen2_5_vl", "text_config", {"rope_parameters": {**YARN, "mrope_section": [16, 24, 24]}}
)
# Three layers, so that two have experts; of the class's 64, with the width of each named: they are wide by default.
ERNIE_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": 303, "image_end_token_id": 304}
IMAGES["ernie4_5_vl"] = (
    "Ernie4_5_VLMoe",
    {
        "text_config": {**SIZES, "hidden_size": 512, "num_hidden_layers": 3, "moe_intermediate_size": [8, 4]}
        | {"num_key_value_heads": 2, "moe_num_experts": 16},
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
        **ERNIE_IDS,
    },
    (32, 3 * 14 * 14),
    QWEN_GRID,
    8,
)
IMAGES["deepseek_vl_hybrid_bare"] = with_part(
    "deepseek_vl_hybrid",
    "high_res_vision_config",
    {"use_abs_pos": False, "use_rel_pos": False, "qkv_bias": False, "mlp_dim": 40, "window_size": 3},
)
IMAGES["internvl_qwen3_moe"] = with_part("internvl", "text_config", {**MIXTURE, "model_type": "qwen3_moe"})
IMAGES["qwen2_5_vl_base"] = with_part("qwen2_5_vl", "vision_config", BASE)
IMAGES["qwen3_vl_base"] = with_part("qwen3_vl", "vision_config", BASE)
IMAGES["kimi_vl_base"] = with_part("kimi_vl", "vision_config", BASE)
CLASSES = {
    **{kind: name for kind, (name, _) in TEXTS.items()},
    "gemma3_text": "Gemma3Text",
    "gemma4_text": "Gemma4Text",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "gemma4_vision": "Gemma4Vision",
    "gemma4_audio": "Gemma4Audio",
    "qwen2_vl": "Qwen2VL",
    "qwen2_vl_text": "Qwen2VLText",
    "qwen2_vl_vision": "Qwen2VLVision",
    "mistral3": "Mistral3",
    "pixtral": "PixtralVision",
    "glm4v": "Glm4v",
    "glm4v_text": "Glm4vText",
    "glm4v_vision": "Glm4vVision",
    "glm4v_moe": "Glm4vMoe",
    "glm4v_moe_text": "Glm4vMoeText",
    "glm4v_moe_vision": "Glm4vMoeVision",
    "glm46v": "Glm46V",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeText",
    "ernie4_5_vl_moe_vision": "Ernie4_5_VLMoeVision",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_5_vision": "Qwen3_5Vision",
    "qwen3_5_moe": "Qwen3_5Moe",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
    "qwen2_5_omni": "Qwen2_5Omni",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinker",
    "qwen2_5_omni_text": "Qwen2_5OmniText",
    "qwen2_5_omni_vision_encoder": "Qwen2_5OmniVisionEncoder",
    "qwen2_5_omni_audio_encoder": "Qwen2_5OmniAudioEncoder",
    "qwen3_omni_moe": "Qwen3OmniMoe",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeThinker",
    "qwen3_omni_moe_text": "Qwen3OmniMoeText",
    "qwen3_omni_moe_vision_encoder": "Qwen3OmniMoeVisionEncoder",
    "qwen3_omni_moe_audio_encoder": "Qwen3OmniMoeAudioEncoder",
    "llava": "Llava",
    "llava_next": "LlavaNext",
    "internvl": "InternVL",
    "deepseek_vl": "DeepseekVL",
    "deepseek_vl_hybrid": "DeepseekVLHybrid",
    "sam_vision_model": "SamVision",
    "deepseek_ocr2": "DeepseekOcr2",
    "deepseek_ocr2_text": "DeepseekOcr2Text",
    "deepseek_ocr2_vision": "DeepseekOcr2Vision",
    "deepseek_ocr2_sam_vision_model": "DeepseekOcr2SamVision",
    "deepseek_ocr2_encoder": "DeepseekOcr2VisionEncoder",
    "smolvlm": "SmolVLM",
    "kimi_k25": "Kimi_K25",
    "clip_vision_model": "CLIPVision",
    "siglip_vision_model": "SiglipVision",
    "internvl_vision": "InternVLVision",
    "smolvlm_vision": "SmolVLMVision",
    "kimi_k25_vision": "Kimi_K25Vision",
    "qwen2_5_vl_text": "Qwen2_5_VLText",
    "qwen2_5_vl_vision": "Qwen2_5_VLVision",
    "qwen3_vl_text": "Qwen3VLText",
    "qwen3_vl_vision": "Qwen3VLVision",
    "qwen3_vl_moe_text": "Qwen3VLMoeText",
}


def configuration(name: str) -> type:
    """A configuration class, also where it is not exported at the top."""
    if hasattr(transformers, f"{name}Config"):
        return getattr(transformers, f"{name}Config")
    modules = [module for key, module in list(sys.modules.items()) if ".configuration_" in key]
    return next(getattr(module, f"{name}Config") for module in modules if hasattr(module, f"{name}Config"))


def write_defaults() -> None:
    """`class_defaults.json`: by `model_type`, what every class has for a key that is absent."""
    base = transformers.PreTrainedConfig().to_dict()
    found = {}
    for kind, name in CLASSES.items():
        values = configuration(name)().to_dict()
        parts = {key for key, value in values.items() if key.endswith("_config") and isinstance(value, dict)}
        skip = (set(base) | parts) - {"tie_word_embeddings"}
        found[kind] = {key: value for key, value in sorted(values.items()) if key not in skip}
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(table)}" for kind, table in found.items())
    (OUT / "class_defaults.json").write_text("{\n" + lines + "\n}\n")


def build(name: str, raw: dict[str, Any], architecture: str) -> Any:
    """The tiny model of a sparse `config.json`, every parameter redrawn; writes `<name>.json` (config and shapes)."""
    kind = getattr(transformers, architecture)
    own = CLASSES.get(name, architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration"))
    config = configuration(own)
    with tempfile.TemporaryDirectory() as directory:
        plain = {"save_original_format": False} if name.startswith("kimi") else {}  # else it writes what it cannot read
        kind(config.from_dict(json.loads(json.dumps(raw)))).save_pretrained(directory, **plain)
        path = Path(directory) / "model.safetensors"
        with safe_open(path, "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        save_file(redraw_all(shapes), path, metadata={"format": "pt"})
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        model, report = kind.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    lines = [f'"config": {json.dumps(raw)}', *[f"{json.dumps(key)}: {json.dumps(shapes[key])}" for key in shapes]]
    (OUT / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return model.eval()


def write(name: str, logits: torch.Tensor, arrays: dict[str, np.ndarray]) -> None:
    rows = np.array([0, logits.shape[1] // 2, logits.shape[1] - 1], np.int32)
    kept = {"rows": rows, "logits": logits[0, rows].numpy(), **arrays}
    np.savez_compressed(OUT / f"{name}.npz", **kept)
    size = (OUT / f"{name}.npz").stat().st_size / 1024
    print(f"{name:>16} {size:6.1f} KiB   logits std {float(logits.std()):.2f}")


def make_text(kind: str) -> None:
    name, more = TEXTS[kind]
    architecture = f"{name}ForCausalLM"
    # A class of experts alone has no width of an MLP.
    sizes = HYBRID if kind == "qwen3_5_moe_text" else SIZES
    model = build(kind, {"architectures": [architecture], "model_type": kind, **sizes, **more}, architecture)
    input_ids = torch.tensor([(np.arange(TOKENS) * 37 + 11) % 290 + 3])
    write(kind, model(input_ids=input_ids).logits, {"input_ids": input_ids[0].numpy().astype(np.int32)})


def make_image(name: str) -> None:
    kind, raw, shape, extra, count = IMAGES[name]
    architecture = f"{kind}ForConditionalGeneration"
    model_type = configuration(kind).model_type
    model = build(name, {"architectures": [architecture], "model_type": model_type, **raw}, architecture)
    start, end = (303, 304) if "image_grid_thw" in extra else (None, None)
    input_ids = tokens_of([5, (count,), 3], start, end)
    pixels = draw_pixels(f"sparse {name}", *shape)
    inputs: dict[str, Any] = {key: torch.tensor(value) for key, value in extra.items()}
    if raw["vision_config"].get("model_type") == "pixtral":
        height, width = (size // 16 for size in extra["image_sizes"][0])
        pixels = (
            pixels.reshape(height, width, 3, 16, 16).transpose(2, 0, 3, 1, 4).reshape(1, 3, height * 16, width * 16)
        )
    inputs["pixel_values"] = torch.from_numpy(pixels)
    if name.startswith(("qwen", "glm", "ernie")):
        inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
    if name.startswith("ernie"):
        inputs["moe_mm_token_type_ids"] = torch.isin(input_ids, torch.tensor([IMAGE, start, end])).int()
    if name.startswith("gemma"):
        inputs["token_type_ids"] = (input_ids == IMAGE).int()
    arrays = {key: np.asarray(value, np.int32) for key, value in extra.items()}
    if name in LARGE:
        inputs["high_res_pixel_values"] = torch.from_numpy(draw_pixels(f"sparse {name} large", *LARGE[name]))
        arrays["large_shape"] = np.array(LARGE[name], np.int32)
    logits = model(input_ids=input_ids, **inputs).logits
    ids = input_ids[0].numpy().astype(np.int32)
    write(name, logits, {"input_ids": ids, "pixel_shape": np.array(shape, np.int32), **arrays})


def make_omni(name: str) -> None:
    """A thinker with an image and a sound; its ids of start tokens have no default in transformers."""
    kind, text, vision, features, frames = OMNI[name]
    width, audio, start, end = text["hidden_size"], 305, 306, 307
    raw: dict[str, Any] = {"text_config": text, "vision_config": {**vision, "out_hidden_size": width}}
    raw |= {"audio_config": {**AUDIO_TOWER, "output_dim": width}, **IDS}
    raw |= {"audio_token_id": audio, "audio_start_token_id": start, "audio_end_token_id": end}
    architecture = f"{kind}ForConditionalGeneration"
    raw |= {"architectures": [architecture], "model_type": configuration(kind).model_type}
    model = build(name, raw, architecture)
    count = model.model.audio_tower(torch.zeros(128, frames), feature_lens=torch.tensor([frames]))[0].shape[0]
    tokens = tokens_of([5, (8,), 3])[0].tolist()
    input_ids = torch.tensor([[*tokens, start, *[audio] * count, end, 9]])
    pixels, mel = draw_pixels(f"sparse {name}", 32, features), draw_pixels(f"sparse {name} sound", 1, 128, frames)
    inputs = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor(QWEN_GRID["image_grid_thw"])}
    inputs |= {"input_features": torch.from_numpy(mel), "feature_attention_mask": torch.ones(1, frames).long()}
    logits = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **inputs).logits
    arrays = {"pixel_shape": np.array(pixels.shape), "mel_shape": np.array(mel.shape)}
    arrays |= {"image_grid_thw": np.array(QWEN_GRID["image_grid_thw"]), "input_ids": input_ids[0].numpy()}
    write(name, logits, {key: value.astype(np.int32) for key, value in arrays.items()})


GEMMA4 = "Gemma4ForConditionalGeneration"


def make_gemma4(name: str) -> None:
    """Gemma 4 with an image of two tokens and a sound of three; only sizes are said of its towers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    raw = {"text_config": only("gemma4_text"), "audio_config": sizes, "architectures": [GEMMA4]}
    raw |= {"vision_config": {**sizes, "num_key_value_heads": 2, "intermediate_size": 48}, "model_type": "gemma4"}
    raw |= {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 305}
    model = build(name, raw, GEMMA4)
    input_ids = torch.tensor([[*range(11, 16), 303, IMAGE, IMAGE, 304, 17, 306, 305, 305, 305, 307, 9]])
    pixels, mel = draw_pixels(f"sparse {name}", 1, 18, 768), draw_pixels(f"sparse {name} sound", 1, 12, 128)
    places = np.stack([np.arange(18) % 6, np.arange(18) // 6], axis=1)[None].astype(np.int64)
    inputs = {"pixel_values": torch.from_numpy(pixels), "image_position_ids": torch.from_numpy(places)}
    inputs |= {"input_features": torch.from_numpy(mel), "input_features_mask": torch.ones(1, 12, dtype=torch.bool)}
    arrays = {"input_ids": input_ids[0].numpy(), "pixel_shape": np.array(pixels.shape), "image_position_ids": places}
    arrays |= {"mel_shape": np.array(mel.shape)}
    write(name, model(input_ids=input_ids, **inputs).logits, {key: x.astype(np.int32) for key, x in arrays.items()})


KEPT = (
    *("deepseek_v3", "deepseek_vl_hybrid_bare", "ernie4_5_vl", "gemma3_text", "gemma4", "glm4v_moe", "internvl"),
    *("kimi_vl_base", "llava_mistral", "llava_next", "mistral", "mistral3", "phi3", "qwen2_5_omni", "qwen2_5_vl"),
    "qwen3_vl",
)
"""One of each kind; others are made where they are named."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    OUT.mkdir(exist_ok=True)
    write_defaults()
    with torch.no_grad():
        wanted = sys.argv[1:] or KEPT
        for kind in TEXTS:
            if kind in wanted:
                make_text(kind)
        for name in IMAGES:
            if name in wanted:
                make_image(name)
        for name in OMNI:
            if name in wanted:
                make_omni(name)
        if "gemma4" in wanted:
            make_gemma4("gemma4")


if __name__ == "__main__":
    main()
