"""Restoring of snapshots into stores: verified, all or nothing.

Names depend on the secret of a root. A tenant's snapshot can be restored into any root: if the secret differs, its
objects are renamed by their content and written again. A snapshot of a whole store can be restored into a root with the
same secret, or into a new one, which adopts the secret.
"""

import dataclasses
import functools
import os
import re
import time

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
from ..format.objects import Blob, blob_of, read_leaves
from ..io.files import typed_errors
from ..libraries.entries import check_resource
from .import_rules import ImportCandidate, import_objects, is_counted, library_bytes, name_of
from .manifest import MANIFEST, Manifest, ManifestEntry, Progress, Summary, header_crc, read_manifest
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
      directory: the snapshot.
      root: the store's directory.
      tenant: the tenant; required for a tenant's snapshot, and selects one from a snapshot of the whole store.
      secret: secret of the root's names if it does not store it, or of a snapshot of the whole store that has lost it.
      key: encryption key of the tenant. Encrypted objects that keep their names need none.
      budget: budget of the disk, with eviction as for a put, and of the tenant's static library (`Budget.library`). A
        size alone is the disk's.
      copy: copies the files; otherwise they are linked if possible.
      skip_damaged: leaves out damaged objects instead of refusing the snapshot.
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
    directory = str(path_of(directory, "snapshot: directory", InputError, "a directory's name"))
    manifest = read_manifest(directory)
    if tenant is not None:
        manifest = of_tenant(directory, manifest, tenant, secret)
        tenant_disk = TenantDisk(root, tenant, secret=secret, key=key, budget=budget)
        coming, damaged = _verified(directory, manifest, tenant_disk, skip_damaged, progress)
        return _added(tenant_disk, manifest, coming, damaged, copy)

    if manifest.scope != "store":
        raise InputError(f"snapshot {directory}: got tenant None; expected the tenant whose snapshot it is")
    if budget is not None and budget.library is not None:
        raise InputError(
            "snapshot of a whole store: got a budget of a library; expected none, or one tenant after the other"
        )

    # The root adopts the secret only after every byte was verified: a refused snapshot leaves it unchanged.
    own = snapshot_secret(directory, manifest, secret)
    check_secret(directory, manifest, root, own)
    coming, damaged = _verified(directory, manifest, None, skip_damaged, progress)
    adopt_secret(root, own)
    return _added(TenantDisk(root, secret=secret, budget=budget, whole_root=True), manifest, coming, damaged, copy)


def load_objects(
    store: TenantStore,
    directory: str,
    *,
    copy: bool = False,
    skip_damaged: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Adds a tenant's snapshot to an open store, under the store's names, as `load_snapshot`."""
    manifest = read_manifest(directory)
    if manifest.scope != "tenant":
        raise StoreSnapshotError(
            f"snapshot {directory}: got one of a whole store; expected a tenant's (load_snapshot takes both)"
        )
    coming, damaged = _verified(directory, manifest, store.tenant_disk, skip_damaged, progress)
    return _added(store.tenant_disk, manifest, coming, damaged, copy)


def _verified(
    directory: str,
    manifest: Manifest,
    tenant_disk: TenantDisk | None,
    skip_damaged: bool,
    progress: Progress | None,
) -> tuple[list[ImportCandidate], int]:
    """Verifies every byte of a snapshot. Returns the objects that may be added, and the number of damaged ones.

    Args:
      tenant_disk: the target. None keeps all names, and decrypts nothing.
    """
    buffers = Buffers()
    coming: list[ImportCandidate] = []
    bad: list[str] = []
    total, done = sum(entry.size for entry in manifest.objects), 0

    for entry in manifest.objects:
        try:
            found = _incoming(directory, entry, tenant_disk, buffers)
            coming += [] if found is None else [found]
        except (StoreCorruptError, StoreVersionError, OSError) as error:
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
    return coming, len(bad)


def _incoming(
    directory: str, entry: ManifestEntry, tenant_disk: TenantDisk | None, buffers: Buffers
) -> ImportCandidate | None:
    """Verifies one object and derives its name in the store. None if it has expired."""
    source, name = LinkSource(directory, entry.path), name_at(entry.path)
    with reading(source.root, source.path) as (fd, header):
        if header.size != entry.size or header_crc(fd, header) != entry.crc:
            raise StoreCorruptError(
                f"object: got another header than {MANIFEST} lists; expected checksum {entry.crc:08x}"
            )
        arrays = read_leaves(fd, header, list(header.leaves), buffers)

    clock = time.time if tenant_disk is None else tenant_disk.clock
    if header.expires is not None and clock() >= header.expires:
        return None

    unchanged = ImportCandidate(name, entry.size, lambda: source, source, _key_check(header))
    if tenant_disk is None:
        return unchanged
    names, encryption = tenant_disk.names, tenant_disk.disk.encryption
    own = entry.path.startswith((f"{names.space}/", f"{names.libraries}/"))
    keyed = encryption.check is not None
    if own and is_sealed(header) and not keyed and not is_counted(tenant_disk, name):
        return unchanged  # an encrypted object that keeps its name needs no key

    plain, arrays = decrypted(header, arrays, encryption)
    if plain.kind == "entry":
        check_resource(plain.body, arrays, plain.expires)
    name = name_of(names, plain.kind, part_of(plain.name), plain.body, arrays)
    blob = blob_of(plain, arrays)
    if name.path == entry.path and is_sealed(header) == keyed:
        return dataclasses.replace(unchanged, library_bytes=library_bytes(tenant_disk, name, blob, entry.size))
    again = functools.partial(_read_again, tenant_disk.disk, source)
    return ImportCandidate(name, entry.size, again, source, library_bytes=library_bytes(tenant_disk, name, blob))


def _key_check(header: Header) -> str | None:
    """Returns the check value of the key with which an object is encrypted; None if it is not."""
    check = header.body.get("check") if is_sealed(header) else None
    if check is not None and not (isinstance(check, str) and re.fullmatch("[0-9a-f]{1,64}", check)):
        raise StoreCorruptError("object: got an invalid check value of a key; expected hexadecimal digits")
    return check


def _read_again(disk: Disk, source: LinkSource) -> Blob:
    """Reads an object with a new name or encryption when it is written, so that not all are in memory at once."""
    try:
        with typed_errors("snapshot: read"), reading(source.root, source.path) as (fd, header):
            arrays = read_leaves(fd, header, list(header.leaves), disk.buffers)
        return blob_of(*decrypted(header, arrays, disk.encryption))
    except (StoreCorruptError, StoreVersionError) as error:
        raise StoreSnapshotError(
            f"snapshot: got a change of {source.path} while it was read ({error}); expected none"
        ) from error


def _added(
    tenant_disk: TenantDisk, manifest: Manifest, coming: list[ImportCandidate], damaged: int, copy: bool
) -> Summary:
    added, nbytes = import_objects(tenant_disk, [coming], copy=copy)
    return Summary(added, nbytes, len(manifest.objects) - damaged - added, damaged)
