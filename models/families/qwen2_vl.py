"""Qwen2-VL (also QVQ, UI-TARS, ShowUI, OS-Atlas): configuration, weight map and the assembled backbone.

Source: transformers' Qwen2VLForConditionalGeneration, whose released (flat) and newer (nested) configurations are both
read. Positions are Qwen2.5-VL's without seconds: a video's time axis counts temporal patches.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..decoder.hf_config import read_axial_theta
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionRule, VideoRule, get_rope_positions
from ..inputs.videos import process_qwen2_videos
from ..towers.qwen2 import Qwen2VisionConfig, Qwen2VisionTower, plan_patches
from ..towers.weights import QWEN2, qwen_vision_entries
from .config_file import ConfigFile, one_size
from .family import Family, Medium
from .image_family import TowerModel, check_width, qwen_vision, qwen_written
from .qwen2_5_vl import VIDEO_SETTINGS, video_tokens
from .qwen3_vl import QWEN_TOKENS, QwenConfig

ARCHITECTURE = "Qwen2VLForConditionalGeneration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2VLConfig(QwenConfig):
    """The whole backbone; `video_rule` says where text behind a video goes on (`inputs/positions.py`)."""

    video_rule: VideoRule = "max"


def _read(file: ConfigFile) -> Qwen2VLConfig:
    text, vision = file.text(), file.part("vision_config")
    # `hidden_size` is the width that the merger gives, `embed_dim` the tower's own.
    check_width("hidden_size", vision["hidden_size"], text)
    tower = Qwen2VisionConfig(
        depth=vision["depth"],
        width=vision["embed_dim"],
        heads=vision["num_heads"],
        intermediate=int(vision["embed_dim"] * vision["mlp_ratio"]),
        output_width=vision["hidden_size"],
        patch=one_size(vision, "patch_size"),
        merge=vision["spatial_merge_size"],
        temporal=one_size(vision, "temporal_patch_size"),
        channels=vision["in_channels"],
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        dtype=text.dtype,
    )
    return file.config(Qwen2VLConfig, text, vision=tower, **file.tokens(*QWEN_TOKENS))


def _positions(config: Qwen2VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    pads = (config.image_token, config.video_token)
    rule = PositionRule(*pads, config.vision.merge, video_rule=config.video_rule)
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, *grids, None, rule)


FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=functools.partial(TowerModel, Qwen2VisionTower),
    entries=lambda config, _: decoder_entries(config.text) + qwen_vision_entries(config.vision, QWEN2, "visual"),
    positions=_positions,
    vision=qwen_vision(plan_patches, "frames"),
    video=Medium(VIDEO_SETTINGS, process_qwen2_videos, video_tokens, qwen_written),
    model_type="qwen2_vl",
)
