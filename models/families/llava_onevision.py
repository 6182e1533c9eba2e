"""LLaVA-OneVision: SigLIP on tiles, two linear maps, Qwen2; a grid of more tiles than a maximum is made smaller.

Source: transformers' LlavaOnevisionForConditionalGeneration. Every image is cut into tiles, as there where images are a
flat list; videos are not taken.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvpatch_jax.errors import ConfigError

from ..inputs.processors import process_images, processor
from ..towers.projectors import pack_tiles, unpadded_grid
from .config_file import ConfigFile, one_layer
from .family import Family, Vision
from .image_family import check_placeholders
from .llava import llava_entries, read_tiles, tile_sizes
from .text_towers import PLAIN
from .vit_family import GlueConfig, ViTModel, ViTModelConfig, drops_class, read_vit

TAPS = ("order", "right", "below", "across")
"""In the plan: the four features that one of a grid made smaller mixes, by the plan's "weights"."""
REDUCED = 1.1
"""How much larger than the maximum a side is before the grid is made smaller."""


class OnevisionModel(ViTModel):
    """Tower, projector, newline and decoder with their parameters."""

    def encode(self, pixel_values: Float[Array, "*images C H W"], plan: Mapping[str, Array]) -> Float[Array, "n E D"]:
        """Returns image features in the plan's order, n = 1."""
        features = self.project(pixel_values, plan)
        assert self.newline is not None
        taps = [pack_tiles(features, self.newline[...], plan[name]).astype(jnp.float32) for name in TAPS]
        mixed = jnp.einsum("tFD,Ft->FD", jnp.stack(taps), plan["weights"])
        return mixed.astype(features.dtype)[None]


def _read(file: ConfigFile) -> ViTModelConfig:
    model, text = file.model, file.text("qwen2", *PLAIN)
    if drops_class(model):
        raise ConfigError("vision_feature_select_strategy: got 'default' for SigLIP, which has no class token")
    tower = read_vit(
        file.part("vision_config"),
        "siglip_vision_model",
        final_norm="kept",
        feature_layer=one_layer(model),
        dtype=text.dtype,
    )
    most = model["vision_aspect_ratio"].removeprefix("anyres_max_")
    if not most.isdecimal() or int(most) < 1:
        raise ConfigError(f"vision_aspect_ratio: got {model['vision_aspect_ratio']!r:.60}; expected 'anyres_max_9'")
    glue = GlueConfig(
        activation=model["projector_hidden_act"],
        bias=model["multimodal_projector_bias"],
        tiles=read_tiles(model, tower),
        most_tiles=int(most),
    )
    return file.config(ViTModelConfig, text, vision=tower, glue=glue, **file.tokens("image_token"))


def _taps(size: int, smaller: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places of an axis that each of fewer ones reads, and the weight of the second: torch's bilinear
    interpolation with align_corners=False, in float32.
    """
    one = np.float32
    source = np.maximum((np.arange(smaller, dtype=one) + one(0.5)) * (one(size) / one(smaller)) - one(0.5), one(0))
    first = np.floor(source).astype(int)
    return np.stack([first, np.minimum(first + 1, size - 1)]), source - first.astype(one)


def _image(config: ViTModelConfig, height: int, width: int, first: int, newline: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the four numbers [4,E] and weights [E,4] of each of an image's features."""
    tiles, side = config.glue.tiles, config.vision.side
    assert tiles is not None
    _, grid = unpadded_grid(tiles, height, width, first)
    (rows, columns), (below, right) = grid.shape, np.zeros((2, 1), np.float32)
    ratio = math.sqrt(rows * columns / (config.glue.most_tiles * side**2))
    taps = np.broadcast_to(grid, (4, rows, columns))
    if ratio > REDUCED:
        (ys, below), (xs, right) = _taps(rows, int(rows // ratio)), _taps(columns, int(columns // ratio))
        taps = np.stack([grid[np.ix_(y, x)] for y in ys for x in xs])
    down, across = np.broadcast_arrays(below[:, None], right[None])
    weights = np.stack([(1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across])
    weights = np.broadcast_to(weights, taps.shape)

    # A newline after each row; the small whole image before all.
    ends = np.stack([np.full(taps.shape[1], newline)] * 4)[:, :, None]
    alone = np.array([1, 0, 0, 0], np.float32)[:, None, None]
    lines = np.concatenate([taps, ends], axis=2).reshape(4, -1)
    weights = np.concatenate([weights, np.broadcast_to(alone, ends.shape)], axis=2).reshape(4, -1)
    whole = np.stack([np.arange(first, first + side**2)] * 4)
    shares = np.concatenate([np.broadcast_to(alone[:, 0], whole.shape), weights], axis=1)
    return np.concatenate([whole, lines], axis=1), shares.T


def _plan(config: ViTModelConfig, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    pixel_values = arrays.get("pixel_values")
    if pixel_values is None:
        return None
    sizes, (images, most) = tile_sizes(config, arrays), np.shape(pixel_values)[:2]
    size, newline = config.tile_tokens, images * most * config.tile_tokens
    parts = [
        _image(config, height, width, number * most * size, newline)
        for number, (height, width) in enumerate(sizes.tolist())
    ]
    taps = np.concatenate([part for part, _ in parts], axis=1).astype(np.int32)
    weights = np.concatenate([shares for _, shares in parts]).astype(np.float32)
    check_placeholders(input_ids, (config.image_token,), len(weights), pixel_values, np.shape(pixel_values))
    return {**dict(zip(TAPS, taps, strict=True)), "weights": weights}


def _tokens(config: ViTModelConfig, arrays: Mapping[str, Any], index: int, tokenizer: Any) -> list[int]:
    height, width = (int(side) for side in arrays["image_sizes"][index])
    return [config.image_token] * len(_image(config, height, width, 0, 0)[1])


def _fills(config: ViTModelConfig) -> dict[str, int]:
    return dict.fromkeys(TAPS, config.tile_tokens)


FAMILY = Family(
    architecture="LlavaOnevisionForConditionalGeneration",
    read=_read,
    module=OnevisionModel,
    entries=llava_entries,
    vision=Vision(processor("llava_onevision.LlavaOnevision"), process_images, _tokens, _plan, _fills),
    model_type="llava_onevision",
)
