"""What things are called: digests of content, and the names that a tenant's objects have on disk.

A digest is blake2b of 256 bits over fields that are framed by their lengths, so that no two lists of fields give the
same bytes. A name is a digest keyed by the tenant: who does not hold the key cannot tell from a name what it names, nor
whether two tenants hold the same thing.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import jax
import numpy as np

from ..content import check_text, fingerprint_of, names_of
from ..errors import ImageError, InputError
from ..images import ImageSource, decoded, is_encoded, is_pixels
from ..ops import PatchFrame
from ..stamp import Base, Patch, Stamp

Content = ImageSource | np.ndarray | jax.Array | str | bytes | Sequence[int]
Encoding = Literal["bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"]
ENCODINGS: tuple[str, ...] = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
_BYTES = 32
_PATH = re.compile(
    r"(?:obj/[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{64}\.(?:kv|enc|p)(?:\.[a-z0-9_]{1,40}){0,2}"
    r"|lib/[0-9a-f]{32}/(?:static/[0-9a-f]{2}/[0-9a-f]{64}\.entry|dynamic/[0-9a-f]{2}/[0-9a-f]{64}\.v[0-9]{9}))"
    r"\.safetensors"
)


def is_object(path: str) -> bool:
    """Whether objects or libraries' entries have such paths below a root."""
    return _PATH.fullmatch(path) is not None


def _digest(fields: Iterable[bytes], key: bytes = b"", size: int = _BYTES) -> str:
    digest = hashlib.blake2b(digest_size=size, key=key)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.hexdigest()


def encoded(text: str) -> bytes:
    """A text in UTF-8. The error does not say what is in it.

    Raises:
      InputError: half of a surrogate pair, which stands for nothing alone.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"text with a lone surrogate at place {error.start}; expected text that UTF-8 can hold"
        ) from None


def _canonical(content: Content) -> Content:
    """An image in its one form (`images.decoded`), however it is given; other content as it is.

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
    """The id of a chunk: 64 hexadecimal digits over what it shows and who reads it.

    Args:
      backbone: the fingerprint (`Backbone.fingerprint`: weights, configuration, preprocessing, rope regime).
      content: in order, images, token ids (a list or an integer array), text, or other arrays. An image counts by its
        pixels (`images.decoded`), so that a path, an encoded file's bytes, a PIL image and an array of the same pixels
        have one id. Of other arrays dtype and shape count; a list of token ids counts as int64.

    Raises:
      InputError: no content, no fingerprint, a str that names a file (`Text` takes it as text), or an array that holds
      no numbers. ImageError: an image that cannot be read.
    """
    fingerprint_of(backbone, "chunk_id")
    if not content:
        raise InputError("chunk_id: no content; expected some")
    parts = [_canonical(part) for part in content]
    return _digest([b"chunk", encoded(backbone), *(field for part in parts for field in _fields(part))])


def content_digest(content: Content) -> str:
    """A digest of a content as it stands, whoever reads it: an encoded image counts by its bytes."""
    return _digest([b"chunk", b"content", *_fields(content)])


def encoder_id(backbone: str, request: Mapping[str, np.ndarray | jax.Array]) -> str:
    """The id of a tower's output: over every array of one prepared request (pixel_values, grids, …), by name.

    Raises:
      InputError: an empty request, or no fingerprint.
    """
    fingerprint_of(backbone, "encoder_id")
    if not request:
        raise InputError("encoder_id: no arrays; expected those of a prepared request")
    fields = [field for name in sorted(request) for field in (encoded(name), *_fields(request[name]))]
    return _digest([b"encoder", encoded(backbone), *fields])


@dataclasses.dataclass(frozen=True)
class Name:
    """Where an object is: relative to the store's root, `folder`/`file`. `chunk` is the keyed name of its chunk."""

    folder: str
    chunk: str
    file: str
    kind: Literal["kv", "patch", "encoder", "entry"]

    @property
    def tenant(self) -> str:
        """The keyed name of the tenant."""
        return self.folder.split("/")[1]

    @property
    def path(self) -> str:
        """Relative path, with forward slashes."""
        return f"{self.folder}/{self.file}"


