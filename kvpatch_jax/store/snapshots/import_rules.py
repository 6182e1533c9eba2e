"""Puts objects from elsewhere into a store: what is there already stays, libraries keep to their bounds.

Of a library, what is there stays by reference: a static entry whose kind and name the library has stays out, and so do
all versions of a dynamic reference that has any version here, a withdrawn one too. So the current version of a
reference never changes by a restore, and versions of two histories never mix.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import StoreCorruptError, StoreVersionError
from ..disk.disk import Disk
from ..disk.key_check import check_key
from ..disk.object_writer import LinkSource
from ..disk.tenant_disk import TenantDisk
from ..format.codec import lead_in, patch_of, patch_parts
from ..format.compatibility import expect_known
from ..format.header import MALFORMED
from ..format.naming import ENCODINGS, Name, ObjectNames, encoding_in
from ..format.objects import Blob, file_size
from ..io.files import open_regular, typed_errors
from ..libraries.entries import chunk_bytes, entry_name
from ..libraries.folder import LibraryFolder, changing, check_quota
from .manifest import Progress

_GROUP, _GROUP_BYTES = 64, 64 << 20
"""Objects, and bytes, that go in with one commit."""


@dataclasses.dataclass(frozen=True)
class ImportCandidate:
    """An object on its way in, verified.

    Attributes:
      name: what it will be called.
      nbytes: of the file that it is, or will be: for the room that is made.
      load: makes it ready to be written: a blob, or a file that stays as it is.
      source: the file that it comes from; None where it comes from arrays.
      key_check: of the key that a file which stays as it is is encrypted under; None where it is not.
      library_bytes: what it counts for in a static library, its chunk included; 0 where there is no bound on them.
    """

    name: Name
    nbytes: int
    load: Callable[[], Blob | LinkSource]
    source: LinkSource | None = None
    key_check: str | None = None
    library_bytes: int = 0


def import_objects(
    tenant_disk: TenantDisk,
    batches: Sequence[Sequence[ImportCandidate]],
    *,
    copy: bool = False,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """Adds the objects that a store does not have, all of them or none, its libraries held meanwhile.

    Args:
      batches: objects that are loaded together. Batches come in one after the other; in each, chunks come before the
        entries that name them, and of a reference the newest version first, so that nobody sees an entry whose chunk
        is still to come, nor an old version as the current one.
      copy: copies files; else they are linked where that can be.

    Returns:
      How many were added, and the bytes of all that were to be.

    Raises:
      LibraryFullError: static entries beyond `Budget.library`. As `TenantDisk.add`. Nothing was added then.
    """
    disk = tenant_disk.disk
    with _changing_libraries(disk, [each.name for batch in batches for each in batch]) as has_reference:
        coming: list[ImportCandidate] = []
        for batch in batches:
            chunks = [each for each in batch if each.name.kind != "entry"]
            entries = [each for each in batch if each.name.kind == "entry"]
            entries.sort(key=lambda each: each.name.path, reverse=True)
            coming += [each for each in chunks if not _is_there(disk, each.name, each.source)]
            coming += [each for each in entries if not has_reference(each.name)]

        quota, library_bytes = tenant_disk.budget.library, sum(each.library_bytes for each in coming)
        if quota is not None and library_bytes:
            check_quota("static library", library_bytes, LibraryFolder(tenant_disk, "static").nbytes, quota)
        # Files that stay encrypted as they are bring the check value of their key, so that a wrong key is found.
        for tenant, check in sorted({(each.name.tenant, each.key_check) for each in coming if each.key_check}):
            check_key(disk.root, f"obj/{tenant}", check, note=True)

        # Entries are outside the budget of the disk, as they are when they are put.
        need = sum(each.nbytes for each in coming if each.name.kind != "entry")
        added = tenant_disk.add(_groups(coming, progress), need, copy=copy)
    return added, sum(each.nbytes for each in coming)


def _groups(
    coming: Sequence[ImportCandidate], progress: Progress | None
) -> Iterator[list[tuple[Name, Blob | LinkSource]]]:
    """Loads objects when their turn comes, in groups for one commit each."""
    group: list[tuple[Name, Blob | LinkSource]] = []
    total, done, begun = sum(each.nbytes for each in coming), 0, 0
    for number, each in enumerate(coming, 1):
        group.append((each.name, each.load()))
        done += each.nbytes
        if len(group) == _GROUP or done - begun >= _GROUP_BYTES or number == len(coming):
            yield group
            group, begun = [], done
            if progress is not None:
                progress(done, total)


def _is_there(disk: Disk, name: Name, source: LinkSource | None = None) -> bool:
    """Whether the store has a whole object of that name, or `source` under it.

    A damaged one goes to quarantine, one that has expired is deleted, and one that a later version wrote stays. Raises
    StoreError.
    """
    same = False
    if source is not None:
        with (
            contextlib.suppress(OSError),
            open_regular(disk.root, name.path, noatime=True) as here,
            open_regular(*source, noatime=True) as there,
        ):
            same = os.path.sameopenfile(here, there)
    with typed_errors("store: add"):
        # The bytes of a file that is the source itself were verified there. What this reader finds damaged is, for all
        # that comes in has just verified.
        try:
            header = disk.examine(name, leaves=not same, certain=True)
        except StoreVersionError:
            return True
    if header is None:
        return False
    if header.expires is None or disk.clock() < header.expires:
        return True
    disk.delete(name.path, disk.has_expired)
    return False


@contextlib.contextmanager
def _changing_libraries(disk: Disk, names: Iterable[Name]) -> Iterator[Callable[[Name], bool]]:
    """Locks the libraries that some names belong to.

    Yields:
      Whether a library has what a name is a version of, in any version that is whole; asked of the disk once for each
      reference.
    """
    known: dict[str, bool] = {}

    def has_reference(name: Name) -> bool:
        if name.chunk_key not in known:
            files = {os.path.basename(entry.path) for entry in disk.of_chunk(name)}
            # All of them are looked at, so that every damaged one goes to quarantine.
            whole = [_is_there(disk, dataclasses.replace(name, file=file)) for file in sorted(files)]
            known[name.chunk_key] = any(whole)
        return known[name.chunk_key]

    with contextlib.ExitStack() as held:
        for folder in sorted({os.path.dirname(name.folder) for name in names if name.kind == "entry"}):
            held.enter_context(changing(disk.root, folder))
        yield has_reference


def name_of(
    names: ObjectNames, kind: str, part: str, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Name:
    """Names a tenant's object by what it says about itself.

    Args:
      part: as `naming.part_of`.
      arrays: of a patch only the dtypes and shapes count.

    Raises:
      StoreCorruptError: it does not say enough. StoreVersionError: it says more than this version knows.
    """
    if kind == "entry":
        return entry_name(names, body)
    try:
        if kind == "kv":
            if encoding_in(part) is not None:
                expect_known("canonical of encoding", [encoding_in(part)], ENCODINGS)
            return names.canonical(body["backbone"], body["id"], encoding_in(part), lead_in(body))
        if kind == "encoder":
            return names.encoder(body["backbone"], body["id"])
        return names.patch(patch_of(patch_parts(body, arrays)))
    except StoreVersionError:
        raise
    except MALFORMED as error:
        raise StoreCorruptError(
            f"object: {kind} without a name of its own ({type(error).__name__}); expected one"
        ) from None


def is_counted(tenant_disk: TenantDisk, name: Name) -> bool:
    """Whether an object is an entry of a static library with a bound."""
    return tenant_disk.budget.library is not None and name.path.startswith(f"lib/{name.tenant}/static/")


def library_bytes(tenant_disk: TenantDisk, name: Name, blob: Blob, size: int | None = None) -> int:
    """Counts an object's bytes in a static library with a bound: its file and its chunk; 0 for all else.

    `size`: of its file, where that is known.
    """
    if not is_counted(tenant_disk, name):
        return 0
    size = file_size(tenant_disk.sealed(name, blob), name.file) if size is None else size
    return size + chunk_bytes(blob.body)
