"""From a video to frames: decoding by PyAV, the sampling rules of each family, normalised pixels.

Frames and times are those of transformers' `read_video_pyav` and of each family's `VideoProcessor.sample_frames`: a
file's frames are numbered from 0, and number n is shown n / (the stream's average rate) seconds after the start. Frames
are turned as the file says that they are shown, which that function leaves out: a phone films lying on its side.
"""

import dataclasses
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from ..checkpoints import read_table
from .qwen_images import CONFIG_FILE, ImageConfig

VIDEO_FILE = "video_preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
_PIXELS = {
    *("image_mean", "image_std", "rescale_factor", "resample"),
    *("do_resize", "do_rescale", "do_normalize"),
}
_PATCHES = {"patch_size", "merge_size", "temporal_patch_size"}
_SAMPLING = {
    *("fps", "num_frames", "min_frames", "max_frames", "initial_shift", "video_sampling"),
    *("cap_pixels_per_frame", "max_video_tokens", "video_processor_type"),
}
FPS = 2.0
"""Frames sampled in a second where neither settings nor a caller say it: what the authors of Qwen-VL have."""


@dataclasses.dataclass(frozen=True)
class VideoConfig:
    """How a family's videos become pixels.

    Attributes:
      pixels: how frames are resized, normalised and cut.
      options: what the video processor's file says and is read here, in JSON.
      own: whether anything but the image settings says it; else it is not written, and no part of a fingerprint, which
        has the image settings.
    """

    pixels: ImageConfig
    options: str
    own: bool = dataclasses.field(default=True, kw_only=True)

    def option(self, name: str, default: Any = None) -> Any:
        """Returns an option of the file, or this where it is absent or null."""
        value = json.loads(self.options).get(name)
        return default if value is None else value

    def length(self, name: str) -> int:
        """Returns an option that is one length: a number, equal sides, or one edge.

        Raises:
          ConfigError: it is not.
        """
        value = self.option(name)
        sides = set(value.values()) - {None} if isinstance(value, Mapping) else {value}
        if len(sides) != 1 or type(side := sides.pop()) is not int:
            raise ConfigError(f"video {name}: got {value!r}; expected one length")
        return side

    @classmethod
    def reader(
        cls,
        only: Mapping[str, Any] | None = None,
        adjust: Callable[[dict[str, Any]], dict[str, Any]] = dict,
        **defaults: Any,
    ) -> Callable[[str | os.PathLike[str]], "VideoConfig"]:
        """Returns a function that reads a directory's video settings, from the file that transformers takes them from:
        `processor_config.json` where it has them, else `video_preprocessor_config.json`, else
        `preprocessor_config.json`.

        It raises ConfigError for an option that `only` has another value for: other ones are not built.

        Args:
          only: options of which one value is built. adjust: the file's options → options by the names used here.
          defaults: what absent options mean; of the options of patches and areas, those named here are read.
        """
        edges = {"shortest_edge", "longest_edge"} <= set(defaults.get("size", ()))
        names = {*_PIXELS, *(_PATCHES & set(defaults)), *(("size", "min_pixels", "max_pixels") if edges else ())}

        def read(directory: str | os.PathLike[str]) -> "VideoConfig":
            root = Path(directory)
            found = read_table(root / PROCESSOR_FILE).get("video_processor")
            found = found or read_table(root / VIDEO_FILE)
            own, found = bool(found), found or read_table(root / CONFIG_FILE)
            if not isinstance(found, Mapping):
                raise ConfigError(f"{root / PROCESSOR_FILE}: got video_processor {found!r:.80}; expected a table")
            found = adjust({name: value for name, value in found.items() if value is not None})
            for name, value in (only or {}).items():
                if found.get(name) not in (None, value):
                    raise ConfigError(f"video {name}: got {found[name]!r}, which is not built; expected {value!r}")

            for name in ("fps", "num_frames", "min_frames", "max_frames"):
                value = found.get(name, 1)
                kinds = (int, float) if name == "fps" else (int,)
                if type(value) not in kinds or not 0 < value < math.inf:
                    raise ConfigError(f"video {name}: got {value!r:.80}; expected a positive number")

            known = _PIXELS | _SAMPLING | names | set(defaults)
            options = defaults | {name: value for name, value in found.items() if name in known}
            pixels = ImageConfig.from_dict({name: value for name, value in options.items() if name in names})
            own = own or bool(_SAMPLING & set(found))
            return cls(pixels, json.dumps(options, sort_keys=True), own=own)

        return read

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes `video_preprocessor_config.json`, or nothing where image settings say all. Returns its path."""
        path = Path(directory) / VIDEO_FILE
        if not self.own:
            return path
        path.write_text(json.dumps(json.loads(self.options), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return path


class Stream(NamedTuple):
    """What is known of a video before its frames are chosen.

    Attributes:
      count: of its frames. rate: frames per second.
    """

    count: int
    rate: float

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.count / self.rate


class Clip(NamedTuple):
    """The frames of a video that a model is shown.

    Attributes:
      frames: RGB.
      timestamps: seconds at which each is shown.
      rate: frames shown per second, on average.
      duration: of the whole video, in seconds; None where only timestamps are known.
    """

    frames: UInt8[np.ndarray, "N H W 3"]
    timestamps: Float64[np.ndarray, " N"]
    rate: float
    duration: float | None


Rate = int | float | None
Sampler = Callable[[Stream, Rate, int | None], np.ndarray]
"""(stream, frames per second or None, frames in all or None) → the numbers of the frames to show, rising."""


def read_clip(video: Video, sample: Sampler, name: str = "video") -> Clip:
    """Returns the frames of a video that are shown: of a file those that `sample` chooses, of given ones all, or where
    the caller asks for a number of them those that `sample` chooses.

    Raises:
      InputError: a file that is no video, or as `Video.read` and `sample`. MissingExtraError: a file without PyAV.
    """
    video = video.read()
    if isinstance(video.source, bytes):
        stream, take = _open(video.source, name)
    elif video.rate is None:
        times = np.asarray(video.timestamps, np.float64)
        mean = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else FPS
        return Clip(video.source, times, float(mean), None)
    else:
        stream, take = Stream(len(video.source), float(video.rate)), video.source.__getitem__

    chosen = np.arange(stream.count)
    if isinstance(video.source, bytes) or video.fps is not None or video.frames is not None:
        chosen = np.asarray(sample(stream, video.fps, video.frames), np.int64)
    rate = len(chosen) / stream.count * stream.rate
    return Clip(take(chosen), chosen / stream.rate, rate, stream.duration)


def _open(content: bytes, name: str) -> tuple[Stream, Callable[[np.ndarray], np.ndarray]]:
    """Returns what is known of an encoded video, and a function that decodes the frames of these numbers."""
    av = require("av", "av", "video")

    def decoded(most: int | None = None):
        try:
            with av.open(io.BytesIO(content)) as container:
                for number, frame in enumerate(container.decode(video=0)):
                    if most is not None and number > most:
                        return
                    yield number, frame
        except (av.FFmpegError, IndexError) as error:
            raise InputError(f"{name}: got a file that cannot be decoded ({error}); expected a video") from error

    try:
        with av.open(io.BytesIO(content)) as container:
            stream = container.streams.video[0]
            count, rate = int(stream.frames), stream.average_rate
    except (av.FFmpegError, IndexError) as error:
        raise InputError(f"{name}: got a file without a video ({error}); expected one that PyAV reads") from error

    # Some containers do not say how many frames they hold.
    count = count or sum(1 for _ in decoded())
    if not count or not rate:
        raise InputError(f"{name}: got {count} frames at rate {rate}; expected a video with frames and a rate")

    def take(chosen: np.ndarray) -> np.ndarray:
        wanted = set(chosen.tolist())
        found = {number: _upright(frame) for number, frame in decoded(max(wanted)) if number in wanted}
        missing = sorted(wanted - set(found))
        if missing:
            raise InputError(
                f"{name}: got {len(found)} of {len(wanted)} frames, without {missing[0]}; expected all of them"
            )
        return np.stack([found[number] for number in chosen.tolist()])

    return Stream(count, float(rate)), take


def _upright(frame: Any) -> UInt8[np.ndarray, "H W 3"]:
    """Returns a decoded frame's pixels, turned by the quarters that its display matrix says (anticlockwise)."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def steady_rate(clip: Clip, name: str) -> float:
    """Returns the frames per second of a clip for a family that counts one rate for all of it.

    Raises:
      InputError: timestamps further from even spacing than half a step.
    """
    times = clip.timestamps
    even = np.linspace(times[0], times[-1], len(times))
    if np.abs(times - even).max() * clip.rate > 0.5:
        raise InputError(f"{name}: got uneven timestamps; expected even ones for a model that counts one rate a video")
    return clip.rate


