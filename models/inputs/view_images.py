"""DeepSeek-OCR's and DeepSeek-VL2's pixels: of each image a padded square view of the whole, and square tiles of it.

Every step rounds as transformers' Pillow processor of DeepSeek-OCR-2, as the `infer` of DeepSeek-OCR's own code, or as
the processor of DeepSeek-VL2's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from ..towers.projectors import best_resolution
from .images import PictureConfig, channels_first, cut, read_images, tile_canvas
from .qwen_images import ImageSource, resize

TILES = "pixel_values_local"
COUNTS = "num_local_patches"
GRIDS = "tile_grids"
SQUASHED = 640
"""Sides up to this one are not padded to where DeepSeek-OCR makes no tiles: the image is squashed."""
MOST_TILED = 2
"""Images of which DeepSeek-VL2 makes as many tiles as suit them; of more it makes one each."""


def process_views(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-OCR-2: the whole on grey, and tiles of the closest aspect ratio.

    Returns pixel_values [n,3,S,S], num_local_patches [n] and, where there are tiles, pixel_values_local [tiles,3,s,s].
    """
    tiled = config["crop_to_patches"]
    side = config.side() if tiled else config["tile_size"]
    out = _tiles(images, config, [_padded(image, (side, side), config, False) for image in read_images(images)])
    grids = out.pop(GRIDS)
    return out | {COUNTS: grids.prod(axis=1, dtype=np.int32)}


def process_ocr(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-OCR: as `process_views`, with tile_grids [n,2] (rows and columns of tiles, 0 for
    none) in place of the counts.
    """
    side, views = config.side(), []
    for image in read_images(images):
        if config["crop_to_patches"] or side > SQUASHED:
            views.append(_padded(image, (side, side), config, True))
        else:
            views.append(resize(image, side, side, config.pixels))
    return _tiles(images, config, views)


def process_vl2(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-VL2: the whole, and the tiles of the best of `candidate_resolutions`, both padded.

    Returns pixel_values [n,3,S,S], pixel_values_local [tiles,3,S,S] and tile_grids [n,2] (rows and columns of tiles).
    """
    side, views, tiles, grids = config.side(), [], [], []
    points = [(height, width) for width, height in config["candidate_resolutions"]]
    for image in read_images(images):
        views.append(_padded(image, (side, side), config, True))
        height, width = image.shape[:2]
        rows, columns = best_resolution(height, width, points) if len(images) <= MOST_TILED else (side, side)
        tiles += cut(_padded(image, (rows, columns), config, True), side)
        grids.append((rows // side, columns // side))
    pixels = {"pixel_values": views, TILES: tiles}
    out = {name: np.stack([channels_first(each, config) for each in parts]) for name, parts in pixels.items()}
    return out | {GRIDS: np.array(grids, np.int32)}


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


def _padded(
    image: np.ndarray, size: tuple[int, int], config: PictureConfig, pillow: bool
) -> UInt8[np.ndarray, "H W 3"]:
    """Returns an image as large as fits into this height and width, in the middle of them; `pillow` says that it is
    rounded as `PIL.ImageOps.pad` does.
    """
    (tall, wide), (rows, columns) = image.shape[:2], size
    if not pillow:
        scale = min(rows / tall, columns / wide)
        height, width = (max(round(edge * scale), 1) for edge in (tall, wide))
        top, left = (rows - height) // 2, (columns - width) // 2
    else:
        height, width = size
        if wide / tall > columns / rows:
            height = max(round(tall / wide * columns), 1)
        elif wide / tall < columns / rows:
            width = max(round(wide / tall * rows), 1)
        top, left = round((rows - height) * 0.5), round((columns - width) * 0.5)
    canvas = np.empty((rows, columns, 3), np.uint8)
    canvas[:] = config["background_color"]
    canvas[top : top + height, left : left + width] = resize(image, height, width, config.pixels)
    return canvas
