"""Restoring of snapshots into stores: verified, all or nothing.

Names depend on the secret of a root. A tenant's snapshot can be restored into any root: if the secret differs, its
objects are renamed by their content and written again. A snapshot of a whole store can be restored into a root with the
same secret, or into a new one, which adopts the secret.

Files of a later version of the library keep their names or are left out: they come in as they are, and are misses.
"""

import dataclasses
import functools
import os
import re
import time
from collections.abc import Sequence

from ...errors import InputError, StoreCorruptError, StoreSnapshotError, StoreVersionError
from ...utils.atomic_files import path_of
from ...utils.sizes import Size
from ..disk.budget import Budget, budget_of
from ..disk.directory import reading
from ..disk.disk import Disk
from ..disk.object_writer import LinkSource
from ..disk.tenant_disk import TenantDisk, TenantStore
from ..format.buffers import Buffers
from ..format.encryption import decrypted, is_sealed
from ..format.header import Header
from ..format.naming import name_at, part_of
from ..format.objects import Arrays, Blob, blob_of, read_leaves
from ..io.files import open_regular, typed_errors
from ..libraries.entries import check_resource
from .import_rules import ImportCandidate, import_objects, is_counted, library_bytes, name_of
from .manifest import (
    EXPORT,
    MANIFEST,
    Manifest,
    ManifestEntry,
    Progress,
    Summary,
    file_crc,
    header_crc,
    read_manifest,
)
from .snapshot_secret import adopt_secret, check_secret, of_tenant, snapshot_secret