def normalise_frames(frames: UInt8[np.ndarray, "N H W 3"], config: ImageConfig) -> Float32[np.ndarray, "N H W 3"]:
    """Rescales and normalises frames as transformers' video processors do: the factor is multiplied into mean and
    deviation first, so that the result differs from an image's in the last bit.
    """
    values = np.arange(256, dtype=np.float32)[:, None]
    if not config.do_normalize:
        table = np.repeat(values * np.float32(config.rescale_factor if config.do_rescale else 1), 3, axis=1)
    else:
        mean, deviation = (np.array(part, np.float32) for part in (config.image_mean, config.image_std))
        if config.do_rescale:
            factor = np.float32(1 / config.rescale_factor)
            mean, deviation = mean * factor, deviation * factor
        table = (values - mean) / deviation
    return table[frames, np.arange(3)]


def sample_qwen2(stream: Stream, fps: Rate, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as Qwen2-VL and Qwen2.5-VL do: even steps from the first one, as many as whole temporal patches.

    Raises:
      InputError: more frames than the video has.
    """
    patch = config.pixels.temporal_patch_size
    fps, frames = asked(fps, frames, config)
    if frames is not None:
        count = round(frames / patch) * patch
    else:
        most = math.floor(min(config.option("max_frames", 768), stream.count) / patch) * patch
        wanted = stream.count / stream.rate * fps
        wanted = min(max(wanted, config.option("min_frames", 4)), most, stream.count)
        count = math.floor(wanted / patch) * patch
    check_count(count, stream)
    # As torch steps: in float64, then truncated.
    return (np.arange(count) * (stream.count / count)).astype(np.int64)


def sample_qwen3(stream: Stream, fps: Rate, frames: int | None, config: VideoConfig) -> np.ndarray:
    """Chooses frames as Qwen3-VL does: evenly from the first to the last one.

    Raises:
      InputError: more frames than the video has.
    """
    fps, frames = asked(fps, frames, config)
    if frames is None:
        frames = int(stream.count / stream.rate * fps)
        frames = min(max(frames, config.option("min_frames", 4)), config.option("max_frames", 768), stream.count)
    check_count(frames, stream)
    return np.linspace(0, stream.count - 1, frames).round().astype(np.int64)


def asked(fps: Rate, frames: int | None, config: VideoConfig) -> tuple[int | float, int | None]:
    """Returns frames per second and frames in all, as the caller asks for them, else as the settings do."""
    if fps is not None or frames is not None:
        return fps or FPS, frames
    return config.option("fps", FPS), config.option("num_frames")


def check_count(count: int, stream: Stream) -> None:
    """Refuses to sample no frames, or more than the video has."""
    if not 0 < count <= stream.count:
        raise InputError(f"video: got {count} frames to sample; expected 1 to {stream.count}, the video's own")


def clips_of(videos: Sequence[Video], sample: Sampler) -> list[Clip]:
    """Returns the clip of each video."""
    return [read_clip(video, sample, f"video {number}") for number, video in enumerate(videos)]
