"""Snapshots: a directory that holds objects of a store as they are, under the same paths, with a list of them.

    directory/obj/…        objects, hard links to the store's files, or copies
    directory/lib/…        entries of libraries, likewise
    directory/STORE.json   the secret of the names, with STORE.copy.json; only in a snapshot of the whole store
    directory/obj/…/KEY    tells the key of a tenant's encrypted objects from another
    directory/MANIFEST     path, bytes and header checksum of every object, and a digest of this list; written last

A header holds the checksums of its leaves, so that the list vouches for every byte. A tenant's snapshot holds that
tenant's objects and nothing from which another's names, or the store's secret, could be told.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np

from ...errors import StoreCorruptError, StoreIOError, StoreSnapshotError
from ..disk.directory import DirectoryEntry, reading
from ..disk.disk import Disk
from ..disk.root_config import SECRETS, find_secret, secret_digest, secret_text
from ..format.buffers import Buffers, expect_memory
from ..format.header import MALFORMED, Header
from ..format.naming import Names, name_at
from ..format.objects import read_leaves
from ..io.files import (
    NotRegularError,
    copy_into,
    crc32,
    folder,
    link,
    open_regular,
    open_regular_in,
    read_into,
    read_small,
    sync_directory,
    typed_errors,
    write_all,
)

Progress = Callable[[int, int], object]
"""Called with bytes done and bytes in all."""

Scope = Literal["tenant", "store"]
MANIFEST, KEY = "MANIFEST", "KEY"
UNTOLD = ""
LARGEST_KEY = 1 << 10
_LARGEST_LIST, _DIGEST_BYTES = 1 << 30, 66


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a snapshot, restore, export or import did.

    Attributes:
      objects, nbytes: taken over.
      skipped: left out because they are expired, went meanwhile, or (on the way in) are there already.
      damaged: left out because they did not verify.
    """

    objects: int
    nbytes: int
    skipped: int = 0
    damaged: int = 0


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


def read_whole(fd: int, header: Header, buffers: Buffers) -> dict[str, np.ndarray]:
    """Every leaf, verified; read-only. Raises as `read_leaves`."""
    return read_leaves(fd, header, list(header.leaves), buffers)


def header_crc(fd: int, header: Header) -> int:
    """The checksum that a manifest keeps: crc32 of all bytes before the leaves."""
    raw = np.empty(header.start, np.uint8)
    read_into(fd, [raw], 0)
    return crc32(raw)


# ------------------------------------------------------------------------------------------------------- writing


def write_snapshot(
    disk: Disk, names: Names | None, directory: str, *, copy: bool = False, progress: Progress | None = None
) -> Summary:
    """Fills an empty directory with a tenant's objects and libraries, or all tenants'; durable when this returns.

    Objects that are evicted or replaced meanwhile are left out or in, whole. Headers are verified, and with `copy`
    every byte; what does not verify goes to quarantine and is left out. Libraries come first, as they are at one
    moment: who would change one waits until its entries are in. So the chunks that were put with entries come too.

    Raises:
      StoreFullError, StoreReadOnlyError, StoreIOError: the directory is then no snapshot, for it has no manifest.
    """
    libraries, space = ("lib", "obj") if names is None else (names.libraries, names.space)
    with typed_errors(f"snapshot {directory}: write"):
        os.chmod(directory, 0o700)  # whoever made it
        with unchanged_libraries(disk.root, libraries):
            shelved = _keep_all(disk, libraries, directory, copy, None)
        objects = _keep_all(disk, space, directory, copy, progress)
        kept, skipped, damaged = shelved[0] + objects[0], shelved[1] + objects[1], shelved[2] + objects[2]
        scope: Scope = "store" if names is None else "tenant"
        told = {"secret": _keep_secret(disk.root, directory)} if names is None else {}
        _keep_key_checks(disk.root, directory, {name_at(each.path).tenant for each in kept})
        listed = [[each.path, each.size, f"{each.crc:08x}"] for each in kept]
        write_list(f"{directory}/{MANIFEST}", {"version": 1, "scope": scope, "objects": listed} | told)
        for each, _, _ in os.walk(directory):
            sync_directory(each)
    return Summary(len(kept), sum(each.size for each in kept), skipped, damaged)


