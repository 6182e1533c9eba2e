"""Items of a prompt (texts, token ids, images, videos and sounds), told apart and read to one form.

A str is a text. One that looks like a file's name or an address is refused, because a text in place of an image would
go unnoticed. A `pathlib.Path` is a file, and a `Text` is always a text.

Ids are computed from the form that `one_form` returns. An image becomes uint8 RGB, turned as its EXIF orientation says
and laid over white, the background of every family (as in vLLM). A video or sound becomes its file's bytes, or frames
or samples; which frames of a file are sampled depends on a family's settings (`models/inputs`).
"""

import contextlib
import dataclasses
import io
import os
import re
import struct
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import UInt8

from ..errors import InputError
from ..utils.optional_packages import require

Sort = Literal["image", "video", "audio", "text", "tokens"]
ImageSource = Any
"""A path (`os.PathLike`), an encoded file's bytes, a PIL image, or uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]."""

_SUFFIXES: dict[Sort, str] = {
    "image": "apng avif bmp gif heic heif ico jp2 jpe jpeg jpg jxl pbm pgm png pnm ppm qoi svg tga tif tiff webp",
    "video": "3gp avi flv m2ts m4v mkv mov mp4 mpe mpeg mpg mts ogv webm wmv",
    "audio": "aac flac m4a mp3 oga ogg opus wav wma",
}
_SORTS: dict[str, Sort] = {f".{word}": sort for sort, words in _SUFFIXES.items() for word in words.split()}
_IMAGE_START = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|(?:RIFF....|....ftyp)(?:WEBP|avif|avis)", re.DOTALL
)

_ADDRESS = r"[a-z][a-z0-9+.-]+://\S|file:/\S"
ADDRESS = re.compile(_ADDRESS, re.IGNORECASE)
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+[;,]", re.IGNORECASE)
_MEDIA_FILE = re.compile(rf".*[^\s.](?:{'|'.join(map(re.escape, _SORTS))})", re.IGNORECASE)
_FILE = re.compile(
    rf"(?:{_ADDRESS}|/\w|\.{{1,2}}/|~[\w.-]*/|[a-z]:[\\/]\S|\\\\\w).*"
    r"|(?a:[\w.~+()=%/-]*[\w)]\.[a-z][a-z0-9]{1,4}"
    # A word with a `/`, except plain words (and/or) and numbers (1/2).
    r"|(?!(?:[a-z]+(?:/[a-z]+)+|[\d.,%]+(?:/[\d.,%]+)+)\Z)[\w.~+()=%-]+(?:/[\w.~+()=%-]*)+)",
    re.IGNORECASE,
)
"""One word that is an address, a path, or the name of a file."""


class AnimatedImageWarning(UserWarning):
    """An image of several frames or pages, read as its first one. A `Video` of the file has its frames."""


class Text(str):
    """String that is always a text, even if it looks like a file's name."""

    __slots__ = ()


class Template(Text):
    """String of a chat template: control tokens that it spells are those tokens, as they are in no other text.

    `prepare` tokenizes it together with the texts beside it.
    """

    __slots__ = ()


def looks_like_a_file(text: str) -> bool:
    """Returns whether a str looks like a file's name or an address, whether or not such a file exists.

    That is a str of one line (surrounding white space is ignored) which is

    - one word that begins like an address (`https://…`, `s3://…`, `file:/…`), or a data URL;
    - one word that begins like a path: `/x`, `./`, `../`, `~/`, `C:\\`, `\\\\x`;
    - one ASCII word that contains a `/` (`shots/run_1`), except plain words and numbers: `and/or`, `1/2`;
    - one ASCII word that ends in a dot and two to five letters and digits, a letter first: `shot1.pgn`;
    - up to eight words that end like the name of an image, video or sound: `my shot.png`.

    So `What is in shot.png?` and `see https://x.org for more` are texts.
    """
    line = text.strip()
    if _DATA_URL.match(line):
        return True
    # Linux takes paths of 4096 characters.
    if len(line) > 4096 or len(line.splitlines()) != 1 or len(line.split()) > 8:
        return False
    return bool(_MEDIA_FILE.fullmatch(line) or (len(line.split()) == 1 and _FILE.fullmatch(line)))


