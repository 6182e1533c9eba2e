"""Keys of DeepSeek-VL2, whose configuration classes are its authors' own."""

from typing import Any

from . import texts
from .parts import words

LATENT = words("kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")
"""Keys of latent attention: files without it have them as 0 or null."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": {
        "language_config": None,
        "vision_config": None,
        "projector_config": None,
        "candidate_resolutions": None,
        # Files do not name it: their tokenizers do.
        "image_token_id": 128815,
        "tie_word_embeddings": False,
    },
    "deepseek_vl_v2_vision": {
        "model_name": "siglip_large_patch16_384",
        "image_size": 384,
        "patch_size": 16,
        "width": 1024,
        "layers": 24,
        "heads": 16,
        "mlp_ratio": 4,
        # Of training, and of a head that is not run.
        **dict.fromkeys(words("deterministic num_classes num_recomputing_layers use_checkpoint weight_init")),
    },
    "deepseek_vl_v2_projector": {"input_dim": 1152, "n_embed": 2048, "mlp_ratio": 1, "downsample_ratio": 2},
    "deepseek_vl_v2_text": texts.DEFAULTS["deepseek_v2"]
    | {
        "num_hidden_layers": 30,
        "num_key_value_heads": 32,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "scoring_func": "softmax",
        "topk_method": None,
        "use_mla": True,
    },
}

ONLY: dict[str, dict[str, Any]] = {
    "deepseek_vl_v2": {"global_view_pos": "head", "tile_tag": "2D"},
    "deepseek_vl_v2_vision": {"class_token": False, "global_pool": "map", "ignore_head": True},
    "deepseek_vl_v2_projector": {"projector_type": "downsample_mlp_gelu", "depth": 2, "token_pooling": False},
    "deepseek_vl_v2_text": {"lm_head": True, "rm_head": False, "moe_layer_freq": 1},
}
AUTHORS = set(DEFAULTS)
