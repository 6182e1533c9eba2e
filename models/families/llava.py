"""LLaVA-1.5 and LLaVA-NeXT (1.6): CLIP's last but one layer, two linear maps, Llama or Mistral.

Source: transformers' LlavaForConditionalGeneration and LlavaNextForConditionalGeneration.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import TensorEntry
from ..decoder.hf_config import need
from ..decoder.weights import decoder_entries
from ..inputs.processors import process_images, processor
from ..towers.projectors import TileConfig, packing_index, unpadded_grid
from ..towers.vit import ViTConfig
from ..towers.weights import clip_entries, projector_entries
from . import mistral3
from .config_file import ConfigFile, one_layer
from .family import Family, Shapes, Vision
from .image_family import check_placeholders
from .text_towers import PLAIN
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, drops_class, read_vit, tile_fills, tile_plan

LLAVA = "LlavaForConditionalGeneration"
NEXT = "LlavaNextForConditionalGeneration"


def _read(file: ConfigFile) -> Any:
    """Reads `config.json` of LLaVA (with CLIP, or Pixtral-12B) or LLaVA-NeXT."""
    model, text, vision = file.model, file.text(*PLAIN), file.part("vision_config")
    if vision["model_type"] == mistral3.TOWER:
        return mistral3.read_model(file, text, merges=False)
    # The last norm is in the files, and is not applied: features are taken below it.
    tower = read_vit(
        vision,
        "clip_vision_model",
        class_token=True,
        drop_class=drops_class(model),
        patch_bias=False,
        pre_norm=True,
        final_norm="kept",
        feature_layer=one_layer(model),
        dtype=text.dtype,
    )
    tiles = None
    if file.family.architecture == NEXT:
        if not tower.drop_class:
            raise ConfigError(
                "vision_feature_select_strategy: got 'full', which is not built for LLaVA-NeXT; expected 'default'"
            )
        tiles = read_tiles(model, tower)

    bias = model["multimodal_projector_bias"]
    glue = GlueConfig(activation=model["projector_hidden_act"], bias=bias, tiles=tiles)
    return file.config(ViTModelConfig, text, vision=tower, glue=glue, **file.tokens("image_token"))


def read_tiles(model: Mapping[str, Any], tower: ViTConfig) -> TileConfig:
    """Reads the resolutions into which images are cut."""
    points = tuple((int(height), int(width)) for height, width in need(model, "image_grid_pinpoints"))
    return TileConfig(tower.image, tower.side, points)


def llava_entries(config: ViTModelConfig, shapes: Shapes) -> list[TensorEntry]:
    """Maps decoder, tower, projector and, where images are cut into tiles, the newline behind a row."""
    decoder = decoder_entries(config.text, prefix="language_model.model.", head="language_model.lm_head")
    glue = "multi_modal_projector"
    entries = [*decoder, *clip_entries(config.vision, "vision_tower")]
    entries += projector_entries(f"{glue}.linear_1", f"{glue}.linear_2")
    return entries + ([TensorEntry("image_newline", ("newline",))] if config.glue.tiles else [])


def tile_sizes(config: ViTModelConfig, arrays: Mapping[str, Any]) -> np.ndarray:
    """Returns the sizes of the images whose tiles `pixel_values` [images, most tiles, …] has, which it checks.

    Raises:
      InputError: another shape than the sizes ask for.
    """
    tiles, sizes, vision = config.glue.tiles, np.asarray(need(arrays, "image_sizes")), config.vision
    assert tiles is not None
    most = max(unpadded_grid(tiles, height, width, 0)[0] for height, width in sizes.tolist())
    found, expected = np.shape(arrays["pixel_values"]), (len(sizes), most, vision.channels, vision.image, vision.image)
    if found != expected:
        raise InputError(f"pixel_values: got shape {found}; expected {expected}")
    return sizes


def _next_plan(config: ViTModelConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    pixel_values, tiles = arrays.get("pixel_values"), config.glue.tiles
    if pixel_values is None:
        return None
    assert tiles is not None
    sizes = tile_sizes(config, arrays)
    order = packing_index(tiles, sizes, np.shape(pixel_values)[1])
    check_placeholders(input_ids, (config.image_token,), order.size, pixel_values, np.shape(pixel_values))
    return {"order": order}


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    if config.glue.tiles is None:
        return [config.image_token] * config.tile_tokens
    return [config.image_token] * len(packing_index(config.glue.tiles, arrays["image_sizes"][index : index + 1]))


def _family(architecture: str, model_type: str, vision: Vision) -> Family:
    return Family(
        architecture=architecture,
        read=_read,
        module=ViTModel,
        entries=llava_entries,
        vision=vision,
        model_type=model_type,
    )


_CLIP = processor("clip.CLIP", "llava.Llava", "siglip.Siglip")
_NEXT = processor("llava_next.LlavaNext")
FAMILIES = {
    LLAVA: _family(LLAVA, "llava", Vision(_CLIP, process_images, _tokens, tile_plan, tile_fills)),
    NEXT: _family(NEXT, "llava_next", Vision(_NEXT, process_images, _tokens, _next_plan, tile_fills)),
}
