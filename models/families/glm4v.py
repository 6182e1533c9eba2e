"""GLM-4.1V, GLM-4.5V and GLM-4.6V: configurations, weight map and the assembled backbone.

Sources: transformers' Glm4vForConditionalGeneration (GLM-4.1V-9B, GLM-4.6V-Flash: text tower GLM-4-0414),
Glm4vMoeForConditionalGeneration (GLM-4.5V, GLM-4.6V: GLM-4.5-Air) and Glm46VForConditionalGeneration (either of them).
Every frame of a video is an image of its own, with the image's own placeholders.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvpatch_jax.errors import InputError

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.positions import PositionRule, get_rope_positions
from ..inputs.processors import processor
from ..inputs.texts import texts_of
from ..inputs.videos import patch_settings, process_glm_videos
from ..towers.packed import PackedConfig, PackedTower
from ..towers.weights import glm4v_vision_entries
from .config_file import ConfigFile, one_size
from .family import Family, Medium, Run, Shapes
from .image_family import TowerModel
from .qwen import QwenConfig, frame_grids, qwen_vision, tower_sizes

PREFIX = "model.language_model."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm4vConfig(QwenConfig):
    """The whole backbone: both towers and the token ids that stand for images.

    `vision_start_token` and `vision_end_token` are those of an image, and of each frame of a video; `video_token`
    stands for a whole video in a chat template, and is never embedded.
    """

    video_start_token: int
    video_end_token: int


def _read(file: ConfigFile) -> Glm4vConfig:
    text, vision = file.text("glm4v_text", "glm4v_moe_text"), file.part("vision_config")
    sizes = tower_sizes(vision, text)
    tower = PackedConfig(
        **sizes
        # GLM-4V's blocks are as wide inside as the tower's output, and its merger as `intermediate_size`.
        | {"intermediate": text.width, "merger_width": vision["intermediate_size"]},
        positions=one_size(vision, "image_size") // sizes["patch"],
        norm_epsilon=vision["rms_norm_eps"],
        rms_norms=True,
        gated=True,
        qkv_bias=vision["attention_bias"],
        bias=False,
        patch_bias=True,
        embedding_norm=True,
        final_norm=True,
        gated_merger=True,
    )
    edges = file.tokens("image_start_token", "image_end_token")
    return file.config(
        Glm4vConfig,
        text,
        vision=tower,
        **file.tokens("image_token", "video_token", "video_start_token", "video_end_token"),
        vision_start_token=edges["image_start_token"],
        vision_end_token=edges["image_end_token"],
    )


def _positions(config: Glm4vConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rule = PositionRule(config.image_token, config.video_token, config.vision.merge)
    # A video's frames have the image's placeholders, between texts that tell their times.
    images, frames = arrays.get("image_grid_thw"), frame_grids(arrays.get("video_grid_thw"))
    if images is not None and frames is not None and len(images) and len(frames):
        raise InputError(
            "image_grid_thw and video_grid_thw: got both for GLM-4V, which has one placeholder for images and frames; "
            "expected one table of grids in the prompt's order, as prepare and chat give it"
        )
    grids = images if frames is None or not len(frames) else frames
    return get_rope_positions(input_ids, grids, None, None, rule)


def _joined(config: Glm4vConfig, arrays: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Returns `pixel_values` and `image_grid_thw` of images and of videos' frames in the prompt's order."""
    if not order:
        return {}

    pixels, grids, numbers, starts = [], [], {"image": 0, "video": 0}, {"image": 0, "video": 0}
    for sort in order:
        part, number, start = arrays[sort], numbers[sort], starts[sort]
        grid = part[f"{sort}_grid_thw"][number : number + 1]
        stop = start + int(np.prod(grid))
        pixels.append(part["pixel_values" if sort == "image" else "pixel_values_videos"][start:stop])
        grids.append(frame_grids(grid))
        numbers[sort], starts[sort] = number + 1, stop
    return {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.concatenate(grids)}


def _video_tokens(config: Glm4vConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns a run of placeholders between an image's start and end for each temporal patch, its time behind it."""
    time, height, width = (int(size) for size in arrays["video_grid_thw"][index])
    first = int(np.sum(arrays["video_grid_thw"][:index, 0]))
    pads = [config.image_token] * (height * width // config.vision.merge**2)
    run: list[int | str] = [config.video_start_token]
    for seconds in arrays["video_timestamps"][first : first + time]:
        said = f"{seconds:.1f} seconds" if arrays["video_decimals"][index] else f"{int(seconds)}"
        run += [config.vision_start_token, *pads, config.vision_end_token, said]
    return [*run, config.video_end_token]


def _written(config: Glm4vConfig, tokenizer: Any) -> tuple[str, str, str]:
    pad, start, end = texts_of(tokenizer, [config.video_token, config.video_start_token, config.video_end_token])
    return pad, start, end


def _entries(config: Glm4vConfig, shapes: Shapes) -> list[TensorEntry]:
    fused = () if config.text.experts else ("gate_up",)
    layout = expert_layout(config.text, shapes, PREFIX)
    decoder = decoder_entries(config.text, prefix=PREFIX, fused=fused, fused_experts=layout)
    return decoder + glm4v_vision_entries(config.vision, "model.visual")


VIDEO_SETTINGS = patch_settings(14, 112 * 112, 28 * 28 * 2 * 30000, fps=2, max_duration=300)


def _family(architecture: str, model_type: str) -> Family:
    return Family(
        architecture=architecture,
        read=_read,
        module=functools.partial(TowerModel, PackedTower),
        entries=_entries,
        positions=_positions,
        vision=qwen_vision(processor("glm4v.Glm4v", "glm46v.Glm46V")),
        video=Medium(VIDEO_SETTINGS, process_glm_videos, _video_tokens, _written),
        join=_joined,
        model_type=model_type,
    )


FAMILIES = {
    family.architecture: family
    for family in (
        _family("Glm4vForConditionalGeneration", "glm4v"),
        _family("Glm4vMoeForConditionalGeneration", "glm4v_moe"),
        _family("Glm46VForConditionalGeneration", "glm46v"),
    )
}
