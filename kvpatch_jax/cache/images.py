"""Decoding of images from files, bytes, PIL images and arrays to one form: uint8 RGB, turned as it is to be shown and
laid over white where it is transparent.

Ids are computed from this form and preprocessing starts with it, so that everything that shows a model the same pixels
is the same image: a file, a PIL image, an array, and RGBA images that differ only in the colours under full
transparency. White is the background of every family, as of vLLM.
"""

import contextlib
import io
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from ..errors import ImageError
from ..utils.optional_packages import require

ImageSource = Any
"""A path (`os.PathLike`), an encoded file's bytes, a PIL image, or uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]."""

_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_BOXES = (b"WEBP", b"avif", b"avis")
"""Formats that begin with a box: its size or the name of its kind is in front of these."""


def is_encoded(content: bytes) -> bool:
    """Whether bytes begin like an encoded image."""
    boxed = content.startswith(b"RIFF") or content[4:8] == b"ftyp"
    return content.startswith(_MAGIC) or (boxed and content[8:12] in _BOXES)


def is_pixels(value: Any) -> bool:
    """Whether an array has the dtype and shape of an image's pixels."""
    array = isinstance(value, np.ndarray | jax.Array) and value.dtype == np.uint8
    return array and (value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in (1, 3, 4)))


def decoded(source: ImageSource, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Decodes an image to pixels, RGB [H, W, 3].

    The EXIF orientation is applied, that of a file and that of a PIL image alike (an image that was turned by hand must
    have lost the tag, as `PIL.ImageOps.exif_transpose` removes it). Pillow converts greys, palettes, CMYK and other
    modes of 8 bits per value to RGB; transparency is laid over white. Errors call the image `name`.

    Raises:
      ImageError: a file does not exist, is not an image or is truncated; values have more than 8 bits; an array has
      another dtype or shape; the image is empty.
    """
    if isinstance(source, np.ndarray | jax.Array):
        image = np.asarray(source)
        if not is_pixels(image):
            raise ImageError(
                f"{name}: got {image.dtype} {list(image.shape)}; expected uint8 [H, W], [H, W, 1], [H, W, 3] or "
                "[H, W, 4]; normalised values go through patchify"
            )
        if image.ndim == 2:
            image = image[..., None]
        if image.shape[-1] == 1:
            image = np.repeat(image, 3, axis=-1)
    elif isinstance(source, bytes | str | os.PathLike):
        with _opened(io.BytesIO(source) if isinstance(source, bytes) else Path(source), name) as file:
            # `open` reads the header alone; a truncated file shows only here.
            file.load()
            image = _of_pil(file, name)
    else:
        image = _of_pil(source, name)

    if image.size == 0:
        raise ImageError(f"{name}: got {image.shape[0]}×{image.shape[1]} pixels; expected an image that is not empty")
    return image if image.shape[-1] == 3 else _over_white(image)


def expect_small(source: ImageSource, most: int, name: str = "image") -> int:
    """Checks that an image has at most `most` bytes, as a file and as pixels, before its pixels are decoded. Returns
    the bytes of its pixels.

    Raises:
      ImageError: the image is too large, a path is not a regular file, or the size cannot be read.
    """
    file: Any = None
    size = 0
    if isinstance(source, str | os.PathLike):
        name, file = os.fspath(source), source
        try:
            status = os.stat(source)
        except (OSError, ValueError) as error:
            raise ImageError(f"{name!r:.300}: got no such file ({error}); expected an image file") from error

        # A FIFO or device could block for ever.
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{name!r:.300}: got no regular file; expected an image file")
        _expect_bytes(status.st_size, most, name, "of its file")
    elif isinstance(source, bytes):
        file = io.BytesIO(source)
        _expect_bytes(len(source), most, name, "of its file")
    elif hasattr(source, "getbands"):
        size = source.width * source.height * 3
    elif hasattr(source, "nbytes"):
        size = source.nbytes

    # Opening reads the header alone, which says how many bytes the pixels take as RGB.
    if file is not None:
        with _opened(file, name) as image:
            size = image.width * image.height * 3
    _expect_bytes(size, most, name, "of its pixels")
    return size


def _expect_bytes(found: int, most: int, name: str, what: str) -> None:
    if found > most:
        raise ImageError(f"{name!r:.300}: got {found} bytes {what}; expected at most {most}")


@contextlib.contextmanager
def _opened(file: Any, name: str) -> Iterator[Any]:
    """Opens an image with Pillow; whatever that or the body raises about the file becomes an ImageError."""
    Image = require("PIL.Image", "Pillow")
    # Warnings about large images, which a program may have made errors.
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(file) as image:
            yield image
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{name}: got no such file; expected an image file") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{name}: got a file that Pillow does not know; expected an image file") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, *bombs) as error:
        raise ImageError(f"{name}: got a damaged or truncated file ({error}); expected an image file") from error


def _of_pil(source: Any, name: str) -> np.ndarray:
    """Converts a PIL image to pixels, RGB or RGBA."""
    # As `content.sort_of` recognises a PIL image, without Pillow.
    if not hasattr(source, "getbands"):
        raise ImageError(f"{name}: got a {type(source).__name__}; expected a path, a PIL image or a uint8 array")
    if 0 in source.size:
        raise ImageError(f"{name}: got {source.height}×{source.width} pixels; expected an image that is not empty")
    # Modes of 16 or 32 bits: Pillow clips instead of scaling.
    if source.mode.startswith(("I", "F")):
        raise ImageError(f"{name}: got mode {source.mode}; expected at most 8 bits a value (rescale it first)")

    try:
        image = require("PIL.ImageOps", "Pillow").exif_transpose(source)
        # A palette may have a transparent colour without a channel of its own.
        alpha = "A" in image.getbands() or image.info.get("transparency") is not None
        return np.array(image.convert("RGBA" if alpha else "RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        raise ImageError(
            f"{name}: got mode {source.mode}, which cannot be read as RGB ({error}); expected an image that Pillow "
            "converts"
        ) from error


def _over_white(image: UInt8[np.ndarray, "H W 4"]) -> UInt8[np.ndarray, "H W 3"]:
    """Composites RGBA pixels over white, with the bits of Pillow's `alpha_composite`."""
    opacity = image[..., 3:].astype(np.uint16)
    if opacity.min() == 255:
        return np.ascontiguousarray(image[..., :3])
    # Divided by 255 and rounded, without leaving 16 bits: x / 255 ≈ (x + x / 256) / 256.
    blended = image[..., :3] * opacity + 255 * (255 - opacity) + 128
    return ((blended + (blended >> 8)) >> 8).astype(np.uint8)
