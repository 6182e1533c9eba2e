"""Videos of SmolVLM2, InternVL and Kimi-K2.5: clips to tiles or patches, and the texts that say when frames are shown.

Sources: transformers' SmolVLMVideoProcessor, InternVLVideoProcessor and Kimi_K25VideoProcessor, whose pixels ours equal
bit for bit, and the processors beside them for the texts; `load_video` of the model cards of InternVL's own releases.
"""

import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import ConfigError, InputError

from .images import kimi_size, longest_side
from .resampling import resize_frames
from .video_frames import Rate, Stream, VideoConfig, asked, check_count, clips_of, normalise_frames

SKIPPED = 1
"""Seconds at either end of a long video that SmolVLM leaves out."""
FRAMES = 8
"""Frames of a video where neither settings nor a caller say it: what InternVL's authors sample."""
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Released templates leave videos out; transformers renders conversations with videos by this one."""
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def number_words(number: int) -> str:
    """Returns a number below a thousand in English words, as num2words writes it.

    Raises:
      InputError: a number of a thousand or more.
    """
    if not 0 <= number < 1000:
        raise InputError(f"video: got {number} frames; expected fewer than 1000, for their number is written in words")
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_ONES[hundreds]} hundred" + (f" and {number_words(rest)}" if rest else "")


def sample_smolvlm(stream: Stream, fps: Rate, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as SmolVLM2 does: evenly, `fps` a second but at most `frames`, without the first and last second
    of a long video.
    """
    each = float(config.option("fps", 1) if fps is None else fps)
    most = int(config.option("num_frames", 64) if frames is None else frames)
    wanted = max(min(round(each * stream.duration), most), 1)
    first, last = 0, stream.count - 1
    if stream.duration - 2 * SKIPPED > most * each:
        first = max(int(SKIPPED * stream.rate), 0)
        last = min(int(stream.count - SKIPPED * stream.rate), stream.count - 1)
    if first >= last:
        first, last = 0, stream.count - 1
    return np.unique(np.linspace(first, last, wanted, dtype=np.int64))


def process_smolvlm_videos(videos: Sequence[Video], config: VideoConfig) -> dict[str, np.ndarray]:
    """Processes videos for SmolVLM2: each frame one tile, resized by its longest side and then to the tile.

    Returns:
      `pixel_values` float32 [1, frames of all videos, 3, S, S], `video_frames` int32 [videos], `video_timestamps`
      float64 [frames of all videos] and `video_durations` float64 [videos], in seconds.

    Raises:
      InputError: as `read_clip`.
    """
    clips = clips_of(videos, functools.partial(sample_smolvlm, config=config))
    longest, side = config.length("size"), config.length("max_image_size")
    tiles = []
    for clip in clips:
        frames = clip.frames
        if config.pixels.do_resize:
            height, width = longest_side(frames.shape[1], frames.shape[2], longest)
            sized = resize_frames(frames, height, width, config.pixels.resample)
            frames = resize_frames(sized, side, side, config.pixels.resample)
        tiles.append(_tiles(frames, config))
    durations = [clip.timestamps[-1] if clip.duration is None else clip.duration for clip in clips]
    return {
        "pixel_values": np.concatenate(tiles)[None],
        "video_frames": np.array([len(clip.frames) for clip in clips], np.int32),
        "video_timestamps": np.concatenate([clip.timestamps for clip in clips]),
        "video_durations": np.array(durations, np.float64),
    }


def smolvlm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a file's options with those of `video_sampling` by their own names."""
    table = options.get("video_sampling")
    if not isinstance(table, Mapping):
        return options
    # The size beside the table counts before the one in it.
    size = options.get("size", table.get("video_size"))
    named = {"fps": table.get("fps"), "num_frames": table.get("max_frames"), "size": size}
    return options | {name: value for name, value in named.items() if value is not None}


