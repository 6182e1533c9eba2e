"""Which keys of `config.json` are known: what each may hold, and what an absent one means.

A key outside these tables may change what a model computes, so `complete` refuses it by name. Defaults are those of the
configuration classes of transformers 5.23 (`tests/goldens/sparse` holds these tables against the classes themselves).
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

Table = Mapping[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


INERT = _words(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _name_or_path _pad_token_id add_cross_attention architectures attention_dropout attn_implementation auto_map
    aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample drop_path_rate dropout dtype early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id hidden_dropout_prob id2label ignore_index image_seq_length
    initializer_factor initializer_range is_composition is_decoder is_encoder_decoder is_llama_config
    keys_to_ignore_at_inference label2id length_penalty max_image_size max_length min_length model_type
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_mtp_layers num_nextn_predict_layers
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id
    perceiver_config pixel_shuffle_factor prefix pretraining_tp problem_type projection_dim projection_dropout
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    sep_token_id seq_aux size suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    use_bfloat16 use_cache use_image_newline_parameter use_reentrant_checkpointing video_token_id vision_end_token_id
    vision_start_token_id vision_token_id vocab_size
    """
)
"""Keys that say nothing of what a forward computes where no table below knows them."""

OFF = _words("debug micro_forward pruned_heads skip_checkpoint use_deepep use_mrope")
"""Keys that change nothing while they are false or empty, and are refused otherwise: heads that were taken out, M-RoPE
(Qwen2.5's files say that they have none), and switches of a trainer that InternVL3.5's files hold."""

_KINDS = {
    "a positive whole number": """
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        max_position_embeddings original_max_position_embeddings sliding_window kv_lora_rank q_lora_rank qk_head_dim
        qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size n_group topk_group num_experts
        num_local_experts num_experts_per_tok moe_layer_freq decoder_sparse_step depth num_heads in_channels in_chans
        num_channels spatial_patch_size spatial_merge_size out_hidden_size window_size num_position_embeddings
        scale_factor init_pos_emb_height init_pos_emb_width init_pos_emb_time pos_emb_height pos_emb_width pos_emb_time
        projection_hidden_size vt_num_attention_heads vt_num_hidden_layers vt_hidden_size vt_intermediate_size
        mm_hidden_size text_hidden_size
    """,
    "a whole number from 0 on": """
        first_k_dense_replace n_shared_experts n_routed_experts max_window_layers image_token_id image_token_index
        video_token_id vision_start_token_id vision_end_token_id media_placeholder_token_id tokens_per_second
    """,
    "a positive number": """
        rms_norm_eps layer_norm_eps projection_layer_norm_eps projector_ln_eps rope_theta partial_rotary_factor
        routed_scaling_factor downsample_ratio layer_scale_init_value
    """,
    "true or false": """
        attention_bias mlp_bias use_sliding_window norm_topk_prob rope_interleave tie_word_embeddings
        multimodal_projector_bias use_qk_norm use_mask_token use_absolute_position_embeddings use_mean_pooling
        vision_use_head
    """,
    "a text": """
        hidden_act topk_method scoring_func projector_hidden_act vision_feature_select_strategy norm_type
    """,
    "a list": """
        layer_types layers_block_type mlp_only_layers fullatt_block_indexes deepstack_visual_indexes
        image_grid_pinpoints
    """,
    "a table": "rope_scaling rope_parameters text_config language_config vision_config linear_attn_config",
    "a positive whole number or a list": "image_size patch_size temporal_patch_size merge_kernel_size",
    "a whole number or a list": "vision_feature_layer",
}
_KIND: dict[str, str] = {}
for _kind, _keys in _KINDS.items():
    _KIND |= dict.fromkeys(_words(_keys), _kind)
_NULL = _words(
    """
    num_key_value_heads head_dim sliding_window q_lora_rank rope_scaling rope_parameters layer_types layers_block_type
    mlp_only_layers n_group topk_group n_routed_experts n_shared_experts num_experts_per_tok linear_attn_config
    partial_rotary_factor text_config language_config original_max_position_embeddings vision_start_token_id
    vision_end_token_id max_window_layers mm_hidden_size text_hidden_size
    """
)
"""Keys whose null has a meaning of its own."""

_ROPE: dict[str, Any] = {
    "rope_theta": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
    "layers_block_type": None,
    "linear_attn_config": None,
}


