"""Keys of GLM-4.1V, GLM-4.5V and GLM-4.6V."""

from typing import Any

from .parts import PARTS, sizes

_ENDS = {
    "image_start_token_id": 151339,
    "image_end_token_id": 151340,
    "video_start_token_id": 151341,
    "video_end_token_id": 151342,
}
_TEXT = sizes(151552, 4096, 13696, 40, 32, 32768) | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_TOWER = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
    "rope_parameters": None,
    "rope_theta": 1e4,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v": PARTS | _ENDS | {"image_token_id": 151343, "video_token_id": 151344},
    "glm4v_text": _TEXT,
    "glm4v_vision": _TOWER,
    "glm4v_moe": PARTS | _ENDS | {"image_token_id": 151363, "video_token_id": 151364},
    "glm4v_moe_text": sizes(151424, 4096, 10944, 46, 96, 65536)
    | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_local_experts": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "glm4v_moe_vision": _TOWER,
    "glm46v": PARTS
    | _ENDS
    | {"image_token_id": 151343, "video_token_id": 151344}
    | {"video_start_token_id": 151361, "video_end_token_id": 151362},
}

ONLY: dict[str, dict[str, Any]] = {
    "glm4v_text": {"attention_bias": True},
    "glm4v_moe_text": {"use_qk_norm": False},
}
