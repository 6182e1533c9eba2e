"""Qwen2-VL's and GLM-4V's image preprocessing: from a file, a PIL image or an array to `pixel_values`.

Every step rounds as transformers' `Qwen2VLImageProcessorPil` and `Glm4vImageProcessorPil` do, so the result is equal to
theirs bit for bit: RGB (over white where there is transparency), bicubic resize by Pillow to multiples of patch × merge
within a range of pixels, rescale, normalise, patches in the order of merge blocks with the image repeated along time.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import repeat
from jaxtyping import Array, Float, Float32, Int32, UInt8

from kvpatch_jax.cache import ImageSource, decoded
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from ..checkpoints import read_table

CONFIG_FILE = "preprocessor_config.json"
MAX_ASPECT_RATIO = 200

_COUNTS = ("patch_size", "merge_size", "temporal_patch_size", "resample")
_SWITCHES = ("do_resize", "do_rescale", "do_normalize")
_GLM = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
"""Of GLM-4V's processor, where the file says nothing."""


def read_settings(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a Hugging Face directory's `preprocessor_config.json`.

    Raises:
      ConfigError: the file is absent, or no table in JSON.
    """
    return read_table(Path(directory) / CONFIG_FILE, "the image settings of a Hugging Face directory")


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """How images become patches; the fields of `preprocessor_config.json`.

    Attributes:
      patch_size: pixels per patch side.
      merge_size: patches per merged token side.
      temporal_patch_size: frames per patch; a still image is repeated.
      min_pixels, max_pixels: range of an image's area after resizing.
      image_mean, image_std: per RGB channel, of values rescaled to 0..1.
      rescale_factor: from stored values to 0..1.
      do_resize, do_rescale, do_normalize: steps that can be left out.
      resample: Pillow's number of the filter (3: bicubic).
      image_processor_type: transformers' class. GLM-4V's counts an image's area once for each frame of a patch.
    """

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: int = 3
    image_processor_type: str = "Qwen2VLImageProcessor"

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; expected a positive whole number")
        if self.min_pixels > self.max_pixels:
            raise ConfigError(f"min_pixels: got {self.min_pixels}; expected at most max_pixels, {self.max_pixels}")
        if min(self.image_std) <= 0:
            raise ConfigError(f"image_std: got {self.image_std!r}; expected positive numbers")

    @property
    def factor(self) -> int:
        """Pixels per merged token side: what resized sides are multiples of."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ImageConfig":
        """Reads the JSON of `preprocessor_config.json`; `min_pixels` and `max_pixels` win over `size`'s edges.

        Raises:
          ConfigError: a field of the wrong kind.
        """
        known: dict[str, Any] = {name: fields[name] for name in (*_COUNTS, *_SWITCHES) if name in fields}
        size = fields.get("size") or {}
        if not isinstance(size, Mapping):
            raise ConfigError(f"size: got {size!r:.80}; expected a table of edges")
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            given = [value for value in (fields.get(name), size.get(name), size.get(edge)) if value is not None]
            known |= {name: given[0]} if given else {}

        # By type and not by `isinstance`: true and false are whole numbers to Python.
        for name, value in known.items():
            wanted = bool if name in _SWITCHES else int
            if type(value) is not wanted:
                raise ConfigError(f"{name}: got {value!r}; expected a {wanted.__name__}")

        if "rescale_factor" in fields:
            known["rescale_factor"] = _floats("rescale_factor", [fields["rescale_factor"]])[0]
        for name in ("image_mean", "image_std"):
            if name in fields:
                value = fields[name]
                known[name] = _floats(name, value if isinstance(value, list | tuple) else [value] * 3)
                if len(known[name]) != 3:
                    raise ConfigError(f"{name}: got {value!r}; expected three numbers")

        return cls(**known)

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> "ImageConfig":
        """Reads the settings of a Hugging Face directory.

        Raises:
          ConfigError: the file is absent, not JSON, or holds a field of the wrong kind.
        """
        return cls.from_dict(read_settings(directory))

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes `preprocessor_config.json` as transformers reads it. Returns its path."""
        fields: dict[str, Any] = dataclasses.asdict(self)
        fields |= {"size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}
        fields |= {"do_convert_rgb": True}
        path = Path(directory) / CONFIG_FILE
        path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


def _floats(name: str, values: Sequence[Any]) -> tuple[float, ...]:
    if not all(isinstance(value, int | float) for value in values):
        raise ConfigError(f"{name}: got {values!r}; expected numbers")
    return tuple(float(value) for value in values)


def glm_image_config(directory: str | os.PathLike[str]) -> ImageConfig:
    """Reads GLM-4V's settings of a Hugging Face directory.

    Raises:
      ConfigError: the file is absent, not JSON, or holds a field of the wrong kind.
    """
    settings = _GLM | read_settings(directory)
    kind = str(settings.get("image_processor_type", ""))
    kind = kind if kind.startswith("Glm") else "Glm4vImageProcessor"
    return dataclasses.replace(ImageConfig.from_dict(settings), image_processor_type=kind)


def preprocess_images(
    images: Sequence[ImageSource], config: ImageConfig
) -> dict[str, Float32[np.ndarray, "patches features"] | Int32[np.ndarray, "images 3"]]:
    """Turns images into the tower's input.

    Args:
      images: each a path of a file Pillow reads, a PIL image, or a uint8 array [H, W], [H, W, 1], [H, W, 3] or
        [H, W, 4]. A file's EXIF orientation is applied; a PIL image is taken as it is.
      config: settings.

    Returns:
      `pixel_values` float32 [patches of all images, channels · time · patch · patch] and `image_grid_thw` int32
      [images, 3]: (time, height, width) in patches.

    Raises:
      InputError: an image that cannot be read, is empty, or is more than 200 times longer than wide. It names the
        image.
    """
    # An array without rows in front, so that no images are no rows and no error.
    pixels, grids = [np.zeros((0, 3 * config.temporal_patch_size * config.patch_size**2), np.float32)], []
    for number, source in enumerate(images):
        name = name_of(source, number)
        image = decoded(source, name)
        height, width = image.shape[:2]
        if config.do_resize:
            image = resize(image, *smart_resize(height, width, config, name), config)
        elif height % config.factor or width % config.factor:
            raise InputError(
                f"{name}: got {height}×{width} pixels; expected multiples of {config.factor} where images are not "
                "resized"
            )
        pixels.append(patchify(normalise(image, config)[None], config)[0])
        grids.append((1, image.shape[0] // config.patch_size, image.shape[1] // config.patch_size))
    return {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.array(grids, np.int32).reshape(-1, 3)}


def patchify(images: Float[Array | np.ndarray, "B H W 3"], config: ImageConfig) -> Float[Any, "B patches features"]:
    """Cuts normalised images of one size into patches; a pure function of NumPy or JAX arrays.

    Patches come in raster order of merge blocks, the patches of a block together; a patch's features are channel, time,
    row, column, with the image repeated along time. H and W must be multiples of patch × merge.

    Raises:
      InputError: sides that are not such multiples.
    """
    height, width = images.shape[1:3]
    if height % config.factor or width % config.factor:
        raise InputError(f"images: got {height}×{width} pixels; expected multiples of {config.factor} (patch × merge)")

    return repeat(
        images,
        "B (block_row row y) (block_column column x) C -> B (block_row block_column row column) (C time y x)",
        row=config.merge_size,
        column=config.merge_size,
        y=config.patch_size,
        x=config.patch_size,
        time=config.temporal_patch_size,
    )


def normalise(images: UInt8[np.ndarray, "*batch H W 3"], config: ImageConfig) -> Float32[np.ndarray, "*batch H W 3"]:
    """Rescales and normalises stored values [..., H, W, 3]: one table look-up per value, rounded as transformers
    does.
    """
    # transformers rescales in float64 and rounds, then subtracts and divides in float32.
    values = np.arange(256, dtype=np.float64)
    table = (values * config.rescale_factor if config.do_rescale else values).astype(np.float32)[:, None]
    table = np.repeat(table, 3, axis=1)
    if config.do_normalize:
        table = (table - np.array(config.image_mean, np.float32)) / np.array(config.image_std, np.float32)
    return table[images, np.arange(3)]


def smart_resize(
    height: int,
    width: int,
    config: ImageConfig,
    name: str = "image",
    most: int | None = None,
    frames: int | None = None,
) -> tuple[int, int]:
    """Returns size to resize to: multiples of patch × merge, area within [min_pixels, max_pixels], aspect about kept.

    `name` is what errors call the image; `most` takes the place of `max_pixels`; `frames` are those of a video, all of
    which GLM-4V counts.

    Raises:
      InputError: an empty image, or one more than 200 times longer than wide.
    """
    if min(height, width) < 1:
        raise InputError(f"{name}: got {height}×{width} pixels; expected one that is not empty")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise InputError(f"{name}: got {height}×{width} pixels; expected sides within a ratio of {MAX_ASPECT_RATIO}")

    # GLM-4V makes small images larger first.
    factor, glm, temporal = config.factor, config.image_processor_type.startswith("Glm"), config.temporal_patch_size
    shown = max(frames or temporal, temporal) if glm else 1
    counted = round(shown / temporal) * temporal if glm else 1
    if glm and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)

    # Sides are rounded first and scaled only where the area is out of bounds, as transformers does.
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    most = config.max_pixels if most is None else most
    if counted * rows * columns > most:
        scale = math.sqrt((shown * height * width) / most)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif counted * rows * columns < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (shown * height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))

    return rows, columns


def resize(image: UInt8[np.ndarray, "H W 3"], height: int, width: int, config: ImageConfig) -> np.ndarray:
    """Resizes with the settings' Pillow filter; an image of this size stays as it is, whether there is Pillow or not.

    Raises:
      MissingExtraError: another size where Pillow is not installed.
    """
    if image.shape[:2] == (height, width):
        return image
    Image = require("PIL.Image", "Pillow")
    return np.array(Image.fromarray(image).resize((width, height), Image.Resampling(config.resample)))


def name_of(source: ImageSource, number: int) -> str:
    """Returns what errors call an image: its path, or its number."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else f"image {number}"
