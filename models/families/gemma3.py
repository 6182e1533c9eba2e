"""Gemma 3: SigLIP, average pooling, a norm and one map, Gemma's text tower.

An image's tokens see each other whatever their order, in the layers that slide within the window. So they do in a chunk
that holds the whole image, wherever it is placed: what a chunk changes is, as with causal attention, only what stands
in front of it.

Source: transformers' Gemma3ForConditionalGeneration and Gemma3Processor (without pan and scan).
"""

import math
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..checkpoints import TensorEntry
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries
from ..inputs.processors import process_images, processor
from ..towers.weights import clip_entries
from .config_file import ConfigFile
from .family import Family, Run, Shapes, Vision, image_runs
from .gemma_text import NORMS
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, read_vit, tile_fills, tile_plan, without_head

ARCHITECTURE = "Gemma3ForConditionalGeneration"
_AROUND = "\n\n"
"""What the processor writes in front of an image and behind it."""


def _read(file: ConfigFile) -> ViTModelConfig:
    text, vision, count = file.text("gemma3_text"), file.part("vision_config"), need(file.model, "mm_tokens_per_image")
    tower = read_vit(vision, "siglip_vision_model", final_norm="applied", dtype=text.dtype)
    side = math.isqrt(count)
    if side**2 != count or tower.side % side:
        raise ConfigError(
            f"mm_tokens_per_image: got {count}; expected the square of a divisor of {tower.side}, the patches of a side"
        )
    image, start, end = file.tokens("image_token", "boi_token", "eoi_token").values()
    glue = GlueConfig("pooled", tower.side // side)
    return file.config(ViTModelConfig, text, vision=tower, glue=glue, image_token=image, edges=(start, end))


def _entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    decoder = decoder_entries(config.text, prefix="language_model.model.", head="language_model.lm_head", norms=NORMS)
    glue = "multi_modal_projector"
    return [
        *decoder,
        *clip_entries(config.vision, "vision_tower"),
        TensorEntry(f"{glue}.mm_soft_emb_norm.weight", ("projector", "norm", "weight")),
        TensorEntry(f"{glue}.mm_input_projection_weight", ("projector", "linear", "kernel")),
    ]


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> Run:
    """Returns the image between its start and end tokens; with a tokenizer, the processor's blank lines around it."""
    assert config.edges is not None
    start, end = config.edges
    image = [start, *[config.image_token] * config.tile_tokens, end]
    return image if tokenizer is None else [_AROUND, *image, _AROUND]


def _mark(config: ViTModelConfig) -> tuple[int, str]:
    """Returns the start token, which Gemma's chat template writes for an image, and the blank lines around it."""
    assert config.edges is not None
    return config.edges[0], _AROUND


_SETTINGS = processor("gemma3.Gemma3", do_pan_and_scan=False)
FAMILY = Family(
    architecture=ARCHITECTURE,
    read=without_head(_read),
    module=ViTModel,
    entries=_entries,
    vision=Vision(_SETTINGS, process_images, _tokens, tile_plan, tile_fills, _mark),
    model_type="gemma3",
    ahead=image_runs,
)
