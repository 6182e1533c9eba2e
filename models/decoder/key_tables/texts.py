"""Keys of families without images."""

from typing import Any

from .parts import sizes

QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN2 = sizes(151936, 4096, 22016, 32, 32, 32768) | QWEN_WINDOW | {"num_key_value_heads": 32}
QWEN3 = QWEN2 | {"head_dim": 128, "attention_bias": False}
QWEN_EXPERTS = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
HYBRID = {
    "head_dim": 256,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Linear attention between full attention, and what is alike in Qwen3-Next and Qwen3.5."""
HYBRID_EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "mlp_only_layers": None,
}
_GLM = sizes(151552, 4096, 13696, 40, 32, 131072) | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_LATENT = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": None,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "scoring_func": None,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": sizes(32000, 4096, 11008, 32, 32, 2048) | {"attention_bias": False, "mlp_bias": False},
    "mistral": sizes(32000, 4096, 14336, 32, 32, 131072) | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": sizes(151936, 2048, 6144, 24, 32, 32768) | QWEN_WINDOW | QWEN_EXPERTS | {"num_key_value_heads": 4},
    "qwen3_next": sizes(151936, 2048, 5632, 48, 16, 32768) | HYBRID | HYBRID_EXPERTS | {"num_key_value_heads": 2},
    "glm": _GLM,
    "glm4": _GLM,
    "phi3": sizes(32064, 3072, 8192, 32, 32, 4096)
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    "deepseek_v2": sizes(102400, 4096, 11008, 32, 32, 2048)
    | _LATENT
    | {
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": sizes(129280, 7168, 18432, 61, 128, 4096)
    | _LATENT
    | {
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": None,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
}

ONLY: dict[str, dict[str, Any]] = {
    "llama": {"qk_layer_norms": False, "use_resampler": False, "rope_interleaved": False},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True},
    "qwen3_next": {"use_sliding_window": False, "attn_output_gate": True},
    # Qwen3-Coder's files say of Qwen2-MoE's switches that they are not used, and of its norms that they are.
    "qwen3_moe": {"qkv_bias": False, "use_qk_norm": True, "shared_experts_intermediate_size": 0},
    "phi3": {
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    "deepseek_v2": {"mlp_bias": False},
}
