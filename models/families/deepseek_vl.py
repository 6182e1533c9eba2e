"""DeepSeek-VL-1.3B: SigLIP, two linear maps, Llama. (The 7B, with a second tower, is `deepseek_vl_hybrid`.)

Source: transformers' DeepseekVLForConditionalGeneration.
"""

from collections.abc import Mapping
from typing import Any

from ..checkpoints import TensorEntry
from ..decoder.weights import decoder_entries
from ..inputs.processors import process_images, processor
from ..towers.weights import clip_entries, projector_entries
from .config_file import ConfigFile
from .family import Family, Shapes, Vision
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, read_vit, tile_fills, tile_plan, without_head

ARCHITECTURE = "DeepseekVLForConditionalGeneration"


def tile_tokens(config: Any, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    """Returns the placeholders of one image of one tile, with nothing around them."""
    return [config.image_token] * config.tile_tokens


def _read(file: ConfigFile) -> ViTModelConfig:
    text, vision = file.text("llama"), file.part("vision_config")
    tower = read_vit(vision, "siglip_vision_model", final_norm="applied", dtype=text.dtype)
    return file.config(ViTModelConfig, text, vision=tower, glue=GlueConfig(), **file.tokens("image_token"))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    entries = decoder_entries(config.text, prefix="model.language_model.")
    entries += clip_entries(config.vision, "model.vision_model")
    return entries + projector_entries("model.aligner.linear1", "model.aligner.linear2")


_SETTINGS = processor("deepseek_vl.DeepseekVL")
FAMILY = Family(
    architecture=ARCHITECTURE,
    read=without_head(_read),
    module=ViTModel,
    entries=_entries,
    vision=Vision(_SETTINGS, process_images, tile_tokens, tile_plan, tile_fills),
    model_type="deepseek_vl",
)
