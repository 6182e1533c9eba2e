"""Keys of DeepSeek-OCR-2."""

from typing import Any

from . import paper_models, texts
from .parts import PARTS, words

_LATENT = words("kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim")
_DENSE = {"first_k_dense_replace", "moe_layer_freq", "norm_topk_prob", "scoring_func"}
_V2 = texts.DEFAULTS["deepseek_v2"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": PARTS | {"image_token_id": 128815},
    "deepseek_ocr2_text": {key: value for key, value in _V2.items() if key not in _LATENT | _DENSE}
    | {"mlp_layer_types": None, "mlp_bias": False},
    "deepseek_ocr2_vision": {"sam_config": None, "encoder_config": None},
    "deepseek_ocr2_sam_vision_model": {
        key: value
        for key, value in paper_models.DEFAULTS["sam_vision_model"].items()
        if key not in ("num_pos_feats", "intermediate_size")
    }
    | {"downsample_channels": None},
    "deepseek_ocr2_encoder": texts.DEFAULTS["qwen2"],
}

ONLY: dict[str, dict[str, Any]] = {
    "deepseek_ocr2_text": {"norm_topk_prob": False},
}
