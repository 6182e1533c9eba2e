"""Videos and sounds as callers give them: a file, or frames with their times and samples with their rate.

Ids are computed from one form (`Video.read`, `Audio.read`): the bytes of a file, or the pixels or samples themselves,
and with them everything that says which frames are shown and when. Decoding is the model's (`models/inputs`): which
frames of a file a family samples depends on its settings.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import InputError
from .images import decoded, expect_small

VIDEO_SUFFIXES = tuple(
    ".3gp .avi .flv .m2ts .m4v .mkv .mov .mp4 .mpe .mpeg .mpg .mts .ogv .webm .wmv".split()  # noqa: SIM905
)
AUDIO_SUFFIXES = tuple(".aac .flac .m4a .mp3 .oga .ogg .opus .wav .wma".split())  # noqa: SIM905


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """A video: a file of which frames are sampled, or frames with their times.

    Attributes:
      source: path or bytes of a video file; path of a folder of frames (image files, in the order of their names); a
        uint8 array [N,H,W,3]; or a sequence of N images of one size, each as `prepare` takes one.
      fps: frames to sample in a second; None: as the family's settings say.
      frames: frames to sample in all, in place of `fps`.
      rate: of frames that are given: how many were shown in a second. All are taken, unless `fps` or `frames` asks
        for fewer.
      timestamps: of frames that are given: seconds at which each was shown, in place of `rate`; all are taken.
      sound: of a file: its own sound is heard too, mixed among its frames (Omni families).

    Raises:
      InputError: numbers that are not positive, a `sound` that is no truth, `fps` with `frames`, `rate` with
      `timestamps`, timestamps that do not rise or are not as many as the frames.
    """

    source: Any
    fps: int | float | None = None
    frames: int | None = None
    rate: int | float | None = None
    timestamps: Sequence[int | float] | np.ndarray | None = None
    sound: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sound, bool):
            raise InputError(f"video: sound: got {self.sound!r:.80}; expected true or false")
        for name, wanted in (("fps", float), ("rate", float), ("frames", int)):
            object.__setattr__(self, name, _number(f"video: {name}", getattr(self, name), wanted))
        for first, second in (
            ("fps", "frames"),
            ("rate", "timestamps"),
            ("fps", "timestamps"),
            ("frames", "timestamps"),
        ):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise InputError(f"video: got both {first} and {second}; expected one of them")
        if self.timestamps is not None:
            object.__setattr__(self, "timestamps", _rising(self.timestamps))

    @property
    def nbytes(self) -> int:
        """Bytes of the source, which is in the form that `read` gives."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.nbytes

    def read(self) -> "Video":
        """Returns the video with a source of its own: a file's bytes, or frames as uint8 [N,H,W,3].

        Raises:
          InputError: no such file, no frames, frames without their times or of several sizes, or a file with `rate`
          or `timestamps`. ImageError: a frame that cannot be read.
        """
        source, name = self.source, "video"
        if isinstance(source, os.PathLike):
            path = Path(source)
            name = str(path)
            source = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else _bytes_of(path)

        if isinstance(source, bytes):
            if self.rate is not None or self.timestamps is not None:
                raise InputError(f"{name}: got a file with rate or timestamps; expected them of frames alone")
            return dataclasses.replace(self, source=source)

        if self.sound:
            raise InputError(f"{name}: got frames with sound=True; expected a file, whose own sound it is")
        if self.rate is None and self.timestamps is None:
            raise InputError(f"{name}: got frames without their times; expected rate= or timestamps=")
        frames = _frames(source, name)
        if self.timestamps is not None and len(self.timestamps) != len(frames):
            raise InputError(
                f"{name}: got {len(self.timestamps)} timestamps; expected one for each of {len(frames)} frames"
            )
        return dataclasses.replace(self, source=frames)

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the source, for ids and files."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return named | {"timestamps": None if self.timestamps is None else list(self.timestamps)}