def check_text(text: str, what: str) -> None:
    """Checks that a str does not look like a file's name or an address, unless it is a `Text`.

    Raises:
      InputError: it does. The message begins with `what` and says how to pass a file or a text.
    """
    if not isinstance(text, Text) and looks_like_a_file(text):
        raise InputError(
            f"{what}: got {text[:300]!r}, which looks like a file's name or an address; expected pathlib.Path(...) for "
            "a file (what has an address is to be downloaded first), or kvpatch_jax.Text(...) for this very text"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Medium:
    """A video or a sound."""

    source: Any

    @property
    def options(self) -> dict[str, Any]:
        """Everything but the source, for ids and files."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}

    def files(self) -> Any:
        """Lists the files of a folder in the order of their names; returns another source as it is."""
        if not isinstance(self.source, os.PathLike) or not os.path.isdir(self.source):
            return self.source
        return sorted(path for path in Path(self.source).iterdir() if path.is_file())


@dataclasses.dataclass(frozen=True, eq=False)
class Video(_Medium):
    """A video: a file of which frames are sampled, or frames with their times.

    Attributes:
      source: path or bytes of a video file; path of a folder of frames (image files, in the order of their names); a
        uint8 array [N,H,W,3]; or a sequence of N images of one size, each as `prepare` takes one.
      fps: frames to sample in a second; None: as the family's settings say.
      frames: frames to sample in all, in place of `fps`.
      rate: of given frames: how many were shown in a second. All are taken, unless `fps` or `frames` asks for fewer.
      timestamps: of given frames: seconds at which each was shown, in place of `rate`; all are taken.
      sound: of a file: its own sound is heard too, mixed among its frames (Omni families).

    Raises:
      InputError: a number that is not positive, a `sound` that is not a bool, `fps` with `frames`, `timestamps` with
      any of the other three, or timestamps that do not rise.
    """

    fps: int | float | None = None
    frames: int | None = None
    rate: int | float | None = None
    timestamps: Sequence[int | float] | np.ndarray | None = None
    sound: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sound, bool):
            raise InputError(f"video: sound: got {self.sound!r:.80}; expected true or false")
        for name, kind in (("fps", float), ("rate", float), ("frames", int)):
            object.__setattr__(self, name, _positive(f"video: {name}", getattr(self, name), kind))
        for pair in (("fps", "frames"), ("rate", "timestamps"), ("fps", "timestamps"), ("frames", "timestamps")):
            if all(getattr(self, name) is not None for name in pair):
                raise InputError(f"video: got both {pair[0]} and {pair[1]}; expected one of them")
        if self.timestamps is None:
            return
        try:
            times = np.asarray(self.timestamps, np.float64)
            rises = times.ndim == 1 and times[0] >= 0 and (np.diff(times) > 0).all() and np.isfinite(times[-1])
        except (TypeError, ValueError, OverflowError, IndexError):
            rises = False
        if not rises:
            shown = f"timestamps {self.timestamps!r:.80}"
            raise InputError(f"video: got {shown}; expected seconds that rise from 0 or more")
        object.__setattr__(self, "timestamps", tuple(times.tolist()))

    def read(self) -> "Video":
        """Returns the video with a source of its own: a file's bytes, or frames as uint8 [N,H,W,3].

        Raises:
          InputError: no such file, no frames, frames without times or of several sizes, a file with times, or a frame
          that cannot be read.
        """
        source = self.files()
        name = os.fspath(self.source) if isinstance(self.source, os.PathLike) else "video"
        source = _bytes_of(source) if isinstance(source, os.PathLike) else source
        is_file, has_times = isinstance(source, bytes), self.rate is not None or self.timestamps is not None
        if is_file == has_times or (self.sound and not is_file):
            shown = f"{'a file' if is_file else 'frames'} with {self.options}"
            raise InputError(f"{name}: got {shown}; expected rate or timestamps of frames, and sound of a file alone")
        if is_file:
            return dataclasses.replace(self, source=source)

        # Frames in one array of their own.
        source = np.asarray(source) if isinstance(source, jax.Array) else source
        is_array = isinstance(source, np.ndarray)
        fits = source.ndim == 4 if is_array else isinstance(source, list | tuple)
        if not fits or not len(source):
            shown = f"frames of shape {list(source.shape)}" if is_array else f"a {type(source).__name__}"
            raise InputError(f"{name}: got {shown}; expected a file, a folder, images or [frames, height, width, 3]")
        frames = [decoded(frame, f"{name}: frame {number}") for number, frame in enumerate(source)]
        sizes = sorted({frame.shape for frame in frames})
        times = len(frames) if self.timestamps is None else len(self.timestamps)
        if len(sizes) != 1 or times != len(frames):
            shown = f"{len(frames)} frames of sizes {sizes} and {times} timestamps"
            raise InputError(f"{name}: got {shown}; expected frames of one size, with one timestamp each")
        return dataclasses.replace(self, source=np.stack(frames))


@dataclasses.dataclass(frozen=True, eq=False)
class Audio(_Medium):
    """A sound: a file, or samples with their rate.

    Attributes:
      source: path or bytes of a file, or a float array [samples] in −1 … 1, one channel.
      rate: samples per second of an array; a file says its own.

    Raises:
      InputError: an array without a rate, or of another shape; a file with one.
    """

    rate: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _positive("audio: rate", self.rate, int))
        source, shown = self.source, f"a {type(self.source).__name__}"
        is_array, fits = isinstance(source, np.ndarray | jax.Array), isinstance(source, bytes | os.PathLike)
        if is_array:
            shown = f"{source.dtype} {list(source.shape)}"
            fits = source.ndim == 1 and source.dtype.kind == "f" and source.size > 0
        if not fits or is_array != (self.rate is not None):
            expected = "a path or bytes without a rate, or floats [samples] of one channel with one"
            raise InputError(f"audio: got {shown} and rate {self.rate}; expected {expected}")

    def read(self) -> "Audio":
        """Returns the sound with a source of its own: a file's bytes, or samples as float32 [samples].

        Raises:
          InputError: no such file, or samples that are not finite.
        """
        if isinstance(self.source, bytes):
            return self
        if isinstance(self.source, os.PathLike):
            return Audio(_bytes_of(self.source))
        samples = np.array(self.source, np.float32)
        if not np.isfinite(samples).all():
            raise InputError("audio: got samples that are not finite; expected numbers in −1 … 1")
        return Audio(samples, self.rate)


def medium_of(item: Any) -> Video | Audio | None:
    """Returns an item that is a video or sound, or the one that a path names by its suffix; else None."""
    if isinstance(item, Video | Audio):
        return item
    kinds = {"video": Video, "audio": Audio}
    kind = kinds.get(sort_of_suffix(item) or "") if isinstance(item, os.PathLike) else None
    return None if kind is None else kind(item)


def _positive(what: str, value: Any, kind: type) -> Any:
    """Returns a positive number as a `kind`, so that equal ones have one form; None is returned as it is."""
    if value is None:
        return None
    kinds = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= sys.float_info.max:
        raise InputError(f"{what}: got {value!r:.80}; expected a positive {'whole ' if kind is int else ''}number")
    return kind(value)


def _bytes_of(path: os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r}: got no readable file ({error}); expected a video or audio file") from error


def is_encoded(content: bytes) -> bool:
    """Returns whether bytes begin like an encoded image."""
    return _IMAGE_START.match(content) is not None


def is_pixels(value: Any) -> bool:
    """Returns whether an array has the dtype and shape of an image's pixels."""
    is_bytes = isinstance(value, np.ndarray | jax.Array) and value.dtype == np.uint8
    return is_bytes and (value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in (1, 3, 4)))


