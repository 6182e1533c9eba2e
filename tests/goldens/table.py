"""The tiny models of the goldens: per family transformers' class, its configuration, image settings and prompts.

Free of torch, so that tests read it too. A prompt is a list of parts: a number of text tokens, `Picture`, `Clip`,
`Sound` or `Both`.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

IMAGE, VIDEO, START, END, AUDIO, AUDIO_START, AUDIO_END = 301, 302, 303, 304, 305, 306, 307
MELS = 16


class Picture(NamedTuple):
    """An image, drawn by its number in the prompt."""

    height: int
    width: int


class Clip(NamedTuple):
    """A video of drawn patches."""

    grid: tuple[int, int, int]
    seconds: float = 1.0


class Sound(NamedTuple):
    """Drawn log-mel features."""

    frames: int


class Both(NamedTuple):
    """A video with its sound, interleaved."""

    grid: tuple[int, int, int]
    seconds: float
    frames: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One family.

    Attributes:
      model: the name of transformers' class without its ending.
      config: keys of its configuration.
      cases: name → prompt.
      processor: transformers' image processor (module and class) and its settings.
      positions: name → prompt of which only position ids are kept; no tower runs.
      new_names: whether files are written under transformers 5's own names instead of the released ones.
      frames: how videos are written: one run of placeholders, or a run for each frame.
      first: the position of the first token.
      authors: whether a text behind a video goes on after its largest position, as the authors' code has it.
      settings: `preprocessor_config.json` where no processor of transformers writes it.
    """

    model: str
    config: dict[str, Any]
    cases: dict[str, list[Any]]
    processor: tuple[str, dict[str, Any]] | None = None
    positions: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    new_names: bool = False
    frames: bool = False
    first: int = 0
    authors: bool = False
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def words(count: int, first: int = 0) -> list[int]:
    """Text tokens, none of which is a control token."""
    return [int(value) for value in ((first + np.arange(count)) * 37 + 11) % 290 + 3]


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration with nested changes."""
    out = dict(config)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merged(out[name], value) if nested else value
    return out


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Returns `rope_parameters`; bases are low, so that every rotary pair matters within a few tokens."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# ---------------------------------------------------------------------------------------------------- text parts

TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
UNTIED = {"tie_word_embeddings": False}
FULL = {**TEXT, "num_key_value_heads": 4}
LLAMA = {**FULL, "model_type": "llama", **UNTIED, **rope(1e2)}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1}
GROUPS = {**ROUTED, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}
ONE_GROUP = {**GROUPS, "n_group": 1, "topk_group": 1}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}
SHORT_MODEL = {"original_max_position_embeddings": 32, "max_position_embeddings": 256}
FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURE = {**FEW, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []}
# Qwen3.5's kind: a quarter of a head rotates, and the third of four layers alone has full attention.
LINEAR = {
    **TEXT,
    "vocab_size": 306,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **UNTIED,
}
LINEAR_MOE = {name: value for name, value in LINEAR.items() if name != "intermediate_size"}
LINEAR_MOE |= {**FEW, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 20}
QUARTER = {"partial_rotary_factor": 0.25}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, **QUARTER}


def gemma_ropes(full: dict[str, Any], theta: float = 5e2, local: float = 3e1) -> dict[str, Any]:
    """Returns ropes of layers that see all and of those that slide."""
    kinds = {"full_attention": {**full, "rope_theta": theta}}
    return {"rope_parameters": kinds | {"sliding_attention": {"rope_type": "default", "rope_theta": local}}}


HALF_PAIRS = {"rope_type": "proportional", "partial_rotary_factor": 0.5}


def kinds(layers: int, *full: int) -> list[str]:
    """Returns `layer_types` of which these see all."""
    return ["full_attention" if layer in full else "sliding_attention" for layer in range(layers)]


SHARED = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
SHARED |= {"num_hidden_layers": 6, "layer_types": kinds(6, 1, 5), "final_logit_softcapping": 20.0}
GEMMA4 = {**TEXT, "head_dim": 16, "global_head_dim": 24, **gemma_ropes(HALF_PAIRS)}


def text(model: str, config: dict[str, Any], length: int = 14, first: int = 0) -> Row:
    """Returns the row of a text family."""
    return Row(model, {**TEXT, "vocab_size": 300, **UNTIED, **config}, {"text": [length]}, first=first)


WINDOW = {"use_sliding_window": True, "sliding_window": 5}
TEXTS = {
    "llama2": text("Llama", {"num_key_value_heads": 4, **rope(1e2)}),
    "llama3_1": text(
        "Llama", {"tie_word_embeddings": True, **rope(5e2, **LLAMA3, original_max_position_embeddings=32)}
    ),
    "llama_linear": text(
        "Llama", {"attention_bias": True, "mlp_bias": True, **rope(1e2, rope_type="linear", factor=2.0)}
    ),
    "llama_yarn": text("Llama", rope(1e2, **YARN | {"factor": 4.0})),
    "llama_dynamic": text("Llama", {"max_position_embeddings": 10, **rope(1e2, rope_type="dynamic", factor=2.0)}),
    "mistral": text("Mistral", {"sliding_window": None, "head_dim": 16, **rope(1e2)}),
    "mistral_window": text("Mistral", {"sliding_window": 5, "head_dim": 16, **rope(1e2)}),
    "qwen2": text("Qwen2", rope(1e2)),
    "qwen2_window": text("Qwen2", {**WINDOW, "max_window_layers": 1, **rope(1e2)}),
    "qwen3": text("Qwen3", {"head_dim": 24, **rope(1e2)}),
    "qwen3_window": text("Qwen3", {**WINDOW, "head_dim": 24, "layer_types": kinds(3, 1), **rope(1e2)}),
    "qwen3_moe": text(
        "Qwen3Moe", {"head_dim": 16, **MIXTURE, "num_experts": 8, "moe_intermediate_size": 32, **rope(1e2)}
    ),
    "glm": text("Glm", {"head_dim": 16, **rope(1e2, partial_rotary_factor=0.5)}),
    "glm4": text("Glm4", {"head_dim": 16, "attention_bias": True, **rope(1e2, partial_rotary_factor=0.5)}),
    "gemma3_text": text(
        "Gemma3",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "layer_types": kinds(3, 1),
            "final_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
            **gemma_ropes({"rope_type": "linear", "factor": 2.0}),
        },
    ),
    "gemma4_text": text(
        "Gemma4",
        {**GEMMA4, **SHARED, "vocab_size": 300, "vocab_size_per_layer_input": 300}
        | {"sliding_window": 5, "tie_word_embeddings": True},
    ),
    "gemma4_wide": text(
        "Gemma4",
        {
            **GEMMA4,
            "vocab_size": 300,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 5,
            "layer_types": kinds(3, 1, 2),
            "tie_word_embeddings": True,
            **gemma_ropes(HALF_PAIRS | QUARTER),
        },
    ),
    "phi3_short": text("Phi3", {**SHORT_MODEL, **rope(1e2, **LONG)}),
    "phi3_long": text("Phi3", {**SHORT_MODEL, **rope(1e2, **LONG)}, first=40),
    "deepseek_v2": text(
        "DeepseekV2",
        {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, **rope(1e2)},
    ),
    "deepseek_v2_lite": text(
        "DeepseekV2",
        {**LATENT, **ONE_GROUP, "q_lora_rank": None, "topk_method": "greedy"}
        | rope(1e2, **YARN, mscale=0.707, mscale_all_dim=0.707),
    ),
    "deepseek_v3": text(
        "DeepseekV3",
        {**LATENT, **GROUPS, "attention_bias": True, "routed_scaling_factor": 2.5}
        | rope(1e2, **YARN, mscale=1.3, mscale_all_dim=1.0),
    ),
    "kimi_vl_text": text(
        "DeepseekV3", {**LATENT, **ONE_GROUP, "q_lora_rank": None, "routed_scaling_factor": 2.446, **rope(8e2)}
    ),
    # 150 tokens: the rule of linear attention goes by blocks of 64.
    "qwen3_next": text(
        "Qwen3Next",
        {**LINEAR, **LINEAR_MOE, "intermediate_size": 64, "norm_topk_prob": True, **rope(30.0, **QUARTER)},
        150,
    ),
    "qwen3_5_text": text("Qwen3_5", {**LINEAR, **rope(30.0, **SECTIONS)}, 150),
    "qwen3_5_moe_text": Row("Qwen3_5Moe", {**LINEAR_MOE, **rope(30.0, **SECTIONS)}, {"text": [150]}),
}

# --------------------------------------------------------------------------------------------------- Qwen's towers

PADS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
IDS = {**PADS, "vision_start_token_id": START, "vision_end_token_id": END}
QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
GELU = {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 25}
DEEP = {**QWEN_TOWER, **GELU, "deepstack_visual_indexes": [0, 2]}
PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Returns M-RoPE of a low base, so that every axis matters in a small image."""
    return rope(30.0, mrope_section=list(sections), **more)


