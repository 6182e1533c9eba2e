"""Qwen2.5-VL's and Qwen3-VL's videos: clips to `pixel_values_videos`, `video_grid_thw` and times, with NumPy.

Source: transformers' Qwen2VLVideoProcessor and Qwen3VLVideoProcessor; pixels are equal to theirs bit for bit.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float32

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import InputError

from .qwen_images import MAX_ASPECT_RATIO, ImageConfig, smart_resize
from .resampling import resize_frames
from .video_frames import Clip, VideoConfig, clips_of, normalise_frames, sample_qwen2, sample_qwen3, steady_rate

TOKEN_SHARE = 0.9
"""Of `max_video_tokens`, what a video's pixels may take (Qwen2.5-VL)."""
FLOOR = 1.05
"""Times the least pixels, what a frame is always allowed where frames are capped."""


def process_qwen2_videos(videos: Sequence[Video], config: VideoConfig) -> dict[str, np.ndarray]:
    """Turns videos into Qwen2.5-VL's input.

    Returns:
      `pixel_values_videos` float32 [patches, features], `video_grid_thw` int32 [videos, 3] and `second_per_grid_ts`
      float32 [videos]: seconds per temporal patch.

    Raises:
      InputError: as `read_clip` and `smart_resize`; timestamps that are uneven.
    """
    clips = clips_of(videos, functools.partial(sample_qwen2, config=config))
    arrays = patches_of(clips, config, _sides_qwen2)
    temporal = config.pixels.temporal_patch_size
    rates = [steady_rate(clip, f"video {number}") for number, clip in enumerate(clips)]
    with np.errstate(over="ignore"):  # what is no number of seconds is refused where positions are counted
        seconds = np.array([temporal / rate for rate in rates], np.float32)
    return arrays | {"second_per_grid_ts": seconds}


def process_qwen3_videos(videos: Sequence[Video], config: VideoConfig) -> dict[str, np.ndarray]:
    """Turns videos into Qwen3-VL's input.

    Returns:
      `pixel_values_videos` and `video_grid_thw` as for Qwen2.5-VL, and `video_timestamps` float64 [temporal patches of
      all videos]: seconds, the mean of a patch's first and last frame.

    Raises:
      InputError: as `read_clip`; a frame more than 200 times longer than wide.
    """
    clips = clips_of(videos, functools.partial(sample_qwen3, config=config))
    temporal, times = config.pixels.temporal_patch_size, []
    for clip in clips:
        shown = _filled(clip.timestamps, temporal)
        times.append((shown[::temporal] + shown[temporal - 1 :: temporal]) / 2)
    return patches_of(clips, config, _sides_qwen3) | {"video_timestamps": np.concatenate(times)}


def patches_of(clips: Sequence[Clip], config: VideoConfig, sides: Any) -> dict[str, np.ndarray]:
    pixels, grids = [], []
    for number, clip in enumerate(clips):
        frames = clip.frames
        if config.pixels.do_resize:
            height, width = sides(*frames.shape[:3], config, f"video {number}")
            frames = resize_frames(frames, height, width, config.pixels.resample)
        patches, grid = patchify_frames(normalise_frames(frames, config.pixels), config.pixels, f"video {number}")
        pixels.append(patches)
        grids.append(grid)
    return {"pixel_values_videos": np.concatenate(pixels), "video_grid_thw": np.array(grids, np.int32)}


def patchify_frames(
    frames: Float32[np.ndarray, "N H W 3"], config: ImageConfig, name: str = "video"
) -> tuple[Float32[np.ndarray, "patches features"], tuple[int, int, int]]:
    """Cuts normalised frames into patches, and returns their (time, height, width) grid too.

    Patches of a temporal patch come in raster order of merge blocks, the patches of a block together; a patch's
    features are channel, time, row, column. The last frame is repeated to whole temporal patches.

    Raises:
      InputError: sides that are no multiples of patch × merge.
    """
    height, width = frames.shape[1:3]
    if height % config.factor or width % config.factor:
        raise InputError(f"{name}: got {height}×{width} pixels; expected multiples of {config.factor} (patch × merge)")
    frames = _filled(frames, config.temporal_patch_size)
    patches = rearrange(
        frames,
        "(block time) (block_row row y) (block_column column x) C "
        "-> (block block_row block_column row column) (C time y x)",
        time=config.temporal_patch_size,
        row=config.merge_size,
        column=config.merge_size,
        y=config.patch_size,
        x=config.patch_size,
    )
    grid = (len(frames) // config.temporal_patch_size, height // config.patch_size, width // config.patch_size)
    return patches, grid


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    """Returns values along the first axis with the last one repeated to a multiple of `size`."""
    return np.concatenate([values, np.repeat(values[-1:], -len(values) % size, axis=0)])


def _sides_qwen2(count: int, height: int, width: int, config: VideoConfig, name: str) -> tuple[int, int]:
    pixels = config.pixels
    most = pixels.max_pixels
    if config.option("cap_pixels_per_frame"):
        total = int(config.option("max_video_tokens", 128000) * pixels.factor**2 * TOKEN_SHARE)
        most = max(min(most, total * pixels.temporal_patch_size // count), int(pixels.min_pixels * FLOOR))
    return smart_resize(height, width, pixels, name, most)


def _sides_qwen3(count: int, height: int, width: int, config: VideoConfig, name: str) -> tuple[int, int]:
    """Returns the size of a frame, where the range of pixels is that of the whole video."""
    pixels, factor = config.pixels, config.pixels.factor
    least, most = pixels.min_pixels, pixels.max_pixels
    if config.option("cap_pixels_per_frame"):
        frame = config.option("max_video_tokens", 768) * factor**2
        most = max(min(frame, most // count), int(least * FLOOR)) * count

    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise InputError(f"{name}: got {height}×{width} pixels; expected sides within a ratio of {MAX_ASPECT_RATIO}")

    temporal = pixels.temporal_patch_size
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    steps = round(count / temporal) * temporal
    if steps * rows * columns > most:
        scale = math.sqrt((count * height * width) / most)
        rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif steps * rows * columns < least:
        scale = math.sqrt(least / (count * height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns
