"""Videos of each family: the frames that are sampled, their patches or tiles, and the times that a prompt says.

Sources: transformers' video processors of Qwen2-VL, Qwen3-VL, GLM-4V, GLM-4.6V, SmolVLM, InternVL, Kimi-K2.5 and
Gemma 4, which need torchvision. Pixels are equal to theirs bit for bit.
"""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float32

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import ConfigError, InputError

from .pictures import CLIP_MEAN, CLIP_STD, HALVES, kimi_patches, kimi_size
from .processors import MAX_ASPECT_RATIO, Reader, Settings, own_settings
from .resampling import resize_frames
from .video_frames import FPS, Clip, Rate, Stream, asked, check_count, clips_of, normalise_frames

TOKEN_SHARE = 0.9
"""Of `max_video_tokens`, what a video's pixels may take (Qwen2.5-VL)."""
FLOOR = 1.05
"""Times the least pixels, what a frame is always allowed where frames are capped."""
GLM_LIMITS = ((30, 3.0), (300, 1.0), (math.inf, 0.5))
"""GLM-4.6V's temporal patches per second, for videos of up to so many seconds."""
GLM_FRAMES, GLM_SECONDS = 640, 2400
"""That GLM-4.6V samples, and that it counts."""
SKIPPED = 1
"""Seconds at either end of a long video that SmolVLM leaves out."""
LONGEST_SIDE = 4096
"""SmolVLM's bound on any resized frame."""
INTERNVL_FRAMES = 8
"""Frames of a video where neither settings nor a caller say it: what InternVL's authors sample."""
GEMMA4_BUDGETS = (70, 140, 280, 560, 1120)
"""Tokens that a frame may become."""
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'] is string %}"
    "{{': ' + message['content']}}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Released templates leave videos out; transformers renders conversations with videos by this one."""
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

# -------------------------------------------------------------------------------------------------------- Qwen and GLM


def patch_settings(patch: int, least: int, most: int, halves: bool = False, **defaults: Any) -> Reader:
    """Returns a function that reads the settings of videos that are cut into patches.

    Args:
      patch: pixels of a patch's side. least, most: pixels of a frame, or of a video. halves: whether mean and deviation
        are ½; else CLIP's.
    """
    mean, deviation = (HALVES, HALVES) if halves else (CLIP_MEAN, CLIP_STD)

    def adjust(given: dict[str, Any], root: Path) -> dict[str, Any]:
        size = given.get("size", {})
        if not isinstance(size, Mapping):
            raise ConfigError(f"video size: got {size!r:.80}; expected a table of edges")
        edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        return {name: value for name, value in edges.items() if value is not None} | given

    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": least, "max_pixels": most}
    pixels = {"image_mean": mean, "image_std": deviation, "resample": 3}
    return own_settings("video", adjust, **pixels, **sizes, **defaults)


