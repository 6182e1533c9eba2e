"""Preprocessing of the plain-ViT families and Kimi-VL: from images to `pixel_values`, with NumPy and Pillow.

Every step rounds as transformers' Pillow processors do (CLIP for LLaVA, LLaVA-NeXT, DeepSeek-VL, GotOcr2 for InternVL,
SmolVLM), so the result is equal to theirs bit for bit. Kimi-VL's follows transformers' Kimi_K25ImageProcessor.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from kvpatch_jax.cache import decoded
from kvpatch_jax.errors import ConfigError, InputError

from ..towers.projectors import best_resolution
from .hd_images import hd_transform, shrink
from .qwen_images import (
    CONFIG_FILE,
    MAX_ASPECT_RATIO,
    ImageConfig,
    ImageSource,
    name_of,
    normalise,
    read_settings,
    resize,
)

CLIP_MEAN, CLIP_STD = ImageConfig.image_mean, ImageConfig.image_std
HALVES = (0.5, 0.5, 0.5)
LONGEST_SIDE = 4096
"""SmolVLM's bound on any resized image."""
_LONGEST = 1 << 14
"""Pixels of the longest side that settings may ask for."""
MOST_TILES = 256
"""Tiles of one image that settings may ask for; releases ask for 40 at most."""
KIMI_SIDE = 512
"""Patches per side that MoonViT's rotary table holds."""


@dataclasses.dataclass(frozen=True)
class PictureConfig:
    """How a family's images become pixels: `pixels` normalises them, `options` is what its processor's file says.

    `options` is JSON, so that the settings can be hashed and written back as they were.
    """

    pixels: ImageConfig
    options: str

    def __getitem__(self, name: str) -> Any:
        """Returns an option of the file.

        Raises:
          ConfigError: it is not there.
        """
        options = json.loads(self.options)
        if options.get(name) is None:
            raise ConfigError(f"{CONFIG_FILE}: got no {name!r}; expected it")
        return options[name]

    def option(self, name: str, default: Any) -> Any:
        """Returns an option of the file, or this where it is absent or null."""
        value = json.loads(self.options).get(name)
        return default if value is None else value

    def side(self, name: str = "size") -> int:
        """Returns a size given as a number, by its (equal) height and width, or by one edge."""
        value = self[name]
        values = list(value.values()) if isinstance(value, Mapping) else [value]
        values = [each for each in values if each is not None]
        if not values or any(each != values[0] for each in values):
            raise ConfigError(f"{CONFIG_FILE}: got {name} {value!r:.80}; expected one length")
        return _pixels(values[0], name)

    def tiles(self, name: str) -> int:
        """Returns a number of tiles.

        Raises:
          ConfigError: it is none, or more than `MOST_TILES`.
        """
        value = self[name]
        if type(value) is not int or not 1 <= value <= MOST_TILES:
            raise ConfigError(f"{CONFIG_FILE}: got {name} {value!r:.80}; expected 1 to {MOST_TILES}")
        return value

    @classmethod
    def reader(
        cls,
        only: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        **defaults: Any,
    ) -> Callable[[str | os.PathLike[str]], "PictureConfig"]:
        """Returns a function that reads a directory's `preprocessor_config.json`.

        It raises ConfigError for an option that `only` has another value for: other ones are not built.

        Args:
          only: options of which one value is built. names: what further options are called here.
          defaults: what absent options mean.
        """

        def read(directory: str | os.PathLike[str]) -> "PictureConfig":
            options = dict(read_settings(directory))
            options |= {ours: options[name] for name, ours in (names or {}).items() if options.get(name) is not None}
            for name, value in (only or {}).items():
                if options.get(name) not in (None, value):
                    raise ConfigError(
                        f"{CONFIG_FILE}: got {name} {options[name]!r}, which is not built; expected {value!r}"
                    )
            return cls.from_dict(defaults | options)

        return read

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "PictureConfig":
        """Reads the JSON of `preprocessor_config.json`.

        Raises:
          ConfigError: a field of the wrong kind.
        """
        names = ("image_mean", "image_std", "rescale_factor", "resample", "do_rescale", "do_normalize")
        fields = {name: options[name] for name in names if options.get(name) is not None}
        return cls(ImageConfig.from_dict(fields), json.dumps(dict(options), sort_keys=True))

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes `preprocessor_config.json`. Returns its path."""
        path = Path(directory) / CONFIG_FILE
        path.write_text(json.dumps(json.loads(self.options), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


def _pixels(value: Any, name: str) -> int:
    """Returns a length of the settings. Raises ConfigError for none, or one that no image is resized to."""
    if type(value) is not int or not 0 < value <= _LONGEST:
        raise ConfigError(f"{CONFIG_FILE}: got {name} {value!r:.80}; expected one length, 1 to {_LONGEST} pixels")
    return value


def read_images(images: Sequence[ImageSource]) -> list[np.ndarray]:
    """Returns the images as arrays.

    Raises:
      InputError: none at all; one that cannot be read, or is more than 200 times longer than wide.
    """
    if not len(images):
        raise InputError("images: got none; expected at least one")

    found = []
    for number, source in enumerate(images):
        name = name_of(source, number)
        found.append(decoded(source, name))
        height, width = found[-1].shape[:2]
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InputError(
                f"{name}: got {height}×{width} pixels; expected sides within a ratio of {MAX_ASPECT_RATIO}"
            )

    return found


def _size(image: np.ndarray) -> tuple[int, int]:
    return image.shape[0], image.shape[1]


def channels_first(image: np.ndarray, config: PictureConfig) -> Float32[np.ndarray, "3 H W"]:
    """Returns a rescaled and normalised image, channels first."""
    return np.ascontiguousarray(normalise(image, config.pixels).transpose(2, 0, 1))


def process_clip(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes an image for LLaVA-1.5: resized to `size`, centre crop. Returns pixel_values [n,3,H,W].

    `do_resize` and `do_center_crop` may leave a step out; with `do_pad`, LLaVA's own processor first pads to a square
    with the mean colour (CLIP's would pad what comes out, all of one size).

    Raises:
      InputError: no images, one that cannot be read, or images that do not come out in one size.
    """
    square = config.option("do_pad", False) and str(config.option("image_processor_type", "")).startswith("Llava")
    out = []
    for image in read_images(images):
        if square:
            image = _padded_square(image, max(image.shape[:2]), config)

        if config.option("do_resize", True):
            target = _both_sides(config["size"])
            if target is None:
                # The shortest edge's length; the other one is cut off, as transformers does.
                (height, width), short = _size(image), config.side()
                long = int(short * max(height, width) / min(height, width))
                target = (long, short) if width <= height else (short, long)
            image = resize(image, *target, config.pixels)

        if config.option("do_center_crop", True):
            crop = _both_sides(config["crop_size"])
            image = _centre(image, *(crop or (config.side("crop_size"),) * 2))
        out.append(channels_first(image, config))

    sizes = {image.shape for image in out}
    if len(sizes) > 1:
        raise InputError(f"images: got sizes {sorted(sizes)} without a centre crop; expected one size")
    return {"pixel_values": np.stack(out)}


