"""Ids made of content: digests of what a chunk shows and who reads it.

A digest is blake2b of 256 bits over fields that are framed by their lengths, so that no two lists of fields give the
same bytes.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from ..errors import ImageError, InputError
from .content import check_text, fingerprint_of
from .images import ImageSource, decoded, is_encoded, is_pixels

Content = ImageSource | np.ndarray | jax.Array | str | bytes | Sequence[int]
_DIGEST_BYTES = 32


def digest_of(fields: Iterable[bytes], key: bytes = b"", size: int = _DIGEST_BYTES) -> str:
    """Digests fields, each framed by its length: blake2b of `size` bytes in hexadecimal, keyed where there is a key."""
    digest = hashlib.blake2b(digest_size=size, key=key)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()


def encoded(text: str) -> bytes:
    """Encodes a text in UTF-8. The error does not say what is in it.

    Raises:
      InputError: no str, or half of a surrogate pair, which stands for nothing alone.
    """
    if not isinstance(text, str):
        raise InputError(f"text or name of type {type(text).__name__}; expected a str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text with a lone surrogate at place {error.start}; expected text that UTF-8 can hold"
        ) from None


def _canonical(content: Content) -> Content:
    """Brings an image to its one form (`images.decoded`), however it is given; other content stays as it is.

    Bytes that are no image after all, though they begin as one, are bytes.
    """
    if isinstance(content, str):
        check_text(content, "chunk_id")
        return content
    if isinstance(content, bytes):
        with contextlib.suppress(ImageError):
            return decoded(content) if is_encoded(content) else content
        return content
    image = isinstance(content, os.PathLike) or hasattr(content, "getbands") or is_pixels(content)
    return decoded(content, os.fspath(content) if isinstance(content, os.PathLike) else "image") if image else content


def _fields(content: Content) -> list[bytes]:
    if isinstance(content, str):
        return [b"text", encoded(content)]
    if isinstance(content, bytes):
        return [b"bytes", content]
    value = np.asarray(content)
    if value.dtype == object or value.dtype.kind in "USV":
        raise InputError(f"id: content of dtype {value.dtype}; expected numbers, text or bytes")
    if value.dtype.kind in "iu" and not isinstance(content, np.ndarray | jax.Array):
        value = value.astype(np.int64)  # token ids given as a list
    shape = ",".join(str(size) for size in value.shape)
    return [b"array", value.dtype.newbyteorder("<").str.encode(), shape.encode(), _little(value)]


def _little(value: np.ndarray) -> bytes:
    swapped = value.astype(value.dtype.newbyteorder("<")) if value.dtype.byteorder == ">" else value
    return np.ascontiguousarray(swapped).tobytes()


def chunk_id(backbone: str, *content: Content) -> str:
    """Computes the id of a chunk: 64 hexadecimal digits over what it shows and who reads it.

    Args:
      backbone: the fingerprint (`Backbone.fingerprint`: weights, configuration, preprocessing, rope regime).
      content: in order, images, token ids (a list or an integer array), text, or other arrays. An image counts by its
        pixels (`images.decoded`), so that a path, an encoded file's bytes, a PIL image and an array of the same pixels
        have one id. Of other arrays dtype and shape count; a list of token ids counts as int64.

    Raises:
      InputError: no content, no fingerprint, a str that looks like a file (`Text` takes it as text), or an array that
      holds no numbers. ImageError: an image that cannot be read.
    """
    fingerprint_of(backbone, "chunk_id")
    if not content:
        raise InputError("chunk_id: no content; expected some")
    parts = [_canonical(part) for part in content]
    return digest_of([b"chunk", encoded(backbone), *(field for part in parts for field in _fields(part))])


def content_digest(content: Content) -> str:
    """Digests a content as it stands, whoever reads it: an encoded image counts by its bytes."""
    return digest_of([b"chunk", b"content", *_fields(content)])


def encoder_id(backbone: str, request: Mapping[str, np.ndarray | jax.Array]) -> str:
    """Computes the id of a tower's output over every array of one prepared request (pixel_values, grids, …).

    Raises:
      InputError: an empty request, or no fingerprint.
    """
    fingerprint_of(backbone, "encoder_id")
    if not isinstance(request, Mapping) or not request:
        raise InputError(f"encoder_id: got {request!r:.80}; expected the arrays of a prepared request, by name")
    fields = [field for name in sorted(request) for field in (encoded(name), *_fields(request[name]))]
    return digest_of([b"encoder", encoded(backbone), *fields])
