"""Qwen2-VL (also QVQ, UI-TARS, ShowUI, OS-Atlas) and Qwen2.5-VL.

Sources: transformers' Qwen2VLForConditionalGeneration and Qwen2_5_VLForConditionalGeneration. A video's time axis
counts temporal patches in Qwen2-VL, seconds in Qwen2.5-VL.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionRule, VideoRule, get_rope_positions
from ..inputs.videos import patch_settings, process_qwen2_videos
from ..towers import qwen2, qwen2_5
from ..towers.weights import QWEN2, QWEN2_5, qwen_vision_entries
from .config_file import ConfigFile
from .family import Family, Medium
from .image_family import TowerModel
from .qwen import TOKENS, QwenConfig, qwen_vision, tower_sizes, video_tokens, video_written

VIDEO_SETTINGS = patch_settings(14, 128 * 28 * 28, 28 * 28 * 768)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(QwenConfig):
    """The whole backbone; `video_rule` says where text behind a video goes on (`inputs/positions.py`)."""

    video_rule: VideoRule = "max"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(Qwen2VLConfig):
    """The whole backbone, whose videos' positions count seconds."""

    tokens_per_second: int


def read_qwen2_5_tower(
    vision: Mapping[str, Any], text: DecoderConfig, fused: bool = True
) -> qwen2_5.Qwen25VisionConfig:
    """Reads the tower (also Qwen2.5-Omni's, whose query, key and value are not `fused`)."""
    full = tuple(vision["fullatt_block_indexes"])
    sizes = tower_sizes(vision, text)
    return qwen2_5.Qwen25VisionConfig(**sizes, window=need(vision, "window_size"), full_layers=full, fused=fused)


def _read_2(file: ConfigFile) -> Qwen2VLConfig:
    text, vision = file.text(), file.part("vision_config")
    # `hidden_size` is the width that the merger gives, `embed_dim` the tower's own.
    own = {"width": vision["embed_dim"], "intermediate": int(vision["embed_dim"] * vision["mlp_ratio"])}
    tower = qwen2.Qwen2VisionConfig(**tower_sizes(vision, text, "hidden_size") | own)
    return file.config(Qwen2VLConfig, text, vision=tower, **file.tokens(*TOKENS))


def _read_2_5(file: ConfigFile) -> Qwen25VLConfig:
    text, vision = file.text(), file.part("vision_config")
    rate, tower = need(vision, "tokens_per_second"), read_qwen2_5_tower(vision, text)
    return file.config(Qwen25VLConfig, text, vision=tower, tokens_per_second=rate, **file.tokens(*TOKENS))


def _positions(config: Qwen2VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rate = getattr(config, "tokens_per_second", None)
    pads = (config.image_token, config.video_token)
    rule = PositionRule(*pads, config.vision.merge, rate or 1, video_rule=config.video_rule)
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    seconds = None if rate is None else arrays.get("second_per_grid_ts")
    return get_rope_positions(input_ids, *grids, seconds, rule)


_VIDEO = Medium(VIDEO_SETTINGS, process_qwen2_videos, video_tokens, video_written)
FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="Qwen2VLForConditionalGeneration",
            read=_read_2,
            module=functools.partial(TowerModel, qwen2.Qwen2VisionTower),
            entries=lambda config, _: (
                decoder_entries(config.text) + qwen_vision_entries(config.vision, QWEN2, "visual")
            ),
            positions=_positions,
            vision=qwen_vision(qwen2.plan_patches, "frames"),
            video=_VIDEO,
            model_type="qwen2_vl",
        ),
        Family(
            architecture="Qwen2_5_VLForConditionalGeneration",
            read=_read_2_5,
            module=functools.partial(TowerModel, qwen2_5.Qwen25VisionTower),
            entries=lambda config, _: [
                *decoder_entries(config.text),
                *qwen_vision_entries(config.vision, QWEN2_5, "visual"),
            ],
            positions=_positions,
            vision=qwen_vision(qwen2_5.plan_patches, "windows", "frames"),
            video=_VIDEO,
            model_type="qwen2_5_vl",
        ),
    )
}