def pictures(first: tuple[int, int], second: tuple[int, int]) -> dict[str, list[Any]]:
    """Returns the cases of families with images."""
    one = [5, Picture(*first), 4]
    return {"text": [9], "one_image": one, "two_images": [5, Picture(*first), 2, Picture(*second), 4]}


CASES = pictures((24, 40), (40, 16))
FRAMES = [4, Clip((2, 4, 4)), 1, Clip((2, 2, 4)), 5]
MIXTURES = {
    "mixed": [2, Picture(16, 24), 1, Clip((5, 4, 4), 0.35), Picture(8, 8), Clip((7, 2, 6), 1.1), 3],
    "slow": [1, Clip((3, 2, 2), 0.2), 1],
    "videos": [Clip((10, 4, 6), 2 / 3), 2, Clip((2, 8, 4), 1.7), 2],
}
QWEN2_5_TOWER = {**QWEN_TOWER, "depth": 4, "hidden_act": "silu", "tokens_per_second": 2, "window_size": 16}
LINEAR_IDS = {**IDS, **UNTIED, "vision_config": {**QWEN_TOWER, **GELU, "depth": 2, "out_hidden_size": 48}}
QWENS = {
    "qwen2_vl": Row(
        "Qwen2VL",
        {
            "text_config": {**TEXT, **mrope(2, 3, 3)},
            "vision_config": {
                "depth": 3,
                "embed_dim": 32,
                "hidden_size": 64,
                "hidden_act": "quick_gelu",
                "mlp_ratio": 2,
            }
            | {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
            **IDS,
            **UNTIED,
        },
        CASES | {"video": [4, Clip((5, 4, 2)), 5]},
        (QWEN, PIXELS),
        authors=True,
    ),
    "qwen2_5_vl": Row(
        "Qwen2_5_VL",
        {
            "text_config": {**TEXT, **mrope(2, 3, 3)},
            "vision_config": {**QWEN2_5_TOWER, "fullatt_block_indexes": [1, 3]},
            **IDS,
            **UNTIED,
        },
        CASES | {"video": [4, Clip((3, 4, 6)), 5]},
        (QWEN, PIXELS),
        MIXTURES,
        authors=True,
    ),
    "qwen3_vl": Row(
        "Qwen3VL",
        {
            "text_config": {**TEXT, "head_dim": 16, "attention_bias": False, **mrope(3, 3, 2, mrope_interleaved=True)},
            "vision_config": DEEP,
            **IDS,
            **UNTIED,
        },
        CASES | {"video": FRAMES},
        (QWEN, {**PIXELS, **HALVES}),
        frames=True,
    ),
    "qwen3_vl_moe": Row(
        "Qwen3VLMoe",
        {
            "text_config": {**TEXT, "head_dim": 16, **MIXTURE, **mrope(3, 3, 2, mrope_interleaved=True)},
            "vision_config": DEEP,
            **IDS,
            **UNTIED,
        },
        CASES,
        (QWEN, {**PIXELS, **HALVES}),
    ),
    "qwen3_5": Row(
        "Qwen3_5",
        {"text_config": {**LINEAR, **rope(30.0, **SECTIONS)}, **LINEAR_IDS},
        CASES | {"text": [150], "video": FRAMES},
        (QWEN, {**PIXELS, **HALVES}),
        frames=True,
    ),
    "qwen3_5_moe": Row(
        "Qwen3_5Moe",
        {"text_config": {**LINEAR_MOE, **rope(30.0, **SECTIONS)}, **LINEAR_IDS},
        CASES | {"text": [150]},
        (QWEN, {**PIXELS, **HALVES}),
    ),
}

# ------------------------------------------------------------------------------------------------- Omni thinkers

AUDIO_TOWER = {
    "num_mel_bins": MELS,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 64,
    "output_dim": 64,
}
HEARD = {"audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END, "position_id_per_seconds": 5}
OMNI = {name: value for name, value in TEXT.items() if not name.endswith("token_id")}
OMNI_CASES = {
    "text": [9],
    "one_image": [5, Picture(24, 40), 4],
    "audio": [3, Sound(37), 4],
    "long_audio": [2, Sound(231), 2],
    "mixed": [2, Sound(16), Picture(16, 24), 2, Clip((3, 4, 4), 0.7), 1, Sound(121), 3],
    "video_with_audio": [2, Both((4, 4, 4), 0.9, 130), 2, Picture(16, 16), 2],
}
OMNI_POSITIONS = {
    "seconds": [3, Clip((3, 4, 6), 4 / 3), 2, Clip((2, 4, 4), 0.37), Sound(211), 5],
    "fast": [3, Clip((5, 4, 4), 2 / 3), 2, Clip((2, 40, 4), 0.1), 5],
    "with_audio": [3, Both((4, 4, 6), 1.0, 410), 2, Picture(16, 16), 1],
    "with_long_audio": [Both((3, 4, 4), 4 / 3, 900), 2, Both((6, 4, 4), 0.7, 205), 4],
    "wide": [2, Both((2, 60, 40), 1.0, 60), 4],
}
LONG_WINDOW = {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 12, "conv_chunksize": 500}
MEL = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16000}
MEL |= {"n_fft": 400, "hop_length": 160, "chunk_length": 30, "padding_side": "right", "padding_value": 0.0}
MEL |= {"n_samples": 480000, "nb_max_frames": 3000, "return_attention_mask": True, "dither": 0.0}
OMNIS = {
    "qwen2_5_omni": Row(
        "Qwen2_5OmniThinker",
        {
            "text_config": {**OMNI, **mrope(2, 3, 3)},
            "vision_config": {**QWEN_TOWER, "hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [1]},
            "audio_config": {**AUDIO_TOWER, "n_window": 8},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_token_index": AUDIO,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
            "seconds_per_chunk": 2,
            **HEARD,
            **UNTIED,
        },
        OMNI_CASES,
        (QWEN, {**PIXELS, **HALVES}),
        OMNI_POSITIONS,
        settings=MEL,
    ),
    "qwen3_omni": Row(
        "Qwen3OmniMoeThinker",
        {
            "text_config": {**OMNI, **FEW, "head_dim": 16, "norm_topk_prob": True}
            | mrope(3, 3, 2, mrope_interleaved=True),
            "vision_config": DEEP,
            "audio_config": {**AUDIO_TOWER, **LONG_WINDOW},
            **IDS,
            "audio_token_id": AUDIO,
            **HEARD,
            **UNTIED,
        },
        OMNI_CASES,
        (QWEN, {**PIXELS, **HALVES}),
        OMNI_POSITIONS,
        settings=MEL,
    ),
}

# -------------------------------------------------------------------------------------------------- other images

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32, "hidden_act": "quick_gelu"}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "layer_norm_eps": 1e-6, "vision_use_head": False}
SELECT = {"projector_hidden_act": "gelu", "vision_feature_select_strategy": "default", "vision_feature_layer": -2}
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]
SQUARE = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
SIDE_16 = {"size": {"height": 16, "width": 16}}
MISTRAL = {**TEXT, "model_type": "mistral", "sliding_window": None, **rope(1e2)}
INTERN_TOWER = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True, "hidden_act": "gelu"}
INTERN_TOWER |= {"layer_norm_eps": 1e-6, "norm_type": "layer_norm", "use_qk_norm": False}
SIX = {"num_hidden_layers": 2, "attention_bias": False, "norm_type": "rms_norm", "use_qk_norm": True}
INTERN = {"image_token_id": IMAGE, "image_seq_length": 4, "downsample_ratio": 0.5, "projector_hidden_act": "gelu"}
INTERN |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", **UNTIED}
TILED = ("got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",)
TILED += ({**SIDE_16, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},)
WIDE = pictures((20, 41), (33, 18))
# Windows of 3 patches over 8: the last of each row is padded. Layers 1 and 3 see everything.
SAM = {"hidden_size": 32, "output_channels": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 32}
SAM |= {"patch_size": 4, "mlp_dim": 48, "window_size": 3, "global_attn_indexes": [1, 3]}
# Patches of one pixel and a compression of 4: the query counts that the class fixes (144 and 256) are of images of 48
# and of 64 pixels. Positions are for 64, so those of tiles are interpolated. Windows of 14 do not divide either.
SAM_OCR = {**SAM, "num_hidden_layers": 2, "image_size": 64, "patch_size": 1, "window_size": 14}
SAM_OCR |= {"global_attn_indexes": [1], "downsample_channels": [12, 24]}
OCR_ENCODER = {
    "vocab_size": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    **rope(1e6),
}
GLM_IDS = {**PADS, "image_start_token_id": START, "image_end_token_id": END, **UNTIED}
GLM_IDS |= {"video_start_token_id": AUDIO_START, "video_end_token_id": AUDIO_END}
GLM_TOWER = {**QWEN_TOWER, "depth": 2, "hidden_act": "silu", "attention_bias": False, "image_size": 20}
# An image's area counts once for each of the two frames of a patch.
GLM_PIXELS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
GLM = "glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil"
GLM_PROCESSOR = (GLM, {**GLM_PIXELS, "size": {"shortest_edge": 1024, "longest_edge": 1600}})
PIXTRAL_TOWER = {**TOWER, "model_type": "pixtral", "image_size": 40, "head_dim": 16}
PIXTRAL_TOWER |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}
PIXTRAL = "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil"
# Heads that are not the width divided by their number, as Mistral Small's.
SMALL = {**MISTRAL, "head_dim": 24, "rms_norm_eps": 1e-5, **rope(1e6)}
GEMMA_IDS = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
GEMMA4_IDS = {**PADS, "audio_token_id": AUDIO, "boi_token_id": START, "eoi_token_id": END}
GEMMA4_IDS |= {"boa_token_id": AUDIO_START, "eoa_token_index": AUDIO_END}
GEMMA4_TOWER = {**TOWER, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 2}
GEMMA4_TOWER |= {"pooling_kernel_size": 2, "position_embedding_size": 80}
GEMMA4_TOWER |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 30.0}}
GEMMA4_TOWER.pop("image_size")
HEARING = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [16, 8],
    "conv_kernel_size": 5,
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "attention_logit_cap": 5.0,
    "output_proj_dims": 24,
}
GEMMA4_TEXT = {**GEMMA4, "vocab_size_per_layer_input": 320, "pad_token_id": 7}
# 26B-A4B's kind: experts beside the MLP, values that are keys, images that see themselves in layers that slide.
GEMMA4_MOE = {
    **GEMMA4_TEXT,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
GEMMA4_MOE |= {"sliding_window": 40, "layer_types": kinds(3, 2), "use_bidirectional_attention": "vision"}
GEMMA4_MOE |= {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
GEMMA4_PIXELS = ("gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil",)
GEMMA4_PIXELS += ({"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70},)
KIMI_TOWER = {"patch_size": 4, "num_attention_heads": 2, "num_hidden_layers": 3, "hidden_size": 32}
KIMI_TOWER |= {"intermediate_size": 48, "hidden_act": "gelu_pytorch_tanh", "pos_emb_height": 5, "pos_emb_width": 5}
KIMI_SETTINGS = {"patch_size": 4, "merge_kernel_size": [2, 2], "in_token_limit": 64, "pad_input": True, **HALVES}
FACTORS = {"short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35]}
FACTORS |= {"long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0]}
PHI = {
    "architectures": ["Phi3VForCausalLM"],
    "model_type": "phi3_v",
    **FULL,
    "rms_norm_eps": 1e-5,
    # Far enough that an image can be moved by 100 000 positions within the short regime.
    "max_position_embeddings": 2**21,
    "original_max_position_embeddings": 2**20,
    "embd_layer": {"embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp"}
    | {"use_hd_transform": True, "with_learnable_separator": True},
    "img_processor": {"image_dim_out": 32, "model_name": "tiny", "name": "clip_vision_model", "num_img_tokens": 4},
    "image_token_id": IMAGE,
    "rope_theta": 100.0,
    "rope_scaling": {"type": "longrope", **FACTORS},
    "torch_dtype": "float32",
}
PHI_PIXELS = {"image_processor_type": "Phi3VImageProcessor", "num_crops": 4, "num_img_tokens": 4, "crop_size": 16}
PHI_PIXELS |= {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
VL2_TEXT = {name: FULL[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
VL2_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3}
VL2_TEXT |= {"n_shared_experts": 2, "moe_intermediate_size": 24}
VL2_LATENT = {**LATENT, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.0}
VL2_LATENT |= {"first_k_dense_replace": 1, "attention_bias": True, "rms_norm_eps": 1e-5, "scoring_func": "sigmoid"}
VL2_LATENT |= {"topk_method": "noaux_tc", "rope_theta": 100.0, "use_mla": True, "tie_word_embeddings": False}
VL2_LATENT |= {"hidden_act": "silu", "model_type": "deepseek_v2", "max_position_embeddings": 4096}
VL2_TILES = [[30, 30], [30, 60], [60, 30], [60, 60], [90, 30], [30, 90]]
VL2_TOWER = {"heads": 2, "image_size": 30, "layers": 3, "mlp_ratio": 3.7362, "patch_size": 4, "width": 32}
VL2_TOWER |= {"model_name": "siglip_so400m_patch14_384", "model_type": "vision"}
VL2_GLUE = {"depth": 2, "downsample_ratio": 2, "input_dim": 32, "mlp_ratio": 2, "n_embed": 64}
VL2_GLUE |= {"model_type": "mlp_projector", "projector_type": "downsample_mlp_gelu", "token_pooling": False}
VL2 = {"architectures": ["DeepseekVLV2ForCausalLM"], "model_type": "deepseek_vl_v2", "tile_tag": "2D"}
VL2 |= {"image_token_id": IMAGE, "global_view_pos": "head", "torch_dtype": "float32"}
# As few keys as the authors' classes need; tiles of 384 pixels in 3×3 patches, whose last rows no patch has.
VL2_TINY = {"model_type": "deepseek_vl_v2", "tile_tag": "2D", "image_token_id": IMAGE}
VL2_TINY |= {"candidate_resolutions": [[384, 384], [384, 768], [768, 384], [768, 768]]}
VL2_TINY |= {"language_config": {**VL2_TEXT, "topk_method": "greedy", "use_mla": False}}
VL2_TINY |= {"projector_config": {"input_dim": 32, "n_embed": 64}}
VL2_TINY |= {"vision_config": {"layers": 2, "patch_size": 100, "width": 32}}


def vl2_settings(tiles: list[list[int]], patch: int) -> dict[str, Any]:
    """Returns `processor_config.json`."""
    out = {"candidate_resolutions": tiles, "downsample_ratio": 2, "normalize": True, **HALVES, "patch_size": patch}
    return out | {"image_token": "<image>", "sft_format": "deepseek", "processor_class": "DeepseekVLV2Processor"}


JOINED = {
    "phi3_v": Row("Phi3V", PHI, WIDE, settings=PHI_PIXELS),
    "deepseek_vl2": Row(
        "DeepseekVL2",
        VL2
        | {"candidate_resolutions": VL2_TILES, "language_config": VL2_TEXT | VL2_LATENT}
        | {"projector_config": VL2_GLUE, "vision_config": VL2_TOWER},
        pictures((40, 70), (61, 37)),
        settings=vl2_settings(VL2_TILES, 4),
    ),
    "deepseek_vl2_tiny": Row(
        "DeepseekVL2",
        VL2_TINY,
        {"text": [9], "one_image": [5, Picture(320, 456), 4]},
        settings=vl2_settings(VL2_TINY["candidate_resolutions"], 100),
    ),
}
OTHERS = {
    "llava": Row(
        "Llava",
        {"vision_config": CLIP, "text_config": LLAMA, "image_token_index": IMAGE, **SELECT, "image_seq_length": 16}
        | UNTIED,
        pictures((15, 33), (40, 27)),
        ("clip.image_processing_pil_clip.CLIPImageProcessorPil", SQUARE),
    ),
    "llava_next": Row(
        "LlavaNext",
        {"vision_config": CLIP, "text_config": MISTRAL, "image_token_index": IMAGE, **SELECT, **UNTIED}
        | {"image_grid_pinpoints": PINPOINTS, "use_image_newline_parameter": True},
        pictures((15, 33), (40, 27)),
        (
            "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
            {**SQUARE, "image_grid_pinpoints": PINPOINTS},
        ),
    ),
    "llava_onevision": Row(
        "LlavaOnevision",
        {
            "vision_config": {**SIGLIP, "hidden_act": "gelu_pytorch_tanh"},
            "text_config": {**TEXT, "model_type": "qwen2", **UNTIED, **rope(1e2)},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
            "vision_aspect_ratio": "anyres_max_4",
            "image_grid_pinpoints": [[16, 16], *PINPOINTS, [48, 16], [48, 48]],
            **UNTIED,
        },
        pictures((20, 41), (47, 50)),
        (
            "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
            {**SIDE_16, "image_grid_pinpoints": [[16, 16], *PINPOINTS, [48, 16], [48, 48]]},
        ),
    ),
    "deepseek_vl": Row(
        "DeepseekVL",
        {"vision_config": {**SIGLIP, "hidden_act": "gelu_pytorch_tanh"}, "text_config": LLAMA, "image_token_id": IMAGE}
        | UNTIED,
        WIDE,
        ("deepseek_vl.image_processing_pil_deepseek_vl.DeepseekVLImageProcessorPil", {**SIDE_16, "min_size": 4}),
    ),
    "deepseek_vl_hybrid": Row(
        "DeepseekVLHybrid",
        {
            "vision_config": {**SIGLIP, "num_hidden_layers": 2, "hidden_act": "gelu"},
            "high_res_vision_config": {**SAM, "model_type": "sam_vision_model"},
            "text_config": LLAMA,
            "image_token_id": IMAGE,
            **UNTIED,
        },
        WIDE,
        (
            "deepseek_vl_hybrid.image_processing_pil_deepseek_vl_hybrid.DeepseekVLHybridImageProcessorPil",
            {**SIDE_16, "high_res_size": {"height": 32, "width": 32}, "min_size": 4, **HALVES, "resample": 2},
        ),
    ),
    "deepseek_ocr2": Row(
        "DeepseekOcr2",
        {
            "vision_config": {"sam_config": SAM_OCR, "encoder_config": OCR_ENCODER},
            "text_config": {**FULL, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2, **UNTIED}
            | {"moe_intermediate_size": 24}
            | {"routed_scaling_factor": 1.5, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
            | {"mlp_layer_types": ["dense", "sparse", "sparse"], **rope(1e2)},
            "image_token_id": IMAGE,
            **UNTIED,
        },
        pictures((40, 70), (20, 41)),
        (
            "deepseek_ocr2.image_processing_pil_deepseek_ocr2.DeepseekOcr2ImageProcessorPil",
            {"size": {"height": 64, "width": 64}, "tile_size": 48, "max_patches": 3},
        ),
        new_names=True,
    ),
    "internvl": Row(
        "InternVL",
        {
            "vision_config": INTERN_TOWER,
            "text_config": {**TEXT, "model_type": "qwen2", **UNTIED, **rope(1e2)},
            **INTERN,
        },
        WIDE,
        TILED,
    ),
    "internvl_6b": Row(
        "InternVL",
        {
            "vision_config": INTERN_TOWER | SIX,
            "text_config": {**TEXT, "model_type": "llama", **UNTIED, **rope(1e2)},
            **INTERN,
        },
        WIDE,
        TILED,
    ),
    "smolvlm": Row(
        "SmolVLM",
        {
            "vision_config": {**TOWER, "image_size": 24, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
            "text_config": LLAMA,
            "image_token_id": IMAGE,
            "scale_factor": 3,
            **UNTIED,
        },
        WIDE,
        (
            "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
            {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24}},
        ),
    ),
    "glm4v": Row(
        "Glm4v",
        {"text_config": {**TEXT, **mrope(1, 1, 2, partial_rotary_factor=0.5)}, "vision_config": GLM_TOWER, **GLM_IDS},
        pictures((24, 40), (5, 30)) | {"video": FRAMES},
        GLM_PROCESSOR,
        frames=True,
    ),
    "glm4v_moe": Row(
        "Glm4vMoe",
        {
            "text_config": {**TEXT, "head_dim": 32, "attention_bias": True, **ROUTED, "moe_intermediate_size": 24}
            | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
            | mrope(2, 3, 3, partial_rotary_factor=0.5),
            "vision_config": {**GLM_TOWER, "attention_bias": True},
            **GLM_IDS,
        },
        pictures((24, 40), (5, 30)),
        GLM_PROCESSOR,
    ),
    "mistral3": Row(
        "Mistral3",
        {
            "text_config": SMALL,
            "vision_config": {**PIXTRAL_TOWER, "hidden_act": "silu"},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            **UNTIED,
        },
        pictures((24, 60), (33, 10)),
        # PixtralProcessor sets the patch size to what a token shows.
        (PIXTRAL, {"size": {"longest_edge": 40}, "patch_size": 8}),
        settings={"patch_size": {"height": 4, "width": 4}},
    ),
    "pixtral": Row(
        "Llava",
        {
            "text_config": SMALL,
            "vision_config": {**PIXTRAL_TOWER, "hidden_act": "gelu"},
            "image_token_index": IMAGE,
            **SELECT,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        pictures((24, 60), (33, 10)),
        (PIXTRAL, {"size": {"longest_edge": 24}, "patch_size": 4}),
    ),
    "gemma3": Row(
        "Gemma3",
        {
            "vision_config": {**SIGLIP, "num_hidden_layers": 2, "image_size": 24},
            "text_config": {
                **{name: value for name, value in TEXT.items()},
                "model_type": "gemma3_text",
                "head_dim": 16,
                "num_hidden_layers": 4,
                "query_pre_attn_scalar": 24,
                "sliding_window": 6,  # smaller than an image of nine tokens
                "layer_types": kinds(4, 1),
                "tie_word_embeddings": True,
                **gemma_ropes({"rope_type": "linear", "factor": 8.0}, 2e3, 1e2),
            },
            **GEMMA_IDS,
            "mm_tokens_per_image": 9,
        },
        WIDE,
        ("gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil", {"size": {"height": 24, "width": 24}, **HALVES}),
    ),
    "gemma4": Row(
        "Gemma4",
        {
            "text_config": {**GEMMA4_TEXT, **SHARED, "sliding_window": 6},
            "vision_config": {**GEMMA4_TOWER, "use_clipped_linears": True},
            "audio_config": HEARING,
            **GEMMA4_IDS,
        },
        WIDE | {"audio": [4, Sound(37), 2, Sound(12), 3]},
        GEMMA4_PIXELS,
    ),
    "gemma4_moe": Row(
        "Gemma4",
        {
            "text_config": GEMMA4_MOE,
            "vision_config": {**GEMMA4_TOWER, "standardize": True, "rms_norm_eps": 1e-5},
            "audio_config": None,
            **GEMMA4_IDS,
        },
        WIDE,
        GEMMA4_PIXELS,
    ),
    "kimi_vl": Row(
        "Kimi_K25",
        {
            "text_config": {**TEXT, **LATENT, **ONE_GROUP, "q_lora_rank": None, "rope_interleave": True, **UNTIED}
            | {"model_type": "deepseek_v3", "norm_topk_prob": True, "routed_scaling_factor": 2.446, **rope(1e2)},
            "vision_config": {**KIMI_TOWER, "merge_kernel_size": [2, 2]},
            "projection_hidden_size": 32,
            **IDS,
            **UNTIED,
        },
        pictures((16, 24), (32, 8)),
        settings={**KIMI_SETTINGS, "image_processor_type": "KimiVLImageProcessor"},
        new_names=True,
    ),
}
FAMILIES = TEXTS | QWENS | OMNIS | OTHERS | JOINED