def _both_sides(value: Any) -> tuple[int, int] | None:
    """Returns a size that is given as height and width; None of one that is not."""
    if isinstance(value, Mapping) and value.get("height") and value.get("width"):
        return _pixels(value["height"], "height"), _pixels(value["width"], "width")
    return None


def _centre(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns the middle of an image, with black around it where it is smaller."""
    rows, columns = max(height, image.shape[0]), max(width, image.shape[1])
    top, left = -(-(rows - image.shape[0]) // 2), -(-(columns - image.shape[1]) // 2)
    first, across = (image.shape[0] - height) // 2 + top, (image.shape[1] - width) // 2 + left
    canvas = np.zeros((rows, columns, 3), np.uint8)
    canvas[top : top + image.shape[0], left : left + image.shape[1]] = image
    return canvas[first : first + height, across : across + width]


def _padded_square(image: np.ndarray, side: int, config: PictureConfig) -> np.ndarray:
    """Returns an image in the middle of a square of the mean colour."""
    square = np.empty((side, side, 3), np.uint8)
    # Cut off and not rounded, as transformers takes the mean colour.
    square[:] = [int(value * 255) for value in config.pixels.image_mean]
    height, width = image.shape[:2]
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square


def process_deepseek(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-VL: longest side to `size`, padded to a square. Returns pixel_values [n,3,S,S]."""
    out = [channels_first(_deepseek_square(image, config.side(), config), config) for image in read_images(images)]
    return {"pixel_values": np.stack(out)}


def _deepseek_square(image: np.ndarray, side: int, config: PictureConfig) -> np.ndarray:
    """Returns an image with this longest side, padded to a square with the mean colour (about zero once normalised)."""
    scale = side / max(image.shape[:2])
    height, width = (max(round(edge * scale), config["min_size"]) for edge in image.shape[:2])
    return _padded_square(resize(image, height, width, config.pixels), max(height, width), config)


def process_deepseek_hybrid(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for DeepSeek-VL-7B: a large square as for DeepSeek-VL, and a small one made of it.

    Returns pixel_values [n,3,S,S] and high_res_pixel_values [n,3,L,L].
    """
    options = json.loads(config.options)
    parts = ("image_mean", "image_std", "resample")
    large = PictureConfig.from_dict(options | {part: options[f"high_res_{part}"] for part in parts})
    side, out = config.side(), {"pixel_values": list[np.ndarray](), "high_res_pixel_values": list[np.ndarray]()}
    for image in read_images(images):
        square = _deepseek_square(image, config.side("high_res_size"), large)
        out["high_res_pixel_values"].append(channels_first(square, large))
        out["pixel_values"].append(channels_first(resize(square, side, side, config.pixels), config))

    return {name: np.stack(values) for name, values in out.items()}


def cut(image: UInt8[np.ndarray, "H W 3"], side: int) -> list[np.ndarray]:
    """Cuts a resized image into squares, in raster order."""
    places = itertools.product(range(0, image.shape[0], side), range(0, image.shape[1], side))
    return [image[row : row + side, column : column + side] for row, column in places]


def process_llava_next(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for LLaVA-NeXT: the whole image as a square, then tiles of the best resolution, padded.

    Returns pixel_values [n,tiles,3,H,W], padded with zeros where images have fewer tiles, and image_sizes [n,2].
    """
    side, points = config.side("crop_size"), [tuple(point) for point in config["image_grid_pinpoints"]]
    if config.side() != side:
        raise ConfigError(f"{CONFIG_FILE}: got size {config['size']!r}; expected the crop_size, {side}")

    stacks, sizes = [], []
    for image in read_images(images):
        height, width = image.shape[:2]
        rows, columns = best_resolution(height, width, points)
        across, down = columns / width, rows / height

        # The side that fits tightly fills the canvas; the other is rounded up, as transformers does.
        if across < down:
            inner = (min(math.ceil(height * across), rows), columns)
        else:
            inner = (rows, min(math.ceil(width * down), columns))

        canvas = np.zeros((rows, columns, 3), np.uint8)
        top, left = (rows - inner[0]) // 2, (columns - inner[1]) // 2
        canvas[top : top + inner[0], left : left + inner[1]] = resize(image, *inner, config.pixels)
        tiles = [resize(image, side, side, config.pixels), *cut(canvas, side)]
        stacks.append(np.stack([channels_first(tile, config) for tile in tiles]))
        sizes.append((height, width))

    # Images have unequal numbers of tiles; the family's plan leaves those of padding out.
    most = max(len(stack) for stack in stacks)
    padded = [np.pad(stack, ((0, most - len(stack)), *[(0, 0)] * 3)) for stack in stacks]
    return {"pixel_values": np.stack(padded), "image_sizes": np.array(sizes, np.int32)}


def tile_canvas(height: int, width: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Chooses InternVL's (rows, columns) of tiles: the aspect ratio closest to the image's, larger for large images."""
    sides = range(1, most + 1)
    grids = [grid for grid in itertools.product(sides, sides) if fewest <= math.prod(grid) <= most]
    best, least = (1, 1), float("inf")
    # From few tiles to many: of equal ratios a larger grid wins only where the image fills more than half of it.
    for columns, rows in sorted(grids, key=math.prod):
        difference = abs(width / height - columns / rows)
        roomy = difference == least and width * height > 0.5 * side * side * columns * rows
        if difference < least or roomy:
            best, least = (columns, rows), difference
    return best[1], best[0]


def process_internvl(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for InternVL: tiles of the closest aspect ratio, then the whole image if there are several.

    Returns pixel_values [tiles of all images,3,S,S] and num_patches [n].
    """
    side, out, counts = config.side(), [], []
    for image in read_images(images):
        rows, columns = 1, 1
        if config["crop_to_patches"] and config.tiles("max_patches") > 1:
            rows, columns = tile_canvas(*_size(image), side, config.tiles("min_patches"), config.tiles("max_patches"))
        tiles = cut(resize(image, rows * side, columns * side, config.pixels), side)
        # A single tile is the whole image already.
        tiles += [resize(image, side, side, config.pixels)] if len(tiles) > 1 else []
        out += [channels_first(tile, config) for tile in tiles]
        counts.append(len(tiles))

    return {"pixel_values": np.stack(out), "num_patches": np.array(counts, np.int32)}


def process_phi3_v(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for Phi-3-vision: of each the whole, small, then the crops of its HD transform in raster order.

    Returns pixel_values [tiles of all images,3,S,S] and image_sizes [n,2] (height, width) of what the crops make up.
    """
    side, tiles, sizes = config.side("crop_size"), [], []
    for image in read_images(images):
        whole = hd_transform(image, side, config.tiles("num_crops"), config.pixels)
        sizes.append(_size(whole))
        tiles.append(shrink(channels_first(whole, config), side))
        tiles += [channels_first(crop, config) for crop in cut(whole, side)]

    return {"pixel_values": np.stack(tiles), "image_sizes": np.array(sizes, np.int32)}


def process_smolvlm(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for SmolVLM: longest side to `size`, sides to multiples of the tile; tiles, then the whole
    image.

    Returns pixel_values [1,tiles of all images,3,S,S], tile_rows and tile_columns [n] (0 where there is one tile).
    """
    side, out, grids = config.side("max_image_size"), [], []

    def up(edge):
        return math.ceil(edge / side) * side

    for image in read_images(images):
        image = resize(image, *longest_side(*_size(image), config.side()), config.pixels)
        if config["do_image_splitting"]:
            # The longer side goes up to whole tiles, the other by the aspect ratio of before, and up in turn.
            height, width = _size(image)
            if width >= height:
                image = resize(image, up(int(up(width) / (width / height))), up(width), config.pixels)
            else:
                image = resize(image, up(height), up(int(up(height) * (width / height))), config.pixels)
        else:
            image = resize(image, side, side, config.pixels)

        # An image of one tile is that tile: no rows and columns are named, and no smaller one follows.
        tiles, grid = [image], (0, 0)
        if max(image.shape[:2]) > side:
            tiles, grid = cut(image, side), (image.shape[0] // side, image.shape[1] // side)
            tiles.append(resize(image, side, side, config.pixels))

        out += [channels_first(tile, config) for tile in tiles]
        grids.append(grid)

    rows, columns = np.array(grids, np.int32).T
    return {"pixel_values": np.stack(out)[None], "tile_rows": rows, "tile_columns": columns}


def longest_side(height: int, width: int, longest: int) -> tuple[int, int]:
    """Returns SmolVLM's size with this longest side: the other even, and none beyond `LONGEST_SIDE`."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2

    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if max(height, width) > LONGEST_SIDE:
        wide = width >= height
        height, width = (int(LONGEST_SIDE / ratio), LONGEST_SIDE) if wide else (LONGEST_SIDE, int(LONGEST_SIDE * ratio))
    return max(height, 1), max(width, 1)


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


def process_kimi(
    images: Sequence[ImageSource], config: PictureConfig
) -> dict[str, Float32[np.ndarray, "P 3 y x"] | Int32[np.ndarray, "n 3"]]:
    """Processes images for Kimi-VL: shrunk to the patch budget, padded with black. Patches are in raster order.

    Returns pixel_values [P,3,patch,patch] and image_grid_thw [n,3] (1, height, width) in patches.
    """
    patch, merge, out, grids = config["patch_size"], config["merge_kernel_size"], [], []
    merge = merge[0] if isinstance(merge, list | tuple) else merge
    for image in read_images(images):
        inner, (height, width) = kimi_size(*_size(image), patch, merge, config["in_token_limit"])
        # Black before the normalisation, below and to the right: the image's own patches keep their places.
        canvas = np.zeros((height, width, 3), np.uint8)
        canvas[: inner[0], : inner[1]] = resize(image, *inner, config.pixels)
        cells = channels_first(canvas, config).reshape(3, height // patch, patch, width // patch, patch)
        out.append(cells.transpose(1, 3, 0, 2, 4).reshape(-1, 3, patch, patch))
        grids.append((1, height // patch, width // patch))

    return {"pixel_values": np.concatenate(out), "image_grid_thw": np.array(grids, np.int32)}
