"""The small backbones: one configuration per kind of attention, each in a real family's own architecture.

All have six layers of width 128 and at most two million parameters; a cell of the task's images is one token.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError
from models import FAMILIES
from models.decoder.config import DecoderConfig
from models.families.qwen2_5_vl import Qwen25VLConfig
from models.inputs.images import PictureConfig
from models.inputs.qwen_images import ImageConfig
from models.towers.qwen2_5 import Qwen25VisionConfig

from . import task
from .task import VOCABULARY

WIDTH, LAYERS, HEADS, HEAD_DIM = 128, 6, 4, 64


class Instance(NamedTuple):
    """A backbone's configuration and its image settings."""

    config: Any
    images: Any


def pixels(patch: int, merge: int, mean: float = 0.5, deviation: float = 0.5, **sizes: int) -> ImageConfig:
    """Makes image settings without any resizing; `sizes` override those of the small task's cells."""
    options: dict[str, Any] = {"temporal_patch_size": task.TEMPORAL, "min_pixels": task.CELL_PIXELS**2, **sizes}
    return ImageConfig(
        patch_size=patch,
        merge_size=merge,
        max_pixels=1_000_000,
        image_mean=(mean, mean, mean),
        image_std=(deviation, deviation, deviation),
        **options,
    )


def cell_tower(width: int, heads: int, patch: int, merge: int, temporal: int) -> Qwen25VisionConfig:
    """Makes the configuration of Qwen2.5-VL's tower of two layers in which the patches of one token see each other."""
    return Qwen25VisionConfig(
        depth=2,
        width=width,
        heads=heads,
        intermediate=2 * width,
        output_width=WIDTH,
        patch=patch,
        merge=merge,
        temporal=temporal,
        window=patch * merge,
        full_layers=(),
    )


def qwen2_5_vl(vision: Qwen25VisionConfig, layers: int, vocabulary: Any = VOCABULARY) -> Qwen25VLConfig:
    """Makes the configuration of a small Qwen2.5-VL: grouped-query attention, M-RoPE in blocks."""
    text = DecoderConfig(
        vocabulary=len(vocabulary),
        width=WIDTH,
        layers=layers,
        heads=HEADS,
        kv_heads=2,
        head_dim=HEAD_DIM,
        intermediate=256,
        rope=Rope(1e4, HEAD_DIM, sections=(1, 9, 22), order="blocked", angles="exact"),
        attention_bias=True,
    )
    return Qwen25VLConfig(
        text=text,
        vision=vision,
        image_token=vocabulary.image,
        video_token=vocabulary.video,
        vision_start_token=vocabulary.vision_start,
        vision_end_token=vocabulary.vision_end,
        end_tokens=(vocabulary.end,),
    )


def _qwen2_5_vl() -> Instance:
    """Returns Qwen2.5-VL; its tower merges four patches to a cell, one cell at a time."""
    vision = cell_tower(width=64, heads=2, patch=task.PATCH, merge=task.MERGE, temporal=task.TEMPORAL)
    return Instance(qwen2_5_vl(vision, LAYERS), pixels(task.PATCH, task.MERGE))


_TEXT = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 131072,
}
_IDS = {
    "image_token_id": VOCABULARY.image,
    "vision_start_token_id": VOCABULARY.vision_start,
    "vision_end_token_id": VOCABULARY.vision_end,
    "eos_token_id": VOCABULARY.end,
    "tie_word_embeddings": False,
}


def _read(architecture: str, raw: Mapping[str, Any]) -> Any:
    return FAMILIES[architecture].config({**raw, "architectures": [architecture]}, "exact", None)


def _qwen3_vl(architecture: str = "Qwen3VLForConditionalGeneration", **experts: Any) -> Instance:
    """Grouped-query attention with normed heads, interleaved M-RoPE, deepstack features into the first two layers."""
    text = {
        **_TEXT,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rope_scaling": {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
        **experts,
    }
    vision = {
        "depth": 2,
        "hidden_size": 96,
        "num_heads": 3,
        "intermediate_size": 192,
        "out_hidden_size": WIDTH,
        "patch_size": task.CELL_PIXELS,
        "spatial_merge_size": 1,
        "temporal_patch_size": task.TEMPORAL,
        "num_position_embeddings": task.ROWS**2,
        "deepstack_visual_indexes": [0, 1],
    }
    raw = {**_IDS, "video_token_id": VOCABULARY.video, "text_config": text, "vision_config": vision}
    return Instance(_read(architecture, raw), pixels(task.CELL_PIXELS, 1))


def _qwen3_vl_moe() -> Instance:
    """Returns Qwen3-VL with four experts per layer, of which each token takes two (softmax router)."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    return _qwen3_vl("Qwen3VLMoeForConditionalGeneration", **experts)


def _kimi_vl() -> Instance:
    """Multi-head latent attention, experts from the second layer on (sigmoid router), positions 0, 1, 2, …"""
    text = {
        **_TEXT,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": 96,
        "q_lora_rank": None,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    vision = {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "intermediate_size": 192,
        "patch_size": task.CELL_PIXELS,
        "merge_kernel_size": [1, 1],
        "init_pos_emb_height": task.ROWS,
        "init_pos_emb_width": task.ROWS,
    }
    raw = {**_IDS, "media_placeholder_token_id": VOCABULARY.image, "text_config": text, "vision_config": vision}
    images = {"patch_size": task.CELL_PIXELS, "merge_kernel_size": [1, 1], "in_token_limit": 4096, "resample": 3}
    return Instance(_read("KimiVLForConditionalGeneration", raw), _picture(**images))


def _llava() -> Instance:
    """Multi-head attention, positions 0, 1, 2, …; images of one size (legends are repeated to fill it)."""
    side = task.ROWS * task.CELL_PIXELS
    vision = {
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "intermediate_size": 192,
        "image_size": side,
        "patch_size": task.CELL_PIXELS,
        "hidden_act": "quick_gelu",
    }
    # Four hundred tokens lie between a legend and the page's last cell: most pairs must turn slowly to match content.
    heads = {"num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "rope_theta": 1e6}
    text = {**_TEXT, "model_type": "llama", **heads}
    raw = {**_IDS, "vision_feature_layer": -2, "text_config": text, "vision_config": vision}
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "resample": 3}
    return Instance(_read("LlavaForConditionalGeneration", raw), _picture(**size))


def _picture(**options: Any) -> PictureConfig:
    return PictureConfig.from_dict({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **options})


INSTANCES: dict[str, Callable[[], Instance]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "kimi_vl": _kimi_vl,
    "llava": _llava,
}


@functools.cache
def instance(name: str) -> Instance:
    """Makes configuration and image settings of a small backbone.

    Raises:
      ConfigError: an unknown name; the known ones are listed.
    """
    if name not in INSTANCES:
        raise ConfigError(f"small backbone: got {name!r}; expected one of {sorted(INSTANCES)}")
    return INSTANCES[name]()