def smolvlm_texts(timestamps: Sequence[float], duration: float) -> list[str]:
    """Returns the text in front of each frame of SmolVLM2's, the first one with what is said of the whole video."""
    intro = (
        f"You are provided the following series of {number_words(len(timestamps))} frames from a "
        f"{datetime.timedelta(seconds=int(duration))} [H:MM:SS] video.\n"
    )
    texts = [f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:" for time in timestamps]
    return [intro + texts[0], *texts[1:]]


def sample_internvl(stream: Stream, fps: Rate, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as InternVL does: the middles of parts of equal length.

    Raises:
      InputError: more frames than the video has.
    """
    if fps is None and frames is None:
        fps, frames = config.option("fps"), config.option("num_frames")
    if fps is not None and frames is None:
        frames = int(stream.count / stream.rate * fps)
    count = min(FRAMES, stream.count) if frames is None else frames
    check_count(count, stream)
    shift = config.option("initial_shift", True)
    first = stream.count / count / 2 if shift is True else float(shift)
    return np.arange(first, stream.count, stream.count / count).astype(np.int64)


def process_internvl_videos(videos: Sequence[Video], config: VideoConfig) -> dict[str, np.ndarray]:
    """Processes videos for InternVL: each frame one tile, whatever its shape.

    Returns:
      `pixel_values` float32 [frames of all videos, 3, S, S] and `video_frames` int32 [videos].

    Raises:
      InputError: as `read_clip`.
    """
    clips = clips_of(videos, functools.partial(sample_internvl, config=config))
    tiles, side = [], config.length("size")
    for clip in clips:
        resized = resize_frames(clip.frames, side, side, config.pixels.resample)
        tiles.append(_tiles(resized if config.pixels.do_resize else clip.frames, config))
    return {
        "pixel_values": np.concatenate(tiles),
        "video_frames": np.array([len(clip.frames) for clip in clips], np.int32),
    }


def _tiles(frames: np.ndarray, config: VideoConfig) -> Float32[np.ndarray, "N 3 H W"]:
    return np.ascontiguousarray(normalise_frames(frames, config.pixels).transpose(0, 3, 1, 2))


def sample_evenly(stream: Stream, fps: Rate, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as transformers does for families without a rule of their own: even steps from the first one.

    Raises:
      InputError: more frames than the video has.
    """
    fps, frames = asked(fps, frames, config)
    count = max(1, int(stream.count / stream.rate * fps)) if frames is None else frames
    check_count(count, stream)
    return np.arange(count) * stream.count // count


def process_kimi_videos(
    videos: Sequence[Video], config: VideoConfig
) -> dict[str, Float32[np.ndarray, "P 3 y x"] | Int32[np.ndarray, "..."] | np.ndarray]:
    """Processes videos for Kimi-K2.5: a few frames at a time, shrunk to the patch budget of one, padded with black.

    Returns:
      `pixel_values_videos` float32 [P,3,patch,patch] in raster order, frame by frame; `video_grid_thw` int32 [parts of
      all videos, 3]; `num_chunks_per_video` int32 [videos]; `video_timestamps` float64 [parts]: seconds of the first
      frame of each.

    Raises:
      InputError: as `read_clip`. ConfigError: frames that are not to be resized.
    """
    if not config.pixels.do_resize:
        raise ConfigError("video do_resize: got False, which is not built for Kimi-K2.5; expected True")
    patch, merge, temporal = (getattr(config.pixels, f"{name}_size") for name in ("patch", "merge", "temporal_patch"))
    out, grids, counts, times = [], [], [], []
    for clip in clips_of(videos, functools.partial(sample_evenly, config=config)):
        count, *size, _ = clip.frames.shape
        (inner, across), (height, width) = kimi_size(size[0], size[1], patch, merge, config.option("max_patches"))
        canvas = np.zeros((count, height, width, 3), np.uint8)
        canvas[:, :inner, :across] = resize_frames(clip.frames, inner, across, config.pixels.resample)
        rows, columns = height // patch, width // patch
        cells = _tiles(canvas, config).reshape(-1, 3, rows, patch, columns, patch)
        out.append(cells.transpose(0, 2, 4, 1, 3, 5).reshape(-1, 3, patch, patch))

        firsts = range(0, len(clip.frames), temporal)
        grids += [(min(temporal, len(clip.frames) - first), rows, columns) for first in firsts]
        times += [clip.timestamps[first] for first in firsts]
        counts.append(len(firsts))
    return {
        "pixel_values_videos": np.concatenate(out),
        "video_grid_thw": np.array(grids, np.int32),
        "num_chunks_per_video": np.array(counts, np.int32),
        "video_timestamps": np.array(times, np.float64),
    }


def kimi_time(seconds: float) -> str:
    """Returns the time in front of a part of Kimi-K2.5's video: hours, minutes, seconds and thousandths, cut off."""
    whole = int(seconds) % 86400
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"
