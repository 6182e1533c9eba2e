"""Entries of a library: named resources, and their encoding as objects of the store.

An entry is a verified, durable object like any other, under `lib/<tenant>/<library>/`. Its name is in its header, so
that a library can be listed; the path is keyed and reveals nothing. Entries do not count for the chunks' budget and are
not evicted.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Float

from ...cache import (
    Chunk,
    Text,
    check_text,
    chunk_id,
    content_digest,
    decoded,
    encoded,
    is_encoded,
    sort_of,
)
from ...core import AnyArray
from ...errors import InputError, NotFiniteError, StoreCorruptError
from ...utils.kinds import expect_kind
from ..format.header import MALFORMED, Header
from ..format.known_words import expect_known
from ..format.naming import Name, ObjectNames
from ..format.objects import Blob
from .references import KINDS, Kind, Reference, check_name
from .retriever import as_vector

Content = str | bytes | np.ndarray | list[int] | tuple[int, ...]
"""Content of a resource: text, an encoded file, pixels (or another array), or token ids."""

_FIELDS = ("kind", "name", "version", "content", "digest", "chunk", "metadata", "withdrawn")
_CONTENTS = ("none", "array", "tokens", "str", "bytes")
"""Types of a content in an entry's body."""

_MOST_VERSIONS = 10**9  # a reference can express smaller numbers only
_NOTHING = np.zeros(1, np.uint8)  # an object has at least one byte


@dataclasses.dataclass(frozen=True)
class LibraryEntry:
    """A resource without its content, as in a listing.

    Attributes:
      reference: the reference in prompts, with its version in a dynamic library.
      nbytes: bytes of its file and of the chunk that was put with it.
      expires: seconds since the epoch, or None.
      chunk: (backbone, id) of the chunk that was put with it, or None.
      withdrawn: whether this version withdraws the reference.
      path: path below the store's root.
    """

    reference: Reference
    nbytes: int
    expires: float | None
    chunk: tuple[str, str] | None = dataclasses.field(repr=False)
    withdrawn: bool
    path: str


@dataclasses.dataclass(frozen=True, eq=False)
class Resource:
    """A verified resource of a library.

    Attributes:
      reference: the reference in prompts, with its version in a dynamic library.
      content: the content that was put; None if there is only a chunk.
      digest: digest of the content, 64 hexadecimal digits; "" without content.
      metadata: the operator's metadata.
      vector: vector by which a retriever finds it, [D] float32, or None.
      expires, chunk: as in `LibraryEntry`.
    """

    reference: Reference
    content: str | bytes | np.ndarray | tuple[int, ...] | None = dataclasses.field(repr=False)
    digest: str = dataclasses.field(repr=False)
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)
    vector: np.ndarray | None = dataclasses.field(repr=False)
    expires: float | None
    chunk: tuple[str, str] | None = dataclasses.field(repr=False)

    def chunk_id(self, backbone: str) -> str:
        """Returns the id of its chunk for a backbone: of the chunk that was put with it, or else of its content.

        Raises:
          InputError: there is no content, and only a chunk of another backbone.
        """
        if self.chunk is not None and self.chunk[0] == backbone:
            return self.chunk[1]
        if self.content is None:
            raise InputError(f"{self.reference}: got a chunk of another backbone only; expected content too")
        return self.content_id(backbone)

    def content_id(self, backbone: str) -> str:
        """Returns the `chunk_id` of its content. Raises InputError if there is none."""
        if self.content is None:
            raise InputError(f"{self.reference}: got no content; expected some")
        return chunk_id(backbone, self.item)

    @property
    def item(self) -> Any:
        """Content as an item for `Backbone.prepare`: pixels of an image, a list of token ids, or a `Text`."""
        if self.reference.kind == "TOKENS" and self.content is not None:
            return [int(token) for token in self.content]
        if isinstance(self.content, bytes) and self.reference.kind == "IMAGE":
            return decoded(self.content, str(self.reference))
        return Text(self.content) if isinstance(self.content, str) else self.content


