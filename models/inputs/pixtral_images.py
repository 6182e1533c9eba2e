"""Pixtral's image preprocessing: from images to patches of their own sizes, with NumPy and Pillow.

Every step rounds as transformers' `PixtralImageProcessorPil` does, so that patches are those of its pixels bit for bit.
transformers pads the images of a prompt to one size; here each is cut into patches, which stand in one row.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from einops import rearrange
from jaxtyping import Float32, Int32

from kvpatch_jax.errors import ConfigError

from ..checkpoints import read_table
from .images import CLIP_MEAN, CLIP_STD, PictureConfig, read_images
from .qwen_images import CONFIG_FILE, ImageSource, normalise, resize

MERGING = "mistral3"
"""`model_type` of the family that merges patches where its configuration does not say so."""

_read = PictureConfig.reader(
    only={"do_resize": True, "do_center_crop": False},
    image_mean=CLIP_MEAN,
    image_std=CLIP_STD,
    resample=3,
    size={"longest_edge": 1024},
)


def pixtral_settings(directory: str | os.PathLike[str]) -> PictureConfig:
    """Reads a directory's `preprocessor_config.json`, and from its `config.json` how many pixels a token shows.

    The processor's own files may leave the latter out, or count it without merging.

    Raises:
      ConfigError: a file that is not JSON, a field of the wrong kind, or a step that is not built.
    """
    settings, model = _read(directory), read_table(Path(directory) / "config.json")
    vision = model.get("vision_config")
    patch = vision.get("patch_size", 16) if isinstance(vision, Mapping) else 16
    merge = model.get("spatial_merge_size", 2 if model.get("model_type") == MERGING else 1)
    sides = {"patch_size": patch[0] if isinstance(patch, list) and patch else patch, "spatial_merge_size": merge}
    for name, side in sides.items():
        if type(side) is not int or side < 1:
            raise ConfigError(f"{CONFIG_FILE}: got {name} {side!r}; expected a positive whole number")
    return dataclasses.replace(settings, options=json.dumps(json.loads(settings.options) | sides, sort_keys=True))


def process_pixtral(
    images: Sequence[ImageSource], config: PictureConfig
) -> dict[str, Float32[np.ndarray, "P 3 y x"] | Int32[np.ndarray, "n 2"]]:
    """Shrinks images to the longest edge, and stretches them to whole tokens.

    Returns:
      pixel_values [P,3,patch,patch], patches of all images in raster order, and image_sizes [n,2], (height, width) in
      pixels.

    Raises:
      InputError: no images, one that cannot be read, or is more than 200 times longer than wide.
    """
    patch, most, out, sizes = config["patch_size"], config.side(), [], []
    step = patch * config["spatial_merge_size"]
    for image in read_images(images):
        ratio = max(image.shape[0] / most, image.shape[1] / most, 1)
        height, width = (-(-max(math.floor(edge / ratio), 1) // step) * step for edge in image.shape[:2])
        pixels = normalise(resize(image, height, width, config.pixels), config.pixels)
        out.append(rearrange(pixels, "(row y) (column x) C -> (row column) C y x", y=patch, x=patch))
        sizes.append((height, width))
    return {"pixel_values": np.concatenate(out), "image_sizes": np.array(sizes, np.int32)}
