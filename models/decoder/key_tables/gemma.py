"""Keys of Gemma's families."""

from typing import Any

from .parts import PARTS, sizes

_TEXT = {key: value for key, value in sizes(262208, 2304, 9216, 26, 8, 131072).items() if key != "hidden_act"}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _TEXT
    | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_theta": None,
        "rope_local_base_freq": None,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": None,
        "final_logit_softcapping": None,
        # What released files say beside the keys that transformers reads.
        "_sliding_window_pattern": None,
        "cache_implementation": None,
    },
    "gemma4_text": {key: value for key, value in _TEXT.items() if key not in ("rope_theta", "rope_scaling")}
    | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "enable_moe_block": False,
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size")),
        "use_double_wide_mlp": False,
    },
    "gemma4": PARTS
    | {
        "audio_config": None,
        "boi_token_id": 255999,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "video_token_id": 258884,
        "boa_token_id": 256000,
        "eoa_token_index": 258883,
        "eoa_token_id": None,  # as released files have it beside the other
        "audio_token_id": 258881,
        "vision_soft_tokens_per_image": None,  # of the processor
        "tie_word_embeddings": True,
    },
    "gemma4_vision": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": None,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_parameters": None,
        "rope_theta": 100.0,
        "pooling_kernel_size": 3,
        "patch_size": 16,
        "position_embedding_size": 10240,
        "use_clipped_linears": False,
        "standardize": False,
    },
    "gemma4_audio": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "hidden_act": "silu",
        "subsampling_conv_channels": [128, 32],
        "conv_kernel_size": 5,
        "residual_weight": 0.5,
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "attention_context_right": 0,
        "attention_logit_cap": 50.0,
        "use_clipped_linears": True,
        "rms_norm_eps": 1e-6,
        "gradient_clipping": 1e10,
        "output_proj_dims": 1536,
    },
    "gemma3": PARTS
    | {
        "mm_tokens_per_image": 256,
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "tie_word_embeddings": True,
    },
}

ONLY: dict[str, dict[str, Any]] = {
    "gemma4_vision": {"attention_bias": False},
    "gemma4_audio": {"attention_invalid_logits_value": -1e9},
    "gemma3_text": {"attn_logit_softcapping": None, "use_bidirectional_attention": False},
}
