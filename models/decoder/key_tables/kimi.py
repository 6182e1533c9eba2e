"""Keys of Kimi-VL and Kimi-K2.5."""

from typing import Any

from .parts import PARTS

_MOONVIT = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "pos_emb_time": 4,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": (2, 2),
    "rope_parameters": None,
    "rope_theta": 1e4,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "kimi_k25": PARTS
    | {
        "image_token_id": 163605,
        "video_token_id": 163840,
        "vision_start_token_id": 163602,
        "vision_end_token_id": 163604,
        "projection_hidden_size": 1152,
        "projection_layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "kimi_vl": PARTS
    | {
        "media_placeholder_token_id": None,
        "image_token_id": None,
        "vision_start_token_id": None,
        "vision_end_token_id": None,
    },
    "kimi_k25_vision": _MOONVIT,
    "moonvit": {
        **{key: value for key, value in _MOONVIT.items() if not key.startswith("pos_emb")},
        "init_pos_emb_height": None,
        "init_pos_emb_width": None,
    },
}
ONLY: dict[str, dict[str, Any]] = {}
AUTHORS = {"kimi_vl", "moonvit"}
