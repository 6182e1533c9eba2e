"""InternVL3 (and 2.5 with a Qwen2 or Llama text tower): InternViT-300M, pixel shuffle ½, norm and two linear maps.

Source: transformers' InternVLForConditionalGeneration, the `-hf` checkpoints. InternViT-6B (RMS norms and norms on
query and key) is not built.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError, InputError

from .configuration import Regime, need
from .decoder_weights import decoder_entries
from .family import Family, Shapes, Vision
from .image_family import freeze, one_size, vision_part
from .image_processing import CLIP_MEAN, CLIP_STD, PictureConfig, process_internvl
from .llava import read_text
from .vision_vit import ViTConfig
from .vision_weights import intern_vit_entries, projector_entries
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, tile_fills, tile_plan
from .weights import Entry

ARCHITECTURE = "InternVLForConditionalGeneration"
BUILT = {"norm_type": "layer_norm", "use_qk_norm": False, "use_mask_token": False, "use_mean_pooling": True}
BUILT |= {"use_absolute_position_embeddings": True}


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> ViTModelConfig:
    text, vision = read_text(raw, angles, regime), vision_part(raw)
    for name, value in BUILT.items():
        if vision.get(name, value) != value:
            raise ConfigError(f"vision {name} {vision[name]!r} is not built for InternVL; expected {value!r}")
    ratio = raw.get("downsample_ratio", 0.5)
    tower = ViTConfig(
        depth=need(vision, "num_hidden_layers"),
        width=need(vision, "hidden_size"),
        heads=need(vision, "num_attention_heads"),
        intermediate=need(vision, "intermediate_size"),
        image=one_size(vision, "image_size"),
        patch=one_size(vision, "patch_size"),
        channels=vision.get("num_channels", 3),
        activation=vision.get("hidden_act", "gelu"),
        norm_epsilon=vision.get("layer_norm_eps", 1e-6),
        class_token=True,
        drop_class=raw.get("vision_feature_select_strategy", "default") == "default",
        layer_scale=True,
        qkv_bias=bool(vision.get("attention_bias", False)),
        feature_layer=raw.get("vision_feature_layer", -1),
        dtype=text.dtype,
    )
    if not tower.drop_class:
        raise ConfigError("vision_feature_select_strategy 'full' is not built for InternVL; expected 'default'")
    glue = GlueConfig(shuffle=round(1 / ratio), activation=raw.get("projector_hidden_act", "gelu"), norm_epsilon=1e-5)
    return ViTModelConfig(FAMILY, text, tower, glue, need(raw, "image_token_id"), freeze(raw))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[Entry]:
    glue = "multi_modal_projector"
    entries = decoder_entries(config.text, prefix="language_model.model.", head="language_model.lm_head")
    entries += intern_vit_entries(config.vision, "vision_tower")
    return entries + projector_entries(f"{glue}.linear_1", f"{glue}.linear_2", norm=f"{glue}.layer_norm")


def _plan(config: ViTModelConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    plan, counts = tile_plan(config, input_ids, arrays), arrays.get("num_patches")
    if plan is not None and counts is not None and int(np.sum(counts)) != len(arrays["pixel_values"]):
        raise InputError(f"num_patches {np.asarray(counts).tolist()}; expected {len(arrays['pixel_values'])} in all")
    return plan


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Between `<img>` and `</img>`, where the tokenizer has them."""
    pads = [config.image_token] * (config.tile_tokens * int(arrays["num_patches"][index]))
    ends = [None if tokenizer is None else tokenizer.token_to_id(name) for name in ("<img>", "</img>")]
    first, last = ([] if end is None else [int(end)] for end in ends)
    return [*first, *pads, *last]


_SETTINGS = PictureConfig.reader(
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    resample=3,
    size={"height": 448, "width": 448},
    crop_to_patches=True,
    min_patches=1,
    max_patches=12,
)
FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=ViTModel,
    entries=_entries,
    vision=Vision(_SETTINGS, process_internvl, _tokens, _plan, tile_fills),
    model_type="internvl",
)
