"""From a video to frames: decoding by PyAV, the frames that a family samples, normalised pixels.

Of a video of constant rate, frames and times are those of transformers' `read_video_pyav`: frames are numbered from 0,
and number n is shown n / (the stream's average rate) seconds after the start. Of a recording of variable rate the times
are the file's own. Frames are turned as the file says that they are shown: a phone films lying on its side.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from kvpatch_jax.cache import Video
from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require

from .processors import Settings

FPS = 2.0
"""Frames sampled in a second where neither settings nor a caller say it: what the authors of Qwen-VL have."""


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
Sampler = Callable[[Stream, Rate, int | None, Settings], np.ndarray]
"""(stream, frames per second or None, frames in all or None, settings) → the numbers of the frames to show, rising."""


def clips_of(videos: Sequence[Video], sample: Sampler, settings: Settings, steady: bool = False) -> list[Clip]:
    """Returns the frames of each video that are shown: of a file those that `sample` chooses, of given ones all, or
    where the caller asks for a number of them those that `sample` chooses.

    Args:
      steady: the family counts one rate for all of a video. Of a recording of variable rate it is shown what a player
        shows at even times, which may be a frame twice; other families see each frame at its own time.

    Raises:
      InputError: a file that is no video, or as `Video.read` and `sample`; with `steady` given times that are further
      from even spacing than half a step. MissingExtraError: a file without PyAV.
    """
    return [_clip(video.read(), sample, settings, steady, f"video {number}") for number, video in enumerate(videos)]


def _clip(video: Video, sample: Sampler, settings: Settings, steady: bool, name: str) -> Clip:
    is_file, uneven = isinstance(video.source, bytes), None
    if is_file:
        stream, uneven, take = _open(video.source, name)
    elif video.rate is None:
        times = np.asarray(video.timestamps, np.float64)
        rate = float((len(times) - 1) / (times[-1] - times[0])) if len(times) > 1 else FPS
        if steady and np.abs(times - np.linspace(times[0], times[-1], len(times))).max() * rate > 0.5:
            raise InputError(
                f"{name}: got uneven timestamps; expected even ones for a model that counts one rate a video"
            )
        return Clip(video.source, times, rate, None)
    else:
        stream, take = Stream(len(video.source), float(video.rate)), video.source.__getitem__

    chosen = np.arange(stream.count)
    if is_file or video.fps is not None or video.frames is not None:
        chosen = np.asarray(sample(stream, video.fps, video.frames, settings), np.int64)
    times = chosen / stream.rate
    rate = len(chosen) / stream.count * stream.rate
    if uneven is None:
        return Clip(take(chosen), times, rate, stream.duration)

    # What is on the screen at each time, or each frame nearest to one.
    if steady:
        return Clip(take(np.searchsorted(uneven, times, side="right") - 1), times, rate, stream.duration)
    if len(chosen) < stream.count:
        chosen = np.unique(np.abs(uneven[:, None] - times).argmin(axis=0))
    return Clip(take(chosen), uneven[chosen], len(chosen) / stream.duration, stream.duration)


def _open(content: bytes, name: str) -> tuple[Stream, np.ndarray | None, Callable[[np.ndarray], np.ndarray]]:
    """Returns what is known of an encoded video, the times of its frames where they are not even, and a function that
    decodes the frames of these numbers.
    """
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
            count, rate, base = int(stream.frames), stream.average_rate, stream.time_base
            shown = sorted(packet.pts for packet in container.demux(stream) if packet.pts is not None)
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

    times = (np.array(shown, np.float64) - shown[0]) * float(base) if len(shown) == count and base else np.zeros(0)
    if len(times) < 2 or np.abs(times * float(rate) - np.arange(count)).max() <= 0.5:
        return Stream(count, float(rate)), None, take
    # The last frame stays as long as one does on average.
    return Stream(count, (count - 1) / float(times[-1])), times, take


def _upright(frame: Any) -> UInt8[np.ndarray, "H W 3"]:
    """Returns a decoded frame's pixels, turned by the quarters that its display matrix says (anticlockwise)."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def normalise_frames(frames: UInt8[np.ndarray, "N H W 3"], settings: Settings) -> Float32[np.ndarray, "N H W 3"]:
    """Rescales and normalises frames as transformers' video processors do: the factor is multiplied into mean and
    deviation first, so that the result differs from an image's in the last bit.
    """
    values = np.arange(256, dtype=np.float32)[:, None]
    scale = settings["rescale_factor"] or 1 / 255 if settings["do_rescale"] is not False else 1.0
    if settings["do_normalize"] is False:
        table = np.repeat(values * np.float32(scale), 3, axis=1)
    else:
        mean, deviation = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
        factor = np.float32(1 / scale)
        table = (values - mean * factor) / (deviation * factor)
    return table[frames, np.arange(3)]


def asked(fps: Rate, frames: int | None, settings: Settings) -> tuple[int | float, int | None]:
    """Returns frames per second and frames in all, as the caller asks for them, else as the settings do."""
    if fps is not None or frames is not None:
        return fps or FPS, frames
    return settings["fps"] or FPS, settings["num_frames"]


def check_count(count: int, stream: Stream) -> None:
    """Refuses to sample no frames, or more than the video has."""
    if not 0 < count <= stream.count:
        raise InputError(f"video: got {count} frames to sample; expected 1 to {stream.count}, the video's own")
