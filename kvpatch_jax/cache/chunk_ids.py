"""Content-derived ids: digests of a chunk's content and of the backbone that reads it.

A digest is 256-bit blake2b over fields framed by their lengths, so that no two lists of fields give the same bytes.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from ..errors import ImageError, InputError
from .content import check_text, fingerprint_of
from .images import ImageSource, decoded, is_encoded, is_pixels
from .media import Audio, Video, medium_of

Content = ImageSource | Video | Audio | np.ndarray | jax.Array | str | bytes | Sequence[int]
_DIGEST_BYTES = 32


def digest_of(fields: Iterable[bytes], key: bytes = b"", size: int = _DIGEST_BYTES) -> str:
    """Digests fields, each framed by its length: blake2b of `size` bytes in hexadecimal, keyed by a non-empty `key`."""
    digest = hashlib.blake2b(digest_size=size, key=key)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()


def encoded(text: str) -> bytes:
    """Encodes a text in UTF-8. Errors do not reveal the text, which may be private.

    Raises:
      InputError: `text` is not a str, or contains a lone surrogate.
    """
    if not isinstance(text, str):
        raise InputError(f"text or name: got type {type(text).__name__}; expected a str")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text: got a lone surrogate at place {error.start}; expected text that UTF-8 can hold"
        ) from None


def _fields(content: Content) -> list[bytes]:
    """Returns the fields to digest: the kind of content, then its bytes; of arrays also dtype and shape."""
    if isinstance(content, str):
        return [b"text", encoded(content)]
    if isinstance(content, bytes):
        return [b"bytes", content]
    if isinstance(content, Video | Audio):
        name = type(content).__name__.lower()
        return [encoded(name), json.dumps(content.options, sort_keys=True).encode(), *_fields(content.source)]

    value = np.asarray(content)
    if value.dtype == object or value.dtype.kind in "USV":
        raise InputError(f"id: got content of dtype {value.dtype}; expected numbers, text or bytes")

    # NumPy's integer type for a list of token ids depends on the platform.
    if value.dtype.kind in "iu" and not isinstance(content, np.ndarray | jax.Array):
        value = value.astype(np.int64)

    # Ids must not depend on the byte order either.
    little_endian = value.dtype.newbyteorder("<")
    if value.dtype.byteorder == ">":
        value = value.astype(little_endian)
    shape = ",".join(str(size) for size in value.shape)
    return [b"array", little_endian.str.encode(), shape.encode(), np.ascontiguousarray(value).tobytes()]


def chunk_id(backbone: str, *content: Content) -> str:
    """Computes the id of a chunk: 64 hexadecimal digits over its content and the backbone's fingerprint.

    Args:
      backbone: the fingerprint (`Backbone.fingerprint`: weights, configuration, preprocessing, rope regime).
      content: in order, images, token ids (a list or an integer array), text, or other arrays. An image is digested by
        its pixels (`images.decoded`), so a path, an encoded file's bytes, a PIL image and an array of the same pixels
        have the same id. A `Video` is digested by its frames or its file's bytes, its times and how it is to be
        sampled, an `Audio` by its samples and rate or its file's bytes. Other arrays include dtype and shape; a list of
        token ids is digested as int64.

    Raises:
      InputError: there is no content or no fingerprint, a str looks like a file (use `Text`), or an array does not
      hold numbers. ImageError: an image cannot be read.
    """
    fingerprint_of(backbone, "chunk_id")
    if not content:
        raise InputError("chunk_id: got no content; expected some")

    # Every part is checked and decoded before any is digested. Images in any form become pixels.
    parts: list[Content] = []
    for part in content:
        if isinstance(part, str):
            check_text(part, "chunk_id")
        elif isinstance(part, bytes) and is_encoded(part):
            # Bytes that begin like an image but cannot be decoded are treated as bytes.
            with contextlib.suppress(ImageError):
                part = decoded(part)
        elif (medium := medium_of(part)) is not None:
            part = medium.read()
        elif isinstance(part, os.PathLike):
            part = decoded(part, os.fspath(part))
        elif hasattr(part, "getbands") or is_pixels(part):
            part = decoded(part, "image")
        parts.append(part)

    fields = [b"chunk", encoded(backbone)]
    for part in parts:
        fields += _fields(part)
    return digest_of(fields)


def content_digest(content: Content) -> str:
    """Digests content without decoding it, independent of any backbone: an encoded image is digested by its bytes."""
    return digest_of([b"chunk", b"content", *_fields(content)])


def encoder_id(backbone: str, request: Mapping[str, np.ndarray | jax.Array]) -> str:
    """Computes the id of a vision tower's output from all arrays of one prepared request (pixel_values, grids, …).

    Raises:
      InputError: the request is empty, or there is no fingerprint.
    """
    fingerprint_of(backbone, "encoder_id")
    if not isinstance(request, Mapping) or not request:
        raise InputError(f"encoder_id: got {request!r:.80}; expected the arrays of a prepared request, by name")

    fields = [b"encoder", encoded(backbone)]
    for name in sorted(request):
        fields += [encoded(name), *_fields(request[name])]
    return digest_of(fields)
