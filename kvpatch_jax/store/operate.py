"""Looking at a root from outside: what is there, how much, and whether it is whole. Keyed names only, never ids."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from ..errors import StoreCorruptError, StoreKeyError
from . import quarantine
from .codec import chunk_of, patch_parts
from .disk import Disk, Entry
from .files import identity_of, opened, try_lock, typed_errors, unnoticed
from .header import Header
from .ids import Name
from .objects import check_name, read_header, read_leaves
from .seal import Plain, is_sealed
from .shelf import changing, check_resource

ALL = ("obj", "lib")
"""The folders of all tenants: of their chunks, and of their libraries."""

type Progress = Callable[[list[Entry]], Iterable[Entry]]
Verdict = Literal["good", "bad", "unreadable", "unopened", "gone"]


def _quiet(entries: list[Entry]) -> Iterable[Entry]:
    return entries


@dataclasses.dataclass(frozen=True)
class Listed:
    """An object as the operator sees it.

    Attributes:
      path: from the root. tenant: its keyed name.
      kind: "kv", "kv.<encoding>", "enc" or "patch"; of a library's entry, the library: "static" or "dynamic".
      nbytes: of the file. used, expires: seconds since the epoch, or None.
      encrypted: None where the header cannot be read.
    """

    path: str
    tenant: str
    kind: str
    nbytes: int
    used: float
    expires: float | None
    encrypted: bool | None


def listing(disk: Disk, below: Sequence[str] = ALL, progress: Progress = _quiet) -> list[Listed]:
    """Every object and entry below some folders (a tenant's, or all), by path. What vanishes meanwhile may lack."""
    return [_listed(disk, entry) for entry in progress(sorted(_scan(disk, below), key=lambda entry: entry.path))]


def _scan(disk: Disk, below: Sequence[str]) -> list[Entry]:
    return [entry for folder in below for entry in disk.scan(folder)]


def _listed(disk: Disk, entry: Entry) -> Listed:
    try:
        with unnoticed(f"{disk.root}/{entry.path}") as fd:
            header = read_header(fd)
        expires, encrypted = header.expires, is_sealed(header)
    except (OSError, StoreCorruptError):
        expires = encrypted = None
    return Listed(entry.path, _name(entry).tenant, _kind(entry), entry.size, entry.used, expires, encrypted)


def _kind(entry: Entry) -> str:
    if entry.path.startswith("lib/"):
        return entry.path.split("/")[2]
    return "patch" if entry.part.startswith("p.") else entry.part


def _name(entry: Entry) -> Name:
    folder, _, file = entry.path.rpartition("/")
    kind = {"p": "patch", "enc": "encoder"}.get(entry.part.partition(".")[0], "kv")
    kind = "entry" if folder.startswith("lib/") else kind
    return Name(folder, file.partition(".")[0], file, kind)  # pyright: ignore[reportArgumentType]


def totals(disk: Disk, below: Sequence[str] = ALL) -> dict[str, Any]:
    """Objects and bytes, by kind and tenant; what is expired, encrypted, in quarantine, being written or deleted.

    Raises:
      StoreIOError: the root cannot be read.
    """
    tenant, listed, now = below[0].partition("/")[2], listing(disk, below), disk.clock()
    quarantined = quarantine.listed(disk.root, tenant)
    return {
        "objects": len(listed),
        "bytes": sum(one.nbytes for one in listed),
        "expired": sum(one.expires is not None and now >= one.expires for one in listed),
        "encrypted": sum(one.encrypted is True for one in listed),
        "unreadable": sum(one.encrypted is None for one in listed),
        "kinds": _sums((one.kind, one.nbytes) for one in listed),
        "tenants": _sums((one.tenant, one.nbytes) for one in listed),
        "quarantined": len(quarantined),
        "quarantined_bytes": sum(one.nbytes for one in quarantined),
        "unfinished_snapshots": len(_files(disk, "unfinished", tenant)),
        "temporaries": len(_files(disk, "tmp", tenant)),
        "being_deleted": len(_files(disk, "deleted", tenant)),
    }


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"objects": 0, "bytes": 0})
    for key, nbytes in pairs:
        sums[key]["objects"] += 1
        sums[key]["bytes"] += nbytes
    return dict(sorted(sums.items()))


