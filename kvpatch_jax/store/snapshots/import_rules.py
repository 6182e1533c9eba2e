"""Import of objects into a store: existing objects stay, libraries keep to their quotas.

In libraries, existing references stay: a static entry is skipped if the library has its kind and name, and all versions
of a dynamic reference are skipped if the library has any version of it, withdrawn ones included. So a restore never
changes the current version of a reference, and never mixes two histories.
"""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import StoreCorruptError, StoreVersionError
from ..disk.disk import Disk
from ..disk.key_check import check_key
from ..disk.object_writer import LinkSource
from ..disk.tenant_disk import TenantDisk
from ..format.codec import digest_in, expect_part
from ..format.header import MALFORMED
from ..format.naming import Name, ObjectNames, encoding_in, expect_encoding
from ..format.objects import Blob, file_size
from ..format.patch_codec import patch_of, patch_parts
from ..io.files import open_regular, typed_errors
from ..libraries.entries import chunk_bytes, entry_name
from ..libraries.folder import LibraryFolder, changing, check_quota
from .manifest import Progress

_GROUP, _GROUP_BYTES = 64, 64 << 20
"""Limits of objects and bytes per commit."""


@dataclasses.dataclass(frozen=True)
class ImportCandidate:
    """A verified object to be imported.

    Attributes:
      name: its name in the store.
      nbytes: size of its file, for the budget.
      load: returns the object to be written: a blob, or an unchanged file.
      source: its file; None if it comes from arrays.
      key_check: check value of the key of an encrypted, unchanged file; None if it is not encrypted.
      library_bytes: bytes that count for the quota of a static library, including its chunk; 0 without a quota.
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
    """Adds the objects that a store does not have, all or none, while its libraries are locked.

    Args:
      tenant_disk: the target.
      batches: objects that are loaded together. They are written in order; in each batch chunks precede the entries
        that name them, and the newest version of a reference comes first, so that nobody sees an entry without its
        chunk, or an old version as the current one.
      copy: copies files; otherwise they are linked if possible.
      progress: called with the processed and the total number of bytes.

    Returns:
      The number of added objects, and the bytes of all candidates.

    Raises:
      LibraryFullError: static entries exceed `Budget.library`. StoreError: as `TenantDisk.add`. Nothing was added.
    """
    disk = tenant_disk.disk
    names = [item.name for item in itertools.chain.from_iterable(batches)]
    with _changing_libraries(disk, names) as has_reference:
        coming: list[ImportCandidate] = []
        for batch in batches:
            chunks = [item for item in batch if item.name.kind != "entry"]
            entries = [item for item in batch if item.name.kind == "entry"]
            entries.sort(key=lambda item: item.name.path, reverse=True)
            coming += [item for item in chunks if not _is_there(disk, item.name, item.source)]
            coming += [item for item in entries if not has_reference(item.name)]

        quota, library_bytes = tenant_disk.budget.library, sum(item.library_bytes for item in coming)
        if quota is not None and library_bytes:
            check_quota("static library", library_bytes, LibraryFolder(tenant_disk, "static").nbytes, quota)
        # Encrypted files that are added unchanged state their key's check value, by which a wrong key is found.
        for tenant, check in sorted({(item.name.tenant, item.key_check) for item in coming if item.key_check}):
            check_key(disk.root, f"obj/{tenant}", check, note=True)

        # Entries do not count for the budget of the disk, as in puts.
        need = sum(item.nbytes for item in coming if item.name.kind != "entry")
        added = tenant_disk.add(_groups(coming, progress), need, copy=copy)
    return added, sum(item.nbytes for item in coming)


def _groups(
    coming: Sequence[ImportCandidate], progress: Progress | None
) -> Iterator[list[tuple[Name, Blob | LinkSource]]]:
    """Yields groups of objects, one commit each, and loads them on demand."""
    group: list[tuple[Name, Blob | LinkSource]] = []
    total, done, begun = sum(item.nbytes for item in coming), 0, 0
    for number, item in enumerate(coming, 1):
        group.append((item.name, item.load()))
        done += item.nbytes
        if len(group) == _GROUP or done - begun >= _GROUP_BYTES or number == len(coming):
            yield group
            group, begun = [], done
            if progress is not None:
                progress(done, total)


def _is_there(disk: Disk, name: Name, source: LinkSource | None = None) -> bool:
    """Returns whether the store has an intact object of that name, or `source` itself under it.

    A damaged one is moved to quarantine, an expired one deleted, and one of another format stays. Raises StoreError.
    """
    same = False
    if source is not None:
        with (
            contextlib.suppress(OSError),
            open_regular(disk.root, name.path, noatime=True) as here,
            open_regular(source.root, source.path, noatime=True) as there,
        ):
            same = os.path.sameopenfile(here, there)

    with typed_errors("store: add"):
        # The source's bytes are verified already.
        try:
            header = disk.examine(name, leaves=not same)
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
    """Locks the libraries of some names.

    Yields:
      A function that returns whether a library has an intact version of a name's reference; each reference is read from
      the disk once.
    """
    known: dict[str, bool] = {}

    def has_reference(name: Name) -> bool:
        if name.chunk_key not in known:
            files = {os.path.basename(entry.path) for entry in disk.of_chunk(name)}
            # All of them are read, so that every damaged one is moved to quarantine.
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
    """Returns the name of a tenant's object from its content.

    Args:
      names: the tenant's names.
      kind: kind of the object.
      part: its part, as `naming.part_of`.
      body: its body.
      arrays: its leaves; of a patch only the dtypes and shapes are used.

    Raises:
      StoreCorruptError: the body is incomplete.
    """
    if kind == "entry":
        return entry_name(names, body)
    if kind == "kv":
        expect_encoding(part)
        expect_part(body, part)
    try:
        if kind == "kv":
            return names.canonical(body["backbone"], body["id"], encoding_in(part), digest_in(body, "lead"))
        if kind == "encoder":
            return names.encoder(body["backbone"], body["id"])
        return names.patch(patch_of(patch_parts(body, arrays)))
    except MALFORMED as error:
        raise StoreCorruptError(
            f"object: got a {kind} without a name of its own ({type(error).__name__}); expected one"
        ) from None


def is_counted(tenant_disk: TenantDisk, name: Name) -> bool:
    """Returns whether an object is an entry of a static library with a quota."""
    return tenant_disk.budget.library is not None and name.path.startswith(f"lib/{name.tenant}/static/")


def library_bytes(tenant_disk: TenantDisk, name: Name, blob: Blob, size: int | None = None) -> int:
    """Returns an object's bytes in a static library with a quota: its file and its chunk; 0 for other objects.

    Args:
      size: size of its file, if known.
    """
    if not is_counted(tenant_disk, name):
        return 0
    size = file_size(tenant_disk.sealed(name, blob), name.file) if size is None else size
    return size + chunk_bytes(blob.body)
