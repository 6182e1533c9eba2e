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

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.config import DecoderConfig
from ..decoder.hf_config import (
    Raw,
    Regime,
    need,
    read_axial_theta,
    read_decoder,
    read_deepseek_experts,
    read_rope,
)
from ..decoder.known_keys import DEFAULTS, ONLY, complete
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.glm_videos import VIDEO_SETTINGS, process_glm_videos
from ..inputs.positions import PositionConfig, get_rope_positions
from ..inputs.qwen_images import glm_image_config
from ..inputs.texts import texts_of
from ..towers.glm4v import Glm4vVisionConfig, Glm4vVisionTower, glm4v_vision_entries, plan_patches
from .family import Family, Medium, Run, Shapes
from .image_family import TowerModel, freeze, one_size, qwen_vision, text_part, thaw, vision_part, whole
from .qwen3_vl import frame_grids
from .text_families import TEXT_TABLE, read_head_dim

DENSE = "Glm4vForConditionalGeneration"
MIXTURE = "Glm4vMoeForConditionalGeneration"
EITHER = "Glm46VForConditionalGeneration"
SECTIONS = (8, 12, 12)
"""Of M-RoPE, where the configuration names none."""
PREFIX = "model.language_model."


@dataclasses.dataclass(frozen=True)
class ModelTypes:
    """What tells one architecture from another.

    Attributes:
      model: its `model_type`. texts: those of its text part, the default first. towers: likewise of its vision part.
    """

    model: str
    texts: tuple[str, ...]
    towers: tuple[str, ...]


MODEL_TYPES = {
    DENSE: ModelTypes("glm4v", ("glm4v_text",), ("glm4v_vision",)),
    MIXTURE: ModelTypes("glm4v_moe", ("glm4v_moe_text",), ("glm4v_moe_vision",)),
    EITHER: ModelTypes("glm46v", ("glm4v_text", "glm4v_moe_text"), ("glm4v_vision", "glm4v_moe_vision")),
}


@dataclasses.dataclass(frozen=True)
class Glm4vConfig:
    """The whole backbone: both towers and the token ids that stand for images; `raw` is config.json as it was read.

    `vision_start_token` and `vision_end_token` are those of an image, and of each frame of a video; `video_token`
    stands for a whole video in a chat template, and is never embedded.
    """

    architecture: str
    text: DecoderConfig
    vision: Glm4vVisionConfig
    image_token: int
    video_token: int
    vision_start_token: int
    vision_end_token: int
    video_start_token: int
    video_end_token: int
    raw: str

    @property
    def family(self) -> Family:
        """The family of this architecture."""
        return FAMILIES[self.architecture]

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        return thaw(self.raw, self.architecture, self.text.dtype)


def _read_text(raw: Raw, kind: str, top: str, angles: str, regime: Regime) -> DecoderConfig:
    """Reads a text tower: norms behind attention and MLP and pairs that rotate, or experts and halves that rotate."""
    text = complete(raw, kind, TEXT_TABLE, drop=DEFAULTS[top])
    head_dim = read_head_dim(text)
    mixture = kind == "glm4v_moe_text"
    if not mixture and head_dim * text["num_attention_heads"] != text["hidden_size"]:
        raise ConfigError(f"head_dim: got {head_dim}; expected hidden_size / num_attention_heads for GLM-4.1V")

    # GLM-4.1V takes an absent share for the whole head, GLM-4.5V for half of it.
    rope = read_rope(
        text,
        head_dim,
        angles=angles,
        regime=regime,
        partial=0.5 if mixture else 1.0,
        cached="half" if mixture else "pairs",
        sections=SECTIONS,
    )

    if mixture:
        count = text["num_local_experts"]
        if count is not None:
            if "n_routed_experts" in raw and count != text["n_routed_experts"]:
                raise ConfigError(
                    f"num_local_experts: got {count}; expected n_routed_experts, {raw['n_routed_experts']}"
                )
            text = {**text, "n_routed_experts": count}
        experts = read_deepseek_experts(text, "sigmoid")
        return read_decoder(text, rope, head_dim=head_dim, attention_bias=text["attention_bias"], experts=experts)

    return read_decoder(text, rope, head_dim=head_dim, attention_bias=True, post_norms=True)


