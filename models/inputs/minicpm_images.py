"""MiniCPM-V's images: the whole, small, and slices of it at full size, each of its own number of patches.

Every step rounds as OpenBMB's `image_processing_minicpmv.py` does with Pillow.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int32

from .images import HALVES, ImageSource, PictureConfig, read_images
from .qwen_images import normalise, resize


def sliced_grid(width: int, height: int, side: int, most: int) -> tuple[int, int] | None:
    """Returns the (columns, rows) into which an image is cut; None for one that fits a square of `side` pixels.

    Of grids of about as many slices as such squares cover the image, at most `most`, that of the closest aspect ratio.
    """
    ratio = math.log(width / height)
    count = min(math.ceil(width * height / (side * side)), most)
    if count <= 1:
        return None
    best, least = (1, 1), float("inf")
    for slices in (count - 1, count, count + 1):
        if slices == 1 or slices > most:
            continue
        for columns in range(1, slices + 1):
            error = abs(ratio - math.log(columns / (slices // columns)))
            if slices % columns == 0 and error < least:
                best, least = (columns, slices // columns), error
    return best


def _whole(length: int | float, unit: int) -> int:
    """Returns a length rounded to a multiple of a unit, at least one."""
    return max(round(length / unit) * unit, unit)


def fitted_size(width: int | float, height: int | float, side: int, patch: int, *, upscale: bool) -> tuple[int, int]:
    """Returns the (width, height) in whole patches of about the area of a square, and of the image's aspect ratio.

    Args:
      side: of the square, in pixels. upscale: whether a smaller image grows; else it keeps its size but for whole
        patches.
    """
    if upscale or width * height > side * side:
        ratio = width / height
        # Cut off twice, as the authors do: the width follows from the height that was cut off.
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return _whole(width, patch), _whole(height, patch)


def process_minicpmv(
    images: Sequence[ImageSource], config: PictureConfig
) -> dict[str, Float32[np.ndarray, "P 3 y x"] | Int32[np.ndarray, "n 2"]]:
    """Processes images for MiniCPM-V: of each the whole in about one square's area, then its slices in raster order.

    Returns pixel_values [P,3,patch,patch] in raster order slice by slice, tgt_sizes [slices,2] (rows and columns of
    patches) and slice_grids [images,2] (columns and rows of slices, 0 where there is the whole alone).
    """
    side, patch, out, sizes, grids = config["scale_resolution"], config["patch_size"], [], [], []
    for image in read_images(images):
        height, width = image.shape[:2]
        grid = sliced_grid(width, height, side, config["max_slice_nums"])
        wide, tall = fitted_size(width, height, side, patch, upscale=grid is None)
        pieces = [resize(image, tall, wide, config.pixels)]
        if grid is not None:
            columns, rows = grid
            # A slice's size is found as the whole's is, of an image that the grid divides.
            inner = (_whole(width, columns) / columns, _whole(height, rows) / rows)
            wide, tall = fitted_size(*inner, side, patch, upscale=True)
            canvas = resize(image, tall * rows, wide * columns, config.pixels)
            pieces += [
                canvas[top : top + tall, left : left + wide]
                for top in range(0, tall * rows, tall)
                for left in range(0, wide * columns, wide)
            ]

        for piece in pieces:
            across = piece.shape[0] // patch, piece.shape[1] // patch
            cells = normalise(piece, config.pixels).reshape(across[0], patch, across[1], patch, 3)
            out.append(cells.transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch))
            sizes.append(across)
        grids.append(grid or (0, 0))

    return {
        "pixel_values": np.concatenate(out),
        "tgt_sizes": np.array(sizes, np.int32),
        "slice_grids": np.array(grids, np.int32),
    }


minicpmv_settings = PictureConfig.reader(
    only={
        "slice_mode": True,
        "use_image_id": True,
        "im_start": "<image>",
        "im_end": "</image>",
        "slice_start": "<slice>",
        "slice_end": "</slice>",
        "unk": "<unk>",
        "im_id_start": "<image_id>",
        "im_id_end": "</image_id>",
    },
    names={"norm_mean": "image_mean", "norm_std": "image_std"},
    image_mean=HALVES,
    image_std=HALVES,
    resample=3,
    max_slice_nums=9,
    scale_resolution=448,
    patch_size=14,
)