def as_content(content: Any, kind: Kind | None = None) -> Content:
    """Converts content to a type that is stored: PIL images and JAX arrays to NumPy arrays, a path to its file's bytes.

    Raises:
      InputError: the content has another type, is a str that looks like a file name (unless `kind` is TEXT), or a file
        that cannot be read.
    """
    if hasattr(content, "getbands"):
        return decoded(content)
    if isinstance(content, jax.Array):
        return np.asarray(content)

    if isinstance(content, os.PathLike):
        try:
            return Path(content).read_bytes()
        except OSError as error:
            raise InputError(f"library: got {os.fspath(content)!r} ({error}); expected a readable file") from error

    if isinstance(content, str):
        if kind != "TEXT":
            check_text(content, "library")
        return str(content)  # a `Text` too
    ids = isinstance(content, list | tuple) and bool(content) and all(type(token) is int for token in content)
    if ids or isinstance(content, bytes | np.ndarray):
        return content
    raise InputError(
        f"library: got content of type {type(content).__name__}; expected text, bytes, an array or token ids"
    )


def kind_of(content: Content) -> Kind:
    """Returns the kind of a content."""
    if isinstance(content, bytes) and not is_encoded(content):
        return "FILE"
    word = sort_of(Text(content) if isinstance(content, str) else content, "library")
    return cast(Kind, word.upper())


def named_content(name: str, content: Any, chunk: Chunk | None, kind: Kind | None) -> tuple[Reference, Content | None]:
    """Returns the reference and the converted content of an entry; the kind is derived from the content by default.

    Raises:
      InputError: as `as_content` and `check_name`.
    """
    if chunk is not None:
        expect_kind(chunk, Chunk, "chunk", "a Chunk")
    content = None if content is None else as_content(content, kind)
    if kind is None:
        kind = "IMAGE" if content is None else kind_of(content)
    return Reference(*check_name(kind, name)), content


def entry_blob(
    reference: Reference,
    content: Content | None,
    chunk: Chunk | None,
    vector: Float[AnyArray, " D"] | None,
    metadata: Mapping[str, Any],
    expires: float | None,
) -> Blob:
    """Encodes a resource as an object.

    Raises:
      InputError: there is neither content nor chunk, the content is empty, or the metadata are not JSON.
      NotFiniteError: the vector is not finite.
      DtypeError: objects cannot hold the dtype of an array.
    """
    if content is None and chunk is None:
        raise InputError(f"{reference}: got neither content nor a chunk; expected one of them")

    # An image may also be a file in an encoding that is not recognised; FILE has any content.
    wanted = {"TEXT": ("TEXT",), "TOKENS": ("TOKENS",), "IMAGE": ("IMAGE", "FILE")}.get(reference.kind)
    if content is not None and wanted is not None and kind_of(content) not in wanted:
        raise InputError(f"{reference}: got content of kind {kind_of(content)}; expected {' or '.join(wanted)}")

    word, array = _array_of(reference, content)
    arrays = {"content": array}
    if vector is not None:
        arrays["vector"] = as_vector(vector, str(reference)).reshape(-1)
        if not np.isfinite(arrays["vector"]).all():
            raise NotFiniteError(f"{reference}: got a vector with NaN or infinity; expected finite values")

    try:
        plain = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"{reference}: got metadata {str(metadata)[:80]}; expected JSON ({error})") from error

    body = {
        "kind": reference.kind,
        "name": reference.name,
        "version": reference.version,
        "content": word,
        "digest": "" if content is None else content_digest(content),
        "chunk": None if chunk is None else [chunk.backbone, chunk.id, chunk.nbytes],
        "metadata": plain,
        "withdrawn": False,
    }
    return Blob("entry", body, arrays, expires)


def withdrawn_blob(reference: Reference) -> Blob:
    """Encodes a version that withdraws its reference."""
    body = {"kind": reference.kind, "name": reference.name, "version": reference.version, "content": "none"}
    more = {"digest": "", "chunk": None, "metadata": {}, "withdrawn": True}
    return Blob("entry", body | more, {"content": _NOTHING}, None)


