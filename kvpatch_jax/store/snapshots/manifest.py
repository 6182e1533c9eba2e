"""Formats of snapshots: a directory with the store's objects under the same paths, and a list of them.

    directory/obj/…        objects, hard links to the store's files, or copies
    directory/lib/…        entries of libraries, likewise
    directory/STORE.json   the secret of the names, with STORE.copy.json; only in a snapshot of the whole store
    directory/MANIFEST     path, bytes and header checksum of every object, and a digest of this list; written last

A header contains the checksums of its leaves, so the list verifies every byte. A tenant's snapshot
contains that tenant's objects, and nothing that reveals names of others or the store's secret.

The Orbax item (`orbax_item`) also writes objects as Orbax arrays; `arrays` reads them:

    directory/objects/, arrays/      descriptions of objects, and their arrays, as pytrees of Orbax
    directory/part-…/, EXPORT        the same in parts of a store, and their number
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ...errors import StoreCorruptError, StoreIOError, StoreSnapshotError
from ..format.header import MALFORMED, crc32, header_length
from ..format.naming import name_at
from ..io.files import open_regular, read_into, read_small, typed_errors, write_all

Progress = Callable[[int, int], object]
"""Called with the processed and the total number of bytes."""

Scope = Literal["tenant", "store"]
MANIFEST, EXPORT = "MANIFEST", "EXPORT"
_LARGEST_LIST, _DIGEST_BYTES = 1 << 30, 66


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts of a snapshot or restore.

    Attributes:
      objects: number of saved or added objects.
      nbytes: their bytes.
      skipped: number of objects that have expired, vanished in the meantime, are of another format, or (in a
        restore) exist already.
      damaged: number of objects that did not verify.
    """

    objects: int
    nbytes: int
    skipped: int = 0
    damaged: int = 0


@dataclasses.dataclass(frozen=True)
class ManifestEntry:
    """An object of a snapshot: path, bytes, and checksum of its header."""

    path: str
    size: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of a snapshot.

    Attributes:
      scope: "tenant" or "store".
      objects: its objects.
      secret: in a snapshot of the whole store, the digest of its secret, or None if the store does not store one.
    """

    scope: Scope
    objects: tuple[ManifestEntry, ...]
    secret: str | None = None


def header_crc(fd: int) -> int:
    """Returns the checksum of a manifest's entry: crc32 of all bytes before the leaves.

    Raises:
      StoreCorruptError: it is no object.
    """
    raw = np.empty(header_length(os.pread(fd, 8, 0), os.fstat(fd).st_size), np.uint8)
    read_into(fd, [raw], 0)
    return crc32(raw)


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def write_list(path: str, tree: Any) -> None:
    """Writes JSON with its digest into a new file. The content is durable, its name not yet."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    with open_regular(*os.path.split(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        write_all(fd, [text, f"\n{_digest(text)}\n".encode()], 0)
        os.fsync(fd)


def read_list(path: str) -> Any:
    """Reads and verifies a file of `write_list`.

    Raises:
      StoreSnapshotError: it does not exist, or was changed.
      StoreIOError: it could not be read.
    """
    try:
        with typed_errors(f"{path}: read"):
            raw = read_small(*os.path.split(path), _LARGEST_LIST)
    except StoreCorruptError as error:
        raise StoreSnapshotError(str(error)) from error
    except StoreIOError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise StoreSnapshotError(f"{path}: got no such file; expected a finished snapshot or export") from None
        raise

    text, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if digest != f"\n{_digest(text)}\n".encode():
        raise StoreSnapshotError(f"{path}: got content that differs from its digest; expected them to agree")
    try:
        return json.loads(text)
    except MALFORMED as error:
        raise StoreSnapshotError(f"{path}: got no JSON ({type(error).__name__}); expected JSON") from None


def read_manifest(directory: str) -> Manifest:
    """Reads and verifies the manifest of a snapshot.

    Raises:
      StoreSnapshotError: it does not exist, or was changed.
    """
    tree = read_list(f"{directory}/{MANIFEST}")
    try:
        if tree["version"] != 1 or tree["scope"] not in ("tenant", "store"):
            raise ValueError(f"version {tree['version']}, scope {tree['scope']}")
        objects = [ManifestEntry(path, size, int(crc, 16)) for path, size, crc in tree["objects"]]
        for entry in objects:
            name_at(entry.path)
            if type(entry.size) is not int:
                raise ValueError(f"size {str(entry.size)[:40]}")
        secret = tree["secret"] if tree["scope"] == "store" else None
        if not (secret is None or isinstance(secret, str)):
            raise ValueError(f"secret of type {type(secret).__name__}")
        return Manifest(tree["scope"], tuple(objects), secret)
    except MALFORMED as error:
        raise StoreSnapshotError(
            f"snapshot {directory}: {MANIFEST}: got {str(error)[:200]}; expected version 1"
        ) from error
