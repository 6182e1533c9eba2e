"""Keys of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from typing import Any

from .parts import PARTS, sizes
from .texts import HYBRID, HYBRID_EXPERTS, QWEN2, QWEN3, QWEN_EXPERTS, QWEN_WINDOW

_QWEN3_VL_TEXT = QWEN3 | {"max_position_embeddings": 128000, "rope_theta": 5e5}
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_QWEN3_5_IDS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
QWEN_TOWER = {
    "hidden_size": 3584,
    "hidden_act": "silu",
    "num_heads": 16,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "rope_parameters": None,
    "rope_theta": 1e4,
}
QWEN3_TOWER = QWEN_TOWER | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}

_QWEN2_VL_TEXT = QWEN2 | {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_vl": PARTS | _QWEN_IDS,
    "qwen2_vl_text": _QWEN2_VL_TEXT,
    "qwen2_vl_vision": {key: value for key, value in QWEN_TOWER.items() if key != "out_hidden_size"}
    | {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "hidden_act": "quick_gelu",
        "patch_size": 14,
        "in_chans": None,
        "spatial_patch_size": None,
    },
    "qwen2_5_vl": PARTS | _QWEN_IDS,
    "qwen2_5_vl_text": _QWEN2_VL_TEXT,
    "qwen2_5_vl_vision": QWEN_TOWER
    | {
        "depth": 32,
        "intermediate_size": 3420,
        "patch_size": 14,
        "tokens_per_second": 4,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "in_chans": None,
        "spatial_patch_size": None,
    },
    "qwen3_vl": PARTS | _QWEN_IDS,
    "qwen3_vl_moe": PARTS | _QWEN_IDS,
    "qwen3_vl_text": {key: value for key, value in _QWEN3_VL_TEXT.items() if key not in QWEN_WINDOW},
    "qwen3_vl_moe_text": sizes(151936, 2048, 5632, 24, 16, 128000)
    | QWEN_EXPERTS
    | {
        "num_key_value_heads": 16,
        "rope_theta": 5e5,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_vision": QWEN3_TOWER,
    "qwen3_5": PARTS | _QWEN3_5_IDS,
    "qwen3_5_moe": PARTS | _QWEN3_5_IDS,
    "qwen3_5_text": sizes(248320, 4096, 12288, 32, 16, 32768) | HYBRID | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": {
        key: value
        for key, value in (sizes(248320, 2048, 0, 40, 16, 32768) | HYBRID | HYBRID_EXPERTS).items()
        if key not in ("intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")
    }
    | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_5_vision": {key: value for key, value in QWEN3_TOWER.items() if key != "deepstack_visual_indexes"},
}

# A gate of the linear layers' norm that the classes of transformers do not read, and no deepstack.
_QWEN3_5 = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
}
ONLY: dict[str, dict[str, Any]] = {
    "qwen3_5": {"language_model_only": False},
    "qwen3_5_moe": {"language_model_only": False},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5 | {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen3_5_vision": {"deepstack_visual_indexes": []},
    "qwen2_vl_text": {"attention_bias": True},
    "qwen2_5_vl_text": {"attention_bias": True},
}