@contextlib.contextmanager
def unchanged_libraries(root: str, below: str) -> Iterator[None]:
    """Keeps the libraries below a folder from changing. Needs to read only, so a root on a read-only medium will do."""
    spaces = [f"{below}/{space}" for space in _listed(root, below)] if below == "lib" else [below]
    with contextlib.ExitStack() as held:
        for path in sorted(f"{space}/{library}/lock" for space in spaces for library in _listed(root, space)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # its tenant was deleted
                fcntl.flock(held.enter_context(open_regular(root, path)), fcntl.LOCK_SH)
        yield


def _listed(root: str, below: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(root, below) as fd:
        return os.listdir(fd)
    return []


def _keep_all(
    disk: Disk, below: str, directory: str, copy: bool, progress: Progress | None
) -> tuple[list[ManifestEntry], int, int]:
    """Takes over all objects below a folder. What was kept, how many were left out, how many did not verify."""
    entries = sorted(disk.scan(below), key=lambda entry: entry.path)
    total, done, damaged = sum(entry.size for entry in entries), 0, 0
    kept: list[ManifestEntry] = []
    for entry in entries:
        try:
            found = _keep(disk, entry, directory, copy)
            kept += [] if found is None else [found]
        except StoreCorruptError:
            disk.examine(name_at(entry.path))  # as it is now, for the link has changed what the system notes of it
            damaged += 1
        done += entry.size
        if progress is not None:
            progress(done, total)
    return kept, len(entries) - len(kept) - damaged, damaged


def _keep_secret(root: str, directory: str) -> str | None:
    """Takes over the secret of a root, if it keeps one; its digest. Raises StoreCorruptError where it is damaged."""
    secret = find_secret(root)
    if secret is None:
        return None
    for name in SECRETS:
        with open_regular(directory, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            write_all(fd, [secret_text(secret)], 0)
            os.fsync(fd)
    return secret_digest(secret)


def _keep_key_checks(root: str, directory: str, tenants: Iterable[str]) -> None:
    """The files that tell under which key tenants' objects are encrypted, and nothing about it."""
    for tenant in tenants:
        with contextlib.suppress(FileNotFoundError):
            check = read_small(root, f"obj/{tenant}/{KEY}", LARGEST_KEY, unnoticed=True)
            with (
                folder(directory, f"obj/{tenant}", make=True) as parent,
                open_regular_in(parent, KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as target,
            ):
                write_all(target, [check], 0)
                os.fsync(target)


def _keep(disk: Disk, entry: DirectoryEntry, directory: str, copy: bool) -> ManifestEntry | None:
    """Links or copies one object, and looks at what arrived. None where it went meanwhile, or is expired."""
    above, _, file = entry.path.rpartition("/")
    keep = False
    try:
        with folder(disk.root, above) as source, folder(directory, above, make=True) as target:
            if copy or not link(source, file, target, file):
                expect_memory(entry.size)  # what cannot be verified is not copied
                with open_regular_in(target, file, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                    copy_into(fd, disk.root, entry.path)
                    os.fsync(fd)
        with reading(directory, entry.path) as (fd, header):
            if header.expires is not None and disk.clock() >= header.expires:
                return None
            if copy:
                read_whole(fd, header, disk.buffers)
            keep = True
            return ManifestEntry(entry.path, header.size, header_crc(fd, header))
    except (FileNotFoundError, NotADirectoryError, NotRegularError):  # gone, or no object of ours
        return None
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None
    finally:
        if not keep:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{directory}/{entry.path}")


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def write_list(path: str, tree: Any) -> None:
    """Writes JSON with its digest into a new file, durably but for its name."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    with open_regular(*os.path.split(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        write_all(fd, [text, f"\n{_digest(text)}\n".encode()], 0)
        os.fsync(fd)


def read_list(path: str) -> Any:
    """What `write_list` wrote.

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
    """The list of a snapshot, verified.

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
