"""DeepSeek-OCR's pixels: of each image a padded square view of the whole and, where it is large, square tiles of it.

Every step rounds as transformers' Pillow processor of DeepSeek-OCR-2, or as the `infer` of DeepSeek-OCR's own code.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from .images import PictureConfig, channels_first, cut, read_images, tile_canvas
from .qwen_images import ImageSource, resize

TILES = "pixel_values_local"
COUNTS = "num_local_patches"
GRIDS = "tile_grids"
SQUASHED = 640
"""Sides up to this one are not padded to where DeepSeek-OCR makes no tiles: the image is squashed."""


def process_views(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-OCR-2: the whole on grey, and tiles of the closest aspect ratio.

    Returns pixel_values [n,3,S,S], num_local_patches [n] and, where there are tiles, pixel_values_local [tiles,3,s,s].
    """
    tiled = config["crop_to_patches"]
    side = config.side() if tiled else config["tile_size"]
    out = _tiles(images, config, [_padded(image, side, config, False) for image in read_images(images)])
    grids = out.pop(GRIDS)
    return out | {COUNTS: grids.prod(axis=1, dtype=np.int32)}


def process_ocr(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-OCR: as `process_views`, with tile_grids [n,2] (rows and columns of tiles, 0 for
    none) in place of the counts.
    """
    side, views = config.side(), []
    for image in read_images(images):
        if config["crop_to_patches"] or side > SQUASHED:
            views.append(_padded(image, side, config, True))
        else:
            views.append(resize(image, side, side, config.pixels))
    return _tiles(images, config, views)


def _tiles(images: Sequence[ImageSource], config: PictureConfig, views: list[np.ndarray]) -> dict[str, Any]:
    side, tiles, grids = config["tile_size"], [], []
    for image in read_images(images):
        (height, width), (rows, columns) = image.shape[:2], (0, 0)
        if config["crop_to_patches"] and max(height, width) > side:
            rows, columns = tile_canvas(height, width, side, config["min_patches"], config["max_patches"])
            tiles += cut(resize(image, rows * side, columns * side, config.pixels), side)
        grids.append((rows, columns))
    out = {
        "pixel_values": np.stack([channels_first(view, config) for view in views]),
        GRIDS: np.array(grids, np.int32),
    }
    return out | ({TILES: np.stack([channels_first(tile, config) for tile in tiles])} if tiles else {})


def _padded(image: np.ndarray, side: int, config: PictureConfig, pillow: bool) -> UInt8[np.ndarray, "S S 3"]:
    """Returns an image with this longest side in the middle of a square; `pillow` says that it is rounded as
    `PIL.ImageOps.pad` does.
    """
    longest, scale = max(image.shape[:2]), side / max(image.shape[:2])
    shares = [edge / longest * side if pillow else edge * scale for edge in image.shape[:2]]
    height, width = (max(round(share), 1) for share in shares)
    top, left = (round((side - size) * 0.5) if pillow else (side - size) // 2 for size in (height, width))
    square = np.empty((side, side, 3), np.uint8)
    square[:] = config["background_color"]
    square[top : top + height, left : left + width] = resize(image, height, width, config.pixels)
    return square
