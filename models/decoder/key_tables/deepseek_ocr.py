"""Keys of DeepSeek-OCR and DeepSeek-OCR-2."""

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
    "deepseek_ocr": {
        "language_config": None,
        "vision_config": None,
        "projector_config": None,
        "image_token_id": 128815,
        "tie_word_embeddings": False,
        # What the model's own code does not read.
        **dict.fromkeys(words("candidate_resolutions global_view_pos tile_tag")),
    },
    "deepseek_ocr_vision": dict.fromkeys(words("image_size mlp_ratio model_name width")),
    # Sizes that their classes have by default are in every file.
    "deepseek_ocr_text": {key: value for key, value in _V2.items() if key not in _LATENT}
    | dict.fromkeys(words("n_routed_experts n_shared_experts moe_intermediate_size topk_method"))
    | dict.fromkeys(words("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads")),
}

ONLY: dict[str, dict[str, Any]] = {
    "deepseek_ocr2_text": {"norm_topk_prob": False},
    "deepseek_ocr_text": {
        "use_mla": False,
        "lm_head": True,
        "rm_head": False,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "moe_layer_freq": 1,
        **dict.fromkeys(_LATENT - {"kv_lora_rank", "q_lora_rank"}, 0),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank")),
    },
}
AUTHORS = {"deepseek_ocr", "deepseek_ocr_text", "deepseek_ocr_vision"}
