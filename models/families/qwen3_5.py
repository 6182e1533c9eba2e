"""Qwen3.5, dense and with experts: Qwen3-VL's tower, without deepstack, in front of a hybrid decoder.

Source: transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.qwen_videos import process_qwen3_videos
from ..towers.qwen3 import Qwen3VisionConfig, Qwen3VisionTower, plan_patches
from ..towers.weights import qwen3_vision_entries
from .family import Family, Medium, Shapes
from .hybrid_text import read_hybrid
from .image_family import TowerModel, freeze, qwen_vision, qwen_written, text_part, thaw, vision_part, whole
from .qwen3_vl import VIDEO_SETTINGS, frame_positions, frame_tokens, read_qwen3_tower

DENSE = "Qwen3_5ForConditionalGeneration"
MIXTURE = "Qwen3_5MoeForConditionalGeneration"
SECTIONS = (11, 11, 10)
"""Of M-RoPE, where the configuration names none."""


@dataclasses.dataclass(frozen=True)
class Qwen35Config:
    """The whole backbone: both towers and the token ids that stand for images; `raw` is config.json as it was read."""

    architecture: str
    text: DecoderConfig
    vision: Qwen3VisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    raw: str

    @property
    def family(self) -> Family:
        """Qwen3.5, dense or with experts."""
        return FAMILIES[self.architecture]

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, self.architecture, self.text.dtype)


def _read(architecture: str, raw: Mapping[str, Any], angles: str, regime: Regime) -> Qwen35Config:
    """Reads `config.json` of either architecture."""
    family = "qwen3_5_moe" if architecture == MIXTURE else "qwen3_5"
    model, kind = whole(raw, family), f"{family}_text"
    decoder = read_hybrid(text_part(model, raw, (kind, family)), angles, regime, kind, SECTIONS)
    vision = vision_part(model, "qwen3_5_vision", "qwen3_5_moe_vision", family)
    return Qwen35Config(
        architecture,
        decoder,
        read_qwen3_tower(vision, decoder),
        image_token=need(model, "image_token_id"),
        video_token=need(model, "video_token_id"),
        vision_start_token=need(model, "vision_start_token_id"),
        vision_end_token=need(model, "vision_end_token_id"),
        raw=freeze(raw),
    )


def _entries(config: Qwen35Config, shapes: Shapes) -> list[TensorEntry]:
    prefix = "model.language_model."
    fused = expert_layout(config.text, shapes, prefix, "rows")  # as released
    decoder = decoder_entries(config.text, prefix=prefix, fused_experts=fused)
    return decoder + qwen3_vision_entries(config.vision, "model.visual")


def _family(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        config=lambda raw, angles, regime: _read(architecture, raw, angles, regime),
        module=functools.partial(TowerModel, Qwen3VisionTower),
        entries=_entries,
        positions=frame_positions,
        vision=qwen_vision(plan_patches, "frames"),
        video=Medium(VIDEO_SETTINGS, process_qwen3_videos, frame_tokens, qwen_written),
        # A layer for multi-token prediction, which is not run.
        model_type=model_type,
    )


FAMILIES = {DENSE: _family(DENSE, "qwen3_5"), MIXTURE: _family(MIXTURE, "qwen3_5_moe")}
