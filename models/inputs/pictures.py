"""Images of Kimi, Phi-3-vision and DeepSeek-VL2, for which transformers has no processor that runs without PyTorch.

Each rounds as the processor of the model's authors, or for Kimi as transformers' Kimi_K25ImageProcessor.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from kvpatch_jax.cache import ImageSource
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.optional_packages import require

from ..towers.common import axis_taps
from ..towers.projectors import best_resolution
from .processors import Settings, read_images

HALVES = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TILES, COUNTS, GRIDS = "pixel_values_local", "num_local_patches", "tile_grids"
"""Of images that are a view of the whole and tiles: arrays of the tiles, their number, their rows and columns."""
MOST_TILED = 2
"""Images of which DeepSeek-VL2 makes as many tiles as suit them; of more it makes one each."""
MOST_TILES = 256
"""Tiles of one image that settings may ask for; releases ask for 40 at most."""
KIMI_SIDE = 512
"""Patches per side that MoonViT's rotary table holds."""


def resize(image: UInt8[np.ndarray, "H W 3"], height: int, width: int, resample: int) -> np.ndarray:
    """Resizes with one of Pillow's filters, by its number."""
    if image.shape[:2] == (height, width):
        return image
    Image = require("PIL.Image", "Pillow")
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling(resample)))


def channels_first(image: UInt8[np.ndarray, "*batch H W 3"], settings: Settings) -> Float32[np.ndarray, "*batch 3 H W"]:
    """Returns rescaled and normalised images: one table look-up per value, rounded as transformers does."""
    # transformers rescales in float64 and rounds, then subtracts and divides in float32.
    table = np.arange(256, dtype=np.float64) * (settings["rescale_factor"] or 1 / 255)
    table = np.repeat(table.astype(np.float32)[:, None], 3, axis=1)
    if settings["do_normalize"] is not False:
        table = (table - np.array(settings["image_mean"], np.float32)) / np.array(settings["image_std"], np.float32)
    return np.ascontiguousarray(np.moveaxis(table[image, np.arange(3)], -1, -3))


def cut(image: UInt8[np.ndarray, "H W 3"], side: int) -> list[np.ndarray]:
    """Cuts a resized image into squares, in raster order."""
    places = itertools.product(range(0, image.shape[0], side), range(0, image.shape[1], side))
    return [image[row : row + side, column : column + side] for row, column in places]