def load_snapshot(
    directory: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    tenant: str | None = None,
    secret: bytes | None = None,
    key: bytes | None = None,
    budget: Budget | Size | None = None,
    copy: bool = False,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Adds a snapshot to a new or existing store. Every byte is verified first; existing objects stay.

    The same holds for libraries: see `import_rules` about versions.

    Args:
      directory: the snapshot: of `save_snapshot`, of a `StoreItem` in an Orbax checkpoint ("chunk_store", or the
        item's own directory), or arrays that an older version exported.
      root: the store's directory.
      tenant: the tenant; required for a tenant's snapshot, and selects one from a snapshot of the whole store.
      secret: secret of the root's names if it does not store it, or of a snapshot of the whole store that has lost it.
      key: encryption key of the tenant. Encrypted objects that keep their names need none.
      budget: budget of the disk, with eviction as for a put, and of the tenant's static library (`Budget.library`). A
        size alone is the disk's.
      copy: copies the files; otherwise they are linked if possible.
      skip_damaged: leaves out damaged objects instead of refusing the snapshot. Arrays are always loaded whole.
      progress: called with the processed and the total number of bytes.

    Raises:
      StoreSnapshotError: it is no snapshot, has another secret or none, or is damaged (`bad` lists the objects).
      InputError: `tenant` is missing.
      LibraryFullError: it exceeds `Budget.library`.
      StoreKeyError: encrypted entries have to be counted for `Budget.library`, and there is no key.
      StoreFullError, StoreReadOnlyError, StoreIOError: it could not be written. Nothing was added in any case.
    """
    budget = None if budget is None else budget_of(budget, "snapshot: budget")
    root = str(path_of(root, "snapshot: root", InputError, "a directory's name"))
    directory = _source(str(path_of(directory, "snapshot: directory", InputError, "a directory's name")))
    manifest = None if holds_arrays(directory) else read_manifest(directory)
    if tenant is not None:
        if manifest is not None:
            manifest = of_tenant(directory, manifest, tenant, secret)
        tenant_disk = TenantDisk(root, tenant, secret=secret, key=key, budget=budget)
        return _restored(directory, manifest, tenant_disk, copy, skip_damaged, progress)

    if manifest is None or manifest.scope != "store":
        raise InputError(f"snapshot {directory}: got tenant None; expected the tenant whose snapshot it is")
    if budget is not None and budget.library is not None:
        raise InputError(
            "snapshot of a whole store: got a budget of a library; expected none, or one tenant after the other"
        )

    # The root adopts the secret only after every byte was verified: a refused snapshot leaves it unchanged.
    own = snapshot_secret(directory, manifest, secret)
    check_secret(directory, manifest, root, own)
    coming, left_out = _verified(directory, manifest, None, skip_damaged, progress)
    adopt_secret(root, own)
    tenant_disk = TenantDisk(root, secret=secret, budget=budget, whole_root=True)
    return _added(tenant_disk, [coming], len(manifest.objects), copy, left_out)


def load_objects(store: TenantStore, directory: str, *, copy: bool = False, skip_damaged: bool = False) -> Summary:
    """Adds a tenant's snapshot or arrays to an open store, under the store's names, as `load_snapshot`."""
    manifest = None if holds_arrays(directory) else read_manifest(directory)
    if manifest is not None and manifest.scope != "tenant":
        raise StoreSnapshotError(
            f"snapshot {directory}: got one of a whole store; expected a tenant's (load_snapshot takes both)"
        )
    return _restored(directory, manifest, store.tenant_disk, copy, skip_damaged, None)


def _source(directory: str) -> str:
    """Returns the directory of a snapshot, which may be an item of a checkpoint."""
    item = f"{directory}/chunk_store"
    return directory if os.path.lexists(f"{directory}/{MANIFEST}") or not os.path.isdir(item) else item


def holds_arrays(directory: str) -> bool:
    """Returns whether a directory holds arrays in place of a snapshot."""
    names = () if os.path.lexists(f"{directory}/{MANIFEST}") else (EXPORT, "objects")
    return any(os.path.lexists(f"{directory}/{name}") for name in names)


def _restored(
    directory: str,
    manifest: Manifest | None,
    tenant_disk: TenantDisk,
    copy: bool,
    skip_damaged: bool,
    progress: Progress | None,
) -> Summary:
    """Adds a tenant's snapshot, or the arrays in a directory without a manifest."""
    if manifest is not None:
        coming, left_out = _verified(directory, manifest, tenant_disk, skip_damaged, progress)
        return _added(tenant_disk, [coming], len(manifest.objects), copy, left_out)

    from .arrays import array_candidates  # Orbax takes a second to import

    batches, total = array_candidates(directory, tenant_disk)
    return _added(tenant_disk, batches, total, copy, (0, 0), progress)


def _added(
    tenant_disk: TenantDisk,
    batches: Sequence[Sequence[ImportCandidate]],
    total: int,
    copy: bool,
    left_out: tuple[int, int],
    progress: Progress | None = None,
) -> Summary:
    """Adds verified objects. `left_out` are the numbers of damaged and of newer ones among all."""
    added, nbytes = import_objects(tenant_disk, batches, copy=copy, progress=progress)
    return Summary(added, nbytes, total - sum(left_out) - added, *left_out)


def _verified(
    directory: str,
    manifest: Manifest,
    tenant_disk: TenantDisk | None,
    skip_damaged: bool,
    progress: Progress | None,
) -> tuple[list[ImportCandidate], tuple[int, int]]:
    """Verifies every byte of a snapshot. Returns the objects that may be added, and how many are damaged and newer.

    Args:
      tenant_disk: the target. None keeps all names, and decrypts nothing.
    """
    buffers = Buffers()
    coming: list[ImportCandidate] = []
    bad: list[str] = []
    total, done, newer = sum(entry.size for entry in manifest.objects), 0, 0

    for entry in manifest.objects:
        try:
            found = _incoming(directory, entry, tenant_disk, buffers)
            coming += [] if found is None else [found]
        except StoreVersionError:
            newer += 1
        except (StoreCorruptError, OSError) as error:
            bad.append(f"{entry.path}: {error}")
        done += entry.size
        if progress is not None:
            progress(done, total)

    if bad and not skip_damaged:
        raise StoreSnapshotError(
            f"snapshot {directory}: got {len(bad)} of {len(manifest.objects)} objects that do not verify, the first is "
            f"{bad[0][:300]}; expected all to (skip_damaged takes the others)",
            tuple(bad),
        )
    return coming, (len(bad), newer)


def _incoming(
    directory: str, entry: ManifestEntry, tenant_disk: TenantDisk | None, buffers: Buffers
) -> ImportCandidate | None:
    """Verifies one object and derives its name in the store. None if it has expired.

    Raises:
      StoreVersionError: a later version wrote it, and it cannot come in as it is.
      StoreCorruptError: it differs from what was saved.
    """
    source = LinkSource(directory, entry.path)
    unchanged = ImportCandidate(name_at(entry.path), entry.size, lambda: source, source)
    with open_regular(*source, noatime=True) as fd:
        if os.fstat(fd).st_size != entry.size or entry.crc != (file_crc(fd) if entry.newer else header_crc(fd)):
            raise StoreCorruptError(f"object: got other bytes than {MANIFEST} lists; expected checksum {entry.crc:08x}")
    try:
        with reading(*source) as (fd, header):
            arrays = read_leaves(fd, header, list(header.leaves), buffers)
    except StoreVersionError:
        if entry.newer and _keeps_name(unchanged, tenant_disk):
            return unchanged
        raise

    clock = time.time if tenant_disk is None else tenant_disk.clock
    if header.expires is not None and clock() >= header.expires:
        return None
    unchanged = dataclasses.replace(unchanged, key_check=_key_check(header))
    try:
        return unchanged if tenant_disk is None else _renamed(unchanged, header, arrays, tenant_disk)
    except StoreVersionError:  # of its body, so that its leaves are verified
        if _keeps_name(unchanged, tenant_disk):
            return unchanged
        raise


def _keeps_name(unchanged: ImportCandidate, tenant_disk: TenantDisk | None) -> bool:
    """Returns whether a file of a later version may come in unread: not into libraries that count or number entries."""
    if tenant_disk is None:
        return True
    names, name = tenant_disk.names, unchanged.name
    numbered = tenant_disk.disk.encryption.check is not None and name.kind == "entry"
    own = name.path.startswith((f"{names.space}/", f"{names.libraries}/"))
    return own and not numbered and not is_counted(tenant_disk, name)


def _renamed(unchanged: ImportCandidate, header: Header, arrays: Arrays, tenant_disk: TenantDisk) -> ImportCandidate:
    """Returns a verified object under its name in the store: its file, or its content that is written again."""
    source, names, encryption = unchanged.source, tenant_disk.names, tenant_disk.disk.encryption
    assert source is not None
    own = source.path.startswith((f"{names.space}/", f"{names.libraries}/"))
    keyed = encryption.check is not None
    if own and is_sealed(header) and not keyed and not is_counted(tenant_disk, unchanged.name):
        return unchanged  # an encrypted object that keeps its name needs no key

    plain, arrays = decrypted(header, arrays, encryption)
    if plain.kind == "entry":
        check_resource(plain.body, arrays, plain.expires)
    name = name_of(names, plain.kind, part_of(plain.name), plain.body, arrays)
    blob = blob_of(plain, arrays)
    if name.path == source.path and is_sealed(header) == keyed:
        return dataclasses.replace(unchanged, library_bytes=library_bytes(tenant_disk, name, blob, unchanged.nbytes))
    again = functools.partial(_read_again, tenant_disk.disk, source)
    counted = library_bytes(tenant_disk, name, blob)
    return ImportCandidate(name, unchanged.nbytes, again, source, library_bytes=counted)


def _key_check(header: Header) -> str | None:
    """Returns the check value of the key with which an object is encrypted; None if it is not."""
    check = header.body.get("check") if is_sealed(header) else None
    if check is not None and not (isinstance(check, str) and re.fullmatch("[0-9a-f]{1,64}", check)):
        raise StoreCorruptError("object: got an invalid check value of a key; expected hexadecimal digits")
    return check


def _read_again(disk: Disk, source: LinkSource) -> Blob:
    """Reads an object with a new name or encryption when it is written, so that not all are in memory at once."""
    try:
        with typed_errors("snapshot: read"), reading(*source) as (fd, header):
            arrays = read_leaves(fd, header, list(header.leaves), disk.buffers)
        return blob_of(*decrypted(header, arrays, disk.encryption))
    except (StoreCorruptError, StoreVersionError) as error:
        raise StoreSnapshotError(
            f"snapshot: got a change of {source.path} while it was read ({error}); expected none"
        ) from error