def decoded(source: ImageSource, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Decodes an image to pixels, RGB [H, W, 3].

    The EXIF orientation is applied, that of a file and that of a PIL image alike (an image that was turned by hand must
    have lost the tag, as `PIL.ImageOps.exif_transpose` removes it). Pillow converts greys, palettes, CMYK and other
    modes of 8 bits per value to RGB; transparency is laid over white. Of an animation the first frame is read, with an
    `AnimatedImageWarning`, unless a PIL image stands at another. Errors call the image `name`.

    Raises:
      InputError: a file does not exist, is not an image or is truncated; values have more than 8 bits; an array has
      another dtype or shape; the image is empty.
    """
    if isinstance(source, np.ndarray | jax.Array):
        pixels = np.asarray(source)
        if not is_pixels(pixels) or not pixels.size:
            raise InputError(
                f"{name}: got {pixels.dtype} {list(pixels.shape)}; expected uint8 [H, W], [H, W, 1], [H, W, 3] or "
                "[H, W, 4], not empty; normalised values go through patchify"
            )
        if pixels.shape[2:] == (3,):
            return pixels
        if pixels.shape[2:] != (4,):
            return np.repeat(pixels.reshape(*pixels.shape[:2], 1), 3, axis=-1)
        source = require("PIL.Image", "Pillow").fromarray(pixels)
    elif not isinstance(source, bytes | os.PathLike) and not hasattr(source, "getbands"):
        raise InputError(f"{name}: got a {type(source).__name__}; expected a path, a PIL image or a uint8 array")

    with _opened(source, name) as file:
        # Modes of 16 or 32 bits: Pillow clips instead of scaling.
        if file.mode.startswith(("I", "F")) or 0 in file.size:
            shown = f"mode {file.mode} and {file.width}×{file.height} pixels"
            raise InputError(f"{name}: got {shown}; expected pixels of at most 8 bits a value (rescale it first)")
        image = require("PIL.ImageOps", "Pillow").exif_transpose(file)
        # A palette may have a transparent colour without a channel of its own.
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            Image = require("PIL.Image", "Pillow")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        pixels = np.array(image.convert("RGB"))
        if _drops_frames(file):
            warnings.warn(
                f"{name}: got several frames or pages; reads the first one (a Video of the file has the frames of a "
                "GIF, APNG or WebP)",
                AnimatedImageWarning,
                stacklevel=2,
            )
        return pixels


def _drops_frames(image: Any) -> bool:
    """Returns whether an image has frames behind its first, and stands there. A photo's preview (MPO) is none."""
    # Counting frames seeks in the file, which may be closed.
    with contextlib.suppress(OSError, ValueError, EOFError, AttributeError):
        return image.is_animated and image.tell() == 0 and image.format != "MPO"
    return False


@contextlib.contextmanager
def _opened(source: Any, name: str) -> Iterator[Any]:
    """Opens an image with Pillow, which reads a file's header alone; errors about the image become InputErrors."""
    Image = require("PIL.Image", "Pillow")
    _expect_no_folder(source, name)
    # Warnings about large images, which a program may have made errors.
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        if hasattr(source, "getbands"):
            yield source
        else:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                yield image
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, *bombs) as error:
        if str(name).lower().endswith(".pdf"):
            raise InputError(f"{name}: got a PDF; expected images of its pages, as pypdfium2 renders them") from error
        raise InputError(f"{name}: got no image that can be read ({error}); expected one that Pillow reads") from error