@dataclasses.dataclass(frozen=True, eq=False)
class Audio:
    """A sound: a file, or samples with their rate.

    Attributes:
      source: path or bytes of a file, or a float array [samples] in −1 … 1, one channel.
      rate: samples per second of an array; a file says its own.

    Raises:
      InputError: an array without a rate, or of another shape; a file with one.
    """

    source: Any
    rate: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _number("audio: rate", self.rate, int))
        array = isinstance(self.source, np.ndarray | jax.Array)
        if array and (self.source.ndim != 1 or self.source.dtype.kind != "f" or not self.source.size):
            raise InputError(
                f"audio: got {self.source.dtype} {list(self.source.shape)}; expected floats [samples] of one channel"
            )
        if not array and not isinstance(self.source, bytes | os.PathLike):
            raise InputError(f"audio: got a {type(self.source).__name__}; expected a path, bytes or a float array")
        if array != (self.rate is not None):
            raise InputError(f"audio: got rate {self.rate}; expected one with an array, and none with a file")

    @property
    def nbytes(self) -> int:
        """Bytes of the source, which is in the form that `read` gives."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.nbytes

    def read(self) -> "Audio":
        """Returns the sound with a source of its own: a file's bytes, or samples as float32 [samples].

        Raises:
          InputError: no such file, or samples that are not finite.
        """
        if isinstance(self.source, bytes):
            return self
        if isinstance(self.source, os.PathLike):
            return Audio(_bytes_of(Path(self.source)))
        samples = np.array(self.source, np.float32)
        if not np.isfinite(samples).all():
            raise InputError("audio: got samples that are not finite; expected numbers in −1 … 1")
        return Audio(samples, self.rate)

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the source, for ids and files."""
        return {"rate": self.rate}


def medium_of(item: Any) -> Video | Audio | None:
    """Returns an item that is a video or sound, or the one that a path names by its suffix; else None."""
    if isinstance(item, Video | Audio):
        return item
    suffix = Path(item).suffix.lower() if isinstance(item, os.PathLike) else ""
    if suffix in VIDEO_SUFFIXES:
        return Video(item)
    return Audio(item) if suffix in AUDIO_SUFFIXES else None


def expect_small_medium(medium: Video | Audio, most: int) -> None:
    """Checks that a video or sound has at most `most` bytes as it was given, before it is read: its file, the pixels of
    its frames, or its array.

    Raises:
      InputError: it is too large, or its path cannot be read. ImageError: a frame that is, or that cannot.
    """
    source, name = medium.source, type(medium).__name__.lower()
    frames = list(source) if isinstance(source, list | tuple) else []
    size = getattr(source, "nbytes", len(source) if isinstance(source, bytes) else 0)
    if isinstance(source, os.PathLike):
        path = Path(source)
        name = repr(str(path))
        try:
            frames = [entry for entry in path.iterdir() if entry.is_file()] if path.is_dir() else []
            # A FIFO or device could block for ever.
            if not path.is_dir() and not path.is_file():
                raise OSError("no regular file")
            size = 0 if path.is_dir() else path.stat().st_size
        except (OSError, ValueError) as error:
            raise InputError(f"{name:.300}: got no such file ({error}); expected a video or audio file") from error
    for frame in frames:
        size += expect_small(frame, most, f"{name}: frame")
        if size > most:
            break
    if size > most:
        raise InputError(f"{name:.300}: got {size} bytes; expected at most {most}")


def _number(what: str, value: Any, wanted: type) -> Any:
    """Returns a positive number as a `wanted`, so that equal ones have one form; None is returned as it is."""
    if value is None:
        return None
    kinds = (int, np.integer) if wanted is int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= sys.float_info.max:
        raise InputError(f"{what}: got {value!r:.80}; expected a positive {'whole ' if wanted is int else ''}number")
    return wanted(value)


def _rising(values: Any) -> tuple[float, ...]:
    """Returns timestamps as floats."""
    try:
        times = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        times = np.zeros(())
    if times.ndim != 1 or not times.size or not np.isfinite(times).all() or times[0] < 0 or (np.diff(times) <= 0).any():
        raise InputError(f"video: got timestamps {values!r:.80}; expected seconds that rise from 0 or more")
    return tuple(float(time) for time in times)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{str(path)!r}: got no readable file ({error}); expected a video or audio file") from error


def _frames(source: Any, name: str) -> np.ndarray:
    """Returns frames as one array of their own, uint8 [N,H,W,3]."""
    if isinstance(source, np.ndarray | jax.Array) and source.ndim != 4:
        raise InputError(f"{name}: got frames of shape {list(source.shape)}; expected [frames, height, width, 3]")
    if not isinstance(source, np.ndarray | jax.Array | list | tuple) or not len(source):
        raise InputError(f"{name}: got a {type(source).__name__} without frames; expected a file, a folder or frames")
    if isinstance(source, jax.Array):
        source = np.asarray(source)

    frames = [decoded(frame, f"{name}: frame {number}") for number, frame in enumerate(source)]
    sizes = sorted({frame.shape for frame in frames})
    if len(sizes) != 1:
        raise InputError(f"{name}: got frames of sizes {sizes}; expected one size")
    return np.stack(frames)
