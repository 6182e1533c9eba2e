"""Audits of a root: listing, sums and verification of its objects. Keyed names only, never ids."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from ...errors import StoreCorruptError, StoreKeyError, StoreVersionError
from ..disk import quarantine
from ..disk.directory import DirectoryEntry
from ..disk.disk import Disk
from ..format.codec import canonical_of, encoder_of
from ..format.encryption import decrypted, is_sealed
from ..format.header import Header
from ..format.naming import LEAD_NAME, Name, expect_encoding, name_at, part_of
from ..format.objects import Arrays, check_name, read_header, read_leaves
from ..format.patch_codec import patch_parts
from ..io.files import ReadInto, folder, identity_of, open_regular, typed_errors
from ..libraries.entries import check_body, check_resource

ALL = ("obj", "lib")
"""Folders of all tenants' chunks and libraries."""

type ObjectProgress = Callable[[list[DirectoryEntry]], Iterable[DirectoryEntry]]
Verdict = Literal["good", "bad", "left", "unreadable", "unopened", "newer", "gone"]


def _quiet(entries: list[DirectoryEntry]) -> Iterable[DirectoryEntry]:
    return entries


@dataclasses.dataclass(frozen=True)
class ObjectInfo:
    """Properties of an object for the operator.

    Attributes:
      path: path below the root.
      tenant: keyed name of the tenant.
      kind: "kv", "kv.<encoding>", "enc" or "patch"; "kv.behind" or "kv.behind.<encoding>" for a canonical behind a
        lead; for a library's entry, the library: "static" or "dynamic".
      nbytes: size of the file.
      used: time of the last use in seconds since the epoch.
      expires: expiry in seconds since the epoch, or None.
      encrypted: None if the header cannot be read.
      newer: whether a later version of the library wrote it.
    """

    path: str
    tenant: str
    kind: str
    nbytes: int
    used: float
    expires: float | None
    encrypted: bool | None
    newer: bool = False


def listing(disk: Disk, below: Sequence[str] = ALL, progress: ObjectProgress = _quiet) -> Iterator[ObjectInfo]:
    """Yields the objects and entries below some folders (a tenant's, or all), by path, each as soon as it was read.

    Objects that vanish in the meantime may be missing.
    """
    for entry in progress(sorted(_scan(disk, below), key=lambda entry: entry.path)):
        yield _listed(disk, entry)


def _scan(disk: Disk, below: Sequence[str]) -> list[DirectoryEntry]:
    entries: list[DirectoryEntry] = []
    for path in below:
        entries += disk.scan(path)
    return entries


def _listed(disk: Disk, entry: DirectoryEntry) -> ObjectInfo:
    expires, encrypted, newer = None, None, False
    try:
        with open_regular(disk.root, entry.path, noatime=True) as fd:
            header = read_header(fd)
        expires, encrypted = header.expires, is_sealed(header)
    except StoreVersionError:
        newer = True
    except (OSError, StoreCorruptError):
        pass

    tenant = name_at(entry.path).tenant
    return ObjectInfo(entry.path, tenant, _kind(entry), entry.size, entry.used, expires, encrypted, newer)


def _kind(entry: DirectoryEntry) -> str:
    if entry.path.startswith("lib/"):
        return entry.path.split("/")[2]
    return "patch" if entry.part.startswith("p.") else LEAD_NAME.sub("behind", entry.part)


def totals(disk: Disk, below: Sequence[str] = ALL) -> dict[str, Any]:
    """Counts objects and bytes by kind and tenant, and expired, encrypted, quarantined and unfinished ones.

    Raises:
      StoreIOError: the root cannot be read.
    """
    tenant, listed, now = below[0].partition("/")[2], list(listing(disk, below)), disk.clock()
    quarantined = quarantine.listed(disk.root, tenant)
    return {
        "objects": len(listed),
        "bytes": sum(one.nbytes for one in listed),
        "expired": sum(one.expires is not None and now >= one.expires for one in listed),
        "encrypted": sum(one.encrypted is True for one in listed),
        "unreadable": sum(one.encrypted is None and not one.newer for one in listed),
        "newer": sum(one.newer for one in listed),
        "kinds": _sums((one.kind, one.nbytes) for one in listed),
        "tenants": _sums((one.tenant, one.nbytes) for one in listed),
        "quarantined": len(quarantined),
        "quarantined_bytes": sum(one.nbytes for one in quarantined),
        "unfinished_snapshots": len(names_in(disk, "unfinished", tenant)),
        "temporaries": len(names_in(disk, "tmp", tenant)),
        "being_deleted": len(names_in(disk, "deleted", tenant)),
    }


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"objects": 0, "bytes": 0})
    for key, nbytes in pairs:
        sums[key]["objects"] += 1
        sums[key]["bytes"] += nbytes
    return dict(sorted(sums.items()))


