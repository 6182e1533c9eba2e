"""GLM-4V's videos: clips to `pixel_values_videos`, `video_grid_thw` and the times of frames, with NumPy.

Source: transformers' Glm4vVideoProcessor (GLM-4.1V, GLM-4.5V) and Glm46VVideoProcessor (GLM-4.6V), told apart by the
processor that a directory names; pixels are equal to theirs bit for bit.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from kvpatch_jax.cache import Video

from .qwen_images import ImageConfig, smart_resize
from .qwen_videos import patches_of
from .video_frames import FPS, Stream, VideoConfig, clips_of

LIMITS = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""GLM-4.6V's temporal patches per second, for videos of up to so many seconds."""
MOST_FRAMES, MOST_SECONDS = 640, 2400
"""That GLM-4.6V samples, and that it counts."""

VIDEO_SETTINGS = VideoConfig.reader(
    image_mean=ImageConfig.image_mean,
    image_std=ImageConfig.image_std,
    resample=3,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    fps=2,
    max_duration=300,
)


def is_newer(config: VideoConfig) -> bool:
    """Returns whether a directory's processor is GLM-4.6V's."""
    names = (config.option("video_processor_type", ""), config.option("processor_class", ""))
    return any(str(name).startswith("Glm46V") for name in names)


def process_glm_videos(videos: Sequence[Video], config: VideoConfig) -> dict[str, np.ndarray]:
    """Turns videos into GLM-4V's input.

    Returns:
      `pixel_values_videos` float32 [patches, features], `video_grid_thw` int32 [videos, 3], `video_timestamps` float64
      [temporal patches of all videos]: seconds at the first frame of each, and `video_decimals` int32 [videos]: how
      many decimals of them the prompt says (0: whole seconds, without a unit).

    Raises:
      InputError: as `read_clip` and `smart_resize`.
    """
    newer, temporal = is_newer(config), config.pixels.temporal_patch_size
    clips = clips_of(videos, functools.partial(sample_glm46 if newer else sample_glm4, config=config))
    arrays = patches_of(clips, config, _sides)
    times = np.concatenate([clip.timestamps[::temporal] for clip in clips])
    return arrays | {"video_timestamps": times, "video_decimals": np.full(len(clips), int(newer), np.int32)}


def sample_glm4(stream: Stream, fps: float | None, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as GLM-4.1V does: so many in a second from the first one on, an even number.

    Where the caller asks for a number of frames they are spread evenly.
    """
    if frames is not None:
        return _even_number(np.linspace(0, stream.count - 1, frames).astype(np.int64))

    last, longest, fps = stream.count - 1, config.option("max_duration"), float(fps or config.option("fps", FPS))
    if stream.duration <= longest:
        numbers = np.arange(max(math.floor(stream.duration * fps), 1)) * stream.rate / fps
    elif int(longest * fps) >= stream.count:
        numbers = np.arange(stream.count, dtype=np.float64)
    else:
        numbers = np.linspace(0, stream.duration, int(longest * fps)) * stream.rate
    return _even_number(np.minimum(np.ceil(numbers).astype(np.int64), last))


def sample_glm46(stream: Stream, fps: float | None, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as GLM-4.6V does: fewer in a second of longer videos, an even number.

    Where the caller asks for a rate or a number of frames they are GLM-4.1V's.
    """
    if fps is not None or frames is not None:
        return sample_glm4(stream, fps, frames, config)

    seconds, temporal = min(stream.duration, MOST_SECONDS), config.pixels.temporal_patch_size
    rate = next(rate for longest, rate in LIMITS if seconds <= longest) * temporal
    wanted = max(min(int(seconds * rate), MOST_FRAMES), 1)
    first, last, numbers = 0, stream.count - 1, list[int]()
    if stream.count >= wanted:
        # The first frame at or behind each step, up to the last whole second.
        step = 0.0
        for number in range(stream.count):
            if number * (1 / stream.rate) >= step:
                step += 1 / rate
                numbers.append(number)
                if step >= int(stream.duration):
                    break
        if len(numbers) < wanted and numbers:
            first, last = numbers[0], numbers[-1]
    if len(numbers) != wanted:
        numbers = np.linspace(first, last, wanted, dtype=np.int64).tolist()
    return _even_number(np.array(numbers, np.int64))


def _even_number(numbers: np.ndarray) -> np.ndarray:
    """Returns rising numbers, each once, the last one again where they are odd in number."""
    numbers = np.unique(numbers)
    return np.append(numbers, numbers[-1:]) if len(numbers) % 2 else numbers


def _sides(count: int, height: int, width: int, config: VideoConfig, name: str) -> tuple[int, int]:
    pixels = dataclasses.replace(config.pixels, image_processor_type="Glm4vVideoProcessor")
    return smart_resize(height, width, pixels, name, frames=count)
