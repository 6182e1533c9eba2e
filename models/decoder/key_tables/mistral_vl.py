"""Keys of Mistral Small 3.1 and of Pixtral's tower."""

from typing import Any

from .parts import PARTS, tower

DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral3": PARTS
    | {
        "image_token_index": 10,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "multimodal_projector_bias": False,
        "spatial_merge_size": 2,
        "tie_word_embeddings": True,
    },
    "pixtral": tower(1024, 4096, 24, 16, 1024, 16)
    | {"hidden_act": "gelu", "head_dim": None, "rope_parameters": None, "rope_theta": 1e4},
}

ONLY: dict[str, dict[str, Any]] = {}