def _array_of(reference: Reference, content: Content | None) -> tuple[str, np.ndarray]:
    if content is None:
        return "none", _NOTHING

    if isinstance(content, np.ndarray):
        word, array = "array", content
    elif isinstance(content, str | bytes):
        raw = encoded(content) if isinstance(content, str) else content
        word, array = type(content).__name__, np.frombuffer(raw, np.uint8)
    else:
        word, array = "tokens", np.asarray(list(content), np.int64)

    if not array.size:
        raise InputError(f"{reference}: got empty content; expected some")
    return word, array


def _content_of(word: str, arrays: Mapping[str, np.ndarray]) -> str | bytes | np.ndarray | tuple[int, ...] | None:
    if word == "none":
        return None
    array = arrays["content"]
    if word == "array":
        return array
    if word == "tokens":
        return tuple(array.tolist())
    return array.tobytes().decode() if word == "str" else array.tobytes()


def _reference_and_chunk(body: Mapping[str, Any]) -> tuple[Reference, tuple[str, str] | None]:
    chunk = body["chunk"]
    return Reference(body["kind"], body["name"], body["version"]), (chunk[0], chunk[1]) if chunk else None


def entry_of_header(header: Header, path: str) -> LibraryEntry:
    """Returns the entry of a header. Raises StoreCorruptError if the object is no entry."""
    check_body(header.body)
    reference, chunk = _reference_and_chunk(header.body)
    nbytes = header.size + chunk_bytes(header.body)
    return LibraryEntry(reference, nbytes, header.expires, chunk, header.body["withdrawn"], path)


def chunk_bytes(body: Mapping[str, Any]) -> int:
    """Returns the bytes of the chunk that was put with an entry, which count for the entry too."""
    return body["chunk"][2] if body["chunk"] else 0


def resource_of(body: Mapping[str, Any], arrays: Mapping[str, np.ndarray], expires: float | None) -> Resource:
    """Makes the resource of an object's body and leaves."""
    reference, chunk = _reference_and_chunk(body)
    content = _content_of(body["content"], arrays)
    return Resource(reference, content, body["digest"], body["metadata"], arrays.get("vector"), expires, chunk)


def entry_name(names: ObjectNames, body: Mapping[str, Any]) -> Name:
    """Returns the name of a tenant's entry from its body. Raises StoreCorruptError as `check_body`."""
    check_body(body)
    library = "static" if body["version"] is None else "dynamic"
    return names.entry(library, body["kind"], body["name"], version=body["version"])


def check_body(body: Mapping[str, Any]) -> None:
    """Raises StoreCorruptError for a body of no entry."""
    try:
        expect_known("entry with a field", body, _FIELDS)
        expect_known("entry whose content is", [body["content"]], _CONTENTS)
        expect_known("entry of kind", [body["kind"]], KINDS)
        kind, name, version, chunk = (body[word] for word in ("kind", "name", "version", "chunk"))
        texts = (kind, name, body["content"], body["digest"])
        whole = all(type(text) is str for text in texts) and isinstance(body["metadata"], dict)
        whole = whole and check_name(kind, name) == (kind, name) and type(body["withdrawn"]) is bool
        whole = whole and (version is None or (type(version) is int and 0 < version < _MOST_VERSIONS))
        whole = whole and (chunk is None or ([type(part) for part in chunk] == [str, str, int] and chunk[2] >= 0))
    except MALFORMED:
        whole = False
    if not whole:
        raise StoreCorruptError("object: got a body without what entries say; expected kind, name, version, …")


def check_resource(body: Mapping[str, Any], arrays: Mapping[str, np.ndarray], expires: float | None) -> None:
    """Raises StoreCorruptError if the leaves of an entry do not match its body."""
    try:
        expect_known("entry with a field", body, _FIELDS)
        expect_known("entry whose content is", [body["content"]], _CONTENTS)
        expect_known("entry with a leaf", arrays, ("content", "vector"))
        resource_of(body, arrays, expires)
    except MALFORMED as error:
        kind = type(error).__name__  # the error's text may contain content
        raise StoreCorruptError(f"object: got a body that does not make an entry ({kind}); expected one") from None