def kimi_size(height: int, width: int, patch: int, merge: int, limit: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns Kimi's size to resize to (never up; at most `limit` patches, 512 a side) and to pad that to, (height,
    width).
    """
    patches = max(1.0, height // patch) * max(1.0, width // patch)
    bound = KIMI_SIDE * patch
    scale = min(1.0, math.sqrt(limit / patches), bound / height, bound / width)
    rows, columns = (min(max(1, int(edge * scale)), bound) for edge in (height, width))

    def up(edge):
        return -(-edge // (merge * patch)) * merge * patch

    return (rows, columns), (up(rows), up(columns))


def kimi_patches(frames: Float32[np.ndarray, "N 3 H W"], patch: int) -> Float32[np.ndarray, "P 3 y x"]:
    """Cuts images of one size into patches, image by image in raster order."""
    count, _, height, width = frames.shape
    cells = frames.reshape(count, 3, height // patch, patch, width // patch, patch)
    return cells.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3, patch, patch)


def process_kimi(images: Sequence[ImageSource], settings: Settings) -> dict[str, np.ndarray]:
    """Processes images for Kimi-VL: shrunk to the patch budget, padded with black. Patches are in raster order.

    Returns pixel_values [P,3,patch,patch] and image_grid_thw [n,3] (1, height, width) in patches.
    """
    patch, merge, out, grids = settings["patch_size"], settings["merge_kernel_size"], [], []
    for image in read_images(images):
        tall, wide = image.shape[:2]
        inner, (height, width) = kimi_size(tall, wide, patch, merge[0], settings["in_token_limit"])
        # Black before the normalisation, below and to the right: the image's own patches keep their places.
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[: inner[0], : inner[1]] = resize(image, inner[0], inner[1], settings["resample"])
        out.append(kimi_patches(channels_first(canvas, settings)[None], patch))
        grids.append((1, height // patch, width // patch))

    return {"pixel_values": np.concatenate(out), "image_grid_thw": np.array(grids, np.int32)}


def process_phi3_v(images: Sequence[ImageSource], settings: Settings) -> dict[str, np.ndarray]:
    """Processes images for Phi-3-vision: of each the whole, small, then the crops of its HD transform in raster order.

    Returns pixel_values [tiles of all images,3,S,S] and image_sizes [n,2] (height, width) of what the crops make up.
    """
    side, crops, tiles, sizes = settings.length("crop_size"), settings["num_crops"], [], []
    if crops > MOST_TILES:
        raise ConfigError(f"num_crops: got {crops}; expected at most {MOST_TILES}")
    for image in read_images(images):
        whole = hd_transform(image, side, crops, settings["resample"])
        sizes.append(whole.shape[:2])
        tiles.append(_shrink(channels_first(whole, settings), side))
        tiles += [channels_first(crop, settings) for crop in cut(whole, side)]

    return {"pixel_values": np.stack(tiles), "image_sizes": np.array(sizes, np.int32)}


def hd_transform(
    image: UInt8[np.ndarray, "H W 3"], side: int, crops: int, resample: int
) -> UInt8[np.ndarray, "H2 W2 3"]:
    """Resizes an image to a whole number of crops along its longer side, and pads the shorter one with white to such.

    Args:
      side: pixels of a crop's side. crops: how many there are at most.
    """
    # A tall image lies down meanwhile: the order of the two passes of a resize decides how it rounds.
    tall = image.shape[1] < image.shape[0]
    if tall:
        image = np.ascontiguousarray(image.transpose(1, 0, 2))

    ratio, scale = image.shape[1] / image.shape[0], 1
    while scale * math.ceil(scale / ratio) <= crops:
        scale += 1
    wide = (scale - 1) * side
    image = resize(image, max(int(wide / ratio), 1), wide, resample)

    room = -image.shape[0] % side
    padded = np.pad(image, ((room // 2, room - room // 2), (0, 0), (0, 0)), constant_values=255)
    return padded.transpose(1, 0, 2) if tall else padded


def _shrink(image: Float32[np.ndarray, "3 H W"], side: int) -> Float32[np.ndarray, "3 S S"]:
    """Returns a normalised image as a square: torch's bicubic interpolation, which reads 4×4 pixels for each one
    however much it shrinks.
    """
    places = np.arange(side)
    for axis in (2, 1):
        taps, weights = axis_taps(places, side, image.shape[axis], "bicubic")
        shape = [1, 1, 1]
        shape[axis] = side
        # Tap by tap in float32, as torch sums them.
        total = np.zeros((), np.float32)
        for tap in range(taps.shape[1]):
            total = total + np.take(image, taps[:, tap], axis=axis) * weights[:, tap].reshape(shape)
        image = total
    return image


def process_vl2(images: Sequence[ImageSource], settings: Settings) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-VL2: the whole, and the tiles of the best of `candidate_resolutions`, both padded.

    Returns pixel_values [n,3,S,S], pixel_values_local [tiles,3,S,S] and tile_grids [n,2] (rows and columns of tiles).
    """
    side, grids = settings.length("size"), []
    pixels: dict[str, Any] = {"pixel_values": [], TILES: []}
    points = [(height, width) for width, height in settings["candidate_resolutions"]]
    for image in read_images(images):
        pixels["pixel_values"].append(_padded(image, side, side, settings))
        many = len(images) > MOST_TILED
        rows, columns = (side, side) if many else best_resolution(image.shape[0], image.shape[1], points)
        pixels[TILES] += cut(_padded(image, rows, columns, settings), side)
        grids.append((rows // side, columns // side))
    out = {name: channels_first(np.stack(parts), settings) for name, parts in pixels.items()}
    return out | {GRIDS: np.array(grids, np.int32)}


def _padded(image: np.ndarray, rows: int, columns: int, settings: Settings) -> UInt8[np.ndarray, "H W 3"]:
    """Returns an image as `PIL.ImageOps.pad` does: as large as fits, in the middle of the mean colour."""
    Image, ops = require("PIL.Image", "Pillow"), require("PIL.ImageOps", "Pillow")
    # Cut off and not rounded, as the authors take the mean colour.
    colour = tuple(int(value * 255) for value in settings["image_mean"])
    method = Image.Resampling(settings["resample"])
    return np.array(ops.pad(Image.fromarray(image), (columns, rows), method=method, color=colour))
