"""Qwen2-VL (also QVQ, UI-TARS, ShowUI, OS-Atlas): configuration, weight map and the assembled backbone.

Source: transformers' Qwen2VLForConditionalGeneration, whose released (flat) and newer (nested) configurations are both
read. Positions are Qwen2.5-VL's without seconds: a video's time axis counts temporal patches.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need, read_axial_theta, read_decoder, read_rope, read_window
from ..decoder.known_keys import DEFAULTS, ONLY, complete
from ..decoder.weights import decoder_entries
from ..inputs.positions import PositionConfig, VideoRule, get_rope_positions
from ..inputs.qwen_videos import process_qwen2_videos
from ..towers.qwen2 import Qwen2VisionConfig, Qwen2VisionTower, plan_patches
from ..towers.weights import QWEN2, qwen_vision_entries
from .family import Family, Medium
from .image_family import (
    TowerModel,
    freeze,
    one_size,
    qwen_vision,
    qwen_written,
    text_part,
    thaw,
    vision_part,
    whole,
)
from .qwen2_5_vl import VIDEO_SETTINGS, video_tokens
from .text_families import TEXT_TABLE, read_head_dim

ARCHITECTURE = "Qwen2VLForConditionalGeneration"
TEXT = "qwen2_vl_text"
SECTIONS = (16, 24, 24)
"""Of M-RoPE, where the configuration names none."""


@dataclasses.dataclass(frozen=True)
class Qwen2VLConfig:
    """The whole backbone: both towers and the token ids that stand for images and videos.

    `raw` is config.json as it was read; `video_rule` says where text behind a video goes on (`inputs/positions.py`).
    """

    text: DecoderConfig
    vision: Qwen2VisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    raw: str
    video_rule: VideoRule = "max"

    @property
    def family(self) -> Family:
        """Qwen2-VL."""
        return FAMILY

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, ARCHITECTURE, self.text.dtype)


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> Qwen2VLConfig:
    """Reads `config.json`: nested (`text_config`) or flat text fields."""
    # Flat text fields may stand at the top level, which is then the text part as well.
    model, nested = whole(raw, "qwen2_vl", DEFAULTS[TEXT] | ONLY[TEXT]), raw.get("text_config") is not None
    kinds = (TEXT, "qwen2_vl") if nested else ()
    part = text_part(model if nested else {**model, "text_config": raw}, raw, kinds)
    text = complete(part, TEXT, TEXT_TABLE, drop=DEFAULTS["qwen2_vl"])
    rope = read_rope(text, read_head_dim(text), angles=angles, regime=regime, sections=SECTIONS)
    decoder = read_decoder(text, rope, attention_bias=True, **read_window(text))

    # `hidden_size` is the width that the merger gives, `embed_dim` the tower's own; released files call the channels
    # `in_chans`.
    vision = vision_part(model, "qwen2_vl_vision", "qwen2_vl")
    if vision["hidden_size"] != decoder.width:
        raise ConfigError(f"vision hidden_size: got {vision['hidden_size']}; expected the text width {decoder.width}")
    patch = vision.get("spatial_patch_size") if vision.get("patch_size") is None else vision["patch_size"]
    tower = Qwen2VisionConfig(
        depth=vision["depth"],
        width=vision["embed_dim"],
        heads=vision["num_heads"],
        intermediate=int(vision["embed_dim"] * vision["mlp_ratio"]),
        output_width=vision["hidden_size"],
        patch=one_size({"patch_size": patch}, "patch_size"),
        merge=vision["spatial_merge_size"],
        temporal=one_size(vision, "temporal_patch_size"),
        channels=vision.get("in_chans") or vision["in_channels"],
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        dtype=decoder.dtype,
    )

    return Qwen2VLConfig(
        decoder,
        tower,
        image_token=need(model, "image_token_id"),
        video_token=need(model, "video_token_id"),
        vision_start_token=need(model, "vision_start_token_id"),
        vision_end_token=need(model, "vision_end_token_id"),
        raw=freeze(raw),
    )


def _positions(config: Qwen2VLConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rule = PositionConfig(config.image_token, config.video_token, config.vision.merge, tokens_per_second=1)
    grids = (arrays.get("image_grid_thw"), arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, *grids, None, rule, config.video_rule)[0]


FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=functools.partial(TowerModel, Qwen2VisionTower),
    entries=lambda config, _: decoder_entries(config.text) + qwen_vision_entries(config.vision, QWEN2, "visual"),
    positions=_positions,
    vision=qwen_vision(plan_patches, "frames"),
    video=Medium(VIDEO_SETTINGS, process_qwen2_videos, video_tokens, qwen_written),
    model_type="qwen2_vl",
)
