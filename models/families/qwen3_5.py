"""Qwen3.5, dense and with experts: Qwen3-VL's tower, without deepstack, in front of a hybrid decoder.

Source: transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration.
"""

import functools

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.videos import process_qwen3_videos
from ..towers.qwen3 import Qwen3VisionTower, plan_patches
from ..towers.weights import qwen3_vision_entries
from .family import Family, Medium, Shapes
from .image_family import TowerModel, qwen_vision, qwen_written
from .qwen3_vl import VIDEO_SETTINGS, QwenConfig, frame_positions, frame_tokens, read_model

DENSE = "Qwen3_5ForConditionalGeneration"
MIXTURE = "Qwen3_5MoeForConditionalGeneration"


def _entries(config: QwenConfig, shapes: Shapes) -> list[TensorEntry]:
    prefix = "model.language_model."
    fused = expert_layout(config.text, shapes, prefix, "rows")  # as released
    decoder = decoder_entries(config.text, prefix=prefix, fused_experts=fused)
    return decoder + qwen3_vision_entries(config.vision, "model.visual")


def _family(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        read=read_model,
        module=functools.partial(TowerModel, Qwen3VisionTower),
        entries=_entries,
        positions=frame_positions,
        vision=qwen_vision(plan_patches, "frames"),
        video=Medium(VIDEO_SETTINGS, process_qwen3_videos, frame_tokens, qwen_written),
        model_type=model_type,
    )


FAMILIES = {DENSE: _family(DENSE, "qwen3_5"), MIXTURE: _family(MIXTURE, "qwen3_5_moe")}
