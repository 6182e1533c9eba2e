"""Qwen3-VL and Qwen3-VL-MoE: configuration, weight map and the assembled backbone with deepstack features.

Source: transformers' Qwen3VLForConditionalGeneration and Qwen3VLMoeForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.positions import PositionRule, get_rope_positions
from ..inputs.videos import patch_settings, process_qwen3_videos
from ..towers.qwen3 import Qwen3VisionConfig, Qwen3VisionTower, plan_patches
from ..towers.weights import qwen3_vision_entries
from .config_file import ConfigFile, FamilyConfig, one_size
from .family import Family, Medium, Run, Shapes
from .image_family import TowerModel, qwen_tower_sizes, qwen_vision, qwen_written

DENSE = "Qwen3VLForConditionalGeneration"
MIXTURE = "Qwen3VLMoeForConditionalGeneration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenConfig(FamilyConfig):
    """The whole backbone: both towers and the token ids that stand for images and videos."""

    vision: Any
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int


QWEN_TOKENS = ("image_token", "video_token", "vision_start_token", "vision_end_token")


def read_qwen3_tower(vision: Mapping[str, Any], text: DecoderConfig) -> Qwen3VisionConfig:
    """Reads the tower (also Qwen3-Omni's and Qwen3.5's) from its part of `config.json`, parsed.

    Raises:
      ConfigError: a field that is missing, or more deepstack layers than the decoder has.
    """
    deepstack = tuple(vision.get("deepstack_visual_indexes") or ())
    # Features of the s-th are added behind language layer s.
    if len(deepstack) > text.layers:
        raise ConfigError(f"deepstack layers: got {len(deepstack)}; expected at most {text.layers}")
    return Qwen3VisionConfig(
        **qwen_tower_sizes(vision, text),
        patch=one_size(vision, "patch_size"),
        positions=need(vision, "num_position_embeddings"),
        deepstack_layers=deepstack,
        channels=vision["in_channels"],
    )


def read_model(file: ConfigFile) -> QwenConfig:
    """Reads `config.json` of Qwen3-VL and Qwen3.5, dense or with experts."""
    text = file.text()
    tower = read_qwen3_tower(file.part("vision_config"), text)
    return file.config(QwenConfig, text, vision=tower, **file.tokens(*QWEN_TOKENS))


def frame_grids(video_grid_thw: Int[np.ndarray, "videos 3"] | None) -> Int32[np.ndarray, "frames 3"] | None:
    """Returns grids of single frames: Qwen3-VL writes each frame as its own run of placeholders behind a timestamp."""
    if video_grid_thw is None:
        return None
    frames: list[tuple[int, int, int]] = []
    for time, height, width in np.asarray(video_grid_thw).tolist():
        frames += [(1, height, width)] * time
    return np.array(frames, np.int32).reshape(-1, 3)


def frame_positions(config: Any, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    """Returns M-RoPE's positions, where each frame of a video counts as an image of its own."""
    rule = PositionRule(config.image_token, config.video_token, config.vision.merge)
    # The text between a video's frames tells their times, so that the frames count as images of their own.
    images, videos = arrays.get("image_grid_thw"), frame_grids(arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, images, videos, None, rule)


def frame_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns a run of placeholders between start and end for each temporal patch, behind its time as a text."""
    time, height, width = (int(size) for size in arrays["video_grid_thw"][index])
    first = int(np.sum(arrays["video_grid_thw"][:index, 0]))
    pads = [config.video_token] * (height * width // config.vision.merge**2)
    run: list[int | str] = []
    for seconds in arrays["video_timestamps"][first : first + time]:
        run += [f"<{seconds:.1f} seconds>", config.vision_start_token, *pads, config.vision_end_token]
    return run


def _entries(config: QwenConfig, shapes: Shapes) -> list[TensorEntry]:
    prefix = "model.language_model."
    fused = expert_layout(config.text, shapes, prefix, "columns")  # as released
    decoder = decoder_entries(config.text, prefix=prefix, fused_experts=fused)
    return decoder + qwen3_vision_entries(config.vision, "model.visual")


VIDEO_SETTINGS = patch_settings(16, 128 * 32 * 32, 32 * 32 * 768, halves=True, fps=2)


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


FAMILIES = {DENSE: _family(DENSE, "qwen3_vl"), MIXTURE: _family(MIXTURE, "qwen3_vl_moe")}
