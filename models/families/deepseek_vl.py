"""DeepSeek-VL-1.3B: SigLIP, two linear maps, Llama. (The 7B, with a second tower, is `deepseek_vl_hybrid`.)

Source: transformers' DeepseekVLForConditionalGeneration.
"""

from collections.abc import Mapping
from typing import Any

from ..checkpoints import TensorEntry
from ..decoder.hf_config import Regime, need
from ..decoder.known_keys import complete
from ..decoder.weights import decoder_entries
from ..inputs.images import CLIP_MEAN, CLIP_STD, PictureConfig, process_deepseek
from ..towers.vit import ViTConfig
from ..towers.weights import clip_entries, projector_entries
from .family import Family, Shapes, Vision
from .image_family import freeze, text_part, vision_part, whole
from .text_families import read_llama
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, read_vit, tile_fills, tile_plan

ARCHITECTURE = "DeepseekVLForConditionalGeneration"


def read_siglip(vision: Mapping[str, Any], dtype: str) -> ViTConfig:
    """Reads SigLIP's tower (also SmolVLM's), from its part of `config.json` or a table of the same keys."""
    # A table that has not gone through `vision_part`.
    if "layer_norm_eps" not in vision:
        vision = complete(vision, "siglip_vision_model", "the tower")
    return read_vit(vision, final_norm="applied", dtype=dtype)


def without_head(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `config.json` without SigLIP's head, which its class has by default: nothing reads it, so that it is not
    loaded and not saved.
    """
    return {**raw, "vision_config": {**raw["vision_config"], "vision_use_head": False}}


def tile_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns the placeholders of one image of one tile, with nothing around them."""
    return [config.image_token] * config.tile_tokens


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> ViTModelConfig:
    model = whole(raw, "deepseek_vl")
    text = read_llama(text_part(model, raw, ("llama",)), angles, regime)
    tower = read_siglip(vision_part(model, "siglip_vision_model"), text.dtype)
    return ViTModelConfig(FAMILY, text, tower, GlueConfig(), need(model, "image_token_id"), freeze(without_head(raw)))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    entries = decoder_entries(config.text, prefix="model.language_model.")
    entries += clip_entries(config.vision, "model.vision_model")
    return entries + projector_entries("model.aligner.linear1", "model.aligner.linear2")


_SETTINGS = PictureConfig.reader(
    only={"do_resize": True, "do_pad": True},
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    resample=3,
    size={"height": 384, "width": 384},
    min_size=14,
)
FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=ViTModel,
    entries=_entries,
    vision=Vision(_SETTINGS, process_deepseek, tile_tokens, tile_plan, tile_fills),
    model_type="deepseek_vl",
)