def _sizes(vocabulary: int, width: int, inner: int, layers: int, heads: int, length: int) -> dict[str, Any]:
    """Returns a text tower's keys with the sizes that its class has by default."""
    return _ROPE | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
        "layer_types": None,
    }


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN2 = _sizes(151936, 4096, 22016, 32, 32, 32768) | _QWEN_WINDOW | {"num_key_value_heads": 32}
_QWEN3 = _QWEN2 | {"head_dim": 128, "attention_bias": False}
_QWEN_EXPERTS = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_QWEN3_VL_TEXT = _QWEN3 | {"max_position_embeddings": 128000, "rope_theta": 5e5}
_GLM = _sizes(151552, 4096, 13696, 40, 32, 131072) | {
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
_QWEN_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_PARTS = {"text_config": None, "vision_config": None, "tie_word_embeddings": False, "vocab_size": None}
_QWEN_TOWER = {
    "hidden_size": 3584,
    "hidden_act": "silu",
    "num_heads": 16,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "rope_parameters": None,
    "rope_theta": 1e4,
}
_QWEN3_TOWER = _QWEN_TOWER | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


def _tower(width: int, inner: int, layers: int, heads: int, image: int, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_channels": 3,
        "image_size": image,
        "patch_size": patch,
    }


_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_LLAVA = _PARTS | {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
    "multimodal_projector_bias": True,
}
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

_UNUSED_EXPERTS = """
    capacity_factor eval_capacity_factor laux_allreduce moe_coeff_ratio moe_config moe_intermediate_size
    moe_output_scale noisy_gate_policy num_experts num_routed_experts num_shared_experts shared_expert_intermediate_size
    use_residual use_rts use_weighted_residual
"""
"""What InternViT's files say of experts that `use_moe` leaves out."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _sizes(32000, 4096, 11008, 32, 32, 2048) | {"attention_bias": False, "mlp_bias": False},
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 131072) | {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_moe": _sizes(151936, 2048, 6144, 24, 32, 32768) | _QWEN_WINDOW | _QWEN_EXPERTS | {"num_key_value_heads": 4},
    "glm": _GLM,
    "glm4": _GLM,
    "phi3": _sizes(32064, 3072, 8192, 32, 32, 4096)
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    "deepseek_v2": _sizes(102400, 4096, 11008, 32, 32, 2048)
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
    "deepseek_v3": _sizes(129280, 7168, 18432, 61, 128, 4096)
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
    "qwen2_5_vl": _PARTS | _QWEN_IDS,
    "qwen2_5_vl_text": _QWEN2
    | {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
        "rope_theta": 1e6,
    },
    "qwen2_5_vl_vision": _QWEN_TOWER
    | {
        "depth": 32,
        "intermediate_size": 3420,
        "patch_size": 14,
        "tokens_per_second": 4,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "in_chans": None,
        "spatial_patch_size": None,
    },
    "qwen3_vl": _PARTS | _QWEN_IDS,
    "qwen3_vl_moe": _PARTS | _QWEN_IDS,
    "qwen3_vl_text": {key: value for key, value in _QWEN3_VL_TEXT.items() if key not in _QWEN_WINDOW},
    "qwen3_vl_moe_text": _sizes(151936, 2048, 5632, 24, 16, 128000)
    | _QWEN_EXPERTS
    | {
        "num_key_value_heads": 16,
        "rope_theta": 5e5,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen3_vl_vision": _QWEN3_TOWER,
    "llava": _LLAVA,
    "llava_next": _LLAVA | {"image_grid_pinpoints": ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))},
    "clip_vision_model": _tower(768, 3072, 12, 12, 224, 32) | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "internvl": _PARTS
    | {
        "image_token_id": 151667,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    "internvl_vision": _tower(1024, 4096, 24, 16, 448, 14)
    | {"attention_bias": False, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "layer_scale_init_value": 0.1},
    "deepseek_vl": _PARTS | {"image_token_id": 100015, "tie_word_embeddings": True},
    "siglip_vision_model": _tower(768, 3072, 12, 12, 224, 16) | _SIGLIP | {"vision_use_head": True},
    "smolvlm": _PARTS | {"image_token_id": 128257, "scale_factor": 2},
    "smolvlm_vision": _tower(1152, 3072, 12, 16, 224, 32) | _SIGLIP,
    "kimi_k25": _PARTS
    | {
        "image_token_id": 163605,
        "video_token_id": 163840,
        "vision_start_token_id": 163602,
        "vision_end_token_id": 163604,
        "projection_hidden_size": 1152,
        "projection_layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "kimi_vl": _PARTS
    | {
        "media_placeholder_token_id": None,
        "image_token_id": None,
        "vision_start_token_id": None,
        "vision_end_token_id": None,
    },
    "internvl_chat": {
        "llm_config": None,
        "vision_config": None,
        "tie_word_embeddings": False,
        "select_layer": -1,
        "downsample_ratio": 0.5,
        "ps_version": "v1",
        "force_image_size": None,
        "dynamic_image_size": False,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
        "use_thumbnail": False,
        "img_context_token_id": None,
        **dict.fromkeys(_words("pad2square use_backbone_lora use_llm_lora"), 0),
        **dict.fromkeys(_words("template system_message image_fold hidden_size num_hidden_layers")),
    },
    "intern_vit_6b": _tower(3200, 12800, 48, 25, 224, 14)
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "norm_type": "rms_norm", "qkv_bias": False}
    | {"qk_normalization": True, "use_flash_attn": True, "use_moe": False}
    | dict.fromkeys(_words(_UNUSED_EXPERTS)),
    "multi_modality": {"language_config": None, "vision_config": None, "aligner_config": None},
    "kimi_k25_release": _PARTS
    | {"media_placeholder_token_id": 163605, "use_unified_vision_chunk": None, "video_placeholder": None},
    "kimi_k25_vision": _MOONVIT,
    "kimi_k25_release_vision": {
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "merge_kernel_size": (2, 2),
        "vt_num_attention_heads": 16,
        "vt_num_hidden_layers": 27,
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "mm_hidden_size": None,
        "text_hidden_size": None,
        "projector_ln_eps": 1e-5,
    },
    "moonvit": {
        **{key: value for key, value in _MOONVIT.items() if not key.startswith("pos_emb")},
        "init_pos_emb_height": None,
        "init_pos_emb_width": None,
    },
}
"""By `model_type`: every key that is read, and what an absent one means (None: nothing, or what its reader derives)."""

ONLY: dict[str, dict[str, Any]] = {
    "llama": {"qk_layer_norms": False, "use_resampler": False, "rope_interleaved": False},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"attention_bias": True},
    "phi3": {
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    "deepseek_v2": {"mlp_bias": False},
    "qwen2_5_vl_text": {"attention_bias": True},
    "internvl_vision": {
        "norm_type": "layer_norm",
        "use_qk_norm": False,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
    },
    "smolvlm_vision": {"vision_use_head": False, "use_base_siglip": False},
    "kimi_k25_release_vision": {
        "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "projector_hidden_act": "gelu",
    },
}
"""By `model_type`: keys of which one value is built; an absent one means that value."""


ALIASES = {"num_local_experts": "num_experts", "image_token_id": "image_token_index"}
"""Two names of one key, where a table knows only the second."""


def complete(raw: Any, kind: str, place: str = "config.json", drop: Collection[str] | None = None) -> dict[str, Any]:
    """Checks a table of `config.json` and fills in what it leaves out.

    Args:
      raw: the table.
      kind: its `model_type`, a key of `DEFAULTS`.
      place: what errors call the table.
      drop: keys of a table around it, which may stand here too and mean nothing here (a flat configuration).

    Raises:
      ConfigError: not a table; a key that this library does not know, or whose value is of another kind or not built.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{place}: got {_short(raw)}; expected a table")

    known, only, found = DEFAULTS[kind], ONLY.get(kind, {}), dict[str, Any]()
    for given, value in raw.items():
        key = given if given in known else ALIASES.get(given, given)
        if key in only:
            if value != only[key] and value is not None:
                raise ConfigError(
                    f"{place}: got {key} {_short(value)}, which is not built for {kind}; expected {only[key]!r}"
                )
        elif key in known:
            wanted = _KIND.get(key)
            absent = value is None and key in _NULL
            if wanted is not None and not absent and not _is(wanted, value):
                raise ConfigError(f"{place}: got {key} {_short(value)}; expected {wanted}")
            found[key] = value
        elif given in INERT or given in (drop or ()) or value is None or (given in OFF and not value):
            found[given] = value
        else:
            raise ConfigError(
                f"{place}: got {given!r}: {_short(value)}, which this library does not know for {kind} and which may "
                f"change what the model computes; expected one of {', '.join(sorted(known))}. If it changes nothing, "
                "take it out of the file"
            )

    return known | found


def _is(kind: str, value: Any) -> bool:
    """Returns whether a value of JSON is of a kind of `_KINDS`."""
    # true and false are whole numbers to Python.
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "a positive whole number":
        return whole and value > 0
    if kind == "a whole number from 0 on":
        return whole and value >= 0
    if kind == "a positive number":
        return (whole or isinstance(value, float)) and value > 0 and math.isfinite(value)
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a text":
        return isinstance(value, str)
    if kind == "a table":
        return isinstance(value, Mapping)
    if kind == "a positive whole number or a list":
        sizes = value if isinstance(value, list | tuple) else [value]
        return all(_is("a positive whole number", size) for size in sizes)
    if kind == "a whole number or a list":
        return whole or _is("a list", value)
    return isinstance(value, list | tuple)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