def _read(architecture: str, raw: Mapping[str, Any], angles: str, regime: Regime) -> Glm4vConfig:
    """Reads `config.json` of any architecture: nested (`text_config`) or, as early releases have it, flat."""
    form = MODEL_TYPES[architecture]
    nested = raw.get("text_config") is not None
    flat = () if nested else DEFAULTS[form.texts[0]] | ONLY[form.texts[0]]
    model = whole(raw, form.model, flat)
    kinds = (*form.texts, form.model) if nested else ()
    part = text_part(model if nested else {**model, "text_config": raw}, raw, kinds)
    kind = part["model_type"] if nested and part["model_type"] in form.texts else form.texts[0]
    decoder = _read_text(part, kind, form.model, angles, regime)

    given = need(raw, "vision_config").get("model_type") if isinstance(raw.get("vision_config"), Mapping) else None
    tower_kind = given if given in form.towers else form.towers[0]
    vision = vision_part(model, tower_kind, form.model)
    width = vision["out_hidden_size"]
    if width != decoder.width:
        raise ConfigError(f"vision out_hidden_size: got {width}; expected the text width {decoder.width}")

    patch = one_size(vision, "patch_size")
    tower = Glm4vVisionConfig(
        depth=vision["depth"],
        width=vision["hidden_size"],
        heads=vision["num_heads"],
        # GLM-4V's blocks are as wide inside as the tower's output, and its merger as `intermediate_size`.
        intermediate=width,
        merger=vision["intermediate_size"],
        output_width=width,
        patch=patch,
        merge=vision["spatial_merge_size"],
        temporal=one_size(vision, "temporal_patch_size"),
        positions=one_size(vision, "image_size") // patch,
        channels=vision["in_channels"],
        activation=vision["hidden_act"],
        theta=read_axial_theta(vision),
        norm_epsilon=vision["rms_norm_eps"],
        qkv_bias=vision["attention_bias"],
        dtype=decoder.dtype,
    )

    return Glm4vConfig(
        architecture,
        decoder,
        tower,
        image_token=need(model, "image_token_id"),
        video_token=need(model, "video_token_id"),
        vision_start_token=need(model, "image_start_token_id"),
        vision_end_token=need(model, "image_end_token_id"),
        video_start_token=need(model, "video_start_token_id"),
        video_end_token=need(model, "video_end_token_id"),
        raw=freeze(raw),
    )


def _positions(config: Glm4vConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> np.ndarray:
    rule = PositionConfig(config.image_token, config.video_token, config.vision.merge)
    # A video's frames have the image's placeholders, between texts that tell their times.
    images, frames = arrays.get("image_grid_thw"), frame_grids(arrays.get("video_grid_thw"))
    if images is not None and frames is not None and len(images) and len(frames):
        raise InputError(
            "image_grid_thw and video_grid_thw: got both for GLM-4V, which has one placeholder for images and frames; "
            "expected one table of grids in the prompt's order, as prepare and chat give it"
        )
    grids = images if frames is None or not len(frames) else frames
    return get_rope_positions(input_ids, grids, None, None, rule)[0]


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


def _family(architecture: str, form: ModelTypes) -> Family:
    return Family(
        architecture=architecture,
        config=lambda raw, angles, regime: _read(architecture, raw, angles, regime),
        module=functools.partial(TowerModel, Glm4vVisionTower),
        entries=_entries,
        positions=_positions,
        vision=qwen_vision(plan_patches, "frames", settings=glm_image_config),
        video=Medium(VIDEO_SETTINGS, process_glm_videos, _video_tokens, _written),
        join=_joined,
        model_type=form.model,
    )


FAMILIES = {architecture: _family(architecture, form) for architecture, form in MODEL_TYPES.items()}
