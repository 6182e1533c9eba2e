"""Looking at a root from outside: what is there, how much, and whether it is whole. Keyed names only, never ids."""

import collections
import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from ..errors import StoreCorruptError, StoreKeyError
from .codec import chunk_of, patch_parts
from .disk import Disk, Entry
from .files import typed_errors, unnoticed
from .header import Header
from .ids import Name
from .objects import check_name, read_header, read_leaves
from .seal import Plain, is_sealed

type Progress = Callable[[list[Entry]], Iterable[Entry]]
Verdict = Literal["good", "bad", "unreadable", "unopened", "gone"]


def _quiet(entries: list[Entry]) -> Iterable[Entry]:
    return entries


@dataclasses.dataclass(frozen=True)
class Listed:
    """An object as the operator sees it.

    Attributes:
      path: from the root. tenant: its keyed name.
      kind: "kv", "kv.<encoding>", "enc" or "patch".
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


def listing(disk: Disk, below: str = "obj", progress: Progress = _quiet) -> list[Listed]:
    """Every object below a folder (a tenant's, or "obj": all), by path. What vanishes meanwhile may be left out."""
    return [_listed(disk, entry) for entry in progress(sorted(disk.scan(below), key=lambda entry: entry.path))]


def _listed(disk: Disk, entry: Entry) -> Listed:
    try:
        with unnoticed(f"{disk.root}/{entry.path}") as fd:
            header = read_header(fd)
        expires, encrypted = header.expires, is_sealed(header)
    except (OSError, StoreCorruptError):
        expires = encrypted = None
    return Listed(entry.path, _name(entry).tenant, _kind(entry), entry.size, entry.used, expires, encrypted)


def _kind(entry: Entry) -> str:
    return "patch" if entry.part.startswith("p.") else entry.part


def _name(entry: Entry) -> Name:
    folder, _, file = entry.path.rpartition("/")
    kind = {"p": "patch", "enc": "encoder"}.get(entry.part.partition(".")[0], "kv")
    return Name(folder, file.partition(".")[0], file, kind)  # pyright: ignore[reportArgumentType]


def totals(disk: Disk, below: str = "obj") -> dict[str, Any]:
    """Objects and bytes, by kind and tenant; what is expired, encrypted, in quarantine, being written or deleted.

    Raises:
      StoreIOError: the root cannot be read.
    """
    tenant, listed, now = below.partition("/")[2], listing(disk, below), disk.clock()
    return {
        "objects": len(listed),
        "bytes": sum(one.nbytes for one in listed),
        "expired": sum(one.expires is not None and now >= one.expires for one in listed),
        "encrypted": sum(one.encrypted is True for one in listed),
        "unreadable": sum(one.encrypted is None for one in listed),
        "kinds": _sums((one.kind, one.nbytes) for one in listed),
        "tenants": _sums((one.tenant, one.nbytes) for one in listed),
        "quarantined": sum(not file.endswith(".reason") for file in _files(disk, "quarantine", tenant)),
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


def verify(disk: Disk, below: str = "obj", progress: Progress = _quiet) -> Verified:
    """Reads every object below a folder, and moves those that are not whole to quarantine."""
    paths: dict[str, list[str]] = collections.defaultdict(list)
    nbytes = 0
    for entry in progress(disk.scan(below)):
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
                disk.quarantine(name, os.fstat(fd).st_ino, str(error))
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
    if name.kind == "encoder":
        if "encoder" not in leaves:
            raise StoreCorruptError("object: no leaf encoder; expected one")
    else:
        (chunk_of if name.kind == "kv" else patch_parts)(header.body, leaves)
    return "good"
