"""What our readers need of the `config.json` of released checkpoints, by the name of their Hugging Face repository.

Published counts cover every parameter of the file, the tower included. Fields and counts are what is publicly said of
these releases; not every file was read from its own repository, and a total that fits is the evidence that the fields
do. No weights of these were loaded: the table of `docs/reference/backbones.md` follows from the configurations alone.
"""

from typing import Any, NamedTuple


class Released(NamedTuple):
    """A released checkpoint: `config.json`, and the billions of parameters it is said to have (None: not known)."""

    config: dict[str, Any]
    published: float | None


def _sizes(width: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


def _text(architecture: str, *sizes: int, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"architectures": [architecture], "torch_dtype": "bfloat16"}
    return names | _sizes(*sizes) | {"rope_theta": theta, "tie_word_embeddings": False, **more}


# ------------------------------------------------------------------------------------------------------------ Qwen

_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def _qwen2_5_vl(*sizes: int, tied: bool) -> dict[str, Any]:
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "hidden_act": "silu"}
    tower |= {"patch_size": 14, "spatial_patch_size": 14, "in_chans": 3, "temporal_patch_size": 2, "window_size": 112}
    tower |= {"spatial_merge_size": 2, "tokens_per_second": 2, "fullatt_block_indexes": [7, 15, 23, 31]}
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    more = {"hidden_act": "silu", "tie_word_embeddings": tied, "rope_scaling": rope, **_QWEN_IDS}
    config = _text("Qwen2_5_VLForConditionalGeneration", *sizes, theta=1e6, **more)
    return config | {"vision_config": tower | {"out_hidden_size": sizes[0]}}


_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}


def _qwen3_vl(*sizes: int, tied: bool, tower: dict[str, Any], **experts: Any) -> dict[str, Any]:
    shared = {"num_heads": 16, "in_channels": 3, "patch_size": 16, "num_position_embeddings": 2304}
    shared |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": sizes[0]}
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {"dtype": "bfloat16", "head_dim": 128, "rope_theta": 5e6, "rope_scaling": rope, **experts}
    name = "Qwen3VLMoeForConditionalGeneration" if experts else "Qwen3VLForConditionalGeneration"
    return {
        "architectures": [name],
        "tie_word_embeddings": tied,
        "text_config": _sizes(*sizes) | text | {"tie_word_embeddings": tied},
        "vision_config": {**shared, **tower},
        **_QWEN_IDS,
    }


_QWEN_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}

# ------------------------------------------------------------------------------------------------------- DeepSeek

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_V2_LITE = {
    **_LATENT,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": 163840,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
_V3 = {
    **_LATENT,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
_KIMI_VL = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "media_placeholder_token_id": 163605,
    "text_config": _text(
        "DeepseekV3ForCausalLM",
        *(2048, 11264, 27, 16, 16, 163840),
        theta=8e5,
        **_V3 | {"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6},
    )
    | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 2.446, "max_position_embeddings": 131072, "rope_scaling": None},
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "merge_kernel_size": [2, 2],
    },
}

_KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "dtype": "bfloat16",
    "media_placeholder_token_id": 163605,
    "text_config": _text(
        "DeepseekV3ForCausalLM", 7168, 18432, 61, 64, 64, 163840, theta=5e4, **_V3 | {"n_routed_experts": 384}
    )
    | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
    | {
        "max_position_embeddings": 262144,
        "rope_scaling": _YARN | {"factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "vision_config": {
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2],
        "mm_hidden_size": 1152,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
    },
}

# --------------------------------------------------------------------------------------------- a plain ViT in front


def _vit(width: int, intermediate: int, layers: int, heads: int, image: int, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
    }


def _deepseek_vl() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekVLForConditionalGeneration"],
        "image_token_id": 100015,
        "text_config": _text("LlamaForCausalLM", 2048, 5632, 24, 16, 16, 102400, model_type="llama"),
        "vision_config": _vit(1024, 4096, 24, 16, 384, 16) | {"vision_use_head": False},
    }


_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def _llava(text: dict[str, Any], pinpoints: list[list[int]] | None = None) -> dict[str, Any]:
    name = "LlavaForConditionalGeneration" if pinpoints is None else "LlavaNextForConditionalGeneration"
    tiles = {} if pinpoints is None else {"image_grid_pinpoints": pinpoints}
    tower = _vit(1024, 4096, 24, 16, 336, 14) | {"hidden_act": "quick_gelu"}
    return {"architectures": [name], "image_token_index": 32000, "text_config": text, "vision_config": tower, **tiles}


# Their files say no more than this of the text tower; the rest are the defaults of transformers' classes.
_VICUNA = {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "float16", "rms_norm_eps": 1e-5}
_MISTRAL = {"model_type": "mistral", "vocab_size": 32064, "torch_dtype": "bfloat16", "intermediate_size": 14336}
_MISTRAL |= {"num_key_value_heads": 8, "rope_theta": 1e6, "sliding_window": None, "rms_norm_eps": 1e-5}


def _internvl3(*sizes: int) -> dict[str, Any]:
    rope = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    more = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_scaling": rope}
    tower = _vit(1024, 4096, 24, 16, 448, 14) | {"attention_bias": True, "norm_type": "layer_norm"}
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": 151667,
        "downsample_ratio": 0.5,
        "text_config": _text("Qwen2ForCausalLM", *sizes, theta=1e6, **more),
        "vision_config": tower | {"image_size": [448, 448], "patch_size": [14, 14], "use_qk_norm": False},
    }


def _internvl3_5(*sizes: int) -> dict[str, Any]:
    config = _internvl3(*sizes)
    text = _text("Qwen3ForCausalLM", *sizes, theta=1e6, model_type="qwen3", head_dim=128, max_position_embeddings=40960)
    return config | {"image_token_id": 151671, "text_config": text}


