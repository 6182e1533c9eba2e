"""Qwen3-Omni's thinker: Qwen3-VL-MoE's decoder and vision tower, deepstack among them, beside an audio encoder.

Source: transformers' Qwen3OmniMoeThinkerForConditionalGeneration.
"""

import functools

import numpy as np
from jaxtyping import Bool, Float

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.videos import patch_settings
from ..towers.qwen3 import Qwen3VisionConfig, Qwen3VisionTower, plan_patches
from ..towers.qwen_audio import Qwen3AudioTower
from ..towers.weights import QWEN3_OMNI_MERGERS, qwen3_vision_entries, qwen_audio_entries
from .config_file import ConfigFile
from .family import Family, Shapes
from .image_family import qwen_vision
from .omni import (
    OmniConfig,
    OmniModel,
    omni_positions,
    read_thinker,
    sound_medium,
    video_medium,
)
from .qwen3_vl import read_qwen3_tower

THINKER = "Qwen3OmniMoeThinkerForConditionalGeneration"
RELEASE = "Qwen3OmniMoeForConditionalGeneration"
KIND = "qwen3_omni_moe"


def _read(file: ConfigFile) -> OmniConfig:
    return read_thinker(file, FAMILIES[THINKER], read_qwen3_tower)


def _entries(config: OmniConfig, shapes: Shapes) -> list[TensorEntry]:
    assert isinstance(config.vision, Qwen3VisionConfig)
    decoder = decoder_entries(config.text, fused_experts=expert_layout(config.text, shapes, "model."))
    vision = qwen3_vision_entries(config.vision, "visual", mergers=QWEN3_OMNI_MERGERS)
    return decoder + vision + qwen_audio_entries(config.audio, "audio_tower")


PADDED = False
"""Of sounds: they are mirrored at their end."""


def _interleaved(shown: Float[np.ndarray, " n"], sounds: int, rate: int | float) -> Bool[np.ndarray, " both"]:
    """Orders a video's tokens and those of its sound by time; at the same time the video's come first."""
    times = np.concatenate([shown * rate, np.arange(sounds)])
    return np.argsort(times, kind="stable") < len(shown)


VIDEOS = video_medium(patch_settings(16, 128 * 32 * 32, 768 * 32 * 32, halves=True), _interleaved)


def _family(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        read=_read,
        module=functools.partial(OmniModel, Qwen3VisionTower, Qwen3AudioTower),
        entries=_entries,
        positions=omni_positions(fractional=True),
        vision=qwen_vision(plan_patches, "frames"),
        video=VIDEOS,
        audio=sound_medium(PADDED),
        model_type=model_type,
    )


FAMILIES = {THINKER: _family(THINKER, f"{KIND}_thinker"), RELEASE: _family(RELEASE, KIND)}
