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
        "use_double_wide_mlp": False,
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
    "gemma4_text": {
        "enable_moe_block": False,
        **dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size")),
    },
    "gemma3_text": {"attn_logit_softcapping": None, "use_bidirectional_attention": False},
}