def _smolvlm2(*sizes: int, scale: int, theta: float, tower: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": 49190,
        "scale_factor": scale,
        "text_config": _text("LlamaForCausalLM", *sizes, theta=theta, head_dim=64, model_type="llama"),
        "vision_config": tower,
    }


# ------------------------------------------------------------------------------------------------------- the table

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_QWEN3 = {"head_dim": 128, "theta": 1e6, "max_position_embeddings": 40960}
_GLM = {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}

RELEASED: dict[str, Released] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": Released(_qwen2_5_vl(2048, 11008, 36, 16, 2, 151936, tied=True), 3.755),
    "Qwen/Qwen2.5-VL-7B-Instruct": Released(_qwen2_5_vl(3584, 18944, 28, 28, 4, 152064, tied=False), 8.292),
    "Qwen/Qwen3-VL-2B-Instruct": Released(
        _qwen3_vl(2048, 6144, 28, 16, 8, 151936, tied=True, tower=_SMALL_TOWER), 2.128
    ),
    "Qwen/Qwen3-VL-4B-Instruct": Released(
        _qwen3_vl(2560, 9728, 36, 32, 8, 151936, tied=True, tower=_SMALL_TOWER), 4.438
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Released(
        _qwen3_vl(4096, 12288, 36, 32, 8, 151936, tied=False, tower=_LARGE_TOWER), 8.767
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Released(
        _qwen3_vl(2048, 6144, 48, 32, 4, 151936, tied=False, tower=_LARGE_TOWER, **_QWEN_EXPERTS), 31.071
    ),
    "moonshotai/Kimi-VL-A3B-Instruct": Released(_KIMI_VL, 16.408),
    "moonshotai/Kimi-K2.5": Released(_KIMI_K25, 1026.879),
    "deepseek-community/deepseek-vl-1.3b-chat": Released(_deepseek_vl(), None),
    "llava-hf/llava-1.5-7b-hf": Released(_llava(_VICUNA), 7.063),
    "llava-hf/llava-v1.6-vicuna-7b-hf": Released(_llava(_VICUNA, _PINPOINTS), 7.063),
    "llava-hf/llava-v1.6-mistral-7b-hf": Released(_llava(_MISTRAL, _PINPOINTS), 7.567),
    "OpenGVLab/InternVL3-1B-hf": Released(_internvl3(896, 4864, 24, 14, 2, 151674), 0.938),
    "OpenGVLab/InternVL3-2B-hf": Released(_internvl3(1536, 8960, 28, 12, 2, 151674), 2.089),
    "OpenGVLab/InternVL3-8B-hf": Released(_internvl3(3584, 18944, 28, 28, 4, 151674), 7.944),
    "OpenGVLab/InternVL3_5-8B-HF": Released(_internvl3_5(4096, 12288, 36, 32, 8, 151936), 8.528),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": Released(
        _smolvlm2(2048, 8192, 24, 32, 32, 49280, scale=3, theta=1.3e5, tower=_vit(1152, 4304, 27, 16, 384, 14)), 2.247
    ),
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": Released(
        _smolvlm2(960, 2560, 32, 15, 5, 49280, scale=4, theta=1e5, tower=_vit(768, 3072, 12, 12, 512, 16)), 0.507
    ),
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": Released(
        _smolvlm2(576, 1536, 30, 9, 3, 49280, scale=4, theta=1e5, tower=_vit(768, 3072, 12, 12, 512, 16)), 0.256
    ),
    "meta-llama/Llama-2-7b-hf": Released(_text("LlamaForCausalLM", 4096, 11008, 32, 32, 32, 32000), 6.738),
    "meta-llama/Llama-3.1-8B": Released(
        _text("LlamaForCausalLM", 4096, 14336, 32, 32, 8, 128256, theta=5e5, rope_scaling=_LLAMA3), 8.030
    ),
    "mistralai/Mistral-7B-v0.1": Released(
        _text("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096), 7.242
    ),
    "Qwen/Qwen2-0.5B": Released(
        _text("Qwen2ForCausalLM", 896, 4864, 24, 14, 2, 151936, theta=1e6, tie_word_embeddings=True), 0.494
    ),
    "Qwen/Qwen2-7B": Released(_text("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 152064, theta=1e6), 7.616),
    "Qwen/Qwen3-0.6B": Released(
        _text("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 151936, **_QWEN3, tie_word_embeddings=True), 0.596
    ),
    "Qwen/Qwen3-8B": Released(_text("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 151936, **_QWEN3), 8.191),
    "Qwen/Qwen3-30B-A3B": Released(
        _text("Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 4, 151936, **_QWEN3, **_QWEN_EXPERTS), 30.532
    ),
    "zai-org/glm-4-9b-hf": Released(
        _text("GlmForCausalLM", 4096, 13696, 40, 32, 2, 151552, **_GLM, attention_bias=True), 9.400
    ),
    "zai-org/GLM-4-9B-0414": Released(
        _text("Glm4ForCausalLM", 4096, 13696, 40, 32, 2, 151552, **_GLM, attention_bias=False), 9.400
    ),
    "microsoft/Phi-3-mini-4k-instruct": Released(
        _text("Phi3ForCausalLM", 3072, 8192, 32, 32, 32, 32064, sliding_window=2047), 3.821
    ),
    "deepseek-ai/DeepSeek-V2-Lite": Released(
        _text("DeepseekV2ForCausalLM", 2048, 10944, 27, 16, 16, 102400, **_V2_LITE), 15.706
    ),
    "deepseek-ai/DeepSeek-V3": Released(
        _text("DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280, **_V3), 671.026
    ),
}
