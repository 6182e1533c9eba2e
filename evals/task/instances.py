"""The small backbones of the task, each a real family's architecture: four layers of width 128; a cell is one token.

Of the attention families that share KV differently: grouped queries (Qwen2.5-VL), the same with features that enter
several layers (Qwen3-VL's DeepStack), a latent with experts (Kimi-VL), as many KV heads as query heads.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.models import FAMILIES
from kvpatch_jax.models.inputs.processors import Settings

from .drawing import CELL, LINE
from .vocabulary import END, IMAGE, VIDEO, VISION_END, VISION_START, vocabulary

LAYERS, WIDTH, HEADS, HEAD_DIM = 4, 128, 4, 64
PAPER, CONTRAST = 0.93, 0.25
"""Mean and deviation that pixels are normalised by: blank paper is about nothing, so that what is drawn stands out."""
_PIXELS = {"image_mean": [PAPER] * 3, "image_std": [CONTRAST] * 3}
_TEXT = {
    "vocab_size": len(vocabulary()),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
_IDS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "eos_token_id": END,
    "tie_word_embeddings": False,
}


class Instance(NamedTuple):
    """A backbone's configuration and its image settings."""

    config: Any
    images: Any


def _read(architecture: str, raw: Mapping[str, Any]) -> Any:
    return FAMILIES[architecture].config({**_IDS, **raw, "architectures": [architecture]}, "exact", None)


def _qwen_images() -> Settings:
    """Makes image settings of squares of 2 × 2 patches, without any resizing."""
    sizes = {"patch_size": LINE, "merge_size": 2, "temporal_patch_size": 1}
    sizes |= {"size": {"shortest_edge": LINE**2, "longest_edge": 1_000_000}}
    return Settings.of(_PIXELS | sizes, processor="qwen2_vl.Qwen2VL")


def _qwen2_5_vl(kv_heads: int = 2) -> Instance:
    """Grouped-query attention, M-RoPE in blocks; the four patches of a cell see each other."""
    text = {"num_key_value_heads": kv_heads, "rope_scaling": {"type": "mrope", "mrope_section": [1, 9, 22]}}
    vision = {
        "depth": 2,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 256,
        "out_hidden_size": WIDTH,
        "hidden_act": "silu",
        "in_chans": 3,
        "patch_size": LINE,
        "spatial_patch_size": LINE,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "window_size": CELL,
        "fullatt_block_indexes": [],
        "tokens_per_second": 2,
    }
    raw = {**_TEXT, **text, "video_token_id": VIDEO, "use_sliding_window": False, "vision_config": vision}
    return Instance(_read("Qwen2_5_VLForConditionalGeneration", raw), _qwen_images())


def _qwen3_vl() -> Instance:
    """Normed heads, interleaved M-RoPE; what leaves the tower's first block enters the first layer as well."""
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    vision = {
        "depth": 2,
        "hidden_size": 112,
        "num_heads": 4,
        "intermediate_size": 224,
        "out_hidden_size": WIDTH,
        "patch_size": LINE,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "num_position_embeddings": 81,
        "deepstack_visual_indexes": [0],
    }
    text = {**_TEXT, "num_key_value_heads": 2, "rope_scaling": rope, "max_position_embeddings": 131072}
    raw = {"video_token_id": VIDEO, "text_config": text, "vision_config": vision}
    return Instance(_read("Qwen3VLForConditionalGeneration", raw), _qwen_images())


def _kimi_vl() -> Instance:
    """Multi-head latent attention, experts from the second layer on (sigmoid router), positions 0, 1, 2, …"""
    heads = {"num_key_value_heads": HEADS, "kv_lora_rank": 96, "q_lora_rank": None}
    heads |= {"qk_rope_head_dim": 32, "qk_nope_head_dim": 48, "v_head_dim": 48}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 56,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    text = {name: value for name, value in _TEXT.items() if name != "head_dim"}
    text |= {**heads, **experts, "max_position_embeddings": 131072}
    squares = {"patch_size": LINE, "merge_kernel_size": [2, 2]}
    vision = {
        **squares,
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "intermediate_size": 192,
        "init_pos_emb_height": 18,
        "init_pos_emb_width": 18,
    }
    raw = {"media_placeholder_token_id": IMAGE, "text_config": text, "vision_config": vision}
    images = Settings.of({**_PIXELS, **squares, "in_token_limit": 4096, "resample": 3})
    return Instance(_read("KimiVLForConditionalGeneration", raw), images)


def _qwen2_5_vl_mha() -> Instance:
    """Qwen2.5-VL with as many KV heads as query heads."""
    return _qwen2_5_vl(HEADS)


INSTANCES = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_5_vl_mha": _qwen2_5_vl_mha,
    "qwen3_vl": _qwen3_vl,
    "kimi_vl": _kimi_vl,
}


@functools.cache
def instance(name: str) -> Instance:
    """Makes configuration and image settings of a small backbone.

    Raises:
      ConfigError: an unknown name; the known ones are listed.
    """
    if name not in INSTANCES:
        raise ConfigError(f"backbone of the task: got {name!r}; expected one of {', '.join(INSTANCES)}")
    return INSTANCES[name]()
