"""Keys of DeepSeek-VL-7B with its SAM tower, and of Phi-3-vision."""

from typing import Any

from . import texts
from .parts import PARTS

DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_vl_hybrid": PARTS
    | {"image_token_id": 100015, "tie_word_embeddings": True, "high_res_vision_config": None},
    "sam_vision_model": {
        "hidden_size": 768,
        "output_channels": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 1024,
        "patch_size": 16,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "mlp_ratio": 4.0,
        "mlp_dim": None,
        "use_abs_pos": True,
        "use_rel_pos": True,
        "window_size": 14,
        "global_attn_indexes": (2, 5, 8, 11),
        # Sizes of SAM's mask decoder, and a multiple of the width that no layer has.
        "num_pos_feats": 128,
        "scale": None,
        "intermediate_size": None,
    },
    # The authors' processor names the image's token nowhere but in the vocabulary.
    "phi3_v": texts.DEFAULTS["phi3"] | {"embd_layer": None, "img_processor": None, "image_token_id": 32044},
}

ONLY: dict[str, dict[str, Any]] = {"phi3_v": texts.ONLY["phi3"]}
AUTHORS = {"phi3_v"}