def sample_qwen2(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as Qwen2-VL and Qwen2.5-VL do: even steps from the first one, as many as whole temporal patches.

    Raises:
      InputError: more frames than the video has, or a video of less than a temporal patch.
    """
    patch = settings["temporal_patch_size"]
    if stream.count < patch:
        raise InputError(
            f"video: got {stream.count} frame; expected at least {patch}, the temporal patch of this family (pass a "
            "single frame as an image)"
        )
    fps, frames = asked(fps, frames, settings)
    if frames is not None:
        count = round(frames / patch) * patch
    else:
        most = math.floor(min(settings["max_frames"] or 768, stream.count) / patch) * patch
        wanted = stream.count / stream.rate * fps
        wanted = min(max(wanted, settings["min_frames"] or 4), most, stream.count)
        count = math.floor(wanted / patch) * patch
    check_count(count, stream)
    # As torch steps: in float64, then truncated.
    return (np.arange(count) * (stream.count / count)).astype(np.int64)


def sample_qwen3(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as Qwen3-VL does: evenly from the first to the last one.

    Raises:
      InputError: more frames than the video has.
    """
    fps, frames = asked(fps, frames, settings)
    if frames is None:
        frames = int(stream.count / stream.rate * fps)
        frames = min(max(frames, settings["min_frames"] or 4), settings["max_frames"] or 768, stream.count)
    check_count(frames, stream)
    return np.linspace(0, stream.count - 1, frames).round().astype(np.int64)


def sample_glm4(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as GLM-4.1V does: so many in a second from the first one on, an even number.

    Where the caller asks for a number of frames they are spread evenly.
    """
    if frames is not None:
        return _even_number(np.linspace(0, stream.count - 1, frames).astype(np.int64))

    last, longest, fps = stream.count - 1, settings["max_duration"] or 300, float(fps or settings["fps"] or FPS)
    if stream.duration <= longest:
        numbers = np.arange(max(math.floor(stream.duration * fps), 1)) * stream.rate / fps
    elif int(longest * fps) >= stream.count:
        numbers = np.arange(stream.count, dtype=np.float64)
    else:
        numbers = np.linspace(0, stream.duration, int(longest * fps)) * stream.rate
    return _even_number(np.minimum(np.ceil(numbers).astype(np.int64), last))


def sample_glm46(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as GLM-4.6V does: fewer in a second of longer videos, an even number.

    Where the caller asks for a rate or a number of frames they are GLM-4.1V's.
    """
    if fps is not None or frames is not None:
        return sample_glm4(stream, fps, frames, settings)

    seconds, temporal = min(stream.duration, GLM_SECONDS), settings["temporal_patch_size"] or 2
    rate = next(rate for longest, rate in GLM_LIMITS if seconds <= longest) * temporal
    wanted = max(min(int(seconds * rate), GLM_FRAMES), 1)
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


def process_qwen2_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Turns videos into Qwen2.5-VL's input.

    Returns:
      `pixel_values_videos` float32 [patches, features], `video_grid_thw` int32 [videos, 3] and `second_per_grid_ts`
      float32 [videos]: seconds per temporal patch.

    Raises:
      InputError: as `clips_of`; a frame more than 200 times longer than wide, or not of whole patches.
    """
    clips = clips_of(videos, sample_qwen2, settings, steady=True)
    with np.errstate(over="ignore"):  # what is no number of seconds is refused where positions are counted
        seconds = np.array([settings["temporal_patch_size"] / clip.rate for clip in clips], np.float32)
    return _patches_of(clips, settings, _range_qwen2, floors=False) | {"second_per_grid_ts": seconds}


def process_qwen3_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Turns videos into Qwen3-VL's input.

    Returns:
      `pixel_values_videos` and `video_grid_thw` as for Qwen2.5-VL, and `video_timestamps` float64 [temporal patches of
      all videos]: seconds, the mean of a patch's first and last frame.

    Raises:
      InputError: as `process_qwen2_videos`.
    """
    clips = clips_of(videos, sample_qwen3, settings)
    temporal, times = settings["temporal_patch_size"], []
    for clip in clips:
        shown = _filled(clip.timestamps, temporal)
        times.append((shown[::temporal] + shown[temporal - 1 :: temporal]) / 2)
    return _patches_of(clips, settings, _range_qwen3) | {"video_timestamps": np.concatenate(times)}


def process_glm_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Turns videos into the input of GLM-4.1V and 4.5V, or of GLM-4.6V, told apart by the processor that a directory
    names.

    Returns:
      `pixel_values_videos` float32 [patches, features], `video_grid_thw` int32 [videos, 3], `video_timestamps` float64
      [temporal patches of all videos]: seconds at the first frame of each, and `video_decimals` int32 [videos]: how
      many decimals of them the prompt says (0: whole seconds, without a unit).

    Raises:
      InputError: as `process_qwen2_videos`.
    """
    names = (settings["video_processor_type"], settings["processor_class"])
    newer, temporal = any(str(name).startswith("Glm46V") for name in names), settings["temporal_patch_size"]
    clips = clips_of(videos, sample_glm46 if newer else sample_glm4, settings)
    arrays = _patches_of(clips, settings, _range_glm)
    times = np.concatenate([clip.timestamps[::temporal] for clip in clips])
    return arrays | {"video_timestamps": times, "video_decimals": np.full(len(clips), int(newer), np.int32)}


def _range_qwen2(count: int, settings: Settings) -> tuple[int, int, int, int]:
    """Returns the least and the most pixels of a video, and what counts as its frames: before and after rounding."""
    least, most = settings["min_pixels"], settings["max_pixels"]
    if settings["cap_pixels_per_frame"]:
        total = int((settings["max_video_tokens"] or 128000) * _factor(settings) ** 2 * TOKEN_SHARE)
        most = max(min(most, total * settings["temporal_patch_size"] // count), int(least * FLOOR))
    return least, most, 1, 1


def _range_qwen3(count: int, settings: Settings) -> tuple[int, int, int, int]:
    least, most, temporal = settings["min_pixels"], settings["max_pixels"], settings["temporal_patch_size"]
    if settings["cap_pixels_per_frame"]:
        frame = (settings["max_video_tokens"] or 768) * _factor(settings) ** 2
        most = max(min(frame, most // count), int(least * FLOOR)) * count
    return least, most, count, round(count / temporal) * temporal


def _range_glm(count: int, settings: Settings) -> tuple[int, int, int, int]:
    temporal = settings["temporal_patch_size"]
    shown = max(count, temporal)
    return settings["min_pixels"], settings["max_pixels"], shown, round(shown / temporal) * temporal


def _factor(settings: Settings) -> int:
    return settings["patch_size"] * settings["merge_size"]


def _sides(size: Sequence[int], factor: int, bounds: tuple[int, int, int, int], floors: bool) -> tuple[int, int]:
    """Returns the size to resize to: multiples of `factor`, pixels within bounds, the aspect about kept.

    Args:
      bounds: as `_range_qwen2`. floors: whether small frames are made larger first.
    """
    (height, width), (least, most, shown, counted) = size, bounds
    if floors and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)

    # Sides are rounded first and scaled only where the area is out of bounds, as transformers does.
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * rows * columns > most:
        scale = math.sqrt((shown * height * width) / most)
        rows, columns = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif counted * rows * columns < least:
        scale = math.sqrt(least / (shown * height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return rows, columns


def _patches_of(
    clips: Sequence[Clip],
    settings: Settings,
    bounds: Callable[[int, Settings], tuple[int, int, int, int]],
    floors: bool = True,
) -> dict[str, np.ndarray]:
    """Returns the patches and grids of videos.

    Patches of a temporal patch come in raster order of merge blocks, the patches of a block together; a patch's
    features are channel, time, row, column. The last frame is repeated to whole temporal patches.
    """
    pixels, grids, factor = [], [], _factor(settings)
    patch, merge, temporal = (settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size"))
    for number, clip in enumerate(clips):
        frames, (count, height, width) = clip.frames, clip.frames.shape[:3]
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InputError(
                f"video {number}: got {height}×{width} pixels; expected sides within a ratio of {MAX_ASPECT_RATIO}"
            )
        if settings["do_resize"] is not False:
            height, width = _sides((height, width), factor, bounds(count, settings), floors)
            frames = resize_frames(frames, height, width, settings["resample"])
        if height % factor or width % factor:
            raise InputError(f"video {number}: got {height}×{width} pixels; expected multiples of {factor}")
        patches = rearrange(
            _filled(normalise_frames(frames, settings), temporal),
            "(block time) (block_row row y) (block_column column x) C "
            "-> (block block_row block_column row column) (C time y x)",
            time=temporal,
            row=merge,
            column=merge,
            y=patch,
            x=patch,
        )
        pixels.append(patches)
        grids.append((-(-count // temporal), height // patch, width // patch))
    return {"pixel_values_videos": np.concatenate(pixels), "video_grid_thw": np.array(grids, np.int32)}


def _filled(values: np.ndarray, size: int) -> np.ndarray:
    """Returns values along the first axis with the last one repeated to a multiple of `size`."""
    return np.concatenate([values, np.repeat(values[-1:], -len(values) % size, axis=0)])


# ------------------------------------------------------------------------------------------------ frames that are tiles


def _tiles(frames: np.ndarray, settings: Settings) -> Float32[np.ndarray, "N 3 H W"]:
    return np.ascontiguousarray(normalise_frames(frames, settings).transpose(0, 3, 1, 2))


def sample_smolvlm(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as SmolVLM2 does: evenly, `fps` a second but at most `frames`, without the first and last second
    of a long video.
    """
    each = float((settings["fps"] or 1) if fps is None else fps)
    most = int((settings["num_frames"] or 64) if frames is None else frames)
    wanted = max(min(round(each * stream.duration), most), 1)
    first, last = 0, stream.count - 1
    if stream.duration - 2 * SKIPPED > most * each:
        first = max(int(SKIPPED * stream.rate), 0)
        last = min(int(stream.count - SKIPPED * stream.rate), stream.count - 1)
    if first >= last:
        first, last = 0, stream.count - 1
    return np.unique(np.linspace(first, last, wanted, dtype=np.int64))


def smolvlm_options(given: dict[str, Any], root: Path) -> dict[str, Any]:
    """Returns a file's options with those of `video_sampling` by their own names."""
    table = given.get("video_sampling")
    if not isinstance(table, Mapping):
        return given
    # The size beside the table counts before the one in it.
    size = given.get("size", table.get("video_size"))
    named = {"fps": table.get("fps"), "num_frames": table.get("max_frames"), "size": size}
    return given | {name: value for name, value in named.items() if value is not None}


def process_smolvlm_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Processes videos for SmolVLM2: each frame one tile, resized by its longest side and then to the tile.

    Returns:
      `pixel_values` float32 [1, frames of all videos, 3, S, S], `video_frames` int32 [videos], `video_timestamps`
      float64 [frames of all videos] and `video_durations` float64 [videos], in seconds.

    Raises:
      InputError: as `clips_of`.
    """
    clips, tiles = clips_of(videos, sample_smolvlm, settings), []
    longest, side = settings.length("size"), settings.length("max_image_size")
    for clip in clips:
        frames = clip.frames
        if settings["do_resize"] is not False:
            height, width = _longest_side(frames.shape[1], frames.shape[2], longest)
            sized = resize_frames(frames, height, width, settings["resample"])
            frames = resize_frames(sized, side, side, settings["resample"])
        tiles.append(_tiles(frames, settings))
    durations = [clip.timestamps[-1] if clip.duration is None else clip.duration for clip in clips]
    return {
        "pixel_values": np.concatenate(tiles)[None],
        "video_frames": np.array([len(clip.frames) for clip in clips], np.int32),
        "video_timestamps": np.concatenate([clip.timestamps for clip in clips]),
        "video_durations": np.array(durations, np.float64),
    }


def _longest_side(height: int, width: int, longest: int) -> tuple[int, int]:
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


def smolvlm_texts(timestamps: Sequence[float], duration: float) -> list[str]:
    """Returns the text in front of each frame of SmolVLM2's, the first one with what is said of the whole video."""
    intro = (
        f"You are provided the following series of {number_words(len(timestamps))} frames from a "
        f"{datetime.timedelta(seconds=int(duration))} [H:MM:SS] video.\n"
    )
    texts = [f"\nFrame from {minutes(time)}:" for time in timestamps]
    return [intro + texts[0], *texts[1:]]


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


def sample_internvl(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as InternVL does: the middles of parts of equal length.

    Raises:
      InputError: more frames than the video has.
    """
    if fps is None and frames is None:
        fps, frames = settings["fps"], settings["num_frames"]
    if fps is not None and frames is None:
        frames = int(stream.count / stream.rate * fps)
    count = min(INTERNVL_FRAMES, stream.count) if frames is None else frames
    check_count(count, stream)
    shift = settings["initial_shift"]
    first = stream.count / count / 2 if shift in (None, True) else float(shift)
    return np.arange(first, stream.count, stream.count / count).astype(np.int64)


def process_internvl_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Processes videos for InternVL: each frame one tile, whatever its shape.

    Returns:
      `pixel_values` float32 [frames of all videos, 3, S, S] and `video_frames` int32 [videos].

    Raises:
      InputError: as `clips_of`.
    """
    clips, side = clips_of(videos, sample_internvl, settings), settings.length("size")
    frames = [clip.frames for clip in clips]
    if settings["do_resize"] is not False:
        frames = [resize_frames(images, side, side, settings["resample"]) for images in frames]
    counts = np.array([len(images) for images in frames], np.int32)
    return {"pixel_values": np.concatenate([_tiles(images, settings) for images in frames]), "video_frames": counts}


# ------------------------------------------------------------------------------------------------ Kimi-K2.5 and Gemma 4


def sample_evenly(stream: Stream, fps: Rate, frames: int | None, settings: Settings) -> np.ndarray:
    """Chooses frames as transformers does for families without a rule of their own: even steps from the first one.

    Raises:
      InputError: more frames than the video has.
    """
    fps, frames = asked(fps, frames, settings)
    count = max(1, int(stream.count / stream.rate * fps)) if frames is None else frames
    check_count(count, stream)
    return np.arange(count) * stream.count // count


def process_kimi_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Processes videos for Kimi-K2.5: a few frames at a time, shrunk to the patch budget of one, padded with black.

    Returns:
      `pixel_values_videos` float32 [P,3,patch,patch] in raster order, frame by frame; `video_grid_thw` int32 [parts of
      all videos, 3]; `num_chunks_per_video` int32 [videos]; `video_timestamps` float64 [parts]: seconds of the first
      frame of each.

    Raises:
      InputError: as `clips_of`.
    """
    patch, merge, temporal = (settings[f"{name}_size"] for name in ("patch", "merge", "temporal_patch"))
    out, grids, counts, times = [], [], [], []
    for clip in clips_of(videos, sample_evenly, settings):
        count, *size, _ = clip.frames.shape
        (inner, across), (height, width) = kimi_size(size[0], size[1], patch, merge, settings["max_patches"])
        canvas = np.zeros((count, height, width, 3), np.uint8)
        canvas[:, :inner, :across] = resize_frames(clip.frames, inner, across, settings["resample"])
        out.append(kimi_patches(_tiles(canvas, settings), patch))

        firsts = range(0, count, temporal)
        grids += [(min(temporal, count - first), height // patch, width // patch) for first in firsts]
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


def process_gemma4_videos(videos: Sequence[Video], settings: Settings) -> dict[str, np.ndarray]:
    """Processes videos for Gemma 4: each frame as an image of a smaller budget.

    Returns:
      `pixel_values_videos` float32 [frames, patches, 3·patch²] in raster order, zeros behind them;
      `video_position_ids` int32 [frames, patches, 2], each patch's column and row, −1 behind them;
      `num_frames_per_video` int32 [videos] and `video_timestamps` float64 [frames], in seconds.

    Raises:
      InputError: as `clips_of`, or frames that the budget has no room for.
    """
    patch, pool, tokens = (settings[name] for name in ("patch_size", "pooling_kernel_size", "max_soft_tokens"))
    if tokens not in GEMMA4_BUDGETS:
        raise ConfigError(f"max_soft_tokens: got {tokens}; expected one of {GEMMA4_BUDGETS}")
    clips, pixels, places = clips_of(videos, sample_evenly, settings), [], []
    for clip in clips:
        frames = clip.frames
        if settings["do_resize"] is not False:
            size = _budget_size(frames.shape[1:3], patch * pool, tokens)
            frames = resize_frames(frames, *size, settings["resample"])
        rows, columns = (side // patch for side in frames.shape[1:3])
        values = normalise_frames(frames, settings)
        patches = rearrange(values, "n (row y) (column x) C -> n (row column) (y x C)", y=patch, x=patch)
        at = np.stack([np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns)], axis=1)
        room = ((0, 0), (0, tokens * pool**2 - rows * columns), (0, 0))
        pixels.append(np.pad(patches, room))
        places.append(np.pad(np.repeat(at[None], len(frames), axis=0).astype(np.int32), room, constant_values=-1))
    return {
        "pixel_values_videos": np.concatenate(pixels),
        "video_position_ids": np.concatenate(places),
        "num_frames_per_video": np.array([len(clip.frames) for clip in clips], np.int32),
        "video_timestamps": np.concatenate([clip.timestamps for clip in clips]),
    }


def _budget_size(size: Sequence[int], step: int, tokens: int) -> tuple[int, int]:
    """Returns the largest (height, width) of about a size's aspect, a whole number of tokens of `step` pixels on each
    side, `tokens` in all at most.
    """
    height, width = size
    factor = math.sqrt(tokens * step**2 / (height * width))
    rows, columns = (math.floor(factor * side / step) for side in size)
    if rows == 0:
        rows, columns = 1, min(width // height, tokens)
    elif columns == 0:
        rows, columns = min(height // width, tokens), 1
    if not 0 < rows * columns <= tokens:
        raise InputError(f"video: got {height}×{width} pixels; expected a size that {tokens} tokens hold")
    return rows * step, columns * step


def minutes(seconds: float) -> str:
    """Returns a time as minutes and seconds, which stand in front of a frame."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"
