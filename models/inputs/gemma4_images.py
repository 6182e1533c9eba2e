"""Gemma 4's images and videos: resized to a budget of tokens, cut into patches, with each patch's place.

Sources: transformers' Gemma4ImageProcessorPil and Gemma4VideoProcessor, whose pixels ours equal bit for bit.
"""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from einops import rearrange
from jaxtyping import Float32

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import ConfigError, InputError

from ..checkpoints import read_table
from .family_videos import sample_evenly
from .images import PictureConfig, read_images
from .qwen_images import CONFIG_FILE, ImageSource, normalise, read_settings, resize
from .resampling import resize_frames
from .video_frames import PROCESSOR_FILE, VideoConfig, clips_of, normalise_frames

BUDGETS = (70, 140, 280, 560, 1120)
"""Tokens that an image, or a frame, may become."""
SIZES = {"patch_size": 16, "pooling_kernel_size": 3}
_DEFAULTS = {"resample": 3, "do_normalize": False, "image_mean": (0.0,) * 3, "image_std": (1.0,) * 3, **SIZES}

read_video_settings = VideoConfig.reader(
    image_mean=(0.0,) * 3, image_std=(1.0,) * 3, resample=3, num_frames=32, max_soft_tokens=70, pooling_kernel_size=3,
    patch_size=16,
)  # fmt: skip


def gemma4_image_settings(directory: str | os.PathLike[str]) -> PictureConfig:
    """Reads a directory's image settings: from `processor_config.json` where it has them, else from
    `preprocessor_config.json`.

    Raises:
      ConfigError: no settings, or one of the wrong kind.
    """
    found = read_table(Path(directory) / PROCESSOR_FILE).get("image_processor")
    options = found if isinstance(found, Mapping) else read_settings(directory)
    options = (
        _DEFAULTS | {"max_soft_tokens": 280} | {name: value for name, value in options.items() if value is not None}
    )
    for name in ("max_soft_tokens", *SIZES):
        if type(options[name]) is not int or options[name] < 1:
            raise ConfigError(f"{CONFIG_FILE}: got {name} {options[name]!r}; expected a positive whole number")
    return PictureConfig.from_dict(options)


def budget_size(size: Sequence[int], patch: int, pool: int, tokens: int) -> tuple[int, int]:
    """Returns the largest (height, width) of about a size's aspect, a whole number of tokens on each side, `tokens` in
    all at most.

    Raises:
      ConfigError: a budget that is none of `BUDGETS`. InputError: an image of which nothing would be left.
    """
    if tokens not in BUDGETS:
        raise ConfigError(f"max_soft_tokens: got {tokens}; expected one of {BUDGETS}")
    step, (height, width) = pool * patch, size
    factor = math.sqrt(tokens * pool**2 * patch**2 / (height * width))
    rows, columns = (math.floor(factor * side / step) for side in (height, width))
    if rows == 0:
        rows, columns = 1, min(width // height, tokens)
    elif columns == 0:
        rows, columns = min(height // width, tokens), 1
    if not 0 < rows * columns <= tokens:
        raise InputError(f"image: got {height}×{width} pixels; expected a size that {tokens} tokens hold")
    return rows * step, columns * step


def _patches(images: Float32[np.ndarray, "n H W 3"], patch: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns patches [n, most, 3·patch²] in raster order, zeros behind them, and places (column, row), −1 there."""
    found = rearrange(images, "n (row y) (column x) C -> n (row column) (y x C)", y=patch, x=patch)
    rows, columns = (side // patch for side in images.shape[1:3])
    places = np.stack([np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns)], axis=1)
    room = ((0, 0), (0, most - found.shape[1]), (0, 0))
    places = np.repeat(places[None], len(images), axis=0).astype(np.int32)
    return np.pad(found, room), np.pad(places, room, constant_values=-1)


def process_gemma4(images: Sequence[ImageSource], config: PictureConfig) -> dict[str, np.ndarray]:
    """Processes images for Gemma 4.

    Returns:
      `pixel_values` float32 [n, patches, 3·patch²], as many patches as the budget has, and `image_position_ids` int32
      [n, patches, 2], each patch's column and row; zeros and −1 behind an image's own.

    Raises:
      InputError: no images, one that cannot be read, or one that the budget has no room for.
    """
    patch, pool, tokens = config["patch_size"], config["pooling_kernel_size"], config["max_soft_tokens"]
    found = []
    for image in read_images(images):
        if config.option("do_resize", True):
            image = resize(image, *budget_size(image.shape[:2], patch, pool, tokens), config.pixels)
        elif image.shape[0] % (patch * pool) or image.shape[1] % (patch * pool):
            raise InputError(
                f"image: got {image.shape[:2]} pixels without resizing; expected multiples of {patch * pool}"
            )
        found.append(_patches(normalise(image, config.pixels)[None], patch, tokens * pool**2))
    pixels, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {"pixel_values": pixels, "image_position_ids": places}


def process_gemma4_videos(videos: Sequence[Video], config: VideoConfig) -> dict[str, np.ndarray]:
    """Processes videos for Gemma 4: each frame as an image of a smaller budget.

    Returns:
      `pixel_values_videos` float32 [frames, patches, 3·patch²], `video_position_ids` int32 [frames, patches, 2],
      `num_frames_per_video` int32 [videos] and `video_timestamps` float64 [frames], in seconds.

    Raises:
      InputError: as `read_clip`, or frames that the budget has no room for.
    """
    patch, pool, tokens = (config.option(name) for name in ("patch_size", "pooling_kernel_size", "max_soft_tokens"))
    clips, found = clips_of(videos, functools.partial(sample_evenly, config=config)), []
    for clip in clips:
        frames = clip.frames
        if config.pixels.do_resize:
            size = budget_size(frames.shape[1:3], patch, pool, tokens)
            frames = resize_frames(frames, *size, config.pixels.resample)
        found.append(_patches(normalise_frames(frames, config.pixels), patch, tokens * pool**2))
    pixels, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {
        "pixel_values_videos": pixels,
        "video_position_ids": places,
        "num_frames_per_video": np.array([len(clip.frames) for clip in clips], np.int32),
        "video_timestamps": np.concatenate([clip.timestamps for clip in clips]),
    }


def mark_time(seconds: float) -> str:
    """Returns what stands in front of a frame: minutes and seconds."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
