"""The snapshot format: a directory of objects as the store has them, under the same paths, with a list of them.

    directory/obj/…        objects, hard links to the store's files, or copies
    directory/lib/…        entries of libraries, likewise
    directory/STORE.json   the secret of the names, with STORE.copy.json; only in a snapshot of the whole store
    directory/obj/…/KEY    check value of the key of a tenant's encrypted objects
    directory/MANIFEST     path, bytes and header checksum of every object, and a digest of this list; written last

A header holds the checksums of its leaves, so that the list vouches for every byte. A tenant's snapshot holds that
tenant's objects and nothing from which another's names, or the store's secret, could be told.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from ...errors import StoreCorruptError, StoreIOError, StoreSnapshotError
from ..format.header import MALFORMED, Header, crc32
from ..format.naming import name_at
from ..io.files import open_regular, read_into, read_small, typed_errors, write_all

Progress = Callable[[int, int], object]
"""Called with bytes done and bytes in all."""

Scope = Literal["tenant", "store"]
MANIFEST, UNTOLD = "MANIFEST", ""
_LARGEST_LIST, _DIGEST_BYTES = 1 << 30, 66


@dataclasses.dataclass(frozen=True)
class Summary:
    """Counts of a snapshot, restore, export or import.

    Attributes:
      objects, nbytes: taken over.
      skipped: left out because they are expired, went meanwhile, or (on the way in) are there already.
      damaged: left out because they did not verify.
      newer: left out because a later version of the library wrote them.
    """

    objects: int
    nbytes: int
    skipped: int = 0
    damaged: int = 0
    newer: int = 0


@dataclasses.dataclass(frozen=True)
class ManifestEntry:
    """One object of a snapshot. `crc`: of its header."""

    path: str
    size: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a snapshot holds.

    `secret`: in a snapshot of the whole store, the digest of the secret that is in it, or None where the store does
    not keep its secret; `UNTOLD` in a tenant's, and in older ones.
    """

    scope: Scope
    objects: tuple[ManifestEntry, ...]
    secret: str | None = UNTOLD


def header_crc(fd: int, header: Header) -> int:
    """Computes the checksum that a manifest keeps: crc32 of all bytes before the leaves."""
    raw = np.empty(header.start, np.uint8)
    read_into(fd, [raw], 0)
    return crc32(raw)


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def write_list(path: str, tree: Any) -> None:
    """Writes JSON with its digest into a new file, durably but for its name."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    with open_regular(*os.path.split(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        write_all(fd, [text, f"\n{_digest(text)}\n".encode()], 0)
        os.fsync(fd)


def read_list(path: str) -> Any:
    """Reads what `write_list` wrote, verified.

    Raises:
      StoreSnapshotError: none there, or other bytes than were written. StoreIOError.
    """
    try:
        with typed_errors(f"{path}: read"):
            raw = read_small(*os.path.split(path), _LARGEST_LIST)
    except StoreCorruptError as error:
        raise StoreSnapshotError(str(error)) from error
    except StoreIOError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise StoreSnapshotError(f"{path}: not there; expected a finished snapshot or export") from None
        raise
    text, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if digest != f"\n{_digest(text)}\n".encode():
        raise StoreSnapshotError(f"{path}: does not agree with its digest; expected it to")
    try:
        return json.loads(text)
    except MALFORMED as error:
        raise StoreSnapshotError(f"{path}: no JSON ({type(error).__name__}); expected some") from None


def read_manifest(directory: str) -> Manifest:
    """Reads the manifest of a snapshot, verified.

    Raises:
      StoreSnapshotError: none there, or not as it was written.
    """
    return _parsed(directory, read_list(f"{directory}/{MANIFEST}"))


def _parsed(directory: str, tree: Any) -> Manifest:
    try:
        if tree["version"] != 1 or tree["scope"] not in ("tenant", "store"):
            raise ValueError(f"version {tree['version']}, scope {tree['scope']}")
        objects = tuple(ManifestEntry(path, size, int(crc, 16)) for path, size, crc in tree["objects"])
        for each in objects:
            name_at(each.path)
            if type(each.size) is not int:
                raise ValueError(f"size {str(each.size)[:40]}")
        secret = tree.get("secret", UNTOLD)
        if not (secret is None or isinstance(secret, str)):
            raise ValueError(f"secret of type {type(secret).__name__}")
        return Manifest(tree["scope"], objects, secret)
    except MALFORMED as error:
        raise StoreSnapshotError(f"snapshot {directory}: {MANIFEST}: {str(error)[:200]}; expected version 1") from error
