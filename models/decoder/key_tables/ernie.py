"""Keys of Ernie 4.5 and Ernie-4.5-VL."""

from typing import Any

from .parts import PARTS, sizes, words

_TEXT = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}
_EXPERTS = {"moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2}
TRAINING = words(
    """
    attention_probs_dropout_prob fuse_rope moe_all_to_all_dropout moe_aux_loss_lambda moe_capacity moe_dropout_prob
    moe_group moe_logging moe_multimodal_dispatch_use_allgather moe_orthogonal_loss_lambda moe_use_size_all2all
    moe_with_send_router_loss moe_z_loss_lambda pixel_hidden_size token_balance_loss use_flash_attention
    use_recompute use_recompute_resampler use_temporal_conv
    """
)
"""Of the authors' files: how they were trained and spread over devices."""
TOWER_TRAINING = words(
    "attn_implementation attn_sep pp_data_balance recompute vit_first_fwd_bsz vit_num_recompute_layers"
)

_ENDS = {
    "image_start_token_id": 101304,
    "image_end_token_id": 101305,
    "video_start_token_id": 101306,
    "video_end_token_id": 101307,
    "video_token_id": 103367,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "ernie4_5": sizes(103424, 1024, 3072, 18, 16, 131072)
    | _TEXT
    | {"num_key_value_heads": 2, "head_dim": 128, "use_bias": False},
    "ernie4_5_moe": sizes(103424, 2560, 12288, 28, 20, 131072)
    | _TEXT
    | _EXPERTS
    | {
        "moe_intermediate_size": 1536,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": None,
        "moe_layer_interval": 1,
    },
    "ernie4_5_vl_moe": PARTS | _ENDS | {"tie_word_embeddings": True, "image_token_id": 100295},
    "ernie4_5_vl_moe_text": sizes(103424, 2560, 12288, 28, 20, 131072)
    | _TEXT
    | _EXPERTS
    | {"moe_intermediate_size": None, "mlp_layer_types": None},
    "ernie4_5_vl_moe_vision": {
        "depth": 32,
        "hidden_size": 1280,
        "hidden_act": "quick_gelu",
        "intermediate_size": 5120,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": None,
        "rope_theta": 1e4,
    },
    # The authors' own format: its text part stands at the top.
    "ernie4_5_moe_vl": sizes(103424, 2560, 12288, 28, 20, 131072)
    | _TEXT
    | _EXPERTS
    | _ENDS
    | {
        "moe_intermediate_size": (1536, 512),
        "moe_num_experts": (64, 64),
        "moe_layer_start_index": (1, 1),
        "moe_layer_end_index": (29, 28),
        "moe_layer_interval": 1,
        "freq_allocation": 20,
        "im_patch_id": 100295,
        "vision_config": None,
        **dict.fromkeys(TRAINING),
    },
    "DFNRope_vision_transformer": {
        "depth": 32,
        "hidden_size": 1280,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        # The width once more, and how its authors ran it.
        "embed_dim": None,
        **dict.fromkeys(TOWER_TRAINING),
    },
}

ONLY: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"use_bias": False, "moe_norm_min": 1e-12},
    "ernie4_5_vl_moe_text": {"use_bias": False, "moe_norm_min": 1e-12},
    # The resampler's order of frames is written for two.
    "ernie4_5_vl_moe_vision": {"temporal_merge_size": 2},
    "ernie4_5_moe_vl": {
        "use_bias": False,
        "rope_3d": True,
        "use_rmsnorm": True,
        "spatial_conv_size": 2,
        "temporal_conv_size": 2,
        "moe_gate": "topk",
        "moe_gate_act": "softmax",
        "moe_norm_gate_logits": True,
        "moe_use_aux_free": True,
        "moe_use_hard_gate": False,
        "moe_num_dense_experts": 0,
        "moe_multimodal_paired_experts": False,
        "multi_token_pred_depth": 0,
    },
}
AUTHORS = {"ernie4_5_moe_vl", "DFNRope_vision_transformer"}
