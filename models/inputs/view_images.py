"""DeepSeek-OCR-2's and DeepSeek-VL2's pixels: of each image a padded square view of the whole, and square tiles of it.

Every step rounds as transformers' Pillow processor of DeepSeek-OCR-2, or as the processor of DeepSeek-VL2's authors.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from ..towers.projectors import best_resolution
from .images import PictureConfig, channels_first, cut, read_images, tile_canvas
from .qwen_images import ImageSource, resize

TILES = "pixel_values_local"
COUNTS = "num_local_patches"
GRIDS = "tile_grids"
MOST_TILED = 2
"""Images of which DeepSeek-VL2 makes as many tiles as suit them; of more it makes one each."""


def process_views(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-OCR-2: the whole on grey, and tiles of the closest aspect ratio.

    Returns pixel_values [n,3,S,S], num_local_patches [n] and, where there are tiles, pixel_values_local [tiles,3,s,s].
    """
    tiled = config["crop_to_patches"]
    tile = config["tile_size"]
    side = config.side() if tiled else tile
    views, tiles, counts = [], [], []
    for image in read_images(images):
        views.append(channels_first(_padded(image, (side, side), config, False), config))
        (height, width), (rows, columns) = image.shape[:2], (0, 0)
        if tiled and max(height, width) > tile:
            rows, columns = tile_canvas(height, width, tile, config["min_patches"], config["max_patches"])
            tiles += cut(resize(image, rows * tile, columns * tile, config.pixels), tile)
        counts.append(rows * columns)
    out = {"pixel_values": np.stack(views), COUNTS: np.array(counts, np.int32)}
    return out | ({TILES: np.stack([channels_first(each, config) for each in tiles])} if tiles else {})


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
