"""Qwen3-VL with deepstack features, and Qwen3.5, the same tower without them in front of a hybrid decoder; dense and
with experts.

Sources: transformers' Qwen3VLForConditionalGeneration, Qwen3_5ForConditionalGeneration and their mixtures.
"""

import functools
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.weights import FusedExperts, decoder_entries, expert_layout
from ..inputs.videos import patch_settings, process_qwen3_videos
from ..towers.packed import PackedConfig, PackedTower
from ..towers.weights import qwen3_vision_entries
from .family import Family, Medium, Shapes
from .image_family import TowerModel
from .qwen import QwenConfig, frame_positions, frame_tokens, model_reader, qwen_vision, tower_sizes, video_written

PREFIX = "model.language_model."
VIDEO_SETTINGS = patch_settings(16, 128 * 32 * 32, 32 * 32 * 768, halves=True, fps=2)


def read_qwen3_tower(vision: Mapping[str, Any], text: DecoderConfig) -> PackedConfig:
    """Reads the tower (also Qwen3-Omni's).

    Raises:
      ConfigError: a field that is missing, positions that are no square, or more deepstack layers than the decoder has.
    """
    deepstack = tuple(vision.get("deepstack_visual_indexes") or ())
    # Features of the s-th are added behind language layer s.
    if len(deepstack) > text.layers:
        raise ConfigError(f"deepstack layers: got {len(deepstack)}; expected at most {text.layers}")
    places = need(vision, "num_position_embeddings")
    side = round(places**0.5)
    if side**2 != places:
        raise ConfigError(f"num_position_embeddings: got {places}; expected a square")
    return PackedConfig(
        **tower_sizes(vision, text),
        patch_bias=True,
        positions=side,
        interpolation="bilinear",
        deepstack_layers=deepstack,
    )


def _family(architecture: str, model_type: str, experts: FusedExperts) -> Family:
    """Returns a family whose releases lay fused `experts` out so."""

    def entries(config: QwenConfig, shapes: Shapes) -> list[TensorEntry]:
        fused = expert_layout(config.text, shapes, PREFIX, experts)
        decoder = decoder_entries(config.text, prefix=PREFIX, fused_experts=fused)
        return decoder + qwen3_vision_entries(config.vision, "model.visual")

    return Family(
        architecture=architecture,
        read=model_reader(read_qwen3_tower),
        module=functools.partial(TowerModel, PackedTower),
        entries=entries,
        positions=frame_positions,
        vision=qwen_vision(),
        video=Medium(VIDEO_SETTINGS, process_qwen3_videos, frame_tokens, video_written),
        model_type=model_type,
    )


FAMILIES = {
    family.architecture: family
    for family in (
        _family("Qwen3VLForConditionalGeneration", "qwen3_vl", "columns"),
        _family("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "columns"),
        _family("Qwen3_5ForConditionalGeneration", "qwen3_5", "rows"),
        _family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "rows"),
    )
}
