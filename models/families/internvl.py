"""InternVL3, 3.5 and 2.5 (a Qwen2, Qwen3 or Llama text tower): InternViT (300M or 6B), pixel shuffle ½, norm, two
linear maps.

Source: transformers' InternVLForConditionalGeneration, the `-hf` checkpoints.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries, expert_layout
from ..inputs.pictures import CLIP_MEAN, CLIP_STD
from ..inputs.processors import own_settings, process_images, processor
from ..inputs.videos import process_internvl_videos
from ..towers.weights import intern_vit_entries, projector_entries
from .config_file import ConfigFile, one_layer
from .family import Family, Medium, Run, Shapes, Vision
from .text_towers import PLAIN
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, drops_class, join_tiles, read_vit, tile_fills, tile_plan

ARCHITECTURE = "InternVLForConditionalGeneration"


def _read(file: ConfigFile) -> ViTModelConfig:
    """Reads `config.json` of a `-hf` checkpoint."""
    model, text, vision = file.model, file.text("qwen2", *PLAIN), file.part("vision_config")
    tower = read_vit(
        vision,
        "internvl_vision",
        class_token=True,
        drop_class=drops_class(model),
        layer_scale=True,
        qkv_bias=vision["attention_bias"],
        norm_type=vision["norm_type"],
        qk_norm=vision["use_qk_norm"],
        feature_layer=one_layer(model),
        dtype=text.dtype,
    )
    # With the class token a tile's features are no square, which the pixel shuffle needs.
    if not tower.drop_class:
        raise ConfigError(
            "vision_feature_select_strategy: got 'full', which is not built for InternVL; expected 'default'"
        )
    # The configuration has the side's factor (½), here it is the square's side. The norm's epsilon is nowhere in it.
    shuffle = round(1 / model["downsample_ratio"])
    glue = GlueConfig(shuffle=shuffle, activation=model["projector_hidden_act"], norm_epsilon=1e-5)
    return file.config(ViTModelConfig, text, vision=tower, glue=glue, **file.tokens("image_token"))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    glue = "multi_modal_projector"
    prefix, head = "language_model.model.", "language_model.lm_head"
    fused = expert_layout(config.text, shapes, prefix)
    entries = decoder_entries(config.text, prefix=prefix, head=head, fused_experts=fused)
    entries += intern_vit_entries(config.vision, "vision_tower")
    return entries + projector_entries(f"{glue}.linear_1", f"{glue}.linear_2", norm=f"{glue}.layer_norm")


def _plan(config: ViTModelConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    plan, counts = tile_plan(config, input_ids, arrays), arrays.get("num_patches")
    if plan is not None and counts is not None and int(np.sum(counts)) != len(arrays["pixel_values"]):
        raise InputError(
            f"num_patches: got {np.asarray(counts).tolist()}; expected {len(arrays['pixel_values'])} in all"
        )
    return plan


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns an image's tokens, between `<img>` and `</img>` where the tokenizer has them."""
    pads = [config.image_token] * (config.tile_tokens * int(arrays["num_patches"][index]))
    ends = [None if tokenizer is None else tokenizer.token_to_id(name) for name in ("<img>", "</img>")]
    first, last = ([] if end is None else [int(end)] for end in ends)
    return [*first, *pads, *last]


def _video_tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns frames, each an image of one tile behind its number."""
    frame = _tokens(config, {"num_patches": [1]}, 0, tokenizer)
    run: list[int | str] = []
    for number in range(int(arrays["video_frames"][index])):
        newline = "\n" if run else ""
        run += [f"{newline}Frame{number + 1}: ", *frame]
    return run


_VIDEO_SETTINGS = own_settings(
    "video", only={"do_center_crop": False}, image_mean=CLIP_MEAN, image_std=CLIP_STD, resample=3, size=None
)
FAMILY = Family(
    architecture=ARCHITECTURE,
    read=_read,
    module=ViTModel,
    entries=_entries,
    vision=Vision(processor("got_ocr2.GotOcr2", crop_to_patches=True), process_images, _tokens, _plan, tile_fills),
    video=Medium(
        _VIDEO_SETTINGS, process_internvl_videos, _video_tokens, lambda config, tokenizer: ("<video>", "", "")
    ),
    join=join_tiles(0, lambda arrays: arrays["num_patches"]),
    model_type="internvl",
)