def _expect_no_folder(source: Any, name: str) -> None:
    """Raises InputError for a folder in place of an image."""
    if isinstance(source, os.PathLike) and os.path.isdir(source):
        name = "image" if name == os.fspath(source) else name
        raise InputError(
            f"{name}: got {os.fspath(source)!r:.300}, a folder; expected an image's file (a folder of frames is a "
            "Video of it, with their rate)"
        )


def sort_of(item: Any, what: str = "prompt") -> Sort:
    """Classifies an item as image, video, audio, text or token ids.

    A path with another suffix than a video's or sound's is an image. So are PIL images (recognised by `getbands`,
    without Pillow), bytes of an encoded image, and arrays other than integer vectors, which are token ids as lists of
    integers are.

    Raises:
      InputError: a str looks like a file's name, or the item is of another kind. Messages begin with `what`.
    """
    if isinstance(item, str):
        check_text(item, what)
        return "text"
    medium = medium_of(item)
    if medium is not None:
        return "video" if isinstance(medium, Video) else "audio"
    if isinstance(item, os.PathLike) or hasattr(item, "getbands") or (isinstance(item, bytes) and is_encoded(item)):
        return "image"
    if isinstance(item, np.ndarray | jax.Array):
        return "tokens" if item.ndim == 1 and item.dtype.kind in "iu" else "image"
    # bool is an int, but True is no token.
    kinds = {type(token) for token in item} if isinstance(item, list | tuple) else {bool}
    if all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        return "tokens"
    expected = "text, token ids or an image, Video or Audio"
    raise InputError(f"{what}: got item of type {type(item).__name__}; expected {expected}")