def _files(disk: Disk, folder: str, tenant: str) -> list[str]:
    with typed_errors(f"store {disk.root}: list"):
        path = f"{disk.root}/{folder}"
        return [name for name in os.listdir(path) if name.startswith(tenant)] if os.path.isdir(path) else []


def drop_old_versions(disk: Disk, below: str = "lib") -> int:
    """Deletes versions of dynamic references that are not the newest and that nobody holds. How many.

    Readers that died leave them. The chunks that were published with them stay, and go as any chunk does.

    Raises:
      StoreReadOnlyError, StoreIOError.
    """
    dropped = 0
    folders = {entry.path.rpartition("/")[0].rpartition("/")[0] for entry in disk.scan(below)}
    for folder in sorted(folder for folder in folders if folder.endswith("/dynamic")):
        with changing(disk.root, folder):
            versions: dict[str, list[str]] = collections.defaultdict(list)
            for entry in disk.scan(folder):
                versions[entry.chunk].append(entry.path)
            old = [path for paths in versions.values() for path in sorted(paths)[:-1]]
            dropped += sum(_dropped(disk, path) for path in old)
    return dropped


def _dropped(disk: Disk, path: str) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW
    with typed_errors("store: gc"), contextlib.suppress(FileNotFoundError), opened(f"{disk.root}/{path}", flags) as fd:
        return try_lock(fd) and disk.delete(path)
    return False


# ------------------------------------------------------------------------------------------------------ verification


@dataclasses.dataclass(frozen=True)
class Verified:
    """What a reading of every object found; each list holds paths.

    Attributes:
      good, nbytes: how many objects are whole, and their bytes.
      unopened: encrypted, and their key was not given: every checksum agreed, the authentication was not tried.
      bad: in quarantine now. unreadable: the file system failed the read; they are where they were.
    """

    good: int
    nbytes: int
    unopened: int
    bad: list[str]
    unreadable: list[str]


def verify(disk: Disk, below: Sequence[str] = ALL, progress: Progress = _quiet) -> Verified:
    """Reads every object and entry below some folders, and moves those that are not whole to quarantine."""
    paths: dict[str, list[str]] = collections.defaultdict(list)
    nbytes = 0
    for entry in progress(_scan(disk, below)):
        verdict = _verdict(disk, entry)
        paths[verdict].append(entry.path)
        nbytes += entry.size if verdict in ("good", "unopened") else 0
    return Verified(len(paths["good"]), nbytes, len(paths["unopened"]), sorted(paths["bad"]), paths["unreadable"])


def _verdict(disk: Disk, entry: Entry) -> Verdict:
    name = _name(entry)
    try:
        with unnoticed(f"{disk.root}/{entry.path}") as fd:
            try:
                header = read_header(fd)
                check_name(header, name.file)
                return _rebuild(disk, name, header, read_leaves(fd, header, list(header.leaves), disk.buffers))
            except StoreKeyError:
                return "unopened"
            except StoreCorruptError as error:
                disk.quarantine(name, identity_of(fd), str(error))
                return "bad"
    except FileNotFoundError:
        return "gone"
    except OSError:
        return "unreadable"


def _rebuild(disk: Disk, name: Name, header: Header, arrays: dict[str, np.ndarray]) -> Verdict:
    """Makes of it what its name says, where it can be opened."""
    seal = disk.seal if is_sealed(header) else Plain()
    opening = seal.opened(header, lambda names: {leaf: arrays[leaf] for leaf in names})
    assert opening is not None
    header, read = opening
    leaves = read(list(header.leaves))
    if name.kind == "entry":
        check_resource(header.body, leaves, header.expires)
    elif name.kind == "encoder":
        if "encoder" not in leaves:
            raise StoreCorruptError("object: no leaf encoder; expected one")
    else:
        (chunk_of if name.kind == "kv" else patch_parts)(header.body, leaves)
    return "good"
