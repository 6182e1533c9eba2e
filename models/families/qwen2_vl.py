"""Qwen2-VL (also QVQ, UI-TARS, ShowUI, OS-Atlas) and Qwen2.5-VL.

Sources: transformers' Qwen2VLForConditionalGeneration and Qwen2_5_VLForConditionalGeneration. A video's time axis
counts temporal patches in Qwen2-VL, seconds in Qwen2.5-VL.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionRule, VideoRule, get_rope_positions
from ..inputs.videos import patch_settings, process_qwen2_videos
from ..towers.packed import PackedConfig, PackedTower
from ..towers.weights import qwen_vision_entries
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


def read_qwen2_5_tower(vision: Mapping[str, Any], text: DecoderConfig, fused: bool = True) -> PackedConfig:
    """Reads the tower (also Qwen2.5-Omni's, whose query, key and value are not `fused`)."""
    return PackedConfig(
        **tower_sizes(vision, text),
        window=need(vision, "window_size"),
        full_layers=tuple(vision["fullatt_block_indexes"]),
        rms_norms=True,
        gated=True,
        fused=fused,
    )


def _read_2(file: ConfigFile) -> Qwen2VLConfig:
    text, vision = file.text(), file.part("vision_config")
    # `hidden_size` is the width that the merger gives, `embed_dim` the tower's own.
    own = {"width": vision["embed_dim"], "intermediate": int(vision["embed_dim"] * vision["mlp_ratio"])}
    tower = PackedConfig(**tower_sizes(vision, text, "hidden_size") | own)
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


def _family(architecture: str, model_type: str, read: Callable[[ConfigFile], Qwen2VLConfig]) -> Family:
    return Family(
        architecture=architecture,
        read=read,
        module=functools.partial(TowerModel, PackedTower),
        entries=lambda config, _: decoder_entries(config.text) + qwen_vision_entries(config.vision, "visual"),
        positions=_positions,
        vision=qwen_vision(),
        video=Medium(VIDEO_SETTINGS, process_qwen2_videos, video_tokens, video_written),
        model_type=model_type,
    )


FAMILIES = {
    family.architecture: family
    for family in (
        _family("Qwen2VLForConditionalGeneration", "qwen2_vl", _read_2),
        _family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", _read_2_5),
    )
}
