"""Qwen2.5-VL: configuration, weight map and the assembled backbone (vision tower and decoder).

Source: transformers' Qwen2_5_VLForConditionalGeneration, whose released and newer configuration keys are both read.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionRule, VideoRule, get_rope_positions
from ..inputs.videos import patch_settings, process_qwen2_videos
from ..towers.qwen2_5 import Qwen25VisionConfig, Qwen25VisionTower, plan_patches
from ..towers.weights import QWEN2_5, qwen_vision_entries
from .config_file import ConfigFile, one_size
from .family import Family, Medium, Run
from .image_family import TowerModel, qwen_tower_sizes, qwen_vision, qwen_written
from .qwen3_vl import QWEN_TOKENS, QwenConfig

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(QwenConfig):
    """The whole backbone; `video_rule` says where text behind a video goes on (`inputs/positions.py`)."""

    tokens_per_second: int = 2
    video_rule: VideoRule = "max"


def read_qwen2_5_tower(vision: Mapping[str, Any], text: DecoderConfig, fused: bool = True) -> Qwen25VisionConfig:
    """Reads the tower (also Qwen2.5-Omni's, whose query, key and value are not `fused`)."""
    return Qwen25VisionConfig(
        **qwen_tower_sizes(vision, text),
        patch=one_size(vision, "patch_size"),
        window=need(vision, "window_size"),
        full_layers=tuple(vision["fullatt_block_indexes"]),
        channels=vision["in_channels"],
        fused=fused,
    )


def _read(file: ConfigFile) -> Qwen25VLConfig:
    text, vision = file.text(), file.part("vision_config")
    if text.activation != "silu":
        raise ConfigError(f"hidden_act: got {text.activation!r} for Qwen2.5-VL; expected 'silu'")
    rate, tower = need(vision, "tokens_per_second"), read_qwen2_5_tower(vision, text)
    return file.config(Qwen25VLConfig, text, vision=tower, tokens_per_second=rate, **file.tokens(*QWEN_TOKENS))


def _positions(config: Qwen25VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    pads, rate = (config.image_token, config.video_token), config.tokens_per_second
    rule = PositionRule(*pads, config.vision.merge, rate, video_rule=config.video_rule)
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, *grids, arrays.get("second_per_grid_ts"), rule)


def video_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns one run of placeholders between start and end for video `index`."""
    pads = int(np.prod(arrays["video_grid_thw"][index])) // config.vision.merge**2
    return [config.vision_start_token, *[config.video_token] * pads, config.vision_end_token]


VIDEO_SETTINGS = patch_settings(14, 128 * 28 * 28, 28 * 28 * 768)


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=functools.partial(TowerModel, Qwen25VisionTower),
    entries=lambda config, _: decoder_entries(config.text) + qwen_vision_entries(config.vision, QWEN2_5, "visual"),
    positions=_positions,
    vision=qwen_vision(plan_patches, "windows", "frames"),
    video=Medium(VIDEO_SETTINGS, process_qwen2_videos, video_tokens, qwen_written),
    model_type="qwen2_5_vl",
)