def sort_of_suffix(path: str | os.PathLike[str]) -> Sort | None:
    """Returns what the suffix of a file's name says it has: image, video or audio; None for another suffix."""
    return _SORTS.get(Path(path).suffix.lower())


def one_form(item: Any) -> Any:
    """Reads images, videos and sounds to the form that ids are computed from; returns other items as they are."""
    medium = medium_of(item)
    if medium is not None:
        return medium.read()
    if isinstance(item, os.PathLike):
        return decoded(item, os.fspath(item))
    return decoded(item) if isinstance(item, bytes) or hasattr(item, "getbands") or is_pixels(item) else item


def expect_small(item: ImageSource | Video | Audio, most: int, name: str = "image") -> int:
    """Checks that an image, video or sound has at most `most` bytes, before it is read or its pixels are decoded.

    Both the file and the pixels of an image count, which its header says; of a video or sound the file, the pixels of
    its frames, or the array. Returns the bytes of an image's pixels, or of the medium.

    Raises:
      InputError: the item or a frame is too large, a path is not a regular file, or the size cannot be read.
    """
    is_medium = isinstance(item, Video | Audio)
    source, name = (item.files(), type(item).__name__.lower()) if is_medium else (item, name)
    frames: Any = source if is_medium and isinstance(source, list | tuple) else ()
    size = len(source) if isinstance(source, bytes) else getattr(source, "nbytes", 0)
    if isinstance(source, os.PathLike):
        _expect_no_folder(source, name)
        name = os.fspath(source)
        if not os.path.isfile(name):  # a FIFO or device could block for ever
            raise InputError(f"{name!r:.300}: got no such file; expected a regular one")
        size = os.path.getsize(name)

    # The header says how many bytes the pixels take as RGB.
    if size <= most and not is_medium and (isinstance(source, bytes | os.PathLike) or hasattr(source, "getbands")):
        with _opened(source, name) as image:
            size = image.width * image.height * 3
    for frame in frames:
        size += expect_small(frame, most, f"{name}: frame") if size <= most else 0
    if size > most:
        raise InputError(f"{name!r:.300}: got {size} bytes; expected at most {most}")
    return size


def items_of(items: Iterable[Any], what: str) -> list[Any]:
    """Lists the items of a sequence; rejects iterables that are single items, such as a text, an array or a mapping.

    Raises:
      InputError: `items` is a single item, or empty.
    """
    # Each of these is iterable, and would be taken apart into letters, rows or keys.
    is_single = isinstance(items, str | bytes | os.PathLike | np.ndarray | jax.Array | Mapping)
    result = [] if is_single or not isinstance(items, Iterable) else list(items)
    if not result:
        shown = repr(items[:40]) if isinstance(items, str) else f"a {type(items).__name__}"
        shown = shown if is_single or not isinstance(items, Iterable) else "no items"
        raise InputError(f"{what}: got {shown}; expected a sequence of items, at least one")
    return result
