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
from ..disk.index import IndexedObject
from ..disk.index_rows import kind_of
from ..format.codec import canonical_of, encoder_of
from ..format.encryption import decrypted, is_sealed
from ..format.expiry import expiry_test
from ..format.header import Header
from ..format.naming import Name, expect_encoding, name_at, part_of
from ..format.objects import Arrays, check_name, read_header, read_leaves
from ..format.patch_codec import patch_parts
from ..io.files import ReadInto, folder, identity_of, open_regular, typed_errors
from ..libraries.entries import check_body, check_resource

ALL = ("obj", "lib")
"""Folders of all tenants' chunks and libraries."""

_PAGE = 1000
type ObjectProgress = Callable[[list[Any]], Iterable[Any]]
Verdict = Literal["good", "bad", "left", "unreadable", "unopened", "gone"]


def _quiet(entries: list[Any]) -> Iterable[Any]:
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
      encrypted: None if the header cannot be read, or is of another version of the format.
    """

    path: str
    tenant: str
    kind: str
    nbytes: int
    used: float
    expires: float | None
    encrypted: bool | None


def listing(disk: Disk, below: Sequence[str] = ALL, progress: ObjectProgress = _quiet) -> Iterator[ObjectInfo]:
    """Yields the objects and entries below some folders (a tenant's, or all), by path, each as soon as it was read.

    Objects that vanish in the meantime may be missing.
    """
    for path in below:
        for entries in _pages(disk, path):
            for entry in progress(entries):
                yield _listed(disk, entry)


def _pages(disk: Disk, below: str) -> Iterator[list[Any]]:
    """Yields what is below a folder by path, in parts, so that the first ones come at once."""
    if not below.startswith("obj"):
        yield sorted(disk.scan(below), key=lambda entry: entry.path)
        return
    disk.index.refresh(below)
    after = ""
    while page := disk.index.below(below, after, _PAGE):
        yield page
        after = page[-1].path


def _listed(disk: Disk, entry: DirectoryEntry | IndexedObject) -> ObjectInfo:
    expires, encrypted = None, None
    try:
        with open_regular(disk.root, entry.path, noatime=True) as fd:
            header = read_header(fd)
        expires, encrypted = header.expires, is_sealed(header)
    except (OSError, StoreCorruptError, StoreVersionError):
        pass

    tenant = name_at(entry.path).tenant
    return ObjectInfo(entry.path, tenant, kind_of(entry.path), entry.size, entry.used, expires, encrypted)


def totals(disk: Disk, below: tuple[str, str] = ALL, *, deep: bool = False) -> dict[str, Any]:
    """Counts objects and bytes by kind and tenant, expired, quarantined and unfinished ones, without opening any.

    Args:
      deep: opens every object, to count encrypted and unreadable ones too.

    Raises:
      StoreIOError: the root cannot be read.
    """
    space, libraries = below
    tenant, index, now = space.partition("/")[2], disk.index, disk.clock()
    index.refresh(space)
    entries = disk.scan(libraries)
    pairs = [(kind_of(entry.path), 1, entry.size) for entry in entries]
    kinds = _sums([*((kind, *sums) for kind, sums in index.usage_by_kind(space).items()), *pairs])
    of_tenants = {tenant: index.usage(space)} if tenant else index.usage_by_tenant()
    pairs = [(name_at(entry.path).tenant, 1, entry.size) for entry in entries]
    tenants = _sums([*((name, *sums) for name, sums in of_tenants.items() if sums[0]), *pairs])

    opened: dict[str, int] = {}
    if deep:
        listed = list(listing(disk, below))
        opened = {
            "encrypted": sum(one.encrypted is True for one in listed),
            "unreadable": sum(one.encrypted is None for one in listed),
        }
    quarantined = quarantine.listed(disk.root, tenant)
    late = len(index.expired(space, now)) + sum(expiry_test(now)(entry.mtime_ns) for entry in entries)
    return {
        "objects": sum(sums["objects"] for sums in kinds.values()),
        "bytes": sum(sums["bytes"] for sums in kinds.values()),
        "expired": late,
        **opened,
        "kinds": kinds,
        "tenants": tenants,
        "quarantined": len(quarantined),
        "quarantined_bytes": sum(one.nbytes for one in quarantined),
        "unfinished_snapshots": len(names_in(disk, "unfinished", tenant)),
        "temporaries": len(names_in(disk, "tmp", tenant)),
        "being_deleted": len(names_in(disk, "deleted", tenant)),
    }


def _sums(counts: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    sums: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"objects": 0, "bytes": 0})
    for key, objects, nbytes in counts:
        sums[key]["objects"] += objects
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
      left: damaged objects that stay, because they could not be moved.
      unreadable: objects that stay, because the file system failed, two reads differed, or it is no regular file or of
        another version of the format.
    """

    good: int
    nbytes: int
    unopened: int
    bad: list[str]
    left: list[str]
    unreadable: list[str]


def verify(disk: Disk, below: Sequence[str] = ALL, progress: ObjectProgress = _quiet) -> VerificationReport:
    """Verifies every object and entry below some folders, and moves damaged ones to quarantine.

    Args:
      disk: the disk.
      below: the folders.
      progress: wraps the entries to show progress.
    """
    paths: dict[str, list[str]] = collections.defaultdict(list)
    nbytes = 0
    entries = [entry for path in below for entry in disk.scan(path)]  # the files themselves, whatever the index knows
    for entry in progress(entries):
        verdict = _verdict(disk, entry)
        paths[verdict].append(entry.path)
        nbytes += entry.size if verdict in ("good", "unopened") else 0
    lists = (sorted(paths[verdict]) for verdict in ("bad", "left", "unreadable"))
    return VerificationReport(len(paths["good"]), nbytes, len(paths["unopened"]), *lists)


def _verdict(disk: Disk, entry: DirectoryEntry) -> Verdict:
    name, moved = name_at(entry.path), list[bool]()
    try:
        with open_regular(disk.root, entry.path, noatime=True) as fd:

            def read(read_bytes: ReadInto) -> Verdict:
                header = read_header(fd, read_bytes=read_bytes)
                check_name(header, name.file)
                leaves = read_leaves(fd, header, list(header.leaves), disk.buffers, read_bytes)
                return _rebuild(disk, name, header, leaves)

            def condemn(why: str) -> None:
                moved.append(disk.quarantine(name, identity_of(fd), why))

            try:
                return disk.read_twice(fd, read, condemn)
            except StoreKeyError:
                return "unopened"
            except StoreVersionError:
                return "unreadable"
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
