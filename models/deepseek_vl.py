"""DeepSeek-VL-1.3B: SigLIP, two linear maps, Llama. (The 7B has a second, high-resolution tower, which is not built.)

Source: transformers' DeepseekVLForConditionalGeneration.
"""

from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

from .configuration import Regime, need
from .decoder_weights import decoder_entries
from .family import Family, Shapes, Vision
from .image_family import freeze, text_part, vision_part
from .image_processing import CLIP_MEAN, CLIP_STD, PictureConfig, process_deepseek
from .text_families import read_llama
from .vision_vit import ViTConfig
from .vision_weights import clip_entries, projector_entries
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, tile_fills, tile_plan
from .weights import Entry

ARCHITECTURE = "DeepseekVLForConditionalGeneration"


def read_siglip(vision: Mapping[str, Any], dtype: str) -> ViTConfig:
    """SigLIP's tower (also SmolVLM's)."""
    return ViTConfig(
        depth=need(vision, "num_hidden_layers"),
        width=need(vision, "hidden_size"),
        heads=need(vision, "num_attention_heads"),
        intermediate=need(vision, "intermediate_size"),
        image=need(vision, "image_size"),
        patch=need(vision, "patch_size"),
        channels=vision.get("num_channels", 3),
        activation=vision.get("hidden_act", "gelu_pytorch_tanh"),
        norm_epsilon=vision.get("layer_norm_eps", 1e-6),
        final_norm="applied",
        dtype=dtype,
    )


def _read(raw: Mapping[str, Any], angles: str, regime: Regime) -> ViTModelConfig:
    text, vision = read_llama(text_part(raw), angles, regime), vision_part(raw)
    if vision.get("vision_use_head"):
        raise ConfigError("vision_use_head=True is not built for DeepSeek-VL; expected False")
    tower = read_siglip(vision, text.dtype)
    return ViTModelConfig(FAMILY, text, tower, GlueConfig(), need(raw, "image_token_id"), freeze(raw))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[Entry]:
    entries = decoder_entries(config.text, prefix="model.language_model.")
    entries += clip_entries(config.vision, "model.vision_model")
    return entries + projector_entries("model.aligner.linear1", "model.aligner.linear2")


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    return [config.image_token] * config.tile_tokens


_SETTINGS = PictureConfig.reader(
    image_mean=CLIP_MEAN, image_std=CLIP_STD, resample=3, size={"height": 384, "width": 384}, min_size=14
)
FAMILY = Family(
    architecture=ARCHITECTURE,
    config=_read,
    module=ViTModel,
    entries=_entries,
    vision=Vision(_SETTINGS, process_deepseek, _tokens, tile_plan, tile_fills),
    ignore=(r".*\.position_ids", r".*\.rotary_emb\.inv_freq"),
    model_type="deepseek_vl",
)