@dataclasses.dataclass(frozen=True)
class Served:
    """What a patch serves: the fields of its `Stamp` that say so, with the same meaning. It does not print ids.

    `content` is that of the chunk which will be patched; None takes that of the canonical that the store has.
    """

    chunk: str = dataclasses.field(repr=False)
    backbone: str
    antecedent: tuple[str, ...] = dataclasses.field(repr=False)
    orbit: bool = False
    base: Base = "canonical"
    base_antecedent: tuple[str, ...] | None = dataclasses.field(default=None, repr=False)
    frame: PatchFrame = "phase_free"
    start: tuple[int, ...] | None = None
    content: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        fingerprint_of(self.backbone, "served")
        names_of(self.antecedent, "antecedent")
        names_of(self.base_antecedent or (), "base_antecedent")


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of one tenant's objects.

    Attributes:
      tenant: who.
      secret: at least 16 bytes; the tenant's key is derived from it.

    Raises:
      InputError: an empty tenant, or a secret below 16 bytes.
    """

    tenant: str = dataclasses.field(repr=False)
    secret: bytes = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not self.tenant or len(self.secret) < 16:
            raise InputError(
                f"names: tenant {self.tenant!r}, a secret of {len(self.secret)} bytes; expected 16 or more"
            )

    @functools.cached_property
    def _key(self) -> bytes:
        return bytes.fromhex(_digest([b"tenant", encoded(self.tenant)], hashlib.blake2b(self.secret).digest()))

    def _name(self, size: int, *fields: str) -> str:
        return _digest([encoded(field) for field in fields], self._key, size)

    @functools.cached_property
    def space(self) -> str:
        """The tenant's directory, below the store's root."""
        return f"obj/{self._name(16, 'space')}"

    @property
    def tenant_name(self) -> str:
        """The keyed name of the tenant, which its files in the store's shared directories begin with."""
        return self.space.removeprefix("obj/")

    def _place(self, backbone: str, chunk: str, rest: str, kind: Literal["kv", "patch", "encoder"]) -> Name:
        fingerprint_of(backbone, "store")
        if not isinstance(chunk, str):
            raise InputError(f"store: id of type {type(chunk).__name__}; expected a str, such as `chunk.id`")
        name = self._name(_BYTES, "chunk", backbone, chunk)
        folder = f"{self.space}/{self._name(16, 'backbone', backbone)}/{name[:2]}"
        return Name(folder, name, f"{name}.{rest}.safetensors", kind)

    def canonical(self, backbone: str, chunk: str, encoding: str | None = None) -> Name:
        """Of a canonical, as it was made, or in a smaller `encoding`: each its own object.

        Raises:
          InputError: an unknown encoding.
        """
        if encoding is not None and encoding not in ENCODINGS:
            raise InputError(f"encoding {encoding!r}; expected None or one of {ENCODINGS}")
        return self._place(backbone, chunk, "kv" if encoding is None else f"kv.{encoding}", "kv")

    def encoder(self, backbone: str, chunk: str) -> Name:
        """Of a tower's output, under the id of the chunk that it makes (or an `encoder_id`)."""
        return self._place(backbone, chunk, "enc", "encoder")

    @property
    def libraries(self) -> str:
        """The directory of the tenant's libraries, below the store's root."""
        return f"lib/{self.tenant_name}"

    def entry(self, library: str, *fields: str, version: int | None = None) -> Name:
        """Of a library's entry, over the library's and the entry's names; with a version in a dynamic library."""
        key = self._name(_BYTES, "entry", library, *fields)
        part = "entry" if version is None else f"v{version:09d}"
        return Name(f"{self.libraries}/{library}/{key[:2]}", key, f"{key}.{part}.safetensors", "entry")

    def patch(self, patch: Patch) -> Name:
        """Of a patch: over chunk, backbone, antecedent (list, or set of an orbit patch), base, ranks, layers."""
        form = json.dumps(_form(patch), sort_keys=True)
        served = self.patches(patch.stamp)
        return dataclasses.replace(served, file=f"{served.file}{self._name(20, 'form', form)}.safetensors")

    def patches(self, stamp: Served | Stamp) -> Name:
        """What the names of all patches that serve the same begin with, whatever their ranks, layers and dtypes."""
        antecedent = sorted(stamp.antecedent) if stamp.orbit else list(stamp.antecedent)
        served = [stamp.base, stamp.orbit, antecedent, stamp.base_antecedent, stamp.frame, stamp.start]
        own = self._place(stamp.backbone, stamp.chunk, "p", "patch")
        return dataclasses.replace(own, file=f"{own.chunk}.p.{self._name(20, 'served', json.dumps(served))}.")


def _form(patch: Patch) -> list:
    dtypes = sorted(
        (name, [str(leaf.dtype) for leaf in jax.tree.leaves(factors)]) for name, factors in patch.factors.items()
    )
    stamp = patch.stamp
    return [sorted(patch.ranks.items()), stamp.layers, stamp.heads, stamp.shared_left, dtypes]
