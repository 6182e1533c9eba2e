"""Keys of the families with a plain ViT: LLaVA, InternVL, DeepSeek-VL and SmolVLM."""

from typing import Any

from .parts import PARTS, SIGLIP, tower

_LLAVA = PARTS | {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llava": _LLAVA,
    "llava_next": _LLAVA | {"image_grid_pinpoints": ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))},
    "clip_vision_model": tower(768, 3072, 12, 12, 224, 32) | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "internvl": PARTS
    | {
        "image_token_id": 151667,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    "internvl_vision": tower(1024, 4096, 24, 16, 448, 14)
    | {"attention_bias": False, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "layer_scale_init_value": 0.1}
    | {"norm_type": "layer_norm", "use_qk_norm": False},
    "deepseek_vl": PARTS | {"image_token_id": 100015, "tie_word_embeddings": True},
    "siglip_vision_model": tower(768, 3072, 12, 12, 224, 16) | SIGLIP | {"vision_use_head": True},
    "smolvlm": PARTS | {"image_token_id": 128257, "scale_factor": 2},
    "smolvlm_vision": tower(1152, 3072, 12, 16, 224, 32) | SIGLIP,
}

ONLY: dict[str, dict[str, Any]] = {
    "internvl_vision": {
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
    },
    "smolvlm_vision": {"vision_use_head": False, "use_base_siglip": False},
}
