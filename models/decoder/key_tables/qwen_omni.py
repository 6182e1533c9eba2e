"""Keys of Qwen2.5-Omni and Qwen3-Omni."""

from typing import Any

from .parts import PARTS, sizes
from .qwen_vl import QWEN3_TOWER, QWEN_TOWER
from .texts import QWEN2, QWEN_EXPERTS

_MARKS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "audio_start_token_id": 151647}
_THINKER = {key: value for key, value in PARTS.items() if key != "vocab_size"} | {
    "audio_config": None,
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
    "user_token_id": None,
    "audio_end_token_id": None,
}
_WHOLE = {"thinker_config": None, "talker_config": None, "enable_audio_output": None, "enable_talker": None}
_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "max_source_positions": 1500,
    "n_window": 100,
    "output_dim": 3584,
    # Repeats `encoder_layers` in released files.
    "num_hidden_layers": None,
    # The encoder multiplies by nothing and drops no layer, whatever these say.
    "scale_embedding": False,
    "encoder_layerdrop": None,
}
_TOWER_WORDS = {"embed_dim": None, "tokens_per_second": None, "in_chans": None, "spatial_patch_size": None}

DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": _WHOLE | {"token2wav_config": None},
    "qwen2_5_omni_thinker": _THINKER
    | _MARKS
    | {"audio_end_token_id": 151648, "user_token_id": 872}
    | {"audio_token_index": 151646, "image_token_index": 151655, "video_token_index": 151656},
    "qwen2_5_omni_text": QWEN2
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "sliding_window": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "qwen2_5_omni_vision_encoder": QWEN_TOWER
    | _TOWER_WORDS
    | {
        "depth": 32,
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen2_5_omni_audio_encoder": _AUDIO,
    "qwen3_omni_moe": _WHOLE
    | {"code2wav_config": None, "im_start_token_id": 151644, "im_end_token_id": 151645, "user_token_id": 872}
    | {"tts_pad_token_id": 151671, "tts_bos_token_id": 151672, "tts_eos_token_id": 151673}
    | {"system_token_id": 8948, "assistant_token_id": 77091},
    "qwen3_omni_moe_thinker": _THINKER
    | _MARKS
    | {"user_token_id": 872, "audio_token_id": 151646, "image_token_id": 151655, "video_token_id": 151656},
    "qwen3_omni_moe_text": sizes(3584, 2048, 18944, 28, 28, 32768)
    | QWEN_EXPERTS
    | {"num_key_value_heads": 4, "rope_theta": 1e6, "norm_topk_prob": True},
    "qwen3_omni_moe_vision_encoder": QWEN3_TOWER | _TOWER_WORDS | {"image_size": None},
    "qwen3_omni_moe_audio_encoder": _AUDIO
    | {"n_window": 50, "n_window_infer": 800, "conv_chunksize": 500, "downsample_hidden_size": 480},
}

ONLY: dict[str, dict[str, Any]] = {
    "qwen2_5_omni_text": {"attention_bias": True},
    "qwen3_omni_moe_text": {
        "sliding_window": None,
        "use_sliding_window": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    "qwen3_omni_moe_vision_encoder": {"apply_vit_abs_pos_embed": True},
}