def names_in(disk: Disk, below: str, tenant: str) -> list[str]:
    """Returns the names in a folder of the root that begin with a tenant's keyed name. Raises StoreError."""
    with (
        typed_errors(f"store {disk.root}: list"),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        folder(disk.root, below) as fd,
    ):
        return [name for name in os.listdir(fd) if name.startswith(tenant)]
    return []


# ------------------------------------------------------------------------------------------------------ verification


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """Result of `verify`; each list contains paths.

    Attributes:
      good: number of intact objects.
      nbytes: bytes of intact and unopened objects.
      unopened: number of encrypted objects without a key: checksums match, the authentication was not checked.
      bad: damaged objects, now in quarantine.
      left: damaged objects that stay, because they could not be moved, or because there are so many that this machine
        may be at fault (`damage_rate`).
      unreadable: objects that stay, because the file system failed, two reads differed, or it is no regular file.
      newer: objects of a later library version, which stay.
    """

    good: int
    nbytes: int
    unopened: int
    bad: list[str]
    left: list[str]
    unreadable: list[str]
    newer: list[str]


def verify(
    disk: Disk, below: Sequence[str] = ALL, progress: ObjectProgress = _quiet, *, certain: bool = False
) -> VerificationReport:
    """Verifies every object and entry below some folders, and moves damaged ones to quarantine.

    Args:
      disk: the disk.
      below: the folders.
      progress: wraps the entries to show progress.
      certain: whether this machine is known to work, so that any number of damaged objects is moved.
    """
    paths: dict[str, list[str]] = collections.defaultdict(list)
    nbytes = 0
    for entry in progress(_scan(disk, below)):
        verdict = _verdict(disk, entry, certain)
        paths[verdict].append(entry.path)
        nbytes += entry.size if verdict in ("good", "unopened") else 0
    lists = (sorted(paths[verdict]) for verdict in ("bad", "left", "unreadable", "newer"))
    return VerificationReport(len(paths["good"]), nbytes, len(paths["unopened"]), *lists)


def _verdict(disk: Disk, entry: DirectoryEntry, certain: bool) -> Verdict:
    name, moved = name_at(entry.path), list[bool]()
    try:
        with open_regular(disk.root, entry.path, noatime=True) as fd:

            def read(read_bytes: ReadInto) -> Verdict:
                header = read_header(fd, read_bytes=read_bytes)
                check_name(header, name.file)
                leaves = read_leaves(fd, header, list(header.leaves), disk.buffers, read_bytes)
                return _rebuild(disk, name, header, leaves)

            def condemn(why: str) -> None:
                moved.append(disk.quarantine(name, identity_of(fd), why, certain=certain))

            try:
                return disk.read_twice(fd, read, condemn)
            except StoreKeyError:
                return "unopened"
            except StoreVersionError:
                return "newer"
            except StoreCorruptError:
                if not moved:
                    return "unreadable"
                if moved[0]:
                    return "bad"
                os.lstat(f"{disk.root}/{entry.path}")  # raises if another process deleted it
                return "left"
    except (FileNotFoundError, NotADirectoryError):
        return "gone"
    except OSError:
        return "unreadable"


def _rebuild(disk: Disk, name: Name, header: Header, arrays: Arrays) -> Verdict:
    """Decodes an object according to its name, if it can be decrypted."""
    header, leaves = decrypted(header, arrays, disk.encryption)
    if name.kind == "entry":
        check_body(header.body)
        check_resource(header.body, leaves, header.expires)
    elif name.kind == "encoder":
        encoder_of(header.body, leaves)
    elif name.kind == "kv":
        expect_encoding(part_of(name.path))
        canonical_of(part_of(name.path))(header.body, leaves)
    else:
        patch_parts(header.body, leaves)
    return "good"
