"""Qwen2.5-Omni's thinker: Qwen2.5-VL's decoder and vision tower beside an audio encoder.

Source: transformers' Qwen2_5OmniThinkerForConditionalGeneration.
"""

import functools
import itertools

import numpy as np
from jaxtyping import Bool, Float

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries
from ..inputs.videos import patch_settings
from ..towers.qwen2_5 import Qwen25VisionConfig, Qwen25VisionTower, plan_patches
from ..towers.qwen_audio import Qwen25AudioTower
from ..towers.weights import QWEN2_5, qwen_audio_entries, qwen_vision_entries
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
from .qwen2_5_vl import read_qwen2_5_tower

THINKER = "Qwen2_5OmniThinkerForConditionalGeneration"
RELEASE = "Qwen2_5OmniForConditionalGeneration"
KIND = "qwen2_5_omni"


def _read(file: ConfigFile) -> OmniConfig:
    return read_thinker(file, FAMILIES[THINKER], functools.partial(read_qwen2_5_tower, fused=False))


def _entries(config: OmniConfig, shapes: Shapes) -> list[TensorEntry]:
    assert isinstance(config.vision, Qwen25VisionConfig)
    vision = qwen_vision_entries(config.vision, QWEN2_5, "visual")
    return decoder_entries(config.text) + vision + qwen_audio_entries(config.audio, "audio_tower")


PADDED = True
"""Of sounds: they are followed by silence."""
SECONDS = 2.0
"""Of a video and of its sound, that follow each other in turn."""


def _interleaved(shown: Float[np.ndarray, " n"], sounds: int, rate: int | float) -> Bool[np.ndarray, " both"]:
    """Orders a video's tokens and those of its sound: two seconds of the one, then of the other.

    A turn ends at the first token that is beyond it, at most one turn per token, as in the authors' code.
    """
    size = int(rate * SECONDS)
    turns = []
    for times in (shown * rate, np.arange(sounds)):
        edges = [0]
        for number, time in enumerate(times):
            if time >= len(edges) * size:
                edges.append(number)
        turns.append(np.diff([*edges, len(times)]))
    lengths = itertools.zip_longest(*turns, fillvalue=0)
    return np.concatenate([np.repeat([True, False], pair) for pair in lengths])


VIDEOS = video_medium(patch_settings(14, 128 * 28 * 28, 768 * 28 * 28), _interleaved)


def _family(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        read=_read,
        module=functools.partial(OmniModel, Qwen25VisionTower, Qwen25AudioTower),
        entries=_entries,
        positions=omni_positions(fractional=False),
        vision=qwen_vision(plan_patches, "windows", "frames"),
        video=VIDEOS,
        audio=sound_medium(PADDED),
        model_type=model_type,
    )


FAMILIES = {THINKER: _family(THINKER, f"{KIND}_thinker"), RELEASE: _family(RELEASE, KIND)}
