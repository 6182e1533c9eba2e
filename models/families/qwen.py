"""What Qwen's families with images, and GLM-4V, share: configuration, images, videos and positions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import need, read_axial_theta
from ..inputs.positions import PositionRule, get_rope_positions
from ..inputs.processors import Reader, process_images, processor
from ..inputs.texts import texts_of
from ..towers.packed import PackedConfig, plan_patches
from .config_file import ConfigFile, FamilyConfig, one_size
from .family import Run, Vision, pixels_of
from .image_family import check_placeholders, check_width, grids_of, packed_fills

QWEN_IMAGES = processor("qwen2_vl.Qwen2VL")
TOKENS = ("image_token", "video_token", "vision_start_token", "vision_end_token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenConfig(FamilyConfig):
    """The whole backbone: both towers and the token ids that stand for images and videos."""

    vision: PackedConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int


def tower_sizes(raw: Mapping[str, Any], text: DecoderConfig, width: str = "out_hidden_size") -> dict[str, Any]:
    """Reads the fields that the towers share from the vision part of `config.json`; `width` names the output's.

    Raises:
      ConfigError: a field that is missing, or an output that is not as wide as the decoder.
    """
    check_width(width, raw[width], text)
    return {
        "depth": need(raw, "depth"),
        "width": need(raw, "hidden_size"),
        "heads": need(raw, "num_heads"),
        "intermediate": raw.get("intermediate_size"),
        "output_width": raw[width],
        "patch": one_size(raw, "patch_size"),
        "merge": need(raw, "spatial_merge_size"),
        "temporal": one_size(raw, "temporal_patch_size"),
        "channels": raw["in_channels"],
        "activation": need(raw, "hidden_act"),
        "theta": read_axial_theta(raw),
        "dtype": text.dtype,
    }


def model_reader(read_tower: Callable[[Mapping[str, Any], DecoderConfig], Any]) -> Callable[[ConfigFile], QwenConfig]:
    """Returns a reader of whole backbones whose tower is read by this function."""

    def read(file: ConfigFile) -> QwenConfig:
        text = file.text()
        return file.config(
            QwenConfig, text, vision=read_tower(file.part("vision_config"), text), **file.tokens(*TOKENS)
        )

    return read


def qwen_vision(settings: Reader = QWEN_IMAGES) -> Vision:
    """Returns what a Qwen family does with images; `settings`: directory → how images become patches.

    Its plan is the tower's own plan of the grids, those of videos behind those of images, held against ids and pixels:
    it raises InputError for placeholders or patches that do not match the grids.
    """

    def plan(config: Any, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        grids = grids_of(arrays)
        if not len(grids):
            return None
        vision, found = config.vision, plan_patches(config.vision, grids)
        # A Qwen tower's processor hands patches over flat, merge block by merge block.
        patches, pads = found["rows"].size, (config.image_token, config.video_token)
        shape = (patches, vision.features)
        check_placeholders(input_ids, pads, patches // vision.merge**2, pixels_of(arrays), shape)
        return found

    def tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
        return _run(config, config.image_token, arrays["image_grid_thw"][index])

    return Vision(settings, process_images, tokens, plan, fills=packed_fills)


def video_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns one run of placeholders between start and end for video `index`."""
    return _run(config, config.video_token, arrays["video_grid_thw"][index])


def _run(config: Any, pad: int, grid: np.ndarray) -> list[int]:
    # The start and end tokens belong to the image's or video's chunk.
    pads = int(np.prod(grid)) // config.vision.merge**2
    return [config.vision_start_token, *[pad] * pads, config.vision_end_token]


def frame_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns a run of placeholders between start and end for each temporal patch, behind its time as a text."""
    time, height, width = (int(size) for size in arrays["video_grid_thw"][index])
    first = int(np.sum(arrays["video_grid_thw"][:index, 0]))
    run: list[int | str] = []
    for seconds in arrays["video_timestamps"][first : first + time]:
        run += [f"<{seconds:.1f} seconds>", *_run(config, config.video_token, np.array([height, width]))]
    return run


def video_written(config: Any, tokenizer: Any) -> tuple[str, str, str]:
    """Returns what the chat templates of Qwen's families write for a video: its placeholder between start and end."""
    pad, start, end = texts_of(tokenizer, [config.video_token, config.vision_start_token, config.vision_end_token])
    return pad, start, end


def frame_grids(video_grid_thw: Int[np.ndarray, "videos 3"] | None) -> Int32[np.ndarray, "frames 3"] | None:
    """Returns grids of single frames: Qwen3-VL writes each frame as its own run of placeholders behind a timestamp."""
    if video_grid_thw is None:
        return None
    frames: list[tuple[int, int, int]] = []
    for time, height, width in np.asarray(video_grid_thw).tolist():
        frames += [(1, height, width)] * time
    return np.array(frames, np.int32).reshape(-1, 3)


def frame_positions(config: Any, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    """Returns M-RoPE's positions, where each frame of a video counts as an image of its own: the text between the
    frames tells their times.
    """
    rule = PositionRule(config.image_token, config.video_token, config.vision.merge)
    images, videos = arrays.get("image_grid_thw"), frame_grids(arrays.get("video_grid_thw"))
    return get_rope_positions(input_ids, images, videos, None, rule)
